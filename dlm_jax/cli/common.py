"""What the programs share: a parser, warnings in one line, set-up of JAX, several hosts."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax

from dlm_jax.checkpoint import not_finite
from dlm_jax.checkpoint.shipped import DEFAULT, SHIPPED
from dlm_jax.cli.ends import NotFiniteError, keep_output_for_texts
from dlm_jax.config.sample import PRESETS
from dlm_jax.inference.model import Model, load

# Seconds within which JAX itself notices a host that is gone; `distributed.watch` is faster.
_HEARTBEAT = 50

CHECKPOINT = (
    f"a run, a weights file, or a model that ships: {', '.join(SHIPPED)}; default: {DEFAULT}"
)

PRESET = (
    f"a loop by name: {', '.join(PRESETS)} (insertions and deletions, docs/generation.md), or one "
    "that comes with a published model, which says the order that its project uses "
    "(docs/published.md)"
)


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are a ValueError, like the library's, instead of a page of usage."""

    def __init__(self, *, prog: str, description: str | None, add_help: bool = True):
        super().__init__(
            prog=prog,
            description=description,
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raises the message as a ValueError."""
        raise ValueError(f"command line: {message}; --help explains every flag")


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads a whole number from `low` to `high`; for ``type=`` of a flag."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
        if not low <= value <= high:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise argparse.ArgumentTypeError(f"{shown} is not in [{low}, {high}]")
        return value

    return number


SEED = whole(0, 2**32 - 1)
"""Reads a seed."""
COUNT = whole(1, 2**20)
"""Reads how many there are of something."""
INDEX = whole(0, 2**20)
"""Reads which one of several it is, from 0."""


def add_host_flags(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the flags that join several processes into one run; `more` is told of them in help."""
    group = parser.add_argument_group(
        "hosts",
        "Start the same command on every host. On TPU pods and Slurm --distributed is enough. "
        + more,
    )
    group.add_argument("--distributed", action="store_true", help="join the other processes")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=COUNT, metavar="N", help="processes in all")
    group.add_argument("--process-id", type=INDEX, metavar="I", help="this process, from 0")


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """One plain line of what a user can act on, without the place in the code where it arose."""
    if issubclass(category, UserWarning):
        text = f"warning: {' '.join(str(message).split())}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def start_jax(args: argparse.Namespace | None = None) -> None:
    """Sets JAX up for a program: joins the other hosts if asked to, and caches compilations.

    From then on what the library warns of is one line on standard error.

    The cache is in ``$JAX_COMPILATION_CACHE_DIR`` or the user's cache directory; with it the second
    start of a program takes a third of the first's time (`benchmarks/compile_cache.py`).

    Raises:
      ValueError: the other processes could not be joined, or a flag about them stands alone.
    """
    warnings.showwarning = _show_warning
    _refuse_lone_host_flags(args)
    if args is not None:
        join_hosts(args)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # A user without a home directory, or one who may not write there, has no cache.
        with contextlib.suppress(RuntimeError, OSError):
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            cache = cache / "dlm_jax" / f"xla-{_machine()}"
            cache.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def join_hosts(args: argparse.Namespace) -> None:
    """Joins the other processes, if the flags of `add_host_flags` ask for it.

    Raises:
      ValueError: they could not be joined.
    """
    if not args.distributed:
        return
    keep_output_for_texts()
    try:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_HEARTBEAT,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"--distributed: {error}; give --coordinator, --num-processes and --process-id"
        ) from None


def load_model(path: str | None, *, mesh: Any = None, dtype: str | None = None) -> Model:
    """The model of that path, its parameters finite; says on standard error what was passed over.

    Raises:
      ValueError: there is no such model.
      NotFiniteError: a parameter is NaN or infinite.
    """
    model = load(path, mesh=mesh, dtype=dtype, report=lambda line: print(line, file=sys.stderr))
    broken = not_finite(model.params)
    if broken is not None:
        raise NotFiniteError(
            f"{path or DEFAULT}: the parameter {broken} is not finite, so that the "
            "model can say nothing; load an earlier checkpoint, or train again"
        )
    return model


def _machine() -> str:
    """Tells processors apart, whose compiled programs are not for each other."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    told = sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), *told]).encode()).hexdigest()[:12]


def _refuse_lone_host_flags(args: argparse.Namespace | None) -> None:
    for name in ("coordinator", "num_processes", "process_id"):
        if args is not None and getattr(args, name) is not None and not args.distributed:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"command line: {flag} means nothing without --distributed; add that or drop it"
            )
