"""Families in the layout of Qwen: Dream, SDAR, Fast-dLLM v2, and causal Qwen and Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dlm_jax.config import ModelConfig, RopeScaling, read_scaling
from dlm_jax.hf.family import Family, FileFields

SHAPE = {
    "num_hidden_layers": ("depth",),
    "hidden_size": ("width",),
    "num_attention_heads": ("heads",),
    "num_key_value_heads": ("kv_heads", 0),
    "tie_word_embeddings": ("tied_head", False),
    "vocab_size": ("vocab_size",),
}
"""Fields that all families except LLaDA share; `read_rope` reads further ones."""

ATTENTION = {
    "blocks/attention_norm/scale": "model.layers.{i}.input_layernorm.weight",
    "blocks/mlp_norm/scale": "model.layers.{i}.post_attention_layernorm.weight",
    "blocks/attention/query/kernel": "model.layers.{i}.self_attn.q_proj.weight",
    "blocks/attention/key/kernel": "model.layers.{i}.self_attn.k_proj.weight",
    "blocks/attention/value/kernel": "model.layers.{i}.self_attn.v_proj.weight",
    "blocks/attention/out/kernel": "model.layers.{i}.self_attn.o_proj.weight",
    "blocks/attention/query/bias": "model.layers.{i}.self_attn.q_proj.bias",
    "blocks/attention/key/bias": "model.layers.{i}.self_attn.k_proj.bias",
    "blocks/attention/value/bias": "model.layers.{i}.self_attn.v_proj.bias",
    "blocks/attention/query_norm/scale": "model.layers.{i}.self_attn.q_norm.weight",
    "blocks/attention/key_norm/scale": "model.layers.{i}.self_attn.k_norm.weight",
}
MLP = {
    "blocks/mlp/gate/kernel": "model.layers.{i}.mlp.gate_proj.weight",
    "blocks/mlp/up/kernel": "model.layers.{i}.mlp.up_proj.weight",
    "blocks/mlp/down/kernel": "model.layers.{i}.mlp.down_proj.weight",
    "blocks/mlp/router/kernel": "model.layers.{i}.mlp.gate.weight",
    "blocks/mlp/expert_gate": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "blocks/mlp/expert_up": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "blocks/mlp/expert_down": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
}
TABLES = {
    "embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}


SCALING_FIELDS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "low": "beta_slow",
        "high": "beta_fast",
        "scale": "attention_factor",
    },
}
"""The fields of ``rope_scaling`` for the numbers of each kind of scaling."""


def read_rope(fields: FileFields, settings: dict[str, Any]) -> dict[str, Any]:
    """The base and scaling of the rotary frequencies, and the rotated share if `settings` have one.

    Like transformers, a non-empty ``rope_scaling`` replaces ``rope_parameters``.
    """
    older, newer = (fields.take(name, dict, {}) for name in ("rope_scaling", "rope_parameters"))
    theta = fields.take("rope_theta", float, 1e4)
    name, said = ("rope_scaling", older) if older else ("rope_parameters", newer)
    inner = FileFields(said, f"{fields.where}: {name}", f"{name}.")
    kind = inner.take("rope_type", str, inner.take("type", str, "default"))
    if kind not in ("default", *SCALING_FIELDS):
        known = ", ".join(("default", *SCALING_FIELDS))
        raise fields.refuse(name, said, f"is not implemented; only the types {known} are")
    share = inner.take("partial_rotary_factor", float, settings.get("rotary_share", 1.0))
    if share != 1 and "rotary_share" not in settings:
        raise fields.refuse("partial_rotary_factor", share, "is not implemented; only 1 is")
    turns: dict[str, Any] = {"rope_theta": inner.take("rope_theta", float, theta)}
    if "rotary_share" in settings:
        turns["rotary_share"] = share
    if kind != "default":
        longest = float(fields.values.get("max_position_embeddings") or 4096)
        turns["rope_scaling"] = str(_read_scaling(inner, kind, longest))
    inner.finish()
    return turns


def _read_scaling(fields: FileFields, kind: str, longest: float) -> RopeScaling:
    """The scaling of the given kind; `longest` is the maximum row length, as in transformers."""
    names, values = SCALING_FIELDS[kind], {}
    if "original" in names:
        values["original"] = fields.take(names["original"], float, longest)
    if kind == "yarn":
        fields.must(truncate=True)
        factor = fields.take("factor", float, longest / values["original"])
        scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        values |= {
            "factor": factor,
            "low": fields.take("beta_slow", float, 0.0) or 1.0,
            "high": fields.take("beta_fast", float, 0.0) or 32.0,
            "scale": fields.take("attention_factor", float, scale),
        }
    others = {
        name: fields.take(field, float) for name, field in names.items() if name not in values
    }
    return RopeScaling(kind, **values, **others)


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for the rotary frequencies; `read_rope` is the inverse."""
    scaling = read_scaling(model.rope_scaling)
    fields = None if scaling is None else scaling_fields(scaling)
    return {"rope_theta": model.rope_theta, "rope_scaling": fields}


def scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """The field ``rope_scaling`` of config.json."""
    fields: dict[str, Any] = {"rope_type": scaling.kind}
    for name, field in SCALING_FIELDS[scaling.kind].items():
        value = getattr(scaling, name)
        fields[field] = int(value) if name == "original" and value.is_integer() else value
    return fields


def _read(fields: FileFields, settings: dict[str, Any]) -> dict[str, Any]:
    layers = fields.take("layer_types", list, ["full_attention"])
    if set(layers) != {"full_attention"}:
        raise fields.refuse("layer_types", layers, "is not implemented; only full_attention is")
    return read_rope(fields, settings)


