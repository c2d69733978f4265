"""The known families, and functions that select one for a config.json or a model.

Families with a plain MLP are LLaDA, Dream, SDAR, Fast-dLLM v2, and causal Qwen and Llama. Families
with experts are LLaDA-MoE, LLaDA2.0 and 2.1, and SDAR with experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dlm_jax.config import KINDS_OF_SCALING, ModelConfig, RopeScaling, read_scaling
from dlm_jax.published.family import (
    CAUSAL,
    DENSE,
    DREAM,
    EXPERTS,
    FAST_DLLM,
    LLADA,
    LLADA2,
    LLADA_MOE,
    SDAR,
    Family,
    FileFields,
    Source,
    in_blocks,
    qwen_sources,
)
from dlm_jax.published.gemma import DIFFUSION_GEMMA
from dlm_jax.settings import brief, closest

# The default RoPE base, for a config.json without one.
_ROPE_THETA = 10000.0

_IDLE_OF_SDAR = (
    "attn_implementation",
    "debug",
    "ep_size",
    "fuse_cross_entropy",
    "micro_forward",
    "skip_checkpoint",
    "use_deepep",
)
"""Fields of SDAR's config.json that have no effect."""

_ASKED_BY_SDAR = {"fuse_cross_entropy": False}
"""Fields that SDAR's code requires; they disable a training kernel."""


def _read_llada(fields: FileFields) -> ModelConfig:
    fields.must(
        block_type="llama",
        layer_norm_type="rms",
        activation_type=("silu", "swiglu"),
        rope=True,
        alibi=False,
        include_bias=False,
        attention_layer_norm=False,
        input_emb_norm=False,
        scale_logits=False,
        bias_for_layer_norm=False,
        block_group_size=1,
        layer_norm_with_affine=True,
        attention_layer_norm_with_affine=True,
        multi_query_attention=False,
    )
    vocab_size = fields.take("vocab_size", int)
    heads = fields.take("n_heads", int)
    return ModelConfig(
        depth=fields.take("n_layers", int),
        width=fields.take("d_model", int),
        heads=heads,
        kv_heads=fields.take("n_kv_heads", int, heads),
        mlp_width=fields.take("mlp_hidden_size", int),
        activation="swiglu",
        norm_epsilon=fields.take("rms_norm_eps", float, 1e-5),
        qk_norm=False,
        qkv_bias=fields.take("include_qkv_bias", bool, False),
        rope_theta=fields.take("rope_theta", float, _ROPE_THETA),
        tied_head=fields.take("weight_tying", bool, True),
        vocab_size=fields.take("embedding_size", int, vocab_size),
    )


def _write_llada(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_type": "silu",
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": model.width,
        "embedding_dropout": 0.0,
        "embedding_size": model.vocab_size,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": model.qkv_bias,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mlp_hidden_size": model.mlp_width,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads or model.heads,
        "n_layers": model.depth,
        "residual_dropout": 0.0,
        "rms_norm_eps": model.norm_epsilon,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": model.rope_theta,
        "scale_logits": False,
        "vocab_size": model.vocab_size,
        "weight_tying": model.tied_head,
    }


def _llada_sources(model: ModelConfig) -> dict[str, Source]:
    blocks = {
        "attention_norm/scale": "attn_norm.weight",
        "mlp_norm/scale": "ff_norm.weight",
        "attention/out/kernel": "attn_out.weight",
        "mlp/gate/kernel": "ff_proj.weight",
        "mlp/up/kernel": "up_proj.weight",
        "mlp/down/kernel": "ff_out.weight",
    }
    for path, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        blocks[f"attention/{path}/kernel"] = f"{name}.weight"
        blocks[f"attention/{path}/bias"] = f"{name}.bias"
    return {
        "embedding": "model.transformer.wte.weight",
        "norm/scale": "model.transformer.ln_f.weight",
        "head/kernel": "model.transformer.ff_out.weight",
    } | in_blocks(blocks, {}, "model.transformer.blocks.{i}.")


