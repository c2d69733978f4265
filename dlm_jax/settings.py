"""Declares rules and their settings.

A rule is a class decorated with `rule`: a frozen dataclass that is a pytree. Its fields are the
parameters for the rows that use the rule, made with `per_row` (an array with one value per row),
`static` (compiled in) or `fact` (a property of the model). Everything else about a setting is
derived from its `Setting`: flags and help, keys of requests, recommendations in checkpoints,
columns, static settings, and error messages.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.moved import moved

T = TypeVar("T", bound=type)
INT_LIMIT = 2**31 - 1
FINITE = 3.0e38
ABOVE_ZERO = math.nextafter(0.0, 1.0)
"""The smallest positive number: the bound `Setting.low` of a setting that excludes 0."""
BELOW_ONE = math.nextafter(1.0, 0.0)
"""The largest number below 1: the bound `Setting.high` of a setting that excludes 1."""

UNSET: Any = ...
"""Replaces the value in an error that does not concern a value."""
_DTYPES = {bool: np.bool_, int: np.int32, float: np.float32, str: np.int32}


class SettingError(ValueError):
    """An invalid setting. The message is ``name=value why; remedy``, without the value if it is
    `UNSET`. ``others`` are the names of other settings involved.
    """

    def __init__(
        self, name: str, value: Any, why: str, remedy: str = "", others: Sequence[str] = ()
    ):
        super().__init__(name, value, why, remedy, others)
        self.name, self.value, self.why, self.remedy = name, value, why, remedy
        self.others = tuple(others)

    def __str__(self) -> str:
        return self.line()

    def line(self, name: str = "") -> str:
        """The message with another name for the setting, such as the flag."""
        shown = "" if self.value is UNSET else f"={brief(self.value)}"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{name or self.name}{shown} {self.why}{remedy}"


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting of a request.

    Attributes:
      name: key in requests and, with dashes, the flag.
      default: default value, whose type is that of all values.
      help: one line that describes its effect and range.
      low: smallest value.
      high: largest value.
      choices: the accepted strings, each with its meaning.
      remedy: remedy in the error message for an invalid value.
      activates: whether a value other than the default activates the rule.
      parse: converts and validates a given value, replacing the checks of `checked`.
      hint: type of the values if it differs from the type of `default`.
      resets: settings that a value other than False returns to their defaults if no value is given
        with it; see `dlm_jax.sampling.params.layered`.
      aliases: names of the setting in other programs. Errors about them name the setting, and the
        server accepts them.
      is_preset: whether the setting belongs to presets and studies: it is a keyword in Python and a
        key of a config's ``[sample]``, but no flag, and no key of a request.
      is_free: whether a resumed run may change the setting of a run.
    """

    name: str
    default: Any
    help: str
    low: float = -FINITE
    high: float = FINITE
    choices: Mapping[str, Any] | None = None
    remedy: str = ""
    activates: bool = True
    parse: Callable[[Any], Any] | None = None
    hint: Any = None
    resets: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_preset: bool = False
    is_free: bool = False

    @property
    def kind(self) -> type:
        return type(self.default)

    @property
    def annotation(self) -> Any:
        """Type of the values, for parsing: `hint`, the choices, or the type of the default."""
        if self.hint is None and self.choices is not None:
            return Literal[tuple(self.choices)]
        return self.kind if self.hint is None else self.hint

    @property
    def is_list(self) -> bool:
        """True if values are lists, which `parse` converts to tuples."""
        return isinstance(self.default, tuple)

    def resets_of(self, value: Any) -> tuple[str, ...]:
        """The settings that `value` returns to their defaults. A rule that is off resets none."""
        return () if value is False else self.resets

    def checked(self, value: Any) -> Any:
        """The value as stored; SettingError if its type is wrong or it is out of range."""
        if self.parse is not None:
            return self.parse(value)
        if self.choices is not None:
            if isinstance(value, str) and value in self.choices:
                return value
            if callable(value) and all(map(callable, self.choices.values())):
                return self.named(value)
            advice = moved(f"{self.name.rpartition('.')[2]}={value}")
            advice = advice or f"did you mean {closest(str(value)[:60], self.choices)!r}?"
            why = f"is not one of {', '.join(self.choices)}"
            raise SettingError(self.name, value, why, self.remedy or advice)
        low, high, why = self.low, self.high, ""
        if self.kind is int:
            low, high = max(low, -INT_LIMIT), INT_LIMIT if high == FINITE else high
        if self.kind in (bool, str):
            why = "" if isinstance(value, self.kind) else f"is not a {self.kind.__name__}"
        elif self.kind is int and (not hasattr(value, "__index__") or isinstance(value, bool)):
            why = "is not an integer"
        elif not isinstance(value, numbers.Real) or isinstance(value, bool):
            why = "is not a number"
        elif not low <= typing.cast(float, value) <= high:  # NaN fails every comparison
            begin = "(0" if low == ABOVE_ZERO else f"[{low:.10g}"
            end = "1)" if high == BELOW_ONE else f"{high:.10g}]"
            why = f"is outside {begin}, {end}"
        require(not why, self.name, value, why, self.remedy or f"use {self.default!r}, say")
        return typing.cast(int, value).__index__() if self.kind is int else value

    def resolved(self, value: Any) -> Any:
        """The value of a choice; other values are returned unchanged."""
        return self.choices.get(value, value) if self.choices is not None else value

    def named(self, value: Any) -> Any:
        """The choice for `value`, or `value` itself if there is none."""
        return next((name for name, of in (self.choices or {}).items() if of == value), value)

    def column(self, values: Sequence[Any]) -> np.ndarray:
        """The values as an array with one entry per row, encoded by `code`."""
        return np.array([self.code(v) for v in values], _DTYPES[self.kind])

    def code(self, value: Any) -> Any:
        """A value as stored in arrays: choices as their index, other values unchanged."""
        return value if self.choices is None else list(self.choices).index(value)


