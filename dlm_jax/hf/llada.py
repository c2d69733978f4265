"""The families LLaDA, LLaDA-MoE, and LLaDA2.0 and 2.1."""

from __future__ import annotations

from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.hf.family import Family, FileFields
from dlm_jax.hf.qwen import ATTENTION, MLP, SHAPE, TABLES, read_rope, write_rope

LLADA: dict[str, dict[str, Any]] = {
    # generate.py of LLaDA (Nie et al. 2025), and its README.
    "llada": {
        "gen_length": 128, "steps": 128, "block_length": 32, "temperature": 0.0,
        "order": "low_confidence", "schedule": "linear", "confidence": "sampled",
        "ties": "lower",
    },
    # generate.py of Fast-dLLM (Wu et al. 2025), which commits all holes at or above the threshold.
    "fast": {
        "gen_length": 128, "steps": 128, "block_length": 32, "temperature": 0.0,
        "order": "threshold", "threshold": 0.9, "confidence": "sampled", "ties": "lower",
    },
}  # fmt: skip

LLADA2: dict[str, dict[str, Any]] = {
    # generate of LLaDA2.0, with 32 steps per block of 32 tokens.
    "llada2": {
        "gen_length": 256, "steps": 288, "temperature": 0.0, "order": "threshold",
        "threshold": 0.95, "threshold_above": True, "confidence": "sampled", "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip
# generate of LLaDA2.1: 32 steps per block, and up to 16 further steps that rewrite tokens.
LLADA2["llada2.1"] = LLADA2["llada2"] | {
    "steps": 432, "order": "joint_threshold", "rewrite_threshold": 0.9, "rewrite_steps": 16,
}  # fmt: skip


def _read_table(fields: FileFields, settings: dict[str, Any]) -> dict[str, Any]:
    return {"vocab_size": fields.take("embedding_size", int, settings["vocab_size"])}


_LLADA = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_type="llada",
    fields={
        "d_model": ("width",),
        "include_qkv_bias": ("qkv_bias", False),
        "mlp_hidden_size": ("mlp_width",),
        "n_heads": ("heads",),
        "n_kv_heads": ("kv_heads", 0),
        "n_layers": ("depth",),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "rope_theta": ("rope_theta", 1e4),
        "vocab_size": ("vocab_size",),
        "weight_tying": ("tied_head", True),
    },
    fixed={
        "activation_type": ("silu", "swiglu"),
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "embedding_dropout": 0.0,
        "flash_attention": False,
        "include_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "residual_dropout": 0.0,
        "rope": True,
        "rope_full_precision": True,
        "scale_logits": False,
    },
    checked={"attention_layer_norm_with_affine": True},
    settings={"activation": "swiglu", "qk_norm": False},
    read_more=_read_table,
    write_more=lambda model, fields: fields | {"embedding_size": model.vocab_size},
    tensors={
        "embedding": "model.transformer.wte.weight",
        "norm/scale": "model.transformer.ln_f.weight",
        "head/kernel": "model.transformer.ff_out.weight",
        "blocks/attention_norm/scale": "model.transformer.blocks.{i}.attn_norm.weight",
        "blocks/mlp_norm/scale": "model.transformer.blocks.{i}.ff_norm.weight",
        "blocks/attention/query/kernel": "model.transformer.blocks.{i}.q_proj.weight",
        "blocks/attention/key/kernel": "model.transformer.blocks.{i}.k_proj.weight",
        "blocks/attention/value/kernel": "model.transformer.blocks.{i}.v_proj.weight",
        "blocks/attention/query/bias": "model.transformer.blocks.{i}.q_proj.bias",
        "blocks/attention/key/bias": "model.transformer.blocks.{i}.k_proj.bias",
        "blocks/attention/value/bias": "model.transformer.blocks.{i}.v_proj.bias",
        "blocks/attention/out/kernel": "model.transformer.blocks.{i}.attn_out.weight",
        "blocks/mlp/gate/kernel": "model.transformer.blocks.{i}.ff_proj.weight",
        "blocks/mlp/up/kernel": "model.transformer.blocks.{i}.up_proj.weight",
        "blocks/mlp/down/kernel": "model.transformer.blocks.{i}.ff_out.weight",
    },
    max_length="max_sequence_length",
    mask_id=126336,
    presets=LLADA,
    idle=("alibi_bias_max",),
)

_EXPERTS = {"num_experts": ("experts",), "num_experts_per_tok": ("experts_per_token",)}


def _read_moe(fields: FileFields, settings: dict[str, Any]) -> dict[str, Any]:
    depth = settings["depth"]
    frequency = fields.take("moe_layer_freq", list, []) or [1] * depth
    num_dense = next((i for i, kind in enumerate(frequency) if kind), depth)
    if len(frequency) != depth or not all(frequency[num_dense:]) or num_dense == depth:
        raise fields.refuse(
            "moe_layer_freq", frequency, "is not implemented; plain layers must precede experts"
        )
    is_biased = fields.take("moe_router_enable_expert_bias", bool, False)
    return read_rope(fields, settings) | {
        "mlp_width": max(settings["mlp_width"], 0),
        "shared_width": max(settings["shared_width"], 0),
        "dense_layers": num_dense,
        "router_bias": "weight" if is_biased else "none",
    }


def _write_moe(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    num_dense = model.dense_layers
    return (
        fields
        | write_rope(model)
        | {
            "dense_intermediate_size": model.mlp_width or -1,
            "moe_layer_freq": [0] * num_dense + [1] * (model.depth - num_dense),
            "moe_router_enable_expert_bias": model.router_bias == "weight",
            "shared_expert_intermediate_size": model.shared_width or None,
        }
    )


_LLADA_MOE = Family(
    name="llada_moe",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    model_type="llada",
    fields=SHAPE
    | _EXPERTS
    | {
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "dense_intermediate_size": ("mlp_width", -1),
        "qk_layernorm": ("qk_norm", False),
        "expert_intermediate_size": ("expert_width",),
        "shared_expert_intermediate_size": ("shared_width", 0),
    },
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": (False, True),
        "partial_rotary_factor": (1, 1.0, -1),
        "routed_scaling_factor": (1, 1.0),
    },
    checked={"router_num_group": (1, -2, -1), "router_topk_group": (1, -2, -1)},
    settings={"activation": "swiglu"},
    read_more=_read_moe,
    write_more=_write_moe,
    tensors=ATTENTION
    | MLP
    | TABLES
    | {
        "blocks/mlp/router_bias": "model.layers.{i}.mlp.gate.expert_bias",
        "blocks/mlp/shared/gate/kernel": "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
        "blocks/mlp/shared/up/kernel": "model.layers.{i}.mlp.shared_expert.up_proj.weight",
        "blocks/mlp/shared/down/kernel": "model.layers.{i}.mlp.shared_expert.down_proj.weight",
    },
    mask_id=156895,
    presets={"llada": LLADA["llada"]},
)


def _read_llada2(fields: FileFields, settings: dict[str, Any]) -> dict[str, Any]:
    settings |= read_rope(fields, settings)
    head_size = settings["head_size"] or settings["width"] // max(settings["heads"], 1)
    fields.must(rotary_dim=int(head_size * settings["rotary_share"]))
    shared_width = settings["expert_width"] * fields.take("num_shared_experts", int, 0)
    fields.must(moe_shared_expert_intermediate_size=shared_width)
    # A single expert's score is not normalised.
    is_normalised = settings["experts_per_token"] > 1
    return settings | {"shared_width": shared_width, "router_normalised": is_normalised}


def _write_llada2(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    return (
        fields
        | write_rope(model)
        | {
            "num_shared_experts": model.shared_width // max(model.expert_width, 1) or None,
            "rotary_dim": model.rotary_size,
        }
    )


_LLADA2 = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_type="llada2_moe",
    fields=SHAPE
    | _EXPERTS
    | {
        "num_key_value_heads": ("kv_heads",),
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "block_length": ("block_length", 32),
        "first_k_dense_replace": ("dense_layers", 0),
        "head_dim": ("head_size", 0),
        "intermediate_size": ("mlp_width",),
        "moe_intermediate_size": ("expert_width",),
        "n_group": ("router_groups", 8),
        "partial_rotary_factor": ("rotary_share", 0.5),
        "routed_scaling_factor": ("router_scale", 2.5),
        "topk_group": ("router_groups_kept", 4),
        "use_qk_norm": ("qk_norm", True),
    },
    fixed={
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "hidden_act": "silu",
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_topk_prob": True,
        "output_dropout": 0.0,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qkv_bias": False,
        "use_sliding_window": False,
    },
    checked={"use_rmsnorm": True},
    settings={
        "activation": "swiglu",
        "attention_type": "block_causal",
        "router_score": "sigmoid",
        "router_bias": "choice",
    },
    read_more=_read_llada2,
    write_more=_write_llada2,
    tensors=MLP
    | TABLES
    | {
        "embedding": "model.word_embeddings.weight",
        "blocks/attention_norm/scale": "model.layers.{i}.input_layernorm.weight",
        "blocks/mlp_norm/scale": "model.layers.{i}.post_attention_layernorm.weight",
        "blocks/attention/query/kernel": "model.layers.{i}.attention.query_key_value.weight",
        "blocks/attention/key/kernel": "model.layers.{i}.attention.query_key_value.weight",
        "blocks/attention/value/kernel": "model.layers.{i}.attention.query_key_value.weight",
        "blocks/attention/out/kernel": "model.layers.{i}.attention.dense.weight",
        "blocks/attention/query_norm/scale": "model.layers.{i}.attention.query_layernorm.weight",
        "blocks/attention/key_norm/scale": "model.layers.{i}.attention.key_layernorm.weight",
        "blocks/mlp/router_bias": "model.layers.{i}.mlp.gate.expert_bias",
        "blocks/mlp/shared/gate/kernel": "model.layers.{i}.mlp.shared_experts.gate_proj.weight",
        "blocks/mlp/shared/up/kernel": "model.layers.{i}.mlp.shared_experts.up_proj.weight",
        "blocks/mlp/shared/down/kernel": "model.layers.{i}.mlp.shared_experts.down_proj.weight",
    },
    mask_id=156895,
    presets=LLADA2,
)

FAMILIES = (_LLADA, _LLADA_MOE, _LLADA2)
