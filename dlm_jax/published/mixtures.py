"""The families with experts: LLaDA-MoE, LLaDA2.0 and 2.1, and SDAR with experts."""

from __future__ import annotations

from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.published import family
from dlm_jax.published.dense import (
    ASKED_BY_SDAR,
    IDLE_OF_SDAR,
    read_head_size,
    read_qwen,
    read_shape,
    write_qwen,
    write_shape,
)
from dlm_jax.published.family import (
    DENSE,
    EXPERTS,
    Family,
    FileFields,
    Source,
    in_blocks,
    qwen_sources,
)


def _read_moe(fields: FileFields) -> ModelConfig:
    fields.must(
        hidden_act="silu", attention_bias=False, clip_qkv=None, moe_router_score_function="softmax",
        partial_rotary_factor=(1, 1.0, -1), router_num_group=(1, -2, -1),
        router_topk_group=(1, -2, -1), routed_scaling_factor=(1, 1.0),
        norm_topk_prob=(False, True),
    )  # fmt: skip
    shape = read_shape(fields, epsilon=1e-5)
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
        experts=fields.take("num_experts", int),
        experts_per_token=fields.take("num_experts_per_tok", int),
        expert_width=fields.take("expert_intermediate_size", int),
        shared_width=max(fields.take("shared_expert_intermediate_size", int, 0), 0),
        dense_layers=num_dense,
        router_bias="weight" if biased else "none",
        **shape,
    )


def _write_moe(model: ModelConfig) -> dict[str, Any]:
    num_dense = model.dense_layers
    return write_shape(model) | {
        "attention_bias": False, "clip_qkv": None,
        "dense_intermediate_size": model.mlp_width or -1,
        "expert_intermediate_size": model.expert_width,
        "moe_layer_freq": [0] * num_dense + [1] * (model.depth - num_dense),
        "moe_router_enable_expert_bias": model.router_bias == "weight",
        "moe_router_score_function": "softmax", "norm_topk_prob": False,
        "num_experts": model.experts, "num_experts_per_tok": model.experts_per_token,
        "partial_rotary_factor": 1, "qk_layernorm": model.qk_norm, "routed_scaling_factor": 1,
        "shared_expert_intermediate_size": model.shared_width or None,
    }  # fmt: skip


def _moe_sources(model: ModelConfig) -> dict[str, Source]:
    parts = ("gate", "up", "down")
    shared = {f"mlp/shared/{part}/kernel": f"mlp.shared_expert.{part}_proj.weight"
              for part in parts}  # fmt: skip
    return qwen_sources(model, more=shared | {"mlp/router_bias": "mlp.gate.expert_bias"})


LLADA_MOE = Family(
    name="llada_moe",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    model_type="llada",
    read=_read_moe,
    write=_write_moe,
    sources=_moe_sources,
    mask_id=156895,
    presets=family.LLADA_MOE,
)


def _read_sdar_moe(fields: FileFields) -> ModelConfig:
    fields.must(decoder_sparse_step=1, mlp_only_layers=[])
    block_length = fields.take("block_size", int, 4)
    return read_qwen(
        fields, qk_norm=True, attention_type="block_causal", block_length=block_length,
        experts=fields.take("num_experts", int),
        experts_per_token=fields.take("num_experts_per_tok", int),
        expert_width=fields.take("moe_intermediate_size", int),
        router_normalised=fields.take("norm_topk_prob", bool, False),
    )  # fmt: skip


def _write_sdar_moe(model: ModelConfig) -> dict[str, Any]:
    return write_qwen(model) | {
        "block_size": model.block_length, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": model.expert_width, "norm_topk_prob": model.router_normalised,
        "num_experts": model.experts, "num_experts_per_tok": model.experts_per_token,
    } | ASKED_BY_SDAR  # fmt: skip


SDAR_MOE = Family(
    name="sdar_moe",
    architectures=("SDARMoeForCausalLM",),
    model_type="sdar_moe",
    read=_read_sdar_moe,
    write=_write_sdar_moe,
    sources=qwen_sources,
    mask_id=151669,
    presets=family.SDAR,
    idle=IDLE_OF_SDAR,
)


def _read_llada2(fields: FileFields) -> ModelConfig:
    fields.must(
        hidden_act="silu", use_bias=False, use_qkv_bias=False, use_sliding_window=False,
        norm_head=False, score_function="sigmoid", norm_topk_prob=True, router_dtype="fp32",
        moe_router_enable_expert_bias=True, norm_softmax=False,
    )  # fmt: skip
    shape = {"kv_heads": fields.take("num_key_value_heads", int)}
    shape = read_shape(fields, epsilon=1e-5) | shape
    head_size = read_head_size(fields, shape)
    share = fields.take("partial_rotary_factor", float, 0.5)
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
        experts=fields.take("num_experts", int),
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
    return write_shape(model) | {
        "block_length": model.block_length, "embedding_dropout": 0.0,
        "first_k_dense_replace": model.dense_layers, "head_dim": head_size,
        "intermediate_size": model.mlp_width, "moe_intermediate_size": model.expert_width,
        "moe_router_enable_expert_bias": True, "n_group": model.router_groups, "norm_head": False,
        "norm_topk_prob": True, "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "num_shared_experts": model.shared_width // max(model.expert_width, 1) or None,
        "output_dropout": 0.0, "partial_rotary_factor": model.rotary_share,
        "rotary_dim": model.rotary_size,
        "routed_scaling_factor": model.router_scale, "router_dtype": "fp32",
        "score_function": "sigmoid", "topk_group": model.router_groups_kept, "use_bias": False,
        "use_qk_norm": model.qk_norm, "use_qkv_bias": False, "use_sliding_window": False,
    }  # fmt: skip


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
    rows = {"query": (0, wide), "key": (wide, wide + narrow),
            "value": (wide + narrow, wide + 2 * narrow)}  # fmt: skip
    for stack in ("blocks", "dense_blocks"):
        for part, span in rows.items():
            found[f"{stack}/attention/{part}/kernel"] = (
                prefix + "attention.query_key_value.weight",
                span,
            )
    return found


LLADA2 = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_type="llada2_moe",
    read=_read_llada2,
    write=_write_llada2,
    sources=_llada2_sources,
    mask_id=156895,
    presets=family.LLADA2,
)
