"""A config as a TOML file that people read and `load` reads back, and what in it is not default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dlm_jax.config.reading import to_dict
from dlm_jax.config.schema import Config


def differing(config: Config) -> dict[str, dict[str, Any]]:
    """The values that are not the defaults, by section and key; sections without any are absent."""
    found = {
        section: {key: value for key, value, default in pairs if value != default}
        for section, pairs in _with_defaults(config)
    }
    return {section: values for section, values in found.items() if values}


def to_toml(config: Config, *, header: str = "") -> str:
    """All of the config as TOML; behind a value that is not the default stands what that is.

    Args:
      config: to write.
      header: lines of text that become the comment at the top.
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for section, pairs in _with_defaults(config):
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value, default in pairs:
            note = "" if value == default else f"  # default: {_value(default)}"
            lines.append(f"{key} = {_value(value)}{note}")
    return "\n".join(lines) + "\n"


def _with_defaults(config: Config) -> Iterator[tuple[str, list[tuple[str, Any, Any]]]]:
    """Of each section its keys, their values and the defaults, as plain values."""
    defaults: Mapping[str, Any] = to_dict(Config())
    for section, values in to_dict(config).items():
        yield section, [(key, value, defaults[section][key]) for key, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        # TOML's basic strings are those of JSON, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
