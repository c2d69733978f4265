"""Reads a configuration from TOML, from the JSON of a checkpoint, and from flags.

A config file has one table per section (``[model]``, ``[data]``, ...). Command-line flags are
dotted names (``--train.steps 100``). Unknown keys and invalid values raise an error that names the
key, the value and the remedy.

A boolean setting has two flags that need no value: ``--edit`` and ``--no-edit``, for example, are
equivalent to ``--edit true`` and ``--edit=false``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dlm_jax.config.schema import Config, declared, sections
from dlm_jax.moved import moved
from dlm_jax.sampling.params import SamplingParams
from dlm_jax.settings import Setting, SettingError, closest, renamed


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The config as nested JSON values; `from_dict` is the inverse."""
    return msgspec.to_builtins(config)


def from_dict(raw: Mapping[str, Any], *, where: str) -> Config:
    """Config from nested JSON values; `where` names their source in errors.

    Raises:
      ValueError: a section or key is unknown (the message suggests the nearest match), or a value
        has the wrong type or is out of range.
    """
    given = {}
    for section, values in raw.items():
        _check_known(section, sections(), where=where, what="section")
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{where}: {section}={values!r} is not a section; write [{section}] above its keys"
            )
        given |= {f"{section}.{name}": value for name, value in values.items()}
    for key in given:
        _check_known(key, declared(), where=where, what="key")
    try:
        return _build(given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def from_saved(meta: Mapping[str, Any], *, where: str) -> Config:
    """Config of a saved model, from its metadata; `where` names the model in errors.

    Raises:
      ValueError: another version wrote keys that this one does not have (the message names all of
        them), or `from_dict` fails.
    """
    raw, known = meta["config"], declared()
    unknown = [f"[{section}]" for section in raw if section not in sections()]
    unknown += [
        f"{section}.{name}"
        for section in sections()
        for name in raw.get(section, ())
        if f"{section}.{name}" not in known
    ]
    if not unknown:
        return from_dict(raw, where=where)
    is_old = any(moved(name.strip("[]").rpartition(".")[2]) for name in unknown)
    version = (meta.get("program") or {}).get("version of dlm_jax")
    version = version or ("0.2.0 or earlier" if is_old else "of another version")
    raise ValueError(
        f"{where}: unknown {'key' if len(unknown) == 1 else 'keys'} "
        f"{', '.join(map(repr, unknown))}, saved by dlm_jax {version}; use that version, or remove "
        "them from the saved config (docs/training.md)"
    )


def load(path: str | Path | None, overrides: Mapping[str, str] | None = None) -> Config:
    """The config from a TOML file (or the defaults), with some keys overridden by flag values.

    Args:
      path: path of the file, or the name of a shipped config, such as ``quickstart``.
      overrides: values of flags as text, by dotted key.

    Raises:
      ValueError: the file does not exist, or `from_dict` or `override` fails.
    """
    if path is None:
        return override(Config(), overrides or {})
    file = find(path)
    return override(from_dict(_read_toml(file), where=str(file)), overrides or {})


def override(config: Config, overrides: Mapping[str, str]) -> Config:
    """The config, with the values of some dotted keys replaced by flags.

    Raises:
      ValueError: a key is unknown, a text is invalid, or values contradict each other. The message
        names the flag.
    """
    if not overrides:
        return config
    known, values = declared(), flat(to_dict(config))
    for key, text in overrides.items():
        _check_known(key, known, where="command line", what="flag")
        try:
            values[key] = _from_text(f"--{key}", text, known[key])
        except ValueError as error:
            raise ValueError(f"command line: {error}") from None
        section, _, _ = key.partition(".")
        for other in known[key].resets_of(values[key]):
            if f"{section}.{other}" not in overrides:
                values.pop(f"{section}.{other}", None)
    try:
        return _build(values)
    except ValueError as error:
        about = {error.name, *error.others} if isinstance(error, SettingError) else set()
        # Errors about settings of requests have no section name.
        named = [key for key in overrides if {key, key.removeprefix("sample.")} & about]
        flags = " ".join(f"--{key} {overrides[key]}" for key in named or overrides)
        raise ValueError(f"command line: {flags}: {error}") from None


def flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of nested sections by dotted key."""
    return {f"{s}.{name}": value for s, values in nested.items() for name, value in values.items()}


def _build(given: Mapping[str, Any]) -> Config:
    known = declared()
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for key, value in given.items():
        section, name = key.split(".", 1)
        nested[section][name] = _typed(key, value, known[key])
    return Config(**{name: cls(**nested[name]) for name, cls in sections().items()})


def sample_settings(
    texts: Mapping[str, str], kind: type[SamplingParams] = SamplingParams
) -> dict[str, Any]:
    """Parses the texts of sampling settings; the keys are field names of `kind`.

    Raises:
      ValueError: a name is unknown, or a text is not a value of the setting's type.
    """
    values = {}
    for name, text in texts.items():
        _check_known(name, kind.declared, where="command line", what="setting")
        values[name] = _from_text("--" + name.replace("_", "-"), text, kind.declared[name])
    return values


def _from_text(flag: str, text: str, setting: Setting) -> Any:
    return _typed(flag, _split(text, setting.annotation), setting, strict=False)


def _typed(shown: str, value: Any, setting: Setting, *, strict: bool = True) -> Any:
    """The value converted to the type of the setting, without a range check."""
    try:
        return msgspec.convert(value, setting.annotation, strict=strict)
    except msgspec.ValidationError:
        if setting.choices is None:
            raise ValueError(f"{shown}={value!r} is not {_describe(setting.annotation)}") from None
    try:
        return setting.checked(value)
    except SettingError as error:
        raise ValueError(error.line(shown)) from None


def _split(text: str, hint: Any) -> Any:
    """The text of a flag, split if it is a list (``a,b``) or pairs (``12:-5,30:2``)."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if typing.get_origin(hint) is tuple:
        return items
    if isinstance(hint, types.UnionType):
        return [item.split(":") for item in items]
    return text


def _check_known(name: str, known: Mapping[str, Any], *, where: str, what: str) -> None:
    if name in known:
        return
    advice = renamed(name, known, SamplingParams.declared)
    advice = advice or f"did you mean {closest(name, known)!r}?"
    raise ValueError(f"{where}: unknown {what} {name!r}; {advice}")


def shipped() -> dict[str, Path]:
    folder = Path(__file__).parent.parent / "shipped" / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find(path: str | Path) -> Path:
    """The config file at `path`, or the shipped config of that name.

    Raises:
      ValueError: neither exists.
    """
    if Path(path).exists() and not Path(path).is_dir():
        return Path(path)
    known = shipped()
    if str(path) in known:
        return known[str(path)]
    near = difflib.get_close_matches(Path(path).stem, known, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else f"shipped are {', '.join(known)}"
    raise ValueError(
        f"config file {path} does not exist, and no shipped config is named {path}; {advice}"
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise ValueError(f"config file {path} is not valid TOML: {error}") from None


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        kinds = {str: "strings", int: "integers", float: "numbers"}
        kind = kinds[typing.get_args(hint)[0]]
        return f"a list of {kind} (on the command line: separated by commas)"
    if isinstance(hint, types.UnionType):
        return "pairs of an id and a number (on the command line: 12:-5,30:2)"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names[hint]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag with help per key, grouped by section."""
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for name, setting in cls.declared.items():
            if setting.is_preset:
                continue
            default = cls.defaults[name]
            shown = ",".join(default) if isinstance(default, tuple) else default
            _add(group, f"{section}.{name}", setting, name, f" (default: {shown!r})")


def add_sample_flags(
    parser: argparse.ArgumentParser, kind: type[SamplingParams] = SamplingParams
) -> None:
    """Adds one flag per field of `kind`, without a default and with dashes for underscores."""
    group = parser.add_argument_group(
        "sampling", "Defaults are the recommendations of the checkpoint."
    )
    for name, setting in kind.table.request_settings.items():
        _add(group, name.replace("_", "-"), setting, name.split("_")[-1])


def _add(group: Any, name: str, setting: Setting, metavar: str, default: str = "") -> None:
    """Adds one flag, and its negation if the setting is boolean. Flag values remain strings."""
    help = f"{setting.help}{default}".replace("%", "%%")
    kept: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": metavar.upper()}
    if setting.annotation is not bool:
        group.add_argument(f"--{name}", help=help, **kept)
        return
    group.add_argument(f"--{name}", nargs="?", const="true", help=help, **kept)
    group.add_argument(
        f"--no-{name}",
        dest=name.replace("-", "_"),
        action="store_const",
        const="false",
        default=argparse.SUPPRESS,
        help=f"the opposite of --{name}",
    )


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The parsed flags, and the texts of the flags that are config keys.

    Raises:
      ValueError: a flag is unknown; the message suggests the nearest match.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].partition("=")[0]
        advice = renamed(name, flags, SamplingParams.declared) if name.startswith("-") else ""
        advice = advice or f"did you mean {closest(name, flags)!r}?"
        raise ValueError(f"command line: unknown argument {name!r}; {advice}")
    keys = declared()
    return args, {name: value for name, value in vars(args).items() if name in keys}


def differing(config: Config) -> dict[str, dict[str, Any]]:
    """The changed values, by section and key; sections without changes are omitted."""
    found = {
        section: {key: value for key, value, default in pairs if value != default}
        for section, pairs in _with_defaults(config)
    }
    return {section: values for section, values in found.items() if values}


def to_toml(config: Config, *, header: str = "") -> str:
    """The config as TOML after a comment `header`; comments show the defaults of changed values."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for section, pairs in _with_defaults(config):
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value, default in pairs:
            note = "" if value == default else f"  # default: {_value(default)}"
            lines.append(f"{key} = {_value(value)}{note}")
    return "\n".join(lines) + "\n"


def _with_defaults(config: Config) -> Iterator[tuple[str, list[tuple[str, Any, Any]]]]:
    """Returns (key, value, default) of all keys, grouped by section, as JSON values."""
    defaults: Mapping[str, Any] = to_dict(Config())
    for section, values in to_dict(config).items():
        yield section, [(key, value, defaults[section][key]) for key, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        # A TOML basic string is a JSON string, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
