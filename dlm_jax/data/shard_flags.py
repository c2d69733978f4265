"""The command line of `dlm_jax.data.shard`."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Sequence
from typing import NamedTuple, NoReturn


class Flags(NamedTuple):
    """What the command line asked for; `files` are paths and sizes."""

    files: tuple[tuple[str, int], ...]
    out: str
    tokenizer: str
    shards: int
    workers: int
    held_out: float
    sample_mb: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}; --help explains every flag")


def parse(argv: Sequence[str] | None, description: str) -> Flags:
    """The checked flags.

    Raises:
      ValueError: a flag that is unknown or out of range, or files that are not there.
    """
    parser = _Parser(
        prog="python -m dlm_jax.data.shard",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="paths or globs, in any order")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory or URL to write to")
    parser.add_argument("--tokenizer", default="byte", help="byte, bpe:N or a tokenizer.json")
    parser.add_argument("--shards", type=int, default=16, help="files to make (default: 16)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.01, help="share of documents (default: 0.01)"
    )
    parser.add_argument(
        "--sample-mb", type=int, default=64, help="text that bpe:N learns from (default: 64 MiB)"
    )
    args = parser.parse_args(argv)
    for name in ("shards", "workers", "sample_mb"):
        if not 1 <= getattr(args, name) <= 100_000:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}={getattr(args, name)} is outside [1, 100000]")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out={args.held_out} is outside (0, 1); 0.01 holds out 1%")
    return Flags(
        tuple((path, os.path.getsize(path)) for path in _found(args.files)),
        args.out, args.tokenizer, args.shards, args.workers, args.held_out, args.sample_mb,
    )  # fmt: skip


def _found(patterns: Sequence[str]) -> list[str]:
    """The files, each once, sorted."""
    found: set[str] = set()
    for pattern in patterns:
        if os.path.isdir(pattern):
            raise ValueError(f"{pattern} is a folder; name its files, such as {pattern}/*.jsonl")
        matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            raise ValueError(f"{pattern} matches no file; give a path or a glob")
        found.update(os.path.abspath(path) for path in files)
    return sorted(found)
