"""The known families, and functions that select one for a config.json or a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dlm_jax.config import ModelConfig, Trait, keys
from dlm_jax.published import dense, gemma, mixtures
from dlm_jax.published.family import Family, FileFields
from dlm_jax.settings import brief

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        dense.LLADA, dense.DREAM, dense.SDAR, dense.FAST_DLLM, mixtures.LLADA_MOE,
        mixtures.LLADA2, mixtures.SDAR_MOE, dense.QWEN2, dense.QWEN3, dense.LLAMA,
        gemma.DIFFUSION_GEMMA,
    )
}  # fmt: skip
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
    for name in named:
        if name in known:
            return known[name]
    if not named:
        kind = config.get("model_type")
        found = [family for family in FAMILIES.values() if family.model_type == kind]
        if len(found) == 1:
            return found[0]
        raise ValueError(
            f"{where}: architectures is absent and model_type={kind!r} does not identify the "
            f"family; add one of {', '.join(known)}"
        )
    near = difflib.get_close_matches(named[0][:60], known, n=1, cutoff=0.0)
    raise ValueError(
        f"{where}: architectures={brief(named)} is not a supported family; the nearest is "
        f"{near[0]!r}, and docs/published.md lists all"
    )


def family_for(model: ModelConfig, name: str | None = None) -> Family:
    """The first family whose config.json can express all settings of a model."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family={name!r} is unknown; use one of {', '.join(FAMILIES)}")
    for family in [FAMILIES[name]] if name is not None else FAMILIES.values():
        try:
            said = family.read(FileFields(family.write(model), "config"))
        except ValueError:  # the family does not support the model
            continue
        if comparable(said) == comparable(model):
            return family
    raise ValueError(
        "model: no published family has this combination of settings; docs/published.md lists the "
        "settings of each"
        if name is None
        else f"family={name!r} cannot express all settings of the model; docs/published.md lists "
        "the settings of each family"
    )


def comparable(model: ModelConfig) -> dict[str, Any]:
    """The settings that affect the computation of a model, in canonical form."""
    said = dict(vars(model))
    said["kv_heads"] = model.kv_heads or model.heads
    said["head_size"] = model.size_of_head
    for key in keys(Trait.IDLE):
        del said[key.removeprefix("model.")]
    return said
