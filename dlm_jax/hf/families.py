"""The known families, those of a config.json or a model, and the settings that they recommend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.hf import gemma, llada, qwen
from dlm_jax.hf.family import Family, FileFields, read_json
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.settings import brief, closest, nearest

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*llada.FAMILIES, *qwen.FAMILIES, *gemma.FAMILIES)
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
    kind = config.get("model_type")
    matching = [known[name] for name in named if name in known]
    if not named:
        matching = [family for family in FAMILIES.values() if family.model_type == kind]
    if matching and (named or len(matching) == 1):
        return matching[0]
    near = f"the nearest is {closest(named[0][:60], known)!r}; " if named else ""
    raise ValueError(
        f"{where}: architectures={brief(named)} is not a supported family, nor is the model_type "
        f"{brief(kind)}; {near}docs/published.md lists all"
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
    for family in [FAMILIES[name]] if name is not None else FAMILIES.values():
        try:
            said = comparable(expressed(family, model))
        except ValueError as error:  # the family does not support the model
            refused = f" ({error})"
            continue
        others.append((family, {key: at for key, at in said.items() if at != ours[key]}))
    for accepted in ({}, {"qkv_bias": True}):
        for family, differing in others:
            if differing == accepted:
                return family
    what = f"family={name!r} cannot" if name else "no published family can"
    if others:
        family, differing = min(others, key=lambda other: len(other[1]))
        needed = (f"model.{key}={at!r}, not {ours[key]!r}" for key, at in differing.items())
        refused = f"; {family.name} requires {', '.join(needed)}"
    raise ValueError(f"{what} express the settings of [model]{refused}")


def expressed(family: Family, model: ModelConfig) -> ModelConfig:
    """The model that the family reads from its config.json of `model`."""
    return family.read(FileFields(family.write(model), "config"))


UNPUBLISHED = frozenset(
    {"lora_rank", "lora_alpha", "lora_targets", "compute_dtype", "remat"}
    | {"add_sampler_head", "sampler_context", "sampler_residual"}
    | {"add_critic_head"}
)
"""Settings of ``[model]`` that published models do not define."""


def comparable(model: ModelConfig) -> dict[str, Any]:
    """The settings that affect the computation of a model, in canonical form."""
    said = vars(model) | {"kv_heads": model.kv_heads or model.heads}
    said |= {"head_size": model.size_of_head}
    idle = (UNPUBLISHED - {"lora_rank"}) | {"start_id"}
    return {key: value for key, value in said.items() if key not in idle}


GENERATION = "generation_config.json"
OWN = "dlm_jax"
"""The field of `GENERATION` with the settings that only this library has."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Fields of `GENERATION` that apply only with ``do_sample`` true."""

_SHARED = dict(zip(_SAMPLING, _SAMPLING, strict=True)) | {
    "repetition_penalty": "repetition_penalty",
    "steps": "steps",
    "max_new_tokens": "gen_length",
}
"""Fields of `GENERATION` that are settings, and the names of these settings in this library."""


def read_settings(
    directory: Path,
    length: int,
    of_family: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda said: {},
) -> dict[str, Any]:
    """The settings that generation_config.json recommends; empty if there is no such file.

    Sampling follows Hugging Face: ``do_sample`` false means temperature 0, and is the default if
    the file has a temperature, ``top_k``, ``top_p``, ``min_p`` or ``typical_p``; ``do_sample`` true
    means temperature 1 unless the file sets one. Without any of these fields, the family sets the
    temperature. A generation longer than the canvas of `length` tokens is replaced by one that
    fills the space after the prompt. `of_family` is `Family.recommended`, for the fields of one
    family.
    """
    file = directory / GENERATION
    said = read_json(file) if file.exists() else {}
    extra = said.get(OWN) or {}
    settings = {name: said[field] for field, name in _SHARED.items() if said.get(field) is not None}
    does_sample = said.get("do_sample")
    if not isinstance(does_sample, bool | None):
        raise ValueError(f"{file}: do_sample={does_sample!r} is not a bool; use true or false")
    is_greedy = not does_sample and (does_sample is not None or settings.keys() & set(_SAMPLING))
    if does_sample:
        settings.setdefault("temperature", 1.0)
    try:
        settings |= of_family(said)
        for name, value in (settings | extra).items():
            if name not in BUILT_IN.settings:
                known = tuple(BUILT_IN.settings)
                raise ValueError(f"{name[:60]!r} is not a setting; {nearest(name[:60], known)}")
            settings[name] = BUILT_IN.settings[name].checked(value)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{file}: {error}") from None
    if is_greedy and "temperature" not in extra:
        settings["temperature"] = 0.0
    if settings.get("gen_length", 0) > length and "gen_length" not in extra:
        settings |= {"gen_length": 0, "steps": settings.get("steps", length)}
    return settings


def settings_fields(sample: SamplingParams, implied: SamplingParams) -> dict[str, Any]:
    """The fields of generation_config.json from which `read_settings` restores `sample`."""
    values = {name: getattr(sample, name) for name in BUILT_IN.settings}
    changed = {name for name, value in values.items() if value != getattr(implied, name)}
    if "gen_length" in changed:  # without it, a reader scales the number of steps
        changed.add("steps")
    names = {name: field for field, name in _SHARED.items()}
    if not sample.gen_length:
        del names["gen_length"]
    fields = {names[name]: values[name] for name in names if name in changed}
    if fields.keys() & set(_SAMPLING):
        fields["do_sample"] = sample.temperature > 0
        fields["temperature"] = sample.temperature
        if not fields["do_sample"]:
            del fields["temperature"]
        # A reader takes a temperature without its end for that of all steps.
        if sample.temperature_end != -1:
            changed.add("temperature_end")
    extra = {name: values[name] for name in values if name in changed - names.keys()}
    return fields | ({OWN: extra} if extra else {})


def presets_of(family: Family, model: ModelConfig) -> dict[str, dict[str, Any]]:
    """The presets of a family; the block lengths of one with `threshold_alone` fit the model."""
    presets = {name: dict(preset) for name, preset in family.presets.items()}
    for preset in presets.values():
        if preset.get("threshold_alone"):
            preset["block_length"] = math.gcd(preset["block_length"], model.block_length)
            preset["threshold_alone"] = model.block_length
    return presets


def implied_sample(family: Family, model: ModelConfig, length: int) -> SamplingParams:
    """The first preset of a family, adapted to a canvas of `length` tokens."""
    settings = next(iter(presets_of(family, model).values()), {})
    if settings.get("gen_length", 0) > length:
        settings |= {"gen_length": length, "steps": length}
    return SamplingParams(**settings)


def recommended(implied: SamplingParams, said: Mapping[str, Any]) -> SamplingParams:
    """A directory's settings; a length without steps keeps the number of tokens per step."""
    if "temperature" in said:
        said = {"temperature_end": -1.0} | dict(said)
    sample = dataclasses.replace(implied, **said)
    if "gen_length" in said and "steps" not in said:
        tokens = implied.gen_length or implied.steps
        steps = -(-implied.steps * sample.gen_length // tokens)
        sample = dataclasses.replace(sample, steps=max(steps, 1))
    return sample
