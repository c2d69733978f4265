"""The DiffusionGemma family: models that denoise canvases of random tokens after a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.published import family
from dlm_jax.published.family import DENSE, QWEN, Family, FileFields, Source

_SLIDING, _FULL = "sliding_attention", "full_attention"
_EVERY = 6
_THETAS = {_SLIDING: 1e4, _FULL: 1e6}
_SHARE = 0.25


def _read(fields: FileFields) -> ModelConfig:
    fields.must(
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        tie_word_embeddings=True,
        use_bidirectional_attention="vision",
    )
    depth, heads = fields.take("num_hidden_layers", int), fields.take("num_attention_heads", int)
    default = [_FULL if (at + 1) % _EVERY == 0 else _SLIDING for at in range(depth)]
    kinds = fields.take("layer_types", list, default)
    every = kinds.index(_FULL) + 1 if _FULL in kinds else 0
    if every < 2 or depth % every or kinds != [*[_SLIDING] * (every - 1), _FULL] * (depth // every):
        raise fields.refuse(
            "layer_types",
            kinds,
            "is not implemented; use equal groups of sliding layers with one full layer",
        )
    head_size, groups = fields.take("head_dim", int), fields.take("num_key_value_heads", int)
    full_size, full_groups = _read_full(fields, kinds, groups)
    rope = fields.take("rope_parameters", dict, {})
    turns = {kind: _read_rope(fields, rope, kind) for kind in (_SLIDING, _FULL)}
    return ModelConfig(
        depth=depth,
        width=fields.take("hidden_size", int),
        heads=heads,
        kv_heads=groups,
        head_size=head_size,
        mlp_width=fields.take("intermediate_size", int),
        activation="geglu",
        norm_epsilon=fields.take("rms_norm_eps", float, 1e-6),
        vocab_size=fields.take("vocab_size", int),
        rope_theta=turns[_SLIDING][0],
        full_rope_theta=turns[_FULL][0],
        full_rotary_share=turns[_FULL][1],
        attention_type="canvas",
        block_length=fields.take("canvas_length", int, 256),
        attention_window=fields.take("sliding_window", int, 512),
        full_every=every,
        full_head_size=full_size,
        full_kv_heads=full_groups,
        full_value_from_key=True,
        attention_scale=1.0,
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scales=True,
        embedding_scaled=True,
        tied_head=True,
        logit_cap=fields.take("final_logit_softcapping", float, 30.0),
        self_conditioning=True,
        experts=fields.take("num_experts", int),
        experts_per_token=fields.take("top_k_experts", int),
        expert_width=fields.take("moe_intermediate_size", int),
        experts_beside=True,
        router_scales=True,
        router_normalised=True,
    )


def _read_full(fields: FileFields, kinds: list[str], groups: int) -> tuple[int, int]:
    """Returns (head size, number of key/value heads) of the full layers."""
    size = fields.take("global_head_dim", int, 512)
    found = {
        "head_dim": size,
        "num_key_value_heads": fields.take("num_global_key_value_heads", int, groups),
    }
    said = fields.take("per_layer_config", dict, {})
    full = {str(at) for at, kind in enumerate(kinds) if kind == _FULL}
    if not said:
        return found["head_dim"], found["num_key_value_heads"]
    same = next(iter(said.values()))
    if said != dict.fromkeys(full, same) or not isinstance(same, dict) or set(same) - set(found):
        raise fields.refuse(
            "per_layer_config", said, "is not implemented; use only one for all full layers"
        )
    inner = FileFields(same, f"{fields.where}: per_layer_config")
    return inner.take("head_dim", int, size), inner.take("num_key_value_heads", int, groups)


def _read_rope(fields: FileFields, said: dict[str, Any], kind: str) -> tuple[float, float]:
    """Returns (RoPE base, rotated fraction) for the layers of one kind."""
    is_full, given = kind == _FULL, said.get(kind)
    if given is None:
        return _THETAS[kind], _SHARE if is_full else 1.0
    if not isinstance(given, dict):
        raise fields.refuse(f"rope_parameters.{kind}", given, "is not an object")
    where, within = f"{fields.where}: rope_parameters of {kind}", f"rope_parameters.{kind}."
    inner = FileFields(given, where, within)
    inner.must(rope_type="proportional" if is_full else "default", factor=1.0)
    if not is_full:
        inner.must(partial_rotary_factor=(1, 1.0))
    theta = inner.take("rope_theta", float, _THETAS[kind])
    share = inner.take("partial_rotary_factor", float, 1.0)
    inner.finish()
    return theta, share


def _write(model: ModelConfig) -> dict[str, Any]:
    if not model.full_every:
        raise ValueError("this family requires groups of sliding and full layers")
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "canvas_length": model.block_length,
        "final_logit_softcapping": model.logit_cap,
        "global_head_dim": model.full_head_size or model.size_of_head,
        "head_dim": model.size_of_head,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "layer_types": [
            _FULL if at in model.layers["full_blocks"] else _SLIDING for at in range(model.depth)
        ],
        "moe_intermediate_size": model.expert_width,
        "num_attention_heads": model.heads,
        "num_experts": model.experts,
        "num_global_key_value_heads": model.full_kv_heads or model.kv_heads or model.heads,
        "num_hidden_layers": model.depth,
        "num_key_value_heads": model.kv_heads or model.heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": model.rope_theta},
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": model.full_rope_theta,
                "partial_rotary_factor": model.full_rotary_share,
            },
        },
        "sliding_window": model.attention_window,
        "tie_word_embeddings": model.tied_head,
        "top_k_experts": model.experts_per_token,
        "vocab_size": model.vocab_size,
    }


def _sources(model: ModelConfig) -> dict[str, Source]:
    inner = model.expert_width
    own: dict[str, Source] = {
        "attention_out_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "pre_feedforward_layernorm.weight",
        "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
        "dense_out_norm/scale": "post_feedforward_layernorm_1.weight",
        "experts_norm/scale": "pre_feedforward_layernorm_2.weight",
        "experts_out_norm/scale": "post_feedforward_layernorm_2.weight",
        "experts/router/kernel": "router.proj.weight",
        "experts/router_scale": "router.scale",
        "experts/output_scale": "router.per_expert_scale",
        "experts/expert_gate": ("experts.gate_up_proj", (0, inner)),
        "experts/expert_up": ("experts.gate_up_proj", (inner, 2 * inner)),
        "experts/expert_down": "experts.down_proj",
        "canvas_scale": "layer_scalar",
    }
    blocks: dict[str, Source] = QWEN | DENSE | own
    found: dict[str, Source] = {
        "embedding": "model.decoder.embed_tokens.weight",
        "norm/scale": "model.decoder.norm.weight",
        "self_conditioning/norm/scale": "model.decoder.self_conditioning.pre_norm.weight",
        "head/kernel": "lm_head.weight",
    }
    for part in ("gate", "up", "down"):
        name = f"model.decoder.self_conditioning.{part}_proj.weight"
        found[f"self_conditioning/mlp/{part}/kernel"] = name
    for stack in ("blocks", "full_blocks"):
        for path, source in blocks.items():
            name, *rows = (source,) if isinstance(source, str) else source
            name = f"model.decoder.layers.{{i}}.{name}"
            found[f"{stack}/{path}"] = (name, rows[0]) if rows else name
        found[f"{stack}/text_scale"] = "model.encoder.language_model.layers.{i}.layer_scalar"
    return found


# Fields of generation_config.json, with the equivalent settings of this library.
_OF_LOOP = {"confidence_threshold": "renoise_stop", "entropy_bound": "entropy_bound"}
# Other fields of generation_config.json, with their types and minimum values.
_NUMBERS: tuple[tuple[str, Any, float], ...] = (
    ("max_denoising_steps", int, 1),
    ("max_new_tokens", int, 1),
    ("t_min", int | float, 0),
    ("t_max", int | float, 0),
)
# Number of decimals to which temperatures are rounded, so that exported values are read back
# exactly.
_DECIMALS = 9


def _recommended(said: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The settings for the fields of a DiffusionGemmaGenerationConfig."""
    inner = said.get("sampler_config") or {}
    if not isinstance(inner, Mapping):
        raise ValueError(f"sampler_config={inner!r} is not an object")
    said = {**said, **inner}
    for name, kind, least in _NUMBERS:
        value = said.get(name)
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and (not is_kind or value < least):
            raise ValueError(f"{name}={value!r} must be a number of at least {least}")
    if said.get("stability_threshold") not in (None, 1):
        raise ValueError(
            f"stability_threshold={said['stability_threshold']!r} is not implemented; use 1"
        )
    found = {name: said[field] for field, name in _OF_LOOP.items() if said.get(field) is not None}
    first = family.DIFFUSION_GEMMA["diffusion_gemma"]
    steps, length = said.get("max_denoising_steps"), said.get("max_new_tokens")
    if steps is not None or length is not None:
        steps = first["steps"] if steps is None else steps
        length = first["gen_length"] if length is None else length
        found["steps"] = steps * -(-length // model.block_length)
    if said.get("t_min") is not None and said.get("t_max") is not None:
        t_min, t_max = said["t_min"], said["t_max"]
        of_canvas = first["steps"] if steps is None else steps
        found["temperature"] = t_max
        found["temperature_end"] = round(t_min + (t_max - t_min) / of_canvas, _DECIMALS)
    return found


def _spoken(sample: SamplingParams, model: ModelConfig) -> dict[str, Any]:
    """The inverse of `_recommended`; empty if no fields can express the settings."""
    num_canvases = max(-(-sample.gen_length // model.block_length), 1)
    steps, rest = divmod(sample.steps, num_canvases)
    first, last = sample.temperature, sample.temperature_end
    is_above = min(last, sample.entropy_bound, sample.renoise_stop) > 0
    if rest or steps < 2 or not (sample.gen_length and is_above and last < first):
        return {}
    return {
        "max_new_tokens": sample.gen_length,
        "max_denoising_steps": steps,
        "t_max": first,
        "t_min": round((last * steps - first) / (steps - 1), _DECIMALS),
        "confidence_threshold": sample.renoise_stop,
        "stability_threshold": 1,
        "sampler_config": {
            "_cls_name": "EntropyBoundSamplerConfig",
            "entropy_bound": sample.entropy_bound,
        },
    }


DIFFUSION_GEMMA = Family(
    name="diffusion_gemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_type="diffusion_gemma",
    read=_read,
    write=_write,
    sources=_sources,
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
    presets=family.DIFFUSION_GEMMA,
    recommended=_recommended,
    spoken=_spoken,
    outside=("canvas_length", "tie_word_embeddings"),
    other_names=(
        # The image tower is omitted.
        (r"model\.encoder\.(vision_tower|embed_vision)\.", ""),
        # Text and canvas use the same parameters, except for the layer scales.
        (r"(model\.encoder\.language_model\.layers\.\d+\.layer_scalar)$", r"\1"),
        (r"model\.encoder\.language_model\.", "model.decoder."),
    ),
)
