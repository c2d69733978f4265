"""Reading a configuration from TOML, from a checkpoint's JSON, and from flags.

A config file holds one table per section (``[model]``, ``[data]``, ...); the same names with a dot
are command-line flags (``--train.steps 100``). Unknown keys and ill-typed values are refused with
one line that names the key, the value and the remedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dlm_jax.config.sample import RowSettings, SampleConfig
from dlm_jax.config.schema import Config


def sections() -> dict[str, type]:
    """Config sections by name, in their order."""
    return dict(typing.get_type_hints(Config))


def key_types() -> dict[str, Any]:
    """Type of every key, by its dotted name."""
    return {
        f"{section}.{name}": hint
        for section, cls in sections().items()
        for name, hint in _hints(cls).items()
    }


def _hints(cls: type) -> dict[str, Any]:
    """Type of every field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as nested plain values, fit for JSON; `from_dict` is its inverse."""
    return msgspec.to_builtins(config)


def from_dict(raw: Mapping[str, Any], *, where: str) -> Config:
    """Config from nested plain values; `where` names their origin in errors.

    Raises:
      ValueError: an unknown section or key (with the nearest match), a value of the wrong type,
        or one out of range.
    """
    flat = {}
    for section, values in raw.items():
        _check_known(section, sections(), where=where, what="section")
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{where}: {section}={values!r} is not a section; write [{section}] above its keys"
            )
        flat |= {f"{section}.{name}": value for name, value in values.items()}
    return _build(flat, where=dict.fromkeys(flat, where), strict=True)


def load(path: str | Path | None, overrides: Mapping[str, str] | None = None) -> Config:
    """Config from a TOML file (or the defaults), with dotted keys overridden by flag texts."""
    flat: dict[str, Any] = {}
    where: dict[str, str] = {}
    if path is not None:
        config = from_dict(_read_toml(Path(path)), where=str(path))
        flat = {
            f"{section}.{name}": value
            for section, values in to_dict(config).items()
            for name, value in values.items()
        }
        where = dict.fromkeys(flat, str(path))
    for key, text in (overrides or {}).items():
        _check_known(key, key_types(), where="command line", what="flag")
        flat[key] = _split(text, key_types()[key])
        where[key] = "command line"
    return _build(flat, where=where, strict=False)


def _build(flat: Mapping[str, Any], *, where: Mapping[str, str], strict: bool) -> Config:
    hints = key_types()
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for key, value in flat.items():
        _check_known(key, hints, where=where[key], what="key")
        section, name = key.split(".", 1)
        lenient = not strict and isinstance(value, str | list)
        try:
            nested[section][name] = _typed(key, value, hints[key], lenient=lenient)
        except ValueError as error:
            raise ValueError(f"{where[key]}: {error}") from None
    origin = next(iter(dict.fromkeys(where.values())), "defaults")
    try:
        return Config(**{name: cls(**nested[name]) for name, cls in sections().items()})
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None


def sample_settings(
    texts: Mapping[str, str], kind: type[RowSettings] = SampleConfig
) -> dict[str, Any]:
    """Values of sampling settings given as texts by the names of the fields of `kind`.

    Raises:
      ValueError: an unknown name, or a text that is no value of its type.
    """
    hints = _hints(kind)
    values = {}
    for name, text in texts.items():
        _check_known(name, hints, where="command line", what="setting")
        values[name] = _typed(name, _split(text, hints[name]), hints[name], lenient=True)
    return values


def _typed(key: str, value: Any, hint: Any, *, lenient: bool) -> Any:
    try:
        return msgspec.convert(value, hint, strict=not lenient)
    except msgspec.ValidationError:
        advice = ""
        if typing.get_origin(hint) is Literal:
            near = difflib.get_close_matches(str(value), typing.get_args(hint), n=1, cutoff=0.0)
            advice = f"; did you mean {near[0]!r}?"
        raise ValueError(f"{key}={value!r} is not {_describe(hint)}{advice}") from None


def _split(text: str, hint: Any) -> Any:
    """A flag's text as a list where a list is wanted: ``a,b`` or, for pairs, ``12:-5,30:2``."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if typing.get_origin(hint) is tuple:
        return items
    if isinstance(hint, types.UnionType):
        return [item.split(":") for item in items]
    return text


def _check_known(name: str, known: Mapping[str, Any], *, where: str, what: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ValueError(f"{where}: unknown {what} {name!r}; did you mean {near[0]!r}?")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config file {path} does not exist; see configs/ for examples") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"config file {path} is not valid TOML: {error}") from None


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        kinds = {str: "texts", int: "whole numbers", float: "numbers"}
        kind = kinds[typing.get_args(hint)[0]]
        return f"a list of {kind} (on the command line: separated by commas)"
    if isinstance(hint, types.UnionType):
        return "pairs of an id and a number (on the command line: 12:-5,30:2)"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names[hint]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per key, grouped by section, whose help tells what the key means."""
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for field in dataclasses.fields(cls):
            default = field.default
            shown = ",".join(default) if isinstance(default, tuple) else default
            group.add_argument(
                f"--{section}.{field.name}",
                metavar=field.name.upper(),
                default=argparse.SUPPRESS,
                help=f"{field.metadata['help']} (default: {shown!r})".replace("%", "%%"),
            )


def add_sample_flags(
    parser: argparse.ArgumentParser, kind: type[RowSettings] = SampleConfig
) -> None:
    """Adds one flag per field of `kind`, dashes for underscores; none has a default."""
    group = parser.add_argument_group(
        "sampling", "What is not given is what the checkpoint recommends."
    )
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            metavar=field.name.split("_")[-1].upper(),
            default=argparse.SUPPRESS,
            help=field.metadata["help"].replace("%", "%%"),
        )


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The parsed flags, and the texts of those that are config keys.

    Raises:
      ValueError: an unknown flag, with the nearest match.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].split("=", 1)[0]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.0)
        raise ValueError(f"command line: unknown argument {name!r}; did you mean {near[0]!r}?")
    keys = key_types()
    return args, {name: value for name, value in vars(args).items() if name in keys}
