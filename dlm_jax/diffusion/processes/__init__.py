"""Forward processes, which add the noise that a model learns to remove."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping

from dlm_jax.config import ObjectiveConfig
from dlm_jax.diffusion.processes.forward_process import (
    HIGHEST_LEVEL,
    Masked,
    Mixed,
    Noise,
    Process,
    Shares,
    Uniform,
    checked,
    divergence,
)
from dlm_jax.settings import UNSET, SettingError, nearest

PROCESSES: Mapping[str, type[Process]] = {
    process.name: process for process in (Masked, Uniform, Mixed)
}
"""Processes by ``objective.process``."""


@functools.lru_cache(maxsize=64)
def process_of(name: str, settings: tuple[str, ...] = ()) -> Process:
    """Returns the process that a config selects.

    Args:
      name: one of `PROCESSES`, or a custom ``module:Class``.
      settings: settings of the process, each ``NAME=VALUE``.

    Raises:
      SettingError: the process does not exist, or a setting is unknown or invalid.
    """
    cls = PROCESSES.get(name) or _own(name)
    fields = {
        field.metadata["setting"].name: (field.name, field.metadata["setting"])
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if "setting" in field.metadata
    }
    values = {field: setting.resolved(setting.default) for field, setting in fields.values()}
    for given in settings:
        key, _, text = given.partition("=")
        if key not in fields:
            why = f"has {key!r}, which objective.process={name!r} does not have"
            advice = nearest(key, tuple(fields)) if fields else "remove it"
            raise SettingError("objective.process_settings", UNSET, why, advice)
        field, setting = fields[key]
        try:
            values[field] = setting.resolved(setting.checked(_parsed(setting.kind, text)))
        except ValueError as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(key, text, "is not a number", "use a number, such as 0.1") from None
    return cls(**values)


def noise_process(objective: ObjectiveConfig) -> Process:
    """The forward process of a config; raises SettingError as `process_of`."""
    return process_of(objective.process, objective.process_settings)


def _parsed(kind: type, text: str) -> object:
    return {"true": True, "false": False}.get(text, text) if kind is bool else kind(text)


def _own(name: str) -> type[Process]:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise SettingError(
            "objective.process",
            name,
            f"is not one of {', '.join(PROCESSES)}",
            f"{nearest(name, tuple(PROCESSES))}, or pass your own as module:Class",
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            "objective.process",
            name,
            f"cannot be imported ({error})",
            "put its module on the path",
        ) from None
    if not (isinstance(found, type) and issubclass(found, Process)) or not hasattr(
        found, "__dataclass_fields__"
    ):
        raise SettingError(
            "objective.process",
            name,
            "is not a process",
            "subclass dlm_jax.diffusion.processes.Process under dlm_jax.rule",
        )
    return found


__all__ = [
    "HIGHEST_LEVEL",
    "Masked",
    "Mixed",
    "Noise",
    "PROCESSES",
    "Process",
    "Shares",
    "Uniform",
    "checked",
    "divergence",
    "noise_process",
    "process_of",
]