def _write(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    fields |= write_rope(model)
    if model.qk_norm or model.head_size:
        return fields | {"attention_bias": model.qkv_bias}
    del fields["head_dim"]
    return fields


def _family(
    name: str,
    architectures: str,
    model_type: str = "",
    *,
    fields: Mapping[str, tuple[Any, ...]] = {},
    fixed: Mapping[str, Any] = {},
    checked: Mapping[str, Any] = {},
    settings: Mapping[str, Any],
    **more: Any,
) -> Family:
    """A family in the layout of Qwen, with its own fields and settings."""
    return Family(
        name=name,
        architectures=tuple(architectures.split()),
        model_type=model_type or name,
        fields={
            **SHAPE,
            "rms_norm_eps": ("norm_epsilon", 1e-6),
            "intermediate_size": ("mlp_width",),
            "head_dim": ("head_size", 0),
            **fields,
        },
        fixed={
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "use_sliding_window": False,
            **fixed,
        },
        checked={
            "attention_bias": settings.get("qkv_bias", False),
            "partial_rotary_factor": (1, 1.0),
            **checked,
        },
        settings={"activation": "swiglu", "qk_norm": False, **settings},
        tensors=ATTENTION | MLP | TABLES,
        **{"read_more": _read, "write_more": _write} | more,
    )


_GREEDY = {"temperature": 0.0, "ties": "lower"}
_IN_BLOCKS = _GREEDY | {"cache": "exact"}
_SAMPLED = _IN_BLOCKS | {"confidence": "sampled", "gen_length": 128, "steps": 132}

DREAM: dict[str, dict[str, Any]] = {
    # diffusion_generate of Dream (Ye et al. 2025), and its README.
    "dream": {
        "gen_length": 512, "steps": 512, "temperature": 0.2, "top_p": 0.95, "order": "entropy",
        "schedule": "timesteps", "confidence_of": "filtered", "ties": "lower",
    },
    "greedy": _GREEDY | {
        "gen_length": 512, "steps": 512, "order": "entropy", "schedule": "timesteps",
    },
}  # fmt: skip

SDAR = {
    # generate.py of SDAR (low_confidence_dynamic), greedy; 4 steps per block of 4.
    "sdar": _SAMPLED | {"order": "threshold", "threshold": 0.85, "threshold_above": True},
    "static": _SAMPLED | {"order": "low_confidence"},
}

FAST_DLLM = {
    # generate of Fast-dLLM v2 (Wu et al. 2025) and its README: sub-blocks of 8 in blocks of 32.
    # Each block starts with a token that the previous block predicts.
    "fast_dllm": _SAMPLED | {
        "gen_length": 512, "steps": 544, "block_length": 8, "order": "threshold", "threshold": 0.9,
        "threshold_above": True, "threshold_alone": 32,
    },
}  # fmt: skip

CAUSAL = {
    "greedy": _IN_BLOCKS | {
        "gen_length": 128, "steps": 128, "order": "left_to_right", "block_length": 1,
    },
}  # fmt: skip

_SDAR: dict[str, Any] = {
    "fields": {"block_size": ("block_length", 4)},
    "settings": {"qk_norm": True, "attention_type": "block_causal"},
    # SDAR's code requires that a training kernel is disabled.
    "fixed": {"fuse_cross_entropy": False},
    "mask_id": 151669,
    "presets": SDAR,
    "idle": (
        "attn_implementation",
        "debug",
        "ep_size",
        "fuse_cross_entropy",
        "micro_forward",
        "skip_checkpoint",
        "use_deepep",
    ),
}


def _causal(name: str, architecture: str, **settings: Any) -> Family:
    def write(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
        # transformers warns of a null scaling in its own classes.
        return {name: value for name, value in _write(model, fields).items() if value is not None}

    return _family(
        name,
        architecture,
        checked={"is_causal": True},
        settings={"attention_type": "causal", "logit_alignment": "shifted"} | settings,
        write_more=write,
        presets=CAUSAL,
    )


FAMILIES = (
    _family(
        "dream",
        "DreamModel DiffuCoderModel",
        "Dream",
        settings={"qkv_bias": True, "logit_alignment": "shifted"},
        mask_id=151666,
        trained_length=2048,
        presets=DREAM,
    ),
    _family("sdar", "SDARForCausalLM", **_SDAR),
    _family(
        "fast_dllm",
        "Fast_dLLM_QwenForCausalLM",
        "Fast_dLLM_Qwen",
        fields={"bd_size": ("block_length", 32)},
        settings={
            "qkv_bias": True,
            "attention_type": "block_causal",
            "logit_alignment": "shifted",
        },
        mask_id=151665,
        presets=FAST_DLLM,
        idle=("conplemenrary_mask",),  # used only in training; misspelt there
    ),
    _family(
        "sdar_moe",
        "SDARMoeForCausalLM",
        **_SDAR
        | {
            "fixed": _SDAR["fixed"] | {"decoder_sparse_step": 1, "mlp_only_layers": []},
            "fields": _SDAR["fields"]
            | {
                "num_experts": ("experts",),
                "num_experts_per_tok": ("experts_per_token",),
                "moe_intermediate_size": ("expert_width",),
                "norm_topk_prob": ("router_normalised", False),
            },
        },
    ),
    _causal("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    _causal("qwen3", "Qwen3ForCausalLM", qk_norm=True),
    _causal("llama", "LlamaForCausalLM"),
)
