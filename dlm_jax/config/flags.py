"""The flags of a config and of a request: one for each key, so that nothing is declared twice.

A setting that is true or false is a flag without a value and its opposite, ``--edit`` and
``--no-edit``; ``--edit true`` and ``--edit=false`` mean the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from dlm_jax.config.reading import hints_of, key_types, sections
from dlm_jax.config.sample import RowSettings, SampleConfig
from dlm_jax.elsewhere import named_here


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per key, grouped by section, whose help tells what the key means."""
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for field in dataclasses.fields(cls):
            default = field.default
            shown = ",".join(default) if isinstance(default, tuple) else default
            _add(
                group, f"{section}.{field.name}", hints_of(cls)[field.name],
                metavar=field.name.upper(),
                help=f"{field.metadata['help']} (default: {shown!r})",
            )  # fmt: skip


def add_sample_flags(
    parser: argparse.ArgumentParser, kind: type[RowSettings] = SampleConfig
) -> None:
    """Adds one flag per field of `kind`, dashes for underscores; none has a default."""
    group = parser.add_argument_group(
        "sampling", "What is not given is what the checkpoint recommends."
    )
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        _add(
            group, field.name.replace("_", "-"), hints_of(kind)[field.name],
            metavar=field.name.split("_")[-1].upper(), help=field.metadata["help"],
        )  # fmt: skip


def _add(group: Any, name: str, hint: Any, *, metavar: str, help: str) -> None:
    """One flag, and its opposite if it is true or false; a text is kept, and none if not given."""
    help = help.replace("%", "%%")
    kept: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": metavar}
    if hint is not bool:
        group.add_argument(f"--{name}", help=help, **kept)
        return
    group.add_argument(f"--{name}", nargs="?", const="true", help=help, **kept)
    group.add_argument(
        f"--no-{name}", dest=name.replace("-", "_"), action="store_const", const="false",
        default=argparse.SUPPRESS, help=f"the opposite of --{name}",
    )  # fmt: skip


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
        name, _, value = unknown[0].partition("=")
        value = value or next((text for text in unknown[1:2] if not text.startswith("-")), "")
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.0)
        advice = named_here(name, flags, value) if name.startswith("-") else ""
        advice = advice or f"did you mean {near[0]!r}?"
        raise ValueError(f"command line: unknown argument {name!r}; {advice}")
    keys = key_types()
    return args, {name: value for name, value in vars(args).items() if name in keys}
