"""The DiffusionGemma family: models that denoise canvases of random tokens after a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.hf.family import Family, FileFields

_SLIDING, _FULL = "sliding_attention", "full_attention"

PRESETS: dict[str, dict[str, Any]] = {
    # generate of DiffusionGemma in transformers: 48 steps for a canvas of 256, and a temperature
    # that falls from 0.8 towards 0.4 and would reach it one step after the last.
    "diffusion_gemma": {
        "gen_length": 256, "steps": 48, "temperature": 0.8, "temperature_end": 0.408333333,
        "order": "entropy_renoise", "entropy_bound": 0.1, "renoise_stop": 0.005,
        "cache": "exact", "ties": "lower",
    },
}  # fmt: skip
PRESETS["greedy"] = PRESETS["diffusion_gemma"] | {"temperature": 0.0, "temperature_end": -1.0}


def _read(fields: FileFields, settings: dict[str, Any]) -> dict[str, Any]:
    depth = settings["depth"]
    default = [_SLIDING if (at + 1) % 6 else _FULL for at in range(depth)]
    kinds = fields.take("layer_types", list, default)
    every = kinds.index(_FULL) + 1 if _FULL in kinds else 0
    if every < 2 or depth % every or kinds != [*[_SLIDING] * (every - 1), _FULL] * (depth // every):
        raise fields.refuse(
            "layer_types",
            kinds,
            "is not implemented; use equal groups of sliding layers with one full layer",
        )
    size, groups = settings["full_head_size"], settings["full_kv_heads"] or settings["kv_heads"]
    if said := fields.take("per_layer_config", dict, {}):
        same = next(iter(said.values()))
        names = {"head_dim", "num_key_value_heads"}
        full = [str(at) for at, kind in enumerate(kinds) if kind == _FULL]
        if said != dict.fromkeys(full, same) or not isinstance(same, dict) or set(same) - names:
            raise fields.refuse(
                "per_layer_config", said, "is not implemented; use only one for all full layers"
            )
        inner = FileFields(same, f"{fields.where}: per_layer_config")
        size = inner.take("head_dim", int, size)
        groups = inner.take("num_key_value_heads", int, groups)
    rope = fields.take("rope_parameters", dict, {})
    full_theta, full_share = _read_rope(fields, rope, _FULL, "proportional", 1e6, 0.25)
    return {
        "full_every": every,
        "full_head_size": size,
        "full_kv_heads": groups,
        "rope_theta": _read_rope(fields, rope, _SLIDING, "default", 1e4, 1.0)[0],
        "full_rope_theta": full_theta,
        "full_rotary_share": full_share,
    }


def _read_rope(
    fields: FileFields, rope: dict[str, Any], kind: str, type_: str, theta: float, share: float
) -> tuple[float, float]:
    """Returns (RoPE base, rotated fraction) for the layers of one kind, with their defaults."""
    given = rope.get(kind)
    if given is None:
        return theta, share
    if not isinstance(given, dict):
        raise fields.refuse(f"rope_parameters.{kind}", given, "is not an object")
    where, within = f"{fields.where}: rope_parameters of {kind}", f"rope_parameters.{kind}."
    inner = FileFields(given, where, within)
    inner.must(rope_type=type_, factor=1.0)
    if kind == _SLIDING:
        inner.must(partial_rotary_factor=(1, 1.0))
    theta = inner.take("rope_theta", float, theta)
    share = inner.take("partial_rotary_factor", float, 1.0)
    inner.finish()
    return theta, share


def _write(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    if not model.full_every:
        raise ValueError("this family requires groups of sliding and full layers")
    return fields | {
        "global_head_dim": model.full_head_size or model.size_of_head,
        "layer_types": [
            _FULL if at in model.layers["full_blocks"] else _SLIDING for at in range(model.depth)
        ],
        "num_global_key_value_heads": model.full_kv_heads or model.kv_heads or model.heads,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": model.rope_theta},
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": model.full_rope_theta,
                "partial_rotary_factor": model.full_rotary_share,
            },
        },
    }


_LAYER = "model.decoder.layers.{i}."
_TENSORS = {
    "embedding": "model.decoder.embed_tokens.weight",
    "norm/scale": "model.decoder.norm.weight",
    "self_conditioning/norm/scale": "model.decoder.self_conditioning.pre_norm.weight",
    "self_conditioning/mlp/gate/kernel": "model.decoder.self_conditioning.gate_proj.weight",
    "self_conditioning/mlp/up/kernel": "model.decoder.self_conditioning.up_proj.weight",
    "self_conditioning/mlp/down/kernel": "model.decoder.self_conditioning.down_proj.weight",
    "head/kernel": "lm_head.weight",
    "blocks/attention_norm/scale": f"{_LAYER}input_layernorm.weight",
    "blocks/attention_out_norm/scale": f"{_LAYER}post_attention_layernorm.weight",
    "blocks/attention/query/kernel": f"{_LAYER}self_attn.q_proj.weight",
    "blocks/attention/key/kernel": f"{_LAYER}self_attn.k_proj.weight",
    "blocks/attention/value/kernel": f"{_LAYER}self_attn.v_proj.weight",
    "blocks/attention/out/kernel": f"{_LAYER}self_attn.o_proj.weight",
    "blocks/attention/query_norm/scale": f"{_LAYER}self_attn.q_norm.weight",
    "blocks/attention/key_norm/scale": f"{_LAYER}self_attn.k_norm.weight",
    "blocks/mlp_norm/scale": f"{_LAYER}pre_feedforward_layernorm.weight",
    "blocks/mlp/gate/kernel": f"{_LAYER}mlp.gate_proj.weight",
    "blocks/mlp/up/kernel": f"{_LAYER}mlp.up_proj.weight",
    "blocks/mlp/down/kernel": f"{_LAYER}mlp.down_proj.weight",
    "blocks/mlp_out_norm/scale": f"{_LAYER}post_feedforward_layernorm.weight",
    "blocks/dense_out_norm/scale": f"{_LAYER}post_feedforward_layernorm_1.weight",
    "blocks/experts_norm/scale": f"{_LAYER}pre_feedforward_layernorm_2.weight",
    "blocks/experts_out_norm/scale": f"{_LAYER}post_feedforward_layernorm_2.weight",
    "blocks/experts/router/kernel": f"{_LAYER}router.proj.weight",
    "blocks/experts/router_scale": f"{_LAYER}router.scale",
    "blocks/experts/output_scale": f"{_LAYER}router.per_expert_scale",
    "blocks/experts/expert_gate": f"{_LAYER}experts.gate_up_proj",
    "blocks/experts/expert_up": f"{_LAYER}experts.gate_up_proj",
    "blocks/experts/expert_down": f"{_LAYER}experts.down_proj",
    "blocks/canvas_scale": f"{_LAYER}layer_scalar",
    "blocks/text_scale": "model.encoder.language_model.layers.{i}.layer_scalar",
}

# Fields of generation_config.json, with the equivalent settings of this library.
_OF_LOOP = {"confidence_threshold": "renoise_stop", "entropy_bound": "entropy_bound"}


def _recommended(said: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The settings for the fields of a DiffusionGemmaGenerationConfig."""
    said = {**said, **(said.get("sampler_config") or {})}
    if said.get("stability_threshold") not in (None, 1):
        raise ValueError(
            f"stability_threshold={said['stability_threshold']!r} is not implemented; use 1"
        )
    settings = {
        name: said[field] for field, name in _OF_LOOP.items() if said.get(field) is not None
    }
    first = PRESETS["diffusion_gemma"]
    steps, length = said.get("max_denoising_steps"), said.get("max_new_tokens")
    if "steps" not in said and (steps is not None or length is not None):
        steps = first["steps"] if steps is None else steps
        length = first["gen_length"] if length is None else length
        settings["steps"] = steps * -(-length // model.block_length)
    if said.get("t_min") is not None and said.get("t_max") is not None:
        t_min, t_max = said["t_min"], said["t_max"]
        of_canvas = first["steps"] if steps is None else steps
        settings["temperature"] = t_max
        settings["temperature_end"] = t_min + (t_max - t_min) / of_canvas
    return settings


_GEMMA = Family(
    name="diffusion_gemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_type="diffusion_gemma",
    fields={
        "num_hidden_layers": ("depth",),
        "hidden_size": ("width",),
        "num_attention_heads": ("heads",),
        "num_key_value_heads": ("kv_heads",),
        "head_dim": ("head_size",),
        "intermediate_size": ("mlp_width",),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        "vocab_size": ("vocab_size",),
        "canvas_length": ("block_length", 256),
        "sliding_window": ("attention_window", 512),
        "global_head_dim": ("full_head_size", 512),
        "num_global_key_value_heads": ("full_kv_heads", 0),
        "final_logit_softcapping": ("logit_cap", 30.0),
        "num_experts": ("experts",),
        "top_k_experts": ("experts_per_token",),
        "moe_intermediate_size": ("expert_width",),
    },
    fixed={
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    checked={"use_bidirectional_attention": "vision"},
    settings={
        "activation": "geglu",
        "attention_type": "canvas",
        "qk_norm": True,
        "tied_head": True,
        "router_normalised": True,
    },
    read_more=_read,
    write_more=_write,
    tensors=_TENSORS,
    mask_id=4,  # the tokenizer's <mask>, which the model itself does not use
    idle=(
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "vision_config",
        "vision_soft_tokens_per_image",
    ),
    within="text_config",
    generates_from_mask=False,
    process="uniform",
    presets=PRESETS,
    recommended=_recommended,
    outside=("canvas_length", "tie_word_embeddings"),
    other_names=(
        # The image tower is omitted.
        (r"model\.encoder\.(vision_tower|embed_vision)\.", ""),
        # Text and canvas use the same parameters, except for the layer scales.
        (r"(model\.encoder\.language_model\.layers\.\d+\.layer_scalar)$", r"\1"),
        (r"model\.encoder\.language_model\.", "model.decoder."),
    ),
)

FAMILIES = (_GEMMA,)
