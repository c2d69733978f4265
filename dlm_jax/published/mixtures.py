"""The families with experts: LLaDA-MoE, and LLaDA2.0 and 2.1."""

from __future__ import annotations

from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.published import presets
from dlm_jax.published.dense import rope_theta
from dlm_jax.published.family import Family, qwen_sources
from dlm_jax.published.fields import Fields
from dlm_jax.published.names import Source


def _read_moe(fields: Fields) -> ModelConfig:
    fields.must(
        hidden_act="silu", attention_bias=False, clip_qkv=None, moe_router_score_function="softmax",
        partial_rotary_factor=(1, 1.0, -1), router_num_group=(1, -2, -1),
        router_topk_group=(1, -2, -1), routed_scaling_factor=(1, 1.0),
        norm_topk_prob=(False, True),
    )  # fmt: skip
    depth = fields.take("num_hidden_layers", int)
    frequency = fields.take("moe_layer_freq", list, []) or [1] * depth
    num_dense = next((i for i, kind in enumerate(frequency) if kind), depth)
    if len(frequency) != depth or not all(frequency[num_dense:]) or num_dense == depth:
        raise fields.refuse(
            "moe_layer_freq", frequency, "is not implemented; only plain layers first, then experts"
        )
    heads = fields.take("num_attention_heads", int)
    dense_width = fields.take("dense_intermediate_size", int, -1)
    biased = fields.take("moe_router_enable_expert_bias", bool, False)
    return ModelConfig(
        depth=depth,
        width=fields.take("hidden_size", int),
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", int, heads),
        mlp_width=max(dense_width, 0),
        activation="swiglu",
        norm_epsilon=fields.take("rms_norm_eps", float, 1e-5),
        qk_norm=fields.take("qk_layernorm", bool, False),
        rope_theta=rope_theta(fields),
        tied_head=fields.take("tie_word_embeddings", bool, False),
        vocab_size=fields.take("vocab_size", int),
        experts=fields.take("num_experts", int),
        experts_per_token=fields.take("num_experts_per_tok", int),
        expert_width=fields.take("expert_intermediate_size", int),
        shared_width=max(fields.take("shared_expert_intermediate_size", int, 0), 0),
        dense_layers=num_dense,
        router_bias="weight" if biased else "none",
    )


def _write_moe(model: ModelConfig) -> dict[str, Any]:
    num_dense = model.dense_layers
    return {
        "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "dense_intermediate_size": model.mlp_width or -1,
        "expert_intermediate_size": model.expert_width, "hidden_act": "silu",
        "hidden_size": model.width, "moe_layer_freq": [0] * num_dense
        + [1] * (model.depth - num_dense),
        "moe_router_enable_expert_bias": model.router_bias == "weight",
        "moe_router_score_function": "softmax", "norm_topk_prob": False,
        "num_attention_heads": model.heads, "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token, "num_hidden_layers": model.depth,
        "num_key_value_heads": model.kv_heads or model.heads, "partial_rotary_factor": 1,
        "qk_layernorm": model.qk_norm, "rms_norm_eps": model.norm_epsilon, "rope_scaling": None,
        "rope_theta": model.rope_theta, "routed_scaling_factor": 1,
        "shared_expert_intermediate_size": model.shared_width or None,
        "tie_word_embeddings": model.tied_head, "vocab_size": model.vocab_size,
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
    presets=presets.LLADA_MOE,
)
