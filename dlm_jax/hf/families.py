"""The known families, and functions that select one for a config.json or a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_jax.config import ModelConfig
from dlm_jax.hf import gemma, llada, qwen
from dlm_jax.hf.family import Family, FileFields
from dlm_jax.settings import brief, closest

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
    for name in named:
        if name in known:
            return known[name]
    if not named:
        kind = config.get("model_type")
        matching = [family for family in FAMILIES.values() if family.model_type == kind]
        if len(matching) == 1:
            return matching[0]
        raise ValueError(
            f"{where}: architectures is absent and model_type={kind!r} does not identify the "
            f"family; add one of {', '.join(known)}"
        )
    raise ValueError(
        f"{where}: architectures={brief(named)} is not a supported family; the nearest is "
        f"{closest(named[0][:60], known)!r}, and docs/published.md lists all"
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
    close: list[Family] = []
    for family in [FAMILIES[name]] if name is not None else FAMILIES.values():
        try:
            said = comparable(expressed(family, model))
        except ValueError as error:  # the family does not support the model
            refused = str(error)
            continue
        differing = {key: value for key, value in said.items() if value != ours[key]}
        if not differing:
            return family
        if differing == {"qkv_bias": True}:
            close.append(family)
        others.append((family.name, differing))
    if close:
        return close[0]
    what = (
        "no published family has this combination of settings of [model]"
        if name is None
        else f"family={name!r} cannot express all settings of the model"
    )
    if not others:
        raise ValueError(f"{what} ({refused})")
    nearest, differing = min(others, key=lambda other: len(other[1]))
    needed = ", ".join(
        f"model.{key}={value!r}, not {ours[key]!r}" for key, value in differing.items()
    )
    raise ValueError(f"{what}; {'it' if name else f'the nearest, {nearest},'} requires {needed}")


def expressed(family: Family, model: ModelConfig) -> ModelConfig:
    """The model that the family reads from its config.json of `model`."""
    return family.read(FileFields(family.write(model), "config"))


UNPUBLISHED = frozenset(
    {"lora_rank", "lora_alpha", "lora_targets", "compute_dtype", "remat"}
    | {"add_sampler_head", "sampler_context", "sampler_width", "sampler_residual"}
    | {"add_critic_head"}
)
"""Settings of ``[model]`` that published models do not define."""


def comparable(model: ModelConfig) -> dict[str, Any]:
    """The settings that affect the computation of a model, in canonical form."""
    said = dict(vars(model))
    said["kv_heads"] = model.kv_heads or model.heads
    said["head_size"] = model.size_of_head
    for key in (UNPUBLISHED - {"lora_rank"}) | {"start_id"}:
        del said[key]
    return said
