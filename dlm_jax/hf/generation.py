"""The sampling settings that a directory recommends, in its generation_config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlm_jax.config import ModelConfig, SamplingParams
from dlm_jax.hf.family import Family, read_json
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.settings import nearest

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
    if not isinstance(extra, dict):
        raise ValueError(f"{file}: {OWN} is not an object of settings; remove it")
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
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if is_greedy and "temperature" not in extra:
        settings["temperature"] = 0.0
    if settings.get("gen_length", 0) > length and "gen_length" not in extra:
        settings |= {"gen_length": 0, "steps": settings.get("steps", length)}
    return settings


def settings_fields(sample: SamplingParams, implied: SamplingParams) -> dict[str, Any]:
    """The fields of generation_config.json from which `read_settings` restores `sample`."""
    names = {name: field for field, name in _SHARED.items()}
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name in BUILT_IN.settings:
        value = getattr(sample, name)
        is_scaled = name == "steps" and sample.gen_length != implied.gen_length
        if value == getattr(implied, name) and not is_scaled:
            continue
        if name in names and (name, value) != ("gen_length", 0):
            fields[names[name]] = value
        else:
            extra[name] = value
    if fields.keys() & set(_SAMPLING):
        fields["do_sample"] = sample.temperature > 0
        fields["temperature"] = sample.temperature
        if not fields["do_sample"]:
            del fields["temperature"]
    # A reader takes a temperature without its end for that of all steps.
    if {"temperature", "do_sample"} & fields.keys() and sample.temperature_end != -1:
        extra["temperature_end"] = sample.temperature_end
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
