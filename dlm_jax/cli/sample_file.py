"""Samples a file of requests: ``sample.py --prompts FILE --output FILE``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax
from dlm_jax.batch.json_lines import (
    Key,
    KeyTable,
    Line,
    RequestFile,
    Results,
    fingerprint,
    share,
)
from dlm_jax.batch.runner import READ_AHEAD, describe_model, describe_settings, run_requests
from dlm_jax.cli.common import heads_line, naming_flags
from dlm_jax.cli.ends import End, refusals
from dlm_jax.distributed.partitions import OwnRows, num_shares, split_rows
from dlm_jax.distributed.processes import check_same_everywhere, gathered
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.request import settings_of_call
from dlm_jax.progress import Progress
from dlm_jax.store.files import NO_SOURCE


class _Keys:
    """The keys of a process's results, in order; each iteration reads the file again."""

    def __init__(self, lines: Iterable[Line], index: int, count: int):
        self._lines, self._index, self._count = lines, index, count

    def __iter__(self) -> Iterator[Key]:
        lines = share(self._lines, self._index, self._count)
        return (key for line in lines for key in line.keys)


def sample_file(model: dlm_jax.Model, args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Runs a file of requests and returns the exit code, one of `End`."""
    if args.max_length is not None:
        settings = settings | {"max_length": args.max_length}
    with refusals(), naming_flags():
        # Checked once, because these errors do not depend on the line.
        sample = settings_of_call(model, settings)
    with refusals():
        lines = RequestFile(args.prompts, num_samples=args.num_samples)
        described = describe_settings(settings) | {
            "seed": args.seed,
            "num_samples": args.num_samples,
        }
        for name in described.get("rules", ()):
            if name.endswith(NO_SOURCE):
                print(f"{name}: changes to its source code are not detected", file=sys.stderr)
        mark = fingerprint(args.prompts, model=describe_model(model), settings=described)
        if args.distributed:
            check_same_everywhere({"model or file of requests": mark})
        index, count, writes = _share(model, args)
        results: Results | None = None
        if writes:
            ahead = max(READ_AHEAD, 2 * args.batch_size)
            plan = {"batch_size": args.batch_size, "read_ahead": ahead}
            results = Results(args.output, fingerprint=mark, index=index, count=count, plan=plan)
    with results or contextlib.nullcontext():
        with refusals():
            done, plan = _same_in_all(results, lines, index, count)
        if jax.process_index() == 0:
            print(heads_line(model, sample), file=sys.stderr)
        return _run(model, args, settings, lines, (index, count), results, done, plan)


def _same_in_all(
    results: Results | None, lines: Iterable[Line], index: int, count: int
) -> tuple[KeyTable, dict[str, int]]:
    """The finished keys and the plan of this process's part, also if it writes no results."""
    if results is not None and jax.process_count() == 1:
        return results.done, results.plan
    keys = list[Key]() if results is None else _Keys(lines, index, count)
    done = results and np.packbits(np.fromiter((key in results.done for key in keys), bool))
    told = gathered((index, results and (results.plan, done)))
    plan, bits = next(value for i, value in told if i == index and value is not None)
    if results is not None:
        return results.done, results.plan
    table = KeyTable()
    for key, is_done in zip(_Keys(lines, index, count), np.unpackbits(bits), strict=False):
        if is_done:
            table.add(key)
    return table, plan


def _share(model: dlm_jax.Model, args: argparse.Namespace) -> tuple[int, int, bool]:
    """Returns (index of this process's part of the lines, number of parts, whether it writes
    results).

    Processes across which only the parameters are sharded have the same part, and only the first of
    them writes.
    """
    if not args.distributed:
        return args.process_id or 0, 1 if args.num_processes is None else args.num_processes, True
    rows = split_rows(model.params)
    index, count = OwnRows(rows, num_shares(rows)).share
    if jax.process_count() == 1:
        return 0, 1, True
    shares: list[Any] = gathered(index)
    return index, count, shares.index(index) == jax.process_index()


def _run(
    model: dlm_jax.Model,
    args: argparse.Namespace,
    settings: dict[str, Any],
    lines: Iterable[Line],
    part: tuple[int, int],
    results: Results | None,
    done: KeyTable,
    plan: Mapping[str, int],
) -> int:
    """Runs the lines of this process (`part`) that have no result yet, and prints a summary."""
    num_lines = num_done = num_rows = 0
    for line in share(lines, *part):
        missing = sum(key not in done for key in line.keys)
        num_lines, num_done, num_rows = num_lines + 1, num_done + (not missing), num_rows + missing
    if num_done and results is not None:
        print(f"{num_done} of {num_lines} requests are done", file=sys.stderr)
    start, rows, errors, tokens, engines = time.perf_counter(), 0, 0, 0, list[Engine]()
    progress = Progress(
        "sample",
        num_rows,
        "row",
        compiling=lambda: engines[0].compiling if engines else "",
        is_shown=results is not None and num_rows > 0,
    )

    def write(result: Mapping[str, Any], new: int) -> None:
        nonlocal rows, errors, tokens
        if results is not None:
            results.write(result)
        is_error = "error" in result
        rows, errors, tokens = rows + (not is_error), errors + is_error, tokens + new
        progress.update(note=f"{tokens / max(progress.seconds(), 1e-6):,.0f} tokens/s")

    try:
        with progress:
            programs = run_requests(
                model,
                lines if args.distributed else share(lines, *part),
                write,
                done=done,
                seed=args.seed,
                settings=settings,
                batch_size=plan["batch_size"],
                read_ahead=plan["read_ahead"],
                on_start=engines.append,
            )
    except KeyboardInterrupt:
        print("stopped; the same command resumes from here", file=sys.stderr)
        if jax.process_count() > 1:  # a process that returns waits for the others
            raise SystemExit(End.INTERRUPTED) from None
        return End.INTERRUPTED
    if results is None:
        return End.DONE
    with refusals():
        results.finish(_Keys(lines, *part))
    seconds = time.perf_counter() - start
    print(
        f"{rows} rows, {errors} refused, {tokens} tokens in {seconds:.2f} s "
        f"({tokens / seconds:,.0f} tokens/s); {len(programs)} programs ({', '.join(programs)})",
        file=sys.stderr,
    )
    print(f"wrote {args.output if part[1] == 1 else results.path}", file=sys.stderr)
    return _end(results.path)


def _end(output: Path) -> End:
    """The exit code for all results, including those of earlier runs."""
    is_partly = False
    with output.open("rb") as rows:
        for row in rows:
            if b'"error"' not in row and b'"non_finite"' not in row:
                continue
            result = json.loads(row)
            if result.get("status") == "non_finite":
                return End.NOT_FINITE
            is_partly |= "error" in result
    return End.PARTLY if is_partly else End.DONE
