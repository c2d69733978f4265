"""Samples a file of requests: ``sample.py --prompts FILE --output FILE``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from tqdm import tqdm

import dlm_jax
from dlm_jax.batch.json_lines import (
    Key,
    KeyTable,
    Line,
    RequestFile,
    Results,
    fingerprint,
    result_key,
    share,
)
from dlm_jax.batch.runner import (
    READ_AHEAD,
    RunReport,
    describe_model,
    describe_settings,
    run_requests,
)
from dlm_jax.cli.common import (
    compile_clock,
    heads_line,
    import_sampler,
    naming_flags,
    speeds,
)
from dlm_jax.cli.ends import End, refusals
from dlm_jax.distributed.partitions import OwnRows, num_shares, split_rows
from dlm_jax.distributed.processes import check_same_everywhere, gathered
from dlm_jax.inference.candidates import HostSampler
from dlm_jax.inference.engine import Engine, Report
from dlm_jax.inference.request import settings_of_call
from dlm_jax.progress import Progress
from dlm_jax.store.files import NO_SOURCE, source_digest


class ProgressMeter:
    """Reports an engine's progress at intervals; `tick` can be called at any time."""

    def __init__(
        self,
        engine: Engine,
        *,
        every: float = 5.0,
        write: Callable[[str], Any] | None = None,
        records: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not every > 0:
            raise ValueError(f"every={every} seconds must be more than 0")
        self._engine, self._every, self._clock = engine, every, clock
        self._write, self._records = write or _to_standard_error, records
        self._start = self._last = clock()
        self._before = engine.report()

    def tick(self) -> None:
        if self._clock() - self._last >= self._every:
            self.tell()

    def tell(self) -> None:
        """Writes a line about the work since the previous line."""
        now, report = self._clock(), self._engine.report()
        figures = self._figures(report, max(now - self._last, 1e-9), now - self._start)
        self._last, self._before = now, report
        self._write(_sentence(figures))
        if self._records is not None:
            try:
                self._records.write(f"{json.dumps(figures)}\n")
                self._records.flush()
            except OSError as error:
                # A failure to report must not end the run.
                self._records = None
                self._write(
                    f"warning: metrics cannot be recorded: {error.strerror}; they are discarded"
                )

    def _figures(self, report: Report, seconds: float, since: float) -> dict[str, Any]:
        rates = {}
        for name in ("rows", "tokens", "forwards"):
            done = _count(report, name) - _count(self._before, name)
            rates[f"{name}_per_second"] = round(done / seconds, 3)
        return {
            "seconds": round(since, 3),
            "rows": report.rows,
            "tokens": report.tokens,
            **rates,
            "running": report.running,
            "slots": report.slots,
            "waiting": report.waiting,
            "occupancy": round(report.occupancy, 4),
            "programs": len(report.programs),
        }


def _count(report: Report, name: str) -> int:
    return report.counters.forwards if name == "forwards" else getattr(report, name)


def _sentence(figures: dict[str, Any]) -> str:
    rates = (
        f"{figures[f'{name}_per_second']:,.1f} {name}/s" for name in ("rows", "tokens", "forwards")
    )
    return (
        f"engine: {', '.join(rates)}; {figures['running']} of {figures['slots']} slots busy, "
        f"{figures['waiting']} waiting, {figures['programs']} programs"
    )


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _NoResults:
    """Replaces `Results` in a process that computes but does not write."""

    def __init__(self, done: KeyTable, plan: dict[str, int]):
        self.done, self.plan = done, plan

    def write(self, result: Mapping[str, Any]) -> None:
        key = result_key(result)
        assert key is not None
        self.done.add(key)


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
    host = {"host_sampler": args.host_sampler, "read_back": args.read_back}
    host = {name: value for name, value in host.items() if value is not None}
    with refusals(), naming_flags():
        # Checked once, because these errors do not depend on the line.
        sample = settings_of_call(model, settings | host)
    settings = settings | host
    with refusals(), contextlib.ExitStack() as stack:
        lines = RequestFile(args.prompts, num_samples=args.num_samples)
        described = describe_settings(settings)
        described |= {"seed": args.seed, "num_samples": args.num_samples}
        described |= {"max_candidates": args.max_candidates}
        modules = sorted(_modules(args))
        described |= {
            "modules": [
                f"{name} {source_digest(sys.modules[name]) or NO_SOURCE}" for name in modules
            ]
        }
        for name in (*described.get("rules", ()), *described["modules"]):
            if name.endswith(NO_SOURCE):
                print(f"{name}: changes to its source code are not detected", file=sys.stderr)
        mark = fingerprint(args.prompts, model=describe_model(model), settings=described)
        if args.distributed:
            check_same_everywhere({"model, file of requests or module": mark})
        index, count, tells = _share(model, args)
        results: Results | None = None
        if tells:
            results = stack.enter_context(
                Results(
                    args.output,
                    fingerprint=mark,
                    index=index,
                    count=count,
                    plan={
                        "batch_size": args.batch_size,
                        "read_ahead": max(READ_AHEAD, 2 * args.batch_size),
                    },
                )
            )
        store = _same_in_all(results, lines, index, count)
        if tells and store.plan["batch_size"] != args.batch_size:
            print(
                f"{args.output} has results of --batch-size {store.plan['batch_size']}, which also "
                "runs the other rows",
                file=sys.stderr,
            )
        open_files = stack.pop_all()
    if jax.process_index() == 0:
        print(heads_line(model, sample), file=sys.stderr)
    with open_files:
        return _run(model, args, settings, lines, store)


def _same_in_all(
    results: Results | None, lines: Iterable[Line], index: int, count: int
) -> Results | _NoResults:
    """The results of this process's part, also in a process that does not write them."""
    if results is not None and jax.process_count() == 1:
        return results
    keys = list[Key]() if results is None else _Keys(lines, index, count)
    done = results and np.packbits(np.fromiter((key in results.done for key in keys), bool))
    told = gathered((index, results and (results.plan, done)))
    plan, bits = next(value for i, value in told if i == index and value is not None)
    if results is not None:
        return results
    table = KeyTable()
    for key, is_done in zip(_Keys(lines, index, count), np.unpackbits(bits), strict=False):
        if is_done:
            table.add(key)
    return _NoResults(table, plan)


def _modules(args: argparse.Namespace) -> set[str]:
    """The modules with functions that requests can use."""
    own = set() if args.host_sampler is None else {args.host_sampler.partition(":")[0]}
    return own | set(args.allow_host_sampler)


def _allowed_samplers(modules: Collection[str]) -> Callable[[str], HostSampler]:
    """A function that looks up ``MODULE:FUNCTION``; ValueError for modules not in `modules`."""

    @functools.cache
    def find(name: str) -> HostSampler:
        module, where = name.partition(":")[0], f"host_sampler={name!r}"
        if ":" in name and module not in modules:
            raise ValueError(
                f"{where} is in a module that is not allowed; add --allow-host-sampler {module}"
            )
        return import_sampler(name, where)

    return find


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
    lines: RequestFile,
    results: Results | _NoResults,
) -> int:
    """Runs the lines that have no result yet, merges the results, and prints a summary."""
    index, count, writes = _share(model, args)
    began, compiled = time.perf_counter(), compile_clock().seconds
    num_lines = num_done = num_rows = 0
    for line in share(lines, index, count):
        missing = sum(key not in results.done for key in line.keys)
        num_lines, num_done = num_lines + 1, num_done + (not missing)
        num_rows += missing
    if num_done and writes:
        print(f"{num_done} of {num_lines} requests are done", file=sys.stderr)
    if num_rows and writes:
        print(f"{num_rows:,} rows", file=sys.stderr)
    own = lines if args.distributed else share(lines, index, count)
    try:
        report = _run_rows(model, args, settings, own, results, num_rows)
    except KeyboardInterrupt:
        print("stopped; the same command resumes from here", file=sys.stderr)
        if jax.process_count() > 1:  # a process that returns waits for the others
            raise SystemExit(End.INTERRUPTED) from None
        return End.INTERRUPTED
    if not isinstance(results, Results):
        return End.DONE
    with refusals():
        results.finish(_Keys(lines, index, count))
    seconds, compiling = time.perf_counter() - began, compile_clock().seconds - compiled
    print(
        f"{report.rows} rows, {report.errors} refused, {report.tokens} tokens in {seconds:.2f} s "
        f"({speeds(report.tokens, seconds, compiling)}), slots {report.occupancy:.0%} occupied; "
        f"{len(report.programs)} programs ({', '.join(report.programs)})",
        file=sys.stderr,
    )
    print(f"wrote {results.path if count > 1 else args.output}", file=sys.stderr)
    return _end(results.path)


