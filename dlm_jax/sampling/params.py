"""The settings of a row: one generated record, from every door to the columns of the rules.

A door layers what is given over the recommendations of the model (`resolve`), which checks every
value once. Rule objects are replaced by their name and all their fields (`given_settings`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dlm_jax.sampling.noise import NoiseRule
from dlm_jax.sampling.rules import (
    BUILT_IN,
    SLOTS,
    RuleTable,
    base_name,
    classes_of,
    shown_rule,
    with_rules,
)
from dlm_jax.sampling.transforms.transform import function_transform, is_greedy
from dlm_jax.settings import Rule, Setting, check_values, nearest


class SamplingParams:
    """Sampling settings of a row; in checkpoints, those that a model recommends."""

    table: ClassVar[RuleTable] = BUILT_IN
    declared: ClassVar[Mapping[str, Setting]] = BUILT_IN.settings

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **settings: object): ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        check_values(self, self.declared)
        self.table.check(self)

    @property
    def is_greedy(self) -> bool:
        """True if every token is the argmax."""
        return is_greedy(self)

    @property
    def is_noise(self) -> bool:
        """True if a noise rule renews every token, instead of a commit rule filling holes."""
        return issubclass(self.table.commit[self.order], NoiseRule)

    @property
    def remasks(self) -> bool:
        """True if tokens can be remasked."""
        return self.remask != "none" and self.table.remask[self.remask].is_used(self)

    @property
    def edits(self) -> bool:
        """True if the length of the row can change."""
        return self.table.named("edit", self) is not None

    @property
    def renoises(self) -> bool:
        """True if tokens can be overwritten before a forward pass."""
        return self.table.named("renoise", self) is not None

    @property
    def refines(self) -> bool:
        """True if existing tokens can change, as required for drafts."""
        return self.remasks or self.resample or self.edits or self.renoises or self.is_noise


_BASE = SamplingParams


@functools.lru_cache(maxsize=64)
def params_of(table: RuleTable) -> type[SamplingParams]:
    """A frozen dataclass with one field per setting of a rule table.

    Raises:
      ValueError: the default of a setting is invalid.
    """
    defaults = {name: s.checked(s.default) for name, s in table.settings.items()}
    fields = [(name, s.annotation, defaults[name]) for name, s in table.settings.items()]
    namespace = {
        "table": table,
        "declared": table.settings,
        "__doc__": _BASE.__doc__,
    }
    return dataclasses.make_dataclass(
        "SamplingParams", fields, bases=(_BASE,), namespace=namespace, frozen=True, kw_only=True
    )


if not TYPE_CHECKING:
    SamplingParams = params_of(BUILT_IN)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # One step of variable-length edits: edit, re-noise, run the network, and write every token that
    # is not given. Re-noising has a separate schedule and is off by default.
    "variable_length": {
        "edit": True, "edit_scoring": "uncertainty", "edit_token": "space",
        "edit_schedule": "cosine", "insert_ratio_start": 0.04, "insert_ratio_end": 0.0,
        "delete_ratio_start": 0.04, "delete_ratio_end": 0.0,
        "delete_margin": 0.02, "delete_lambda": 0.3, "cooldown_distance": 1,
        "length_target_mode": "none", "resample": True, "order": "random", "schedule": "all",
        "fill": "parallel", "remask": "none", "block_length": 0, "cache": "none",
    },
}  # fmt: skip
"""Presets for every model: keyword arguments of `dlm_jax.generate`; see ``--preset NAME``."""


def layered(*layers: Mapping[str, Any] | None, table: RuleTable = BUILT_IN) -> dict[str, Any]:
    """Layers of settings in one mapping. Later layers take precedence, and None is an empty layer.

    A value also removes the settings that it resets (`Setting.resets_of`) from earlier layers.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            for other in table.settings[name].resets_of(value) if name in table.settings else ():
                merged.pop(other, None)
        merged |= layer or {}
    return merged