def per_row(
    setting: Setting,
    *,
    default: Any = dataclasses.MISSING,
    column: Callable[[Sequence[Any]], Any] | None = None,
) -> Any:
    """A field with one value per row, and optionally another default than the setting's.

    `column` converts the rows' values to an array, in place of the setting's `column`; preferably
    to a NumPy array, because transfers to a device take host time.
    """
    default = setting.default if default is dataclasses.MISSING else default
    metadata = {"setting": setting, "column": column or setting.column}
    return dataclasses.field(default=default, metadata=metadata)


def static(setting: Setting) -> Any:
    """A compiled-in field: rows with different values run in different programs."""
    default = setting.resolved(setting.default)
    return dataclasses.field(default=default, metadata={"setting": setting, "static": True})


def fact(name: str, default: Any = None) -> Any:
    """A static field with a property of the model: the attribute `name` of the model's facts."""
    return dataclasses.field(default=default, metadata={"fact": name, "static": True})


def reads(name: str, default: Any) -> Any:
    """A static field with the value of the setting `name`, which another rule declares."""
    return dataclasses.field(default=default, metadata={"reads": name, "static": True})


class Rule:
    """The base class of all rules; custom rules may override any member.

    Attributes:
      name: name used in settings; by default, the class name in snake case.
    """

    name: ClassVar[str] = ""
    _settings: ClassVar[tuple[Setting, ...]] = ()

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        return cls._settings

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """Returns whether a row uses the rule; by default, if any setting is not neutral."""
        return any(getattr(row, s.name) != s.default for s in cls._settings if s.activates)

    @classmethod
    def check(cls, row: Any) -> None:
        """Raises ValueError for contradictory settings of a row."""

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises ValueError for settings that a model with the given `facts` does not support."""

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        """Raises ValueError for a canvas, given by its open positions, that is not supported."""

    def is_active(self) -> jax.Array:
        """bool ``[B]``, True for rows that use the rule, that is, have a non-neutral setting."""
        is_set = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "column" in field.metadata:
                setting: Setting = field.metadata["setting"]
                if setting.activates and not setting.is_list:
                    is_set.append(getattr(self, field.name) != setting.code(setting.default))
        return functools.reduce(jnp.logical_or, is_set)

    def as_settings(self) -> dict[str, Any]:
        """The rule's fields as settings by name; fields that are None are omitted."""
        settings = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            setting, value = field.metadata.get("setting"), getattr(self, field.name)
            if setting is not None and value is not None:
                is_static = field.metadata.get("static")
                settings[setting.name] = setting.named(value) if is_static else value
        return settings

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Any:
        """An instance of the rule with the rows' settings in host arrays.

        Static settings are taken from the first row.
        """
        values = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            match field.metadata:
                case {"fact": name}:
                    values[field.name] = getattr(facts, name)
                case {"reads": name}:
                    values[field.name] = getattr(rows[0], name)
                case {"setting": setting, "static": True}:
                    values[field.name] = setting.resolved(getattr(rows[0], setting.name))
                case {"setting": setting, "column": column}:
                    of_rows = [getattr(row, setting.name) for row in rows]
                    values[field.name] = np.asarray(column(of_rows))
        return cls(**values)

    @classmethod
    def static_values(cls, row: Any) -> tuple[Any, ...]:
        """The static settings of the rule in a row."""
        values = []
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            match field.metadata:
                case {"reads": name}:
                    values.append(getattr(row, name))
                case {"setting": setting, "static": True}:
                    values.append(getattr(row, setting.name))
        return tuple(values)

    @classmethod
    def pack(cls, rows: Sequence[Any], facts: Any) -> Any:
        """The result of `columns` on the device; compiled functions may close over the arrays."""
        return on_device(cls.columns(rows, facts))


