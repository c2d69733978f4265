"""The families with a plain MLP: LLaDA, Dream, SDAR, Fast-dLLM v2, and causal Qwen and Llama."""

from __future__ import annotations

from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.published import family
from dlm_jax.published.family import Family, FileFields, Source, in_blocks, qwen_sources

# The default RoPE base, for a config.json without one.
_ROPE_THETA = 10000.0


def _read_llada(fields: FileFields) -> ModelConfig:
    fields.must(
        block_type="llama", layer_norm_type="rms", activation_type=("silu", "swiglu"), rope=True,
        alibi=False, include_bias=False, attention_layer_norm=False, input_emb_norm=False,
        scale_logits=False, bias_for_layer_norm=False, block_group_size=1,
        layer_norm_with_affine=True, attention_layer_norm_with_affine=True,
        multi_query_attention=False,
    )  # fmt: skip
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
        "activation_type": "silu", "alibi": False, "attention_dropout": 0.0,
        "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1,
        "block_type": "llama", "d_model": model.width, "embedding_dropout": 0.0,
        "embedding_size": model.vocab_size, "flash_attention": False, "include_bias": False,
        "include_qkv_bias": model.qkv_bias, "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mlp_hidden_size": model.mlp_width, "n_heads": model.heads,
        "n_kv_heads": model.kv_heads or model.heads, "n_layers": model.depth,
        "residual_dropout": 0.0, "rms_norm_eps": model.norm_epsilon, "rope": True,
        "rope_full_precision": True, "rope_theta": model.rope_theta, "scale_logits": False,
        "vocab_size": model.vocab_size, "weight_tying": model.tied_head,
    }  # fmt: skip


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


def rope_theta(fields: FileFields) -> float:
    """The base of the rotary frequencies; raises ValueError for RoPE scaling."""
    fields.must(rope_scaling=None)
    newer = fields.take("rope_parameters", dict, {})
    if newer:
        inner = FileFields(newer, f"{fields.where}: rope_parameters")
        inner.must(rope_type="default")
        theta = inner.take("rope_theta", float, _ROPE_THETA)
        inner.finish()
        fields.take("rope_theta", float, theta)
        return theta
    return fields.take("rope_theta", float, _ROPE_THETA)


def read_qwen(
    fields: FileFields, *, qkv_bias: bool = False, qk_norm: bool = False, **settings: Any
) -> ModelConfig:
    """Reads the config of Qwen, Llama and related models."""
    fields.must(
        hidden_act="silu", use_sliding_window=False, use_mrope=False, mlp_bias=False,
        attention_bias=qkv_bias,
    )  # fmt: skip
    layers = fields.take("layer_types", list, ["full_attention"])
    if set(layers) != {"full_attention"}:
        raise fields.refuse("layer_types", layers, "is not implemented; only full_attention is")
    shape = read_shape(fields, epsilon=1e-6)
    return ModelConfig(
        head_size=read_head_size(fields, shape),
        mlp_width=fields.take("intermediate_size", int),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        **shape,
        **settings,
    )


def read_shape(fields: FileFields, *, epsilon: float) -> dict[str, Any]:
    """The settings in the fields that all families except LLaDA share; inverse of `write_shape`.

    `epsilon` is the default epsilon of the norms.
    """
    heads = fields.take("num_attention_heads", int)
    return {
        "depth": fields.take("num_hidden_layers", int),
        "width": fields.take("hidden_size", int),
        "heads": heads,
        "kv_heads": fields.take("num_key_value_heads", int, heads),
        "activation": "swiglu",
        "norm_epsilon": fields.take("rms_norm_eps", float, epsilon),
        "rope_theta": rope_theta(fields),
        "tied_head": fields.take("tie_word_embeddings", bool, False),
        "vocab_size": fields.take("vocab_size", int),
    }