def resolve(*layers: Mapping[str, Any] | None, table: RuleTable = BUILT_IN) -> SamplingParams:
    """Merges layers of settings as `layered` does. Pass a checkpoint's recommendations first and
    explicit values last. A value overrides earlier layers even if it equals the built-in default.

    Raises:
      ValueError: a name is unknown (the message suggests the nearest known name), or a value is out
          of range.
    """
    merged = layered(*layers, table=table)
    for name, value in merged.items():
        if name not in table.settings:
            raise ValueError(
                f"{name}={value!r} is not a sampling setting; {nearest(name, table.settings)}"
            )
    return params_of(table)(**merged)


def given_settings(*layers: Mapping[str, Any]) -> tuple[RuleTable, dict[str, Any]]:
    """Returns the table with the custom rules of the layers, and the merged settings, in which
    rule objects are names and fields.

    A rule object selects its rule and gives all its fields. A list of ``transforms`` is the whole
    chain: the settings of all other transforms have their defaults. If it begins with ``...``, the
    chain of the model comes first. ``rules`` are custom rules (see `classes_of`).

    Args:
      layers: mappings from names to settings. Later layers take precedence. ``transforms`` (a list
        of rule objects and functions of the logits), ``commit``, ``fill``, ``remask``, ``edit``,
        ``cache`` and ``renoise`` can be rule objects.
    """
    objects = [_rule_objects(layer) for layer in layers]
    classes = [cls for layer in layers for cls in classes_of(layer.get("rules"))]
    classes += [type(rule) for pairs in objects for slot, rule in pairs if SLOTS[slot].selector]
    table = with_rules(classes)
    named = (_with_names(table, *one) for one in zip(layers, objects, strict=True))
    settings = layered(*named, table=table)
    # NumPy scalars become Python numbers.
    return table, {n: v.item() if getattr(v, "ndim", 1) == 0 else v for n, v in settings.items()}


def _rule_objects(layer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The rule objects of a layer, each with its slot; functions become transforms."""
    objects: list[tuple[str, Any]] = []
    for slot, (base, selector, _) in SLOTS.items():
        value: Any = layer.get(slot)
        is_chain = slot == "transforms"
        if is_chain and not isinstance(value, list | tuple | None):
            raise ValueError(f"transforms is {shown_rule(value)}; pass a list, such as [..., f]")
        is_object = isinstance(value, base) or (selector and isinstance(value, Rule | type))
        if value is None or not (is_object or slot in ("transforms", "commit")):
            continue  # a name or a value of the setting of this name
        if selector != slot and selector in layer:
            raise ValueError(f"{slot} and {selector} both select a rule; pass only one")
        rules: list[Any] = list(layer[slot]) if is_chain else [value]
        if rules[:1] == [...]:
            rules = rules[1:]
        for rule in rules:
            if rule is ...:
                raise ValueError("transforms has ... behind a rule; put it first, as in [..., f]")
            if is_chain and callable(rule) and not isinstance(rule, Rule | type):
                rule = function_transform(rule)
            if not isinstance(rule, base):
                kind = base_name(base)
                raise ValueError(f"{slot} is {shown_rule(rule)}, which is not a {kind} object")
            objects.append((slot, rule))
    return objects


def _with_names(
    table: RuleTable, layer: Mapping[str, Any], objects: list[tuple[str, Any]]
) -> dict[str, Any]:
    """The settings of a layer, with its rule objects as names and fields."""
    replaced = {"rules", "transforms", *(slot for slot, _ in objects)}
    settings = {name: value for name, value in layer.items() if name not in replaced}
    transforms = layer.get("transforms")
    extends = bool(transforms) and transforms[0] is ...
    for slot, rule in objects:
        for name, value in rule.as_settings().items():
            if name in settings and not np.array_equal(settings[name], value):
                raise ValueError(f"{name} is given twice, with different values; use one value")
            settings[name] = value
        name, selector = table.name_of(slot, type(rule)), SLOTS[slot].selector
        if slot != "transforms":
            settings |= {selector: name} if selector else {}
        elif not extends:
            settings[selector] = (*settings.get(selector, ()), name)
        settings |= {"edit": True} if slot == "edit" else {}
    if transforms is not None and not extends:
        off = {s.name: s.default for cls in table.transforms.values() for s in cls.settings()}
        settings = off | {"chain": ()} | settings
    return settings