def on_device(packed: Any) -> Any:
    """The pytree with its host arrays as device arrays."""
    return jax.tree.map(jnp.asarray, packed)


@dataclass_transform(frozen_default=True)
def pytree(cls: T) -> T:
    """Makes a class a frozen dataclass and a pytree with a unique tree structure.

    jaxlib treats the structures of two `register_dataclass` classes as equal if they have the same
    number of data fields and no metadata, so `jax.jit` can run the wrong program. Every class
    therefore has a metadata field ``identity``, which contains the class itself. Fields are leaves,
    except those with ``"static": True`` in their metadata.
    """
    # Python 3.14 makes the annotations of a class on access, so they may not be in its `vars`.
    cls.__annotations__ = {**cls.__annotations__, "identity": type}
    cls.identity = dataclasses.field(
        default=cls, kw_only=True, repr=False, metadata={"static": True}
    )
    made = dataclass(frozen=True)(cls)
    fields = dataclasses.fields(made)
    return jax.tree_util.register_dataclass(
        made,
        data_fields=[field.name for field in fields if not field.metadata.get("static")],
        meta_fields=[field.name for field in fields if field.metadata.get("static")],
    )


@dataclass_transform(frozen_default=True)
def rule(cls: T) -> T:
    """Makes a class a rule: a named `pytree` with the settings that its fields declare."""
    if "name" not in vars(cls):
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    made = pytree(cls)
    declared = (f.metadata["setting"] for f in dataclasses.fields(made) if "setting" in f.metadata)
    made._settings = tuple({setting.name: setting for setting in declared}.values())
    return made


def check_values(record: Any, settings: Mapping[str, Setting]) -> None:
    """Replaces the fields of a frozen record by their checked values; raises SettingError."""
    for key, setting in settings.items():
        value = getattr(record, key)
        if value is not getattr(type(record), key):  # most values are defaults, which are valid
            object.__setattr__(record, key, setting.checked(value))


def require(
    condition: bool, name: str, value: Any, why: str, remedy: str = "", *others: str
) -> None:
    """Raises `SettingError`, made from the other arguments, unless `condition` is true."""
    if not condition:
        raise SettingError(name, value, why, remedy, others)


def require_values(row: Any, allowed: Mapping[str, Sequence[Any]], why: str) -> None:
    """Raises `SettingError` for the first setting of a row whose value is not an allowed one."""
    for name, values in allowed.items():
        given = getattr(row, name)
        require(given in values, name, given, why, f"use {name}={values[0]!r}")


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises `SettingError` for an id outside the vocabulary."""
    for id_ in ids:
        if not 0 <= id_ < vocab_size:
            why = f"has id {id_}, outside the vocabulary of {vocab_size}"
            raise SettingError(name, UNSET, why, f"use 0 to {vocab_size - 1}")


def require_head(head: str, facts: Any, name: str, value: Any, instead: str = "") -> None:
    """Raises `SettingError` if the model lacks a head; `instead` is another remedy."""
    remedy = f"{instead}, or " * bool(instead) + f"train one with model.add_{head}_head"
    why = f"requires a {head} head, which this model lacks"
    require(head in facts.heads, name, value, why, remedy)


def brief(value: Any) -> str:
    """The value as text for an error message, shortened to fit on a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def closest(name: str, known: Any) -> str:
    """The known name that is most similar to `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]


def renamed(name: str, settings: Mapping[str, Setting], known: Collection[str] = ()) -> str:
    """Advice for a name that left the core (`moved`), or an alias or a preset's name of the
    `settings`, which may be written as a flag or a dotted key; otherwise empty. The advice names a
    setting as `known` does.
    """

    def plain(name: str) -> str:
        return re.split(r"\.|--", name)[-1].replace("-", "_")

    if advice := moved(name) or moved(plain(name)):
        return advice
    name = plain(name)
    for setting in settings.values():
        if name == setting.name and setting.is_preset:
            return "a preset sets it: --preset, or a keyword in Python, or [sample] of a config"
        if name in setting.aliases:
            shown = (one for one in known if plain(one) == setting.name)
            return f"it is named {next(shown, setting.name)} here"
    return ""


def nearest(name: str, known: Mapping[str, Setting] | Sequence[str]) -> str:
    """Advice for an unknown name: that of `renamed`, the most similar name, or all names."""
    advice = renamed(str(name), known) if isinstance(known, Mapping) else ""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return advice or (f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known)}")