def _read_rope(fields: FileFields) -> dict[str, Any]:
    """The base and scaling of the rotary frequencies, and the rotated share if it is given.

    Like transformers, a non-empty ``rope_scaling`` replaces ``rope_parameters``.
    """
    older, newer = (fields.take(name, dict, {}) for name in ("rope_scaling", "rope_parameters"))
    theta = fields.take("rope_theta", float, _ROPE_THETA)
    name, said = ("rope_scaling", older) if older else ("rope_parameters", newer)
    inner = FileFields(said, f"{fields.where}: {name}", f"{name}.")
    kind = inner.take("type", str, "default")
    kind = inner.take("rope_type", str, kind)
    if kind not in ("default", *KINDS_OF_SCALING):
        known = ", ".join(("default", *KINDS_OF_SCALING))
        raise fields.refuse(name, said, f"is not implemented; only the types {known} are")
    found: dict[str, Any] = {"rope_theta": inner.take("rope_theta", float, theta)}
    if (share := inner.take("partial_rotary_factor", float, -1.0)) >= 0:
        found["rotary_share"] = share
    if kind != "default":
        longest = float(fields.values.get("max_position_embeddings") or 4096)
        found["rope_scaling"] = str(_read_scaling(inner, kind, longest))
    inner.finish()
    return found