def _run_rows(
    model: dlm_jax.Model,
    args: argparse.Namespace,
    settings: dict[str, Any],
    lines: Iterable[Line],
    results: Results | _NoResults,
    num_rows: int,
) -> RunReport:
    """Runs the requests, showing progress and the state of the engine."""
    writes, tokens = isinstance(results, Results), 0
    with contextlib.ExitStack() as stack:
        shown: list[Progress] = []

        def begin(engine: Engine) -> None:
            progress = Progress(
                "sample",
                num_rows,
                "row",
                idle=lambda: compile_clock().seconds,
                compiling=lambda: engine.compiling,
                is_shown=writes,
            )
            shown.append(stack.enter_context(progress))

        def show(result: Mapping[str, Any], new: int) -> None:
            nonlocal tokens
            tokens += new
            pace = tokens / max(shown[0].seconds(), 1e-6)
            shown[0].update(note=f"{pace:,.0f} tokens/s")

        tick = stack.enter_context(_meter(args, tells=writes))
        return run_requests(
            model,
            lines,
            results,
            seed=args.seed,
            settings=settings,
            **results.plan,
            host_samplers=_allowed_samplers(_modules(args)),
            max_candidates=args.max_candidates,
            on_start=begin,
            on_result=show,
            on_turn=tick,
        )


@contextlib.contextmanager
def _meter(args: argparse.Namespace, *, tells: bool) -> Iterator[Callable[[Engine], None]]:
    """A function that reports progress after each turn of the engine, as the flags specify."""
    made: list[ProgressMeter] = []
    with contextlib.ExitStack() as stack:
        records = None
        if tells and args.report_json is not None:
            with refusals():
                records = open(args.report_json, "a", encoding="utf-8")  # noqa: SIM115
            stack.enter_context(contextlib.suppress(OSError))
            stack.callback(records.close)

        def tick(engine: Engine) -> None:
            if tells and args.report_every and not made:
                made.append(
                    ProgressMeter(engine, every=args.report_every, write=_above, records=records)
                )
            for meter in made:
                if records is not None and not engine.is_busy:
                    # The final report, while the engine still has its programs.
                    meter.tell()
                else:
                    meter.tick()

        yield tick


def _above(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


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
