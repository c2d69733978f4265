"""Converts custom rules and rule objects into named settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.config import layered
from dlm_jax.sampling.rules import BUILT_IN, SLOTS, ModelFacts, RuleTable
from dlm_jax.sampling.transforms.transform import function_transform
from dlm_jax.settings import Rule, nearest

_KINDS = {name: slot for name, slot in SLOTS.items() if slot.selector}
"""The kinds of custom rules, keyed by name."""


RESERVED = frozenset(
    (
        "batch_size",
        "checkpoint",
        "commit",
        "defaults",
        "draft",
        "edits",
        "every",
        "help",
        "host_sampler",
        "id",
        "infill",
        "inserts",
        "is_greedy",
        "max_candidates",
        "max_length",
        "model",
        "num_processes",
        "num_samples",
        "on_commits",
        "output",
        "process_id",
        "prompt",
        "prompts",
        "read_back",
        "refines",
        "remasks",
        "renoises",
        "report_chain",
        "rules",
        "seed",
        "table",
        "template",
        "tokens",
        "trace",
        "transforms",
        "version",
        "watch",
    )
)
"""Names that requests, `SampleConfig` or ``sample.py`` already use."""


class OwnRules(NamedTuple):
    """The settings of a call, including those converted from rule objects.

    Attributes:
      table: all rules, including custom rules.
      settings: values of the settings, keyed by name.
      rows: names of settings with one value per row.
    """

    table: RuleTable
    settings: dict[str, Any]
    rows: frozenset[str]


def of_row(rules: OwnRules, index: int) -> dict[str, Any]:
    """Returns the settings of the row with this index."""
    return {
        name: _plain(value[index]) if name in rules.rows else _plain(value)
        for name, value in rules.settings.items()
    }


def own_rules(*layers: Mapping[str, Any], num_rows: int) -> OwnRules:
    """Converts ``rules`` and the rule objects of a call into named settings.

    Args:
      layers: mappings from names to settings. Later layers take precedence. ``rules`` is a list of
        custom classes and modules, or a module. ``transforms`` (a list, in which a first ``...``
        stands for the model's chain), ``commit``, ``fill``, ``remask``, ``edit`` and ``renoise``
        can be rule objects, whose fields contain one value for all rows or one per row.
      num_rows: number of rows.
    """
    found = [(layer, _objects(layer)) for layer in layers]
    classes = [cls for layer in layers for cls in classes_of(layer.get("rules"))]
    classes += [type(given) for _, objects in found for kind, given in objects if kind in _KINDS]
    table = with_rules(tuple(dict.fromkeys(classes)))
    settings = layered(*(_settings(table, *one) for one in found), table=table)
    rows = {name for name, value in settings.items() if _holds_rows(table, name, value)}
    settings |= {name: list(settings[name]) for name in rows}
    for name in sorted(rows):
        if len(settings[name]) != num_rows:
            raise ValueError(
                f"{name} has {len(settings[name])} values for {num_rows} rows; pass one value or "
                f"one per row"
            )
    return OwnRules(table, settings, frozenset(rows))


def _holds_rows(table: RuleTable, name: str, value: Any) -> bool:
    """Returns whether a scalar setting has one value per row."""
    setting = table.settings.get(name)
    if setting is None or setting.is_list:
        return False
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1


def _plain(value: Any) -> Any:
    """Converts a NumPy scalar to a Python number and returns other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _objects(layer: Mapping[str, Any]) -> list[tuple[str, Rule]]:
    """Returns the rule objects among the settings of a layer, with their kinds."""
    found: list[tuple[str, Any]] = []
    for kind, (base, selector, _) in SLOTS.items():
        value: Any = layer.get(kind)
        if kind not in _KINDS:
            found += [(kind, value)] if isinstance(value, base) else []
            continue
        is_setting = kind not in ("transforms", "commit") and not isinstance(
            value, Rule | type | list | tuple
        )
        if value is None or is_setting:
            continue  # the setting with this name rejects invalid values
        if kind == "transforms" and not isinstance(value, list | tuple):
            raise ValueError(f"transforms is {_shown(value)}; pass a list of rule objects")
        for place, given in enumerate(value if isinstance(value, list | tuple) else [value]):
            if kind == "transforms" and given is ... and place == 0:
                continue  # the row's chain, which custom transforms follow
            if kind == "transforms" and callable(given) and not isinstance(given, Rule | type):
                given = function_transform(given)
            if not isinstance(given, base):
                problem = f"which is not a {SLOTS[kind].base_name}"
                if isinstance(given, type) and issubclass(given, base):
                    problem = f"not an object; pass {given.__name__}(...)"
                elif kind == "commit":
                    problem += "; use order=... for a name"
                raise ValueError(f"{kind} is {_shown(given)}, {problem}")
            found.append((kind, given))
        if selector != kind and selector in layer:
            raise ValueError(f"{kind} and {selector} both select a rule; pass only one")
    return found


def _settings(
    table: RuleTable, layer: Mapping[str, Any], objects: Sequence[tuple[str, Rule]]
) -> dict[str, Any]:
    """Returns the settings of a layer, keyed by name, including those of its rule objects."""
    taken = {"rules", "transforms", *(kind for kind, _ in objects)}
    settings = {name: value for name, value in layer.items() if name not in taken}
    chain: list[str] = []
    told: dict[str, Any] = {}
    kinds = [type(given) for _, given in objects]
    for kind, given in objects:
        fields = given.as_settings()
        for name in fields:
            if name in layer and name != kind:
                raise ValueError(f"{name} is also set by {kind}; pass it once")
            if name not in told or np.array_equal(fields[name], told[name]):
                continue
            # A field with the default value is ignored if another rule sets the same setting.
            if np.array_equal(told[name], table.settings[name].default):
                told.pop(name)
            elif not np.array_equal(fields[name], table.settings[name].default):
                raise ValueError(
                    f"{name} has different values in two rules; use the same value in both"
                )
        told = fields | told
        if kind == "transforms":
            name = name_of(table, kind, type(given))
            # A name can map to several settings, such as the two temperatures.
            if name not in chain or kinds.count(type(given)) > 1:
                chain.append(name)
        elif SLOTS[kind].selector:
            settings[SLOTS[kind].selector] = name_of(table, kind, type(given))
            settings |= {"edit": True} if kind == "edit" else {}
    settings |= told
    given = layer.get("transforms")
    if given is not None and not (given and given[0] is ...):
        # Only these transforms are active, so the settings of all others are reset to defaults.
        parts = (cls for classes in table.transforms.values() for cls in classes)
        off = {s.name: s.default for cls in parts for s in cls.settings()}
        settings = off | settings | {"chain": tuple(chain)}
    return settings


def _shown(value: Any) -> str:
    """Formats a value for an error message. Long values, such as rules with arrays, are shown by
    class.
    """
    if isinstance(value, str | int | float):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def classes_of(rules: Any) -> Sequence[type[Rule]]:
    """Returns the rule classes that a module and its submodules define, or those of a sequence of
    classes and modules.
    """
    if isinstance(rules, ModuleType):
        values = [value for value in vars(rules).values() if isinstance(value, type)]
        found = [
            cls
            for cls in values
            if issubclass(cls, Rule)
            and _is_registered(cls)
            and f"{cls.__module__}.".startswith(f"{rules.__name__}.")
        ]
        if not found:
            raise ValueError(f"rules={rules.__name__} defines no rule; see docs/own_rules.md")
        return found
    if rules is not None and not isinstance(rules, list | tuple):
        raise ValueError(
            f"rules is {_shown(rules)}; pass a list of classes or a module with classes"
        )
    found = []
    for cls in rules or ():
        if isinstance(cls, ModuleType):
            found += classes_of(cls)
            continue
        if not isinstance(cls, type) or not issubclass(cls, Rule):
            raise ValueError(
                f"rules has {cls!r}, which is not a rule; pass classes decorated by dlm_jax.rule "
                f"that "
                "subclass CommitRule, LogitTransform, ..."
            )
        found.append(cls)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def with_rules(classes: tuple[type[Rule], ...]) -> RuleTable:
    """Returns a table with the built-in rules and the given rules."""
    table = BUILT_IN
    for cls in classes:
        kind = _kind(cls)
        if name_of(table, kind, cls):
            continue
        known: Mapping[str, Any] = getattr(table, kind)
        if cls.name in known or cls.name == "none":
            raise ValueError(
                f"rule {cls.__name__} has the name {cls.name!r}, which is already taken"
            )
        entry = (cls,) if kind == "transforms" else cls
        table = replace(table, **{kind: {**known, cls.name: entry}})
    # Every boolean setting also has a negated flag.
    opposites = {f"no_{name}" for name, s in table.settings.items() if s.kind is bool}
    aliases = {alias for s in BUILT_IN.settings.values() for alias in s.aliases}
    taken = {*RESERVED, *opposites, *aliases}
    for name in table.settings:  # raises an error if a setting is declared twice
        is_taken = name in taken or not name.isidentifier()
        if name not in BUILT_IN.settings and is_taken:
            raise ValueError(f"a setting cannot have the name {name!r}; choose another")
    return table


def name_of(table: RuleTable, kind: str, cls: type[Rule]) -> str:
    """Returns the name of a rule in a table; empty if it is not in the table."""
    for name, entry in getattr(table, kind).items():
        if cls is entry or (isinstance(entry, tuple) and cls in entry):
            return name
    return ""


_MOVED = {
    "measure": "score",
    "observe": "score",
    "weighed": "score",
    "start_memory": "init",
    "remember": "the state that select returns",
    "log_chance": "log_prob",
    "reads_head": "needs",
    "map_blocks": "needs",
    "rereads": "needs",
    "renews": "NoiseRule",
    "goes_on": "needs",
    "patience": "rewrites",
    "rewrite_steps_B": "rewrites",
    "remembers_ids": "init",
}
"""Members of rules in version 0.2, and where they are."""


def _kind(cls: type[Rule]) -> str:
    kind = next((name for name, slot in _KINDS.items() if issubclass(cls, slot.base)), None)
    if kind is None or not _is_registered(cls):
        bases = ", ".join(slot.base_name for slot in _KINDS.values())
        raise ValueError(
            f"rule {cls.__name__} has no kind; decorate it with dlm_jax.rule and subclass one of "
            f"{bases}"
        )
    base: Any = next((c for c in cls.__mro__[1:] if "required" in vars(c)), _KINDS[kind].base)
    required = [n for n in getattr(base, "required", ()) if getattr(cls, n) is getattr(base, n)]
    for name in (*required, *(n for n in dir(cls) if _is_abstract(getattr(cls, n)))):
        owner = next(c for c in cls.__mro__ if name in vars(c))
        raise ValueError(f"rule {cls.__name__} lacks {name}(), which {owner.__name__} requires")
    for name, new in _MOVED.items() if kind in ("commit", "remask") else ():
        if hasattr(cls, name):
            raise ValueError(
                f"rule {cls.__name__} defines {name}, which is {new} now; see docs/own_rules.md"
            )
    fields = [field.metadata for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    per_row = [meta["setting"] for meta in fields if "column" in meta]
    if kind == "transforms":
        per_row = [s for s in per_row if s.activates and not s.is_list]
    needs_row = kind in ("transforms", "remask", "edit") and cls.is_active is base.is_active
    if needs_row and not per_row:
        raise ValueError(
            f"rule {cls.__name__} has no per-row setting that enables it; declare one, or define "
            "is_active() and is_used()"
        )
    for fact in (meta["fact"] for meta in fields if "fact" in meta):
        if fact not in (known := [field.name for field in dataclasses.fields(ModelFacts)]):
            advice = nearest(fact, known)
            raise ValueError(f"rule {cls.__name__} requires the fact {fact!r}; {advice}")
    return kind


def _is_abstract(member: Any) -> bool:
    return getattr(member, "__isabstractmethod__", False)


def _is_registered(cls: type) -> bool:
    return "__dataclass_fields__" in vars(cls) and "identity" in vars(cls)["__dataclass_fields__"]