def _read_scaling(fields: FileFields, kind: str, longest: float) -> RopeScaling:
    """The scaling of the given kind; `longest` is the maximum row length, as in transformers."""
    if kind == "linear":
        return RopeScaling(kind, fields.take("factor", float))
    original = fields.take("original_max_position_embeddings", float, longest)
    if kind == "llama3":
        return RopeScaling(
            kind,
            fields.take("factor", float),
            original,
            low=fields.take("low_freq_factor", float),
            high=fields.take("high_freq_factor", float),
        )
    fields.must(truncate=True)
    factor = fields.take("factor", float, longest / original)
    scales = [fields.take(name, float, 0.0) for name in ("mscale", "mscale_all_dim")]

    def scale_of(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = scale_of(scales[0]) / scale_of(scales[1]) if all(scales) else scale_of(1.0)
    return RopeScaling(
        kind,
        factor,
        original,
        low=fields.take("beta_slow", float, 0.0) or 1.0,
        high=fields.take("beta_fast", float, 0.0) or 32.0,
        scale=fields.take("attention_factor", float, scale),
    )


def _write_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """The ``rope_scaling`` of config.json; `_read_scaling` is the inverse."""
    found = read_scaling(model.rope_scaling)
    if found is None:
        return None
    low, high = {"yarn": ("beta_slow", "beta_fast")}.get(
        found.kind, ("low_freq_factor", "high_freq_factor")
    )
    names = {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "low": low,
        "high": high,
        "scale": "attention_factor",
    }
    said: dict[str, Any] = {names[own]: getattr(found, own) for own in KINDS_OF_SCALING[found.kind]}
    if found.original.is_integer() and "original" in KINDS_OF_SCALING[found.kind]:
        said[names["original"]] = int(found.original)
    return {"rope_type": found.kind} | said


def _read_qwen(
    fields: FileFields, *, qkv_bias: bool = False, qk_norm: bool = False, **settings: Any
) -> ModelConfig:
    """Reads the config of Qwen, Llama and related models."""
    fields.must(
        hidden_act="silu",
        use_sliding_window=False,
        use_mrope=False,
        mlp_bias=False,
        attention_bias=qkv_bias,
        partial_rotary_factor=(1, 1.0),
    )
    if settings.get("attention_type") == "causal":
        fields.must(is_causal=True)
    layers = fields.take("layer_types", list, ["full_attention"])
    if set(layers) != {"full_attention"}:
        raise fields.refuse("layer_types", layers, "is not implemented; only full_attention is")
    shape = _read_shape(fields, epsilon=1e-6)
    return ModelConfig(
        head_size=_read_head_size(fields, shape),
        mlp_width=fields.take("intermediate_size", int),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        **shape,
        **settings,
    )


def _read_shape(fields: FileFields, *, epsilon: float, is_partial: bool = False) -> dict[str, Any]:
    """The settings in the fields that all families except LLaDA share; inverse of `_write_shape`.

    `epsilon` is the default epsilon of the norms. `is_partial` is True if the family can rotate a
    part of each head.
    """
    heads, turns = fields.take("num_attention_heads", int), _read_rope(fields)
    share = turns.get("rotary_share", 1.0)
    if share != 1 and not is_partial:
        raise fields.refuse("partial_rotary_factor", share, "is not implemented; only 1 is")
    return turns | {
        "depth": fields.take("num_hidden_layers", int),
        "width": fields.take("hidden_size", int),
        "heads": heads,
        "kv_heads": fields.take("num_key_value_heads", int, heads),
        "activation": "swiglu",
        "norm_epsilon": fields.take("rms_norm_eps", float, epsilon),
        "tied_head": fields.take("tie_word_embeddings", bool, False),
        "vocab_size": fields.take("vocab_size", int),
    }


def _read_head_size(fields: FileFields, shape: dict[str, Any]) -> int:
    """``head_dim``, or 0 if it equals width / heads."""
    size = fields.take("head_dim", int, shape["width"] // shape["heads"])
    return 0 if size * shape["heads"] == shape["width"] else size


def _write_shape(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that all families except LLaDA have, including mixtures."""
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.depth,
        "num_key_value_heads": model.kv_heads or model.heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_scaling": _write_scaling(model),
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied_head,
        "vocab_size": model.vocab_size,
    }


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that Qwen, Llama and related models have."""
    head_size = model.size_of_head
    written = _write_shape(model) | {
        "intermediate_size": model.mlp_width,
        "use_sliding_window": False,
    }
    if model.qk_norm or model.head_size:
        written |= {"head_dim": head_size, "attention_bias": model.qkv_bias}
    return written


def _read_sdar(fields: FileFields) -> ModelConfig:
    block_length = fields.take("block_size", int, 4)
    return _read_qwen(
        fields, qk_norm=True, attention_type="block_causal", block_length=block_length
    )


def _read_fast_dllm(fields: FileFields) -> ModelConfig:
    block_length = fields.take("bd_size", int, 32)
    return _read_qwen(
        fields,
        qkv_bias=True,
        attention_type="block_causal",
        block_length=block_length,
        logit_alignment="shifted",
    )


def _write_causal(model: ModelConfig) -> dict[str, Any]:
    """The fields without a null scaling, of which transformers warns in its own classes."""
    written = _write_qwen(model)
    return {name: value for name, value in written.items() if value is not None}


def _causal(name: str, architecture: str, **settings: bool) -> Family:
    return Family(
        name=name,
        architectures=(architecture,),
        model_type=name,
        read=lambda fields: _read_qwen(
            fields, attention_type="causal", logit_alignment="shifted", **settings
        ),
        write=_write_causal,
        sources=qwen_sources,
        presets=CAUSAL,
    )


def _num_experts(fields: FileFields) -> int:
    number = fields.take("num_experts", int)
    if number < 1:
        raise fields.refuse("num_experts", number, "leaves no experts; use a family without them")
    return number


def _read_moe(fields: FileFields) -> ModelConfig:
    fields.must(
        hidden_act="silu",
        attention_bias=False,
        clip_qkv=None,
        moe_router_score_function="softmax",
        partial_rotary_factor=(1, 1.0, -1),
        router_num_group=(1, -2, -1),
        router_topk_group=(1, -2, -1),
        routed_scaling_factor=(1, 1.0),
        norm_topk_prob=(False, True),
    )
    shape = _read_shape(fields, epsilon=1e-5)
    depth = shape["depth"]
    frequency = fields.take("moe_layer_freq", list, []) or [1] * depth
    num_dense = next((i for i, kind in enumerate(frequency) if kind), depth)
    if len(frequency) != depth or not all(frequency[num_dense:]) or num_dense == depth:
        raise fields.refuse(
            "moe_layer_freq", frequency, "is not implemented; plain layers must precede experts"
        )
    biased = fields.take("moe_router_enable_expert_bias", bool, False)
    return ModelConfig(
        mlp_width=max(fields.take("dense_intermediate_size", int, -1), 0),
        qk_norm=fields.take("qk_layernorm", bool, False),
        experts=_num_experts(fields),
        experts_per_token=fields.take("num_experts_per_tok", int),
        expert_width=fields.take("expert_intermediate_size", int),
        shared_width=max(fields.take("shared_expert_intermediate_size", int, 0), 0),
        dense_layers=num_dense,
        router_bias="weight" if biased else "none",
        **shape,
    )


def _write_moe(model: ModelConfig) -> dict[str, Any]:
    num_dense = model.dense_layers
    return _write_shape(model) | {
        "attention_bias": False,
        "clip_qkv": None,
        "dense_intermediate_size": model.mlp_width or -1,
        "expert_intermediate_size": model.expert_width,
        "moe_layer_freq": [0] * num_dense + [1] * (model.depth - num_dense),
        "moe_router_enable_expert_bias": model.router_bias == "weight",
        "moe_router_score_function": "softmax",
        "norm_topk_prob": False,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "partial_rotary_factor": 1,
        "qk_layernorm": model.qk_norm,
        "routed_scaling_factor": 1,
        "shared_expert_intermediate_size": model.shared_width or None,
    }


def _moe_sources(model: ModelConfig) -> dict[str, Source]:
    parts = ("gate", "up", "down")
    shared = {
        f"mlp/shared/{part}/kernel": f"mlp.shared_expert.{part}_proj.weight" for part in parts
    }
    return qwen_sources(model, more=shared | {"mlp/router_bias": "mlp.gate.expert_bias"})


def _read_sdar_moe(fields: FileFields) -> ModelConfig:
    fields.must(decoder_sparse_step=1, mlp_only_layers=[])
    block_length = fields.take("block_size", int, 4)
    return _read_qwen(
        fields,
        qk_norm=True,
        attention_type="block_causal",
        block_length=block_length,
        experts=_num_experts(fields),
        experts_per_token=fields.take("num_experts_per_tok", int),
        expert_width=fields.take("moe_intermediate_size", int),
        router_normalised=fields.take("norm_topk_prob", bool, False),
    )


def _write_sdar_moe(model: ModelConfig) -> dict[str, Any]:
    return (
        _write_qwen(model)
        | {
            "block_size": model.block_length,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": model.expert_width,
            "norm_topk_prob": model.router_normalised,
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
        }
        | _ASKED_BY_SDAR
    )


def _read_llada2(fields: FileFields) -> ModelConfig:
    fields.must(
        hidden_act="silu",
        use_bias=False,
        use_qkv_bias=False,
        use_sliding_window=False,
        norm_head=False,
        score_function="sigmoid",
        norm_topk_prob=True,
        router_dtype="fp32",
        moe_router_enable_expert_bias=True,
        norm_softmax=False,
        use_rmsnorm=True,
        using_split_qkv_in_self_attention=False,
    )
    shape = {"kv_heads": fields.take("num_key_value_heads", int)}
    shape = _read_shape(fields, epsilon=1e-5, is_partial=True) | shape
    head_size = _read_head_size(fields, shape)
    share = fields.take("partial_rotary_factor", float, 0.5)
    share = shape.pop("rotary_share", share)
    fields.must(rotary_dim=int((head_size or shape["width"] // shape["heads"]) * share))
    expert_width = fields.take("moe_intermediate_size", int)
    num_shared = fields.take("num_shared_experts", int, 0)
    num_each = fields.take("num_experts_per_tok", int)
    fields.must(moe_shared_expert_intermediate_size=expert_width * num_shared)
    return ModelConfig(
        head_size=head_size,
        mlp_width=fields.take("intermediate_size", int),
        qk_norm=fields.take("use_qk_norm", bool, True),
        rotary_share=share,
        attention_type="block_causal",
        block_length=fields.take("block_length", int, 32),
        experts=_num_experts(fields),
        experts_per_token=num_each,
        expert_width=expert_width,
        shared_width=expert_width * num_shared,
        dense_layers=fields.take("first_k_dense_replace", int, 0),
        router_score="sigmoid",
        router_groups=fields.take("n_group", int, 8),
        router_groups_kept=fields.take("topk_group", int, 4),
        router_bias="choice",
        router_normalised=num_each > 1,  # a single expert's score is not normalised
        router_scale=fields.take("routed_scaling_factor", float, 2.5),
        **shape,
    )


def _write_llada2(model: ModelConfig) -> dict[str, Any]:
    head_size = model.size_of_head
    return _write_shape(model) | {
        "block_length": model.block_length,
        "embedding_dropout": 0.0,
        "first_k_dense_replace": model.dense_layers,
        "head_dim": head_size,
        "intermediate_size": model.mlp_width,
        "moe_intermediate_size": model.expert_width,
        "moe_router_enable_expert_bias": True,
        "n_group": model.router_groups,
        "norm_head": False,
        "norm_topk_prob": True,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "num_shared_experts": model.shared_width // max(model.expert_width, 1) or None,
        "output_dropout": 0.0,
        "partial_rotary_factor": model.rotary_share,
        "rotary_dim": model.rotary_size,
        "routed_scaling_factor": model.router_scale,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": model.router_groups_kept,
        "use_bias": False,
        "use_qk_norm": model.qk_norm,
        "use_qkv_bias": False,
        "use_sliding_window": False,
    }


def _llada2_sources(model: ModelConfig) -> dict[str, Source]:
    prefix = "model.layers.{i}."
    own = {
        "attention_norm/scale": "input_layernorm.weight",
        "mlp_norm/scale": "post_attention_layernorm.weight",
        "attention/out/kernel": "attention.dense.weight",
        "attention/query_norm/scale": "attention.query_layernorm.weight",
        "attention/key_norm/scale": "attention.key_layernorm.weight",
    }
    parts = ("gate", "up", "down")
    experts = EXPERTS | {"mlp/router_bias": "mlp.gate.expert_bias"}
    experts |= {f"mlp/shared/{p}/kernel": f"mlp.shared_experts.{p}_proj.weight" for p in parts}
    found = in_blocks(own | experts, own | DENSE, prefix) | {
        "embedding": "model.word_embeddings.weight",
        "norm/scale": "model.norm.weight",
        "head/kernel": "lm_head.weight",
    }
    # One matrix contains the rows of the query, key and value matrices.
    size = model.size_of_head
    wide, narrow = model.heads * size, (model.kv_heads or model.heads) * size
    rows = {
        "query": (0, wide),
        "key": (wide, wide + narrow),
        "value": (wide + narrow, wide + 2 * narrow),
    }
    for stack in ("blocks", "dense_blocks"):
        for part, span in rows.items():
            found[f"{stack}/attention/{part}/kernel"] = (
                prefix + "attention.query_key_value.weight",
                span,
            )
    return found


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llada",
            architectures=("LLaDAModelLM",),
            model_type="llada",
            read=_read_llada,
            write=_write_llada,
            sources=_llada_sources,
            max_length="max_sequence_length",
            mask_id=126336,
            presets=LLADA,
            idle=("alibi_bias_max",),
        ),
        Family(
            name="dream",
            architectures=("DreamModel", "DiffuCoderModel"),
            model_type="Dream",
            read=lambda fields: _read_qwen(fields, qkv_bias=True, logit_alignment="shifted"),
            write=_write_qwen,
            sources=qwen_sources,
            mask_id=151666,
            trained_length=2048,
            presets=DREAM,
        ),
        Family(
            name="sdar",
            architectures=("SDARForCausalLM",),
            model_type="sdar",
            read=_read_sdar,
            write=lambda model: (
                _write_qwen(model) | {"block_size": model.block_length} | _ASKED_BY_SDAR
            ),
            sources=qwen_sources,
            mask_id=151669,
            presets=SDAR,
            idle=_IDLE_OF_SDAR,
        ),
        Family(
            name="fast_dllm",
            architectures=("Fast_dLLM_QwenForCausalLM",),
            model_type="Fast_dLLM_Qwen",
            read=_read_fast_dllm,
            write=lambda model: _write_qwen(model) | {"bd_size": model.block_length},
            sources=qwen_sources,
            mask_id=151665,
            presets=FAST_DLLM,
            idle=("conplemenrary_mask",),  # used only in training; misspelt there
        ),
        Family(
            name="llada_moe",
            architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
            model_type="llada",
            read=_read_moe,
            write=_write_moe,
            sources=_moe_sources,
            mask_id=156895,
            presets=LLADA_MOE,
        ),
        Family(
            name="llada2",
            architectures=("LLaDA2MoeModelLM",),
            model_type="llada2_moe",
            read=_read_llada2,
            write=_write_llada2,
            sources=_llada2_sources,
            mask_id=156895,
            presets=LLADA2,
        ),
        Family(
            name="sdar_moe",
            architectures=("SDARMoeForCausalLM",),
            model_type="sdar_moe",
            read=_read_sdar_moe,
            write=_write_sdar_moe,
            sources=qwen_sources,
            mask_id=151669,
            presets=SDAR,
            idle=_IDLE_OF_SDAR,
        ),
        _causal("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
        _causal("qwen3", "Qwen3ForCausalLM", qk_norm=True),
        _causal("llama", "LlamaForCausalLM"),
        DIFFUSION_GEMMA,
    )
}
"""Families by name."""


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json.

    ``architectures`` selects the family. ``model_type`` is used only if ``architectures`` is
    absent, because some families share it.
    """
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(
            f"{where}: architectures={brief(named)} is not a list of names; correct it"
        )
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    for name in named:
        if name in known:
            return known[name]
    if not named:
        kind = config.get("model_type")
        found = [family for family in FAMILIES.values() if family.model_type == kind]
        if len(found) == 1:
            return found[0]
        raise ValueError(
            f"{where}: architectures is absent and model_type={kind!r} does not identify the "
            f"family; add one of {', '.join(known)}"
        )
    raise ValueError(
        f"{where}: architectures={brief(named)} is not a supported family; the nearest is "
        f"{closest(named[0][:60], known)!r}, and docs/published.md lists all"
    )


def family_for(model: ModelConfig, name: str | None = None) -> Family:
    """The first family whose config.json can express all settings of a model.

    A model without biases on queries, keys and values fits a family that has them, because biases
    of zero change nothing, but a family without them comes first.

    Raises:
      ValueError: there is no such family; the message names the settings that the nearest one
        requires.
    """
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family={name!r} is unknown; use one of {', '.join(FAMILIES)}")
    ours, others, refused = comparable(model), [], ""
    close: list[Family] = []
    for family in [FAMILIES[name]] if name is not None else FAMILIES.values():
        try:
            said = comparable(expressed(family, model))
        except ValueError as error:  # the family does not support the model
            refused = str(error)
            continue
        differing = {key: value for key, value in said.items() if value != ours[key]}
        if not differing:
            return family
        if differing == {"qkv_bias": True}:
            close.append(family)
        others.append((family.name, differing))
    if close:
        return close[0]
    what = (
        "no published family has this combination of settings of [model]"
        if name is None
        else f"family={name!r} cannot express all settings of the model"
    )
    if not others:
        raise ValueError(f"{what} ({refused})")
    nearest, differing = min(others, key=lambda other: len(other[1]))
    needed = ", ".join(
        f"model.{key}={value!r}, not {ours[key]!r}" for key, value in differing.items()
    )
    raise ValueError(f"{what}; {'it' if name else f'the nearest, {nearest},'} requires {needed}")


def expressed(family: Family, model: ModelConfig) -> ModelConfig:
    """The model that the family reads from its config.json of `model`."""
    return family.read(FileFields(family.write(model), "config"))


UNPUBLISHED = frozenset(
    {"lora_rank", "lora_alpha", "lora_targets", "compute_dtype", "remat"}
    | {"add_sampler_head", "sampler_context", "sampler_width", "sampler_residual"}
    | {"add_critic_head"}
)
"""Settings of ``[model]`` that published models do not define."""


def comparable(model: ModelConfig) -> dict[str, Any]:
    """The settings that affect the computation of a model, in canonical form."""
    said = dict(vars(model))
    said["kv_heads"] = model.kv_heads or model.heads
    said["head_size"] = model.size_of_head
    for key in (UNPUBLISHED - {"lora_rank"}) | {"start_id"}:
        del said[key]
    return said
