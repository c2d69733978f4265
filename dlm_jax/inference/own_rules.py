"""Rules of one's own, and rules given as objects, beside settings given by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.sampling.commit import CommitRule
from dlm_jax.sampling.edits import EditRule
from dlm_jax.sampling.propose import FillRule
from dlm_jax.sampling.remask import RemaskRule, Renoise
from dlm_jax.sampling.rules import BUILT_IN, RuleTable
from dlm_jax.sampling.transforms import LogitTransform
from dlm_jax.settings import Rule

_KINDS: dict[str, tuple[type[Rule], str]] = {
    "transforms": (LogitTransform, "chain"),
    "commit": (CommitRule, "order"),
    "fill": (FillRule, "fill"),
    "remask": (RemaskRule, "remask"),
    "edit": (EditRule, "edit_scoring"),
}
"""Kinds of rules by their table: what they are, and the setting that names one."""


class OwnRules(NamedTuple):
    """What a call asks for, with its rules as settings.

    Attributes:
      table: all rules, one's own too.
      settings: by name; an array of `rows` holds one value a row.
      rows: the names of those settings.
      transforms: names in the chain of one's own transforms.
    """

    table: RuleTable
    settings: dict[str, Any]
    rows: frozenset[str]
    transforms: tuple[str, ...]

    @property
    def has_rows(self) -> bool:
        """Whether rows differ."""
        return bool(self.rows)


def of_row(rules: OwnRules, index: int) -> dict[str, Any]:
    """The settings of the row of that place."""
    try:
        return {
            name: value[index].item() if name in rules.rows else value
            for name, value in rules.settings.items()
        }
    except IndexError:
        name = min(rules.rows, key=lambda name: len(rules.settings[name]))
        raise ValueError(
            f"{name} has {len(rules.settings[name])} values, and there is a row {index}; give one "
            "value, or one for each row"
        ) from None


def own_rules(asked: Mapping[str, Any]) -> OwnRules:
    """The settings of a call, whose ``rules`` and rule objects are taken apart.

    Args:
      asked: settings by name; ``rules`` holds classes of one's own (or a module of them), and
        ``transforms`` (a list), ``commit``, ``fill``, ``remask``, ``edit`` and ``renoise`` may be
        rule objects, whose fields hold one value for all rows or one value a row.

    Raises:
      ValueError: a rule without its protocol, a name or setting that is taken, or a rule and the
        setting that names another.
    """
    settings = dict(asked)
    classes = list(classes_of(settings.pop("rules", None)))
    objects: list[tuple[str, Rule]] = []
    for name, (base, selector) in _KINDS.items():
        value = settings.get(name)
        if name == "transforms" and value is not None:
            objects += [("transforms", transform) for transform in settings.pop(name)]
        elif isinstance(value, Rule):
            objects.append((name, settings.pop(name)))
        elif name == "commit" and name in settings:
            raise ValueError(f"commit={value!r} is no commit rule; use order={value!r} for a name")
        if selector in settings and any(kind == name for kind, _ in objects):
            raise ValueError(f"{name} and {selector} name a rule both; give one of them")
        for kind, given in objects:
            if kind == name and not isinstance(given, base):
                raise ValueError(f"{name}={given!r} is no {base.__name__}; see docs/generation.md")
    classes += [type(given) for _, given in objects]
    table = with_rules(tuple(dict.fromkeys(classes)))
    if isinstance(settings.get("renoise"), Renoise):
        settings |= settings.pop("renoise").as_settings()
    chain: list[str] = []
    for kind, given in objects:
        name = name_of(table, kind, type(given))
        settings |= given.as_settings()
        if kind == "transforms":
            chain.append(name)
        else:
            settings |= {_KINDS[kind][1]: name} | ({"edit": True} if kind == "edit" else {})
    if chain:
        # Just these: what the model recommends of other transforms is off.
        off = (
            s for classes in table.transforms.values() for cls in classes for s in cls.settings()
        )
        settings = {s.name: s.default for s in off} | settings | {"chain": tuple(chain)}
    rows = {name for name, value in settings.items() if getattr(value, "ndim", 0) == 1}
    settings |= {name: np.asarray(settings[name]) for name in rows}
    own = tuple(name for name in table.transforms if name not in BUILT_IN.transforms)
    return OwnRules(table, settings, frozenset(rows), own)


def classes_of(rules: Any) -> Sequence[type[Rule]]:
    """The rule classes of a sequence, or those that a module defines.

    Raises:
      ValueError: one of them is no rule, or the module defines none.
    """
    if isinstance(rules, ModuleType):
        values = [value for value in vars(rules).values() if isinstance(value, type)]
        found = [
            cls for cls in values
            if issubclass(cls, Rule) and cls.__module__ == rules.__name__ and _is_registered(cls)
        ]  # fmt: skip
        if not found:
            raise ValueError(f"rules={rules.__name__} defines no rule; see docs/generation.md")
        return found
    for cls in rules or ():
        if not isinstance(cls, type) or not issubclass(cls, Rule):
            raise ValueError(
                f"rules has {cls!r}, which is no rule; give classes under dlm_jax.rule that "
                "subclass CommitRule, LogitTransform, ..."
            )
    return tuple(rules or ())


@functools.lru_cache(maxsize=64)
def with_rules(classes: tuple[type[Rule], ...]) -> RuleTable:
    """The table with these rules beside the built-in ones.

    Raises:
      ValueError: a rule without its protocol, or a name or setting that is taken.
    """
    table = BUILT_IN
    for cls in classes:
        kind = _kind(cls)
        if name_of(table, kind, cls):
            continue
        known: Mapping[str, Any] = getattr(table, kind)
        if cls.name in known:
            raise ValueError(f"rule {cls.__name__} has the name {cls.name!r}, which is taken")
        entry = (cls,) if kind == "transforms" else cls
        table = replace(table, **{kind: {**known, cls.name: entry}})
    # Settings that are declared twice are refused here.
    assert table.settings
    return table


def name_of(table: RuleTable, kind: str, cls: type[Rule]) -> str:
    """The name of a rule in its table; empty if it is not there."""
    for name, entry in getattr(table, kind).items():
        if cls is entry or (isinstance(entry, tuple) and cls in entry):
            return name
    return ""


def _kind(cls: type[Rule]) -> str:
    kind = next((name for name, (base, _) in _KINDS.items() if issubclass(cls, base)), None)
    if kind is None or not _is_registered(cls):
        bases = ", ".join(base.__name__ for base, _ in _KINDS.values())
        raise ValueError(
            f"rule {cls.__name__} is of no kind; put it under dlm_jax.rule and subclass one of "
            f"{bases}"
        )
    base = _KINDS[kind][0]
    for name in base.required:  # type: ignore[attr-defined]
        if getattr(cls, name) is getattr(base, name):
            raise ValueError(f"rule {cls.__name__} lacks {name}(), which {base.__name__} requires")
    return kind


def _is_registered(cls: type) -> bool:
    return "__dataclass_fields__" in vars(cls) and "identity" in vars(cls)["__dataclass_fields__"]
