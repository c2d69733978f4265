"""Names of settings in other projects; error messages about unknown names use this table.

The projects are LLaDA, Dream, Fast-dLLM, SDAR, LLaDA2, dInfer, MDLM and ReMDM, Hugging Face, vLLM,
SGLang and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Given = Mapping[str, Any]
"""Settings by name."""


class Here(NamedTuple):
    """The equivalent in this library of a name from another project.

    Attributes:
      names: candidate settings; the first that exists in the context is used. Empty if there is no
          equivalent.
      values: equivalents of some values.
      note: the difference between the two settings.
    """

    names: tuple[str, ...] = ()
    values: Mapping[str, Given] = {}
    note: str = ""


ORDERS: dict[str, Given] = {
    "low_confidence": {"order": "low_confidence"}, "random": {"order": "random"},
    "origin": {"order": "ancestral"}, "maskgit_plus": {"order": "low_confidence"},
    "topk_margin": {"order": "margin"}, "entropy": {"order": "entropy"},
    "low_confidence_static": {"order": "low_confidence"},
    "low_confidence_dynamic": {"order": "threshold"}, "sequential": {"order": "left_to_right"},
    "entropy_bounded": {"order": "entropy_bound"}, "ddpm": {"order": "ancestral"},
    "ddpm_cache": {"order": "ancestral"}, "confidence_based": {"order": "low_confidence"},
    "margin_based": {"order": "margin"}, "entropy_based": {"order": "entropy"},
}  # fmt: skip
"""Names of commit orders in other projects, and the equivalent settings of this library."""
_NUMBERED: dict[str, Given] = {
    str(number): ORDERS[name] for number, name in enumerate(
        ("origin", "entropy_based", "margin_based", "random", "confidence_based")
    )
}  # fmt: skip
_SERVED: dict[str, Given] = {
    "lowconfidence": {"order": "threshold"},
    "jointthreshold": {"order": "joint_threshold"},
}
_REMASKS: dict[str, Given] = {
    f"remdm_{kind}": {"remask": f"remdm_{kind}"} for kind in ("cap", "rescale", "conf")
}
_TRUE = "true"
_LENGTH, _STEPS = ("max_tokens", "gen_length"), ("steps",)
_ROWS = ("n", "num_samples")
_STEPS_OF_BLOCK = "it is the number of steps per block; steps is the number per row"

_STRUCTURED = Here(
    ("response_format", "structure"),
    note="response_format is a schema, but structure is a regular expression",
)
_ENTROPY = Here(("entropy_bound",), note="it requires order='entropy_bound'")
_REWRITES = Here(("rewrite_threshold",), note="it requires order='joint_threshold'")
_BREAKERS = Here(("dry_breakers",), note="its values are token ids")
_GUMBEL = Here(("draw",), {_TRUE: {"draw": "gumbel"}})

_RENAMED: dict[tuple[str, ...], str] = {
    _LENGTH: "max_new_tokens max_gen_toks max_completion_tokens n_predict num_predict",
    ("gen_length",): "max_tokens",
    _STEPS: "diffusion_steps num_steps sampling_steps num_inference_steps max_iterations",
    ("block_length",): "bd_size diffusion_block_length",
    ("guidance",): "cfg_scale cfg diffusion_cfg_scale unsupervised_cfg_scale",
    ("temperature",): "temp t_max",
    ("temperature_end",): "t_min",
    ("top_p",): "top_p_logits nucleus_p",
    ("top_k",): "top_k_logits",
    ("typical_p",): "typ_p typical",
    ("top_n_sigma",): "top_nsigma",
    ("repetition_penalty",): "repeat_penalty penalty_repeat rep_p",
    ("penalty_last_n",): "repeat_last_n",
    ("dynatemp_exponent",): "dynatemp_exp",
    ("mirostat_tau",): "mirostat_ent",
    ("mirostat_eta",): "mirostat_lr",
    ("dry_last_n",): "dry_penalty_last_n",
    ("chain",): "samplers",
    ("stop_at_eos",): "eos_early_stop early_stop early_stopping",
    ("ignore_eos",): "logits_eos_inf",
    ("structure",): "guided_regex",
    _ROWS: "num_return_sequences num_sample_batches",
    ("n",): "num_samples",
    ("num_samples",): "n",
    ("frequency_penalty",): "penalty_freq",
    ("presence_penalty",): "penalty_present",
    ("delete_margin",): "margin",
    ("delete_lambda",): "lam",
    ("dynatemp_range", "temperature"): "temp_ext",
}
"""Names that other projects use for settings of this library, keyed by the settings."""

TABLE: dict[str, Here] = {
    name: Here(ours) for ours, theirs in _RENAMED.items() for name in theirs.split()
} | {
    # Choice of positions.
    "remasking": Here(("order",), ORDERS),
    "remasking_strategy": Here(("order",), ORDERS),
    "alg": Here(("order",), ORDERS),
    "algorithm": Here(("order",), ORDERS),
    "dllm_algorithm": Here(("order",), _SERVED),
    "unmasking": Here(("order",), ORDERS),
    "predictor": Here(("order",), ORDERS),
    "diffusion_algorithm": Here(("order",), _NUMBERED),
    "sampler": Here(("remask",), _REMASKS),
    "alg_temp": Here(note="positions are selected without noise, as with alg_temp=0"),
    "diffusion_alg_temp": Here(note="positions are selected without noise, as with 0"),
    "confidence_threshold": Here(("threshold",), note="it requires order='threshold'"),
    "eb_threshold": _ENTROPY,
    "gamma": _ENTROPY,
    "editing_threshold": _REWRITES,
    "edit_threshold": _REWRITES,
    "max_post_steps": Here(("rewrite_steps",), note="it requires order='joint_threshold'"),
    "eta": Here(("remask_eta",), note="it requires remask='remdm_cap'"),
    # Lengths, steps and blocks.
    "denoising_steps": Here(_STEPS, note=_STEPS_OF_BLOCK),
    "max_denoising_steps": Here(_STEPS, note=_STEPS_OF_BLOCK),
    "steps_per_block": Here(_STEPS, note=_STEPS_OF_BLOCK),
    "block_size": Here(("block_length",), note="the canvas size is max_length"),
    "small_block_size": Here(
        ("block_length",), note="threshold_alone is the length of the enclosing blocks"
    ),  # fmt: skip
    # Guidance, draws and truncations.
    "guidance_scale": Here(("guidance",), note="guidance is guidance_scale - 1; 0 disables it"),
    "dry_sequence_breakers": _BREAKERS,
    "dry_sequence_breaker": _BREAKERS,
    "do_sample": Here(
        ("temperature",), {"false": {"temperature": 0.0}, _TRUE: {"temperature": 1.0}}
    ),  # fmt: skip
    "add_gumbel_noise": _GUMBEL,
    "diffusion_add_gumbel_noise": _GUMBEL,
    # Ends and formats of texts.
    "confidence_eos_eot_inf": Here(("confidence_without",), note="its values are token ids"),
    "structured_outputs": _STRUCTURED,
    "guided_decoding": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "grammar": _STRUCTURED,
    "preset": Here(note="a preset applies to a whole program: --preset, or Model.preset in Python"),
    "use_float32_gumbel": _GUMBEL,
    "tokens_per_step": Here(_STEPS, note="steps is the number of tokens / tokens_per_step"),
    "max_waves": Here(note="the holes determine the number of waves"),
    "backend_sampling": Here(
        note="all rows except those with host_sampler are sampled on the device"
    ),
    "enable_early_stopping": Here(
        note="a row ends when it has no holes, and at EOS with stop_at_eos"
    ),
    "mask_id": Here(note="the tokenizer defines it"),
    # Caches.
    "use_cache": Here(("cache",), {_TRUE: {"cache": "prefix"}, "false": {"cache": "none"}}),
    "dual_cache": Here(("cache",), {_TRUE: {"cache": "dual"}, "false": {"cache": "none"}}),
    "use_block_cache": Here(("cache",), {_TRUE: {"cache": "dual"}, "false": {"cache": "none"}}),
}
"""Names of settings in other projects; some are recognised only in certain contexts."""

VALUES: dict[str, Mapping[str, Given]] = {
    "order": ORDERS, "remask": ORDERS | _REMASKS,
    "cache": {_TRUE: {"cache": "prefix"}, "false": {"cache": "none"}},
}  # fmt: skip
"""For each setting of this library, values from other projects and their equivalents."""


def named_here(name: str, known: Iterable[str], value: Any = None) -> str:
    """Advice with this library's name for a setting of another project; empty if unknown.

    Args:
      name: the given name, with dashes, underscores, or a section before a dot.
      known: existing names, in the form that the advice shows.
      value: the given value.
    """
    here = TABLE.get(_plain(name))
    if here is None:
        return ""
    section = name.lstrip("-").rpartition(".")[0]
    shown = {_plain(one): one for one in known if one.lstrip("-").rpartition(".")[0] == section}
    if not here.names:
        return f"it has no counterpart here ({here.note}); remove it"
    found = next((shown[one] for one in here.names if one in shown), None)
    if found is None:
        return ""
    asked = here.values.get(_plain_value(value))
    if asked is not None:
        return f"it is named {found} here; use {written(asked, shown)}"
    if here.values:
        listed = ", ".join(f"{v} is {written(s, shown)}" for v, s in here.values.items())
        return f"it is named {found} here: {listed}"
    return f"it is named {found} here" + (f" ({here.note})" if here.note else "")


def meant(name: str, value: Any) -> str:
    """Advice for a value from another project; empty if unknown."""
    asked = VALUES.get(name, {}).get(_plain_value(value))
    return "" if asked is None else written(asked)


def written(asked: Given, shown: Mapping[str, str] = {}) -> str:
    """Settings in the user's notation, with the name in `shown` for each setting that has one."""
    parts = []
    for name, value in asked.items():
        called = shown.get(name, name)
        is_flag = called.startswith("--")
        parts.append(f"{called} {value}" if is_flag else f"{called}={value!r}")
    return " and ".join(parts)


def _plain(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2].lower().replace("-", "_")


def _plain_value(value: Any) -> str:
    return str(value).lower().replace("-", "_")