def read_head_size(fields: FileFields, shape: dict[str, Any]) -> int:
    """``head_dim``, or 0 if it equals width / heads."""
    size = fields.take("head_dim", int, shape["width"] // shape["heads"])
    return 0 if size * shape["heads"] == shape["width"] else size


def write_shape(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that all families except LLaDA have, including mixtures."""
    return {
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": model.width,
        "num_attention_heads": model.heads, "num_hidden_layers": model.depth,
        "num_key_value_heads": model.kv_heads or model.heads, "rms_norm_eps": model.norm_epsilon,
        "rope_scaling": None, "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied_head, "vocab_size": model.vocab_size,
    }  # fmt: skip


def write_qwen(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that Qwen, Llama and related models have."""
    head_size = model.size_of_head
    written = write_shape(model) | {
        "intermediate_size": model.mlp_width, "use_sliding_window": False,
    }  # fmt: skip
    if model.qk_norm or model.head_size:
        written |= {"head_dim": head_size, "attention_bias": model.qkv_bias}
    return written


def _read_dream(fields: FileFields) -> ModelConfig:
    return read_qwen(fields, qkv_bias=True, logit_alignment="shifted")


def _read_sdar(fields: FileFields) -> ModelConfig:
    block_length = fields.take("block_size", int, 4)
    return read_qwen(fields, qk_norm=True, attention_type="block_causal", block_length=block_length)


def _write_sdar(model: ModelConfig) -> dict[str, Any]:
    return write_qwen(model) | {"block_size": model.block_length} | ASKED_BY_SDAR


def _read_fast_dllm(fields: FileFields) -> ModelConfig:
    block_length = fields.take("bd_size", int, 32)
    return read_qwen(
        fields, qkv_bias=True, attention_type="block_causal", block_length=block_length,
        logit_alignment="shifted",
    )  # fmt: skip


def _write_fast_dllm(model: ModelConfig) -> dict[str, Any]:
    return write_qwen(model) | {"bd_size": model.block_length}


def _read_causal(fields: FileFields, **settings: Any) -> ModelConfig:
    # `read_published` replaces the start id.
    return read_qwen(fields, attention_type="causal", start_id=0, **settings)


IDLE_OF_SDAR = (
    "attn_implementation", "debug", "ep_size", "fuse_cross_entropy", "micro_forward",
    "skip_checkpoint", "use_deepep",
)  # fmt: skip
"""Fields of SDAR's config.json that have no effect."""

ASKED_BY_SDAR = {"fuse_cross_entropy": False}
"""Fields that SDAR's code requires; they disable a training kernel."""

LLADA = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_type="llada",
    read=_read_llada,
    write=_write_llada,
    sources=_llada_sources,
    max_length="max_sequence_length",
    mask_id=126336,
    presets=family.LLADA,
    idle=("alibi_bias_max",),
)
DREAM = Family(
    name="dream",
    architectures=("DreamModel", "DiffuCoderModel"),
    model_type="Dream",
    read=_read_dream,
    write=write_qwen,
    sources=qwen_sources,
    mask_id=151666,
    trained_length=2048,
    presets=family.DREAM,
)
SDAR = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_type="sdar",
    read=_read_sdar,
    write=_write_sdar,
    sources=qwen_sources,
    mask_id=151669,
    presets=family.SDAR,
    idle=IDLE_OF_SDAR,
)
FAST_DLLM = Family(
    name="fast_dllm",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_type="Fast_dLLM_Qwen",
    read=_read_fast_dllm,
    write=_write_fast_dllm,
    sources=qwen_sources,
    mask_id=151665,
    presets=family.FAST_DLLM,
    idle=("conplemenrary_mask",),  # used only in training; misspelt there
)
QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    read=lambda fields: _read_causal(fields, qkv_bias=True),
    write=write_qwen,
    sources=qwen_sources,
    presets=family.CAUSAL,
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    read=lambda fields: _read_causal(fields, qk_norm=True),
    write=write_qwen,
    sources=qwen_sources,
    presets=family.CAUSAL,
)
LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    read=_read_causal,
    write=write_qwen,
    sources=qwen_sources,
    presets=family.CAUSAL,
)
