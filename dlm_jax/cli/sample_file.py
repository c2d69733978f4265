"""Texts for a file of requests: what ``sample.py --prompts in.jsonl --output out.jsonl`` does."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dlm_jax
from dlm_jax.batch.requests import Id, Line, read_requests, share
from dlm_jax.batch.results import Results, fingerprint
from dlm_jax.batch.run import Plan, Report, describe_model, describe_settings, run_requests
from dlm_jax.cli.common import refusals
from dlm_jax.cli.compiling import compile_clock
from dlm_jax.cli.flags import naming_flags, speeds
from dlm_jax.inference.own_rules import with_rules
from dlm_jax.inference.request import settings_of_call
from dlm_jax.progress import Progress


def sample_file(model: dlm_jax.Model, args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Runs a file of requests; exit code 1 if some were refused, 130 if it was stopped."""
    if args.max_length is not None:
        settings = settings | {"max_length": args.max_length}
    with refusals(), naming_flags():
        # Once, or every line would be refused for what no line says.
        settings_of_call(model, settings)
    with refusals():
        known = with_rules(tuple(settings.get("rules", ()))).settings
        lines = read_requests(args.prompts, known=[*known, "infill"])
        own = share(lines, args.process_id, args.num_processes)
        mark = fingerprint(
            args.prompts,
            model=describe_model(model),
            settings=describe_settings(settings) | {"seed": args.seed},
        )
        results = Results(
            args.output, fingerprint=mark, index=args.process_id, count=args.num_processes
        )
    began, compiled = time.perf_counter(), compile_clock().seconds
    with results:
        todo = [line for line in own if line.id not in results.done]
        if len(todo) < len(own):
            print(f"{len(own) - len(todo)} of {len(own)} requests are done", file=sys.stderr)
        try:
            report = _run(model, own, results, args, settings)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            return 130
        with refusals():
            is_complete = results.finish([line.id for line in lines])
    seconds, compiling = time.perf_counter() - began, compile_clock().seconds - compiled
    print(
        f"{report.rows} rows, {report.errors} refused, {report.tokens} tokens in {seconds:.2f} s "
        f"({speeds(report.tokens, seconds, compiling)}), slots {report.occupancy:.0%} occupied "
        "while rows of their program waited; "
        f"{len(report.programs)} programs ({', '.join(report.programs)})",
        file=sys.stderr,
    )
    print(
        f"wrote {args.output}" if is_complete else "the other processes have not finished yet",
        file=sys.stderr,
    )
    errors = report.errors
    if is_complete:
        rows = Path(args.output).read_text(encoding="utf-8").splitlines()
        errors = sum("error" in json.loads(row) for row in rows)
    return 1 if errors else 0


def _run(
    model: dlm_jax.Model,
    lines: list[Line],
    results: Results,
    args: argparse.Namespace,
    settings: dict[str, Any],
) -> Report:
    """Runs the requests, and shows how far it is."""
    tokens = 0
    work: dict[Id, float] = {}
    with contextlib.ExitStack() as stack:
        shown: list[Progress] = []

        def begin(planned: Plan) -> None:
            work.update(planned.work)
            count, programs = len(work), len(planned.programs)
            if count:
                kind = "program" if programs == 1 else "programs"
                print(f"{count:,} requests in {programs} {kind}", file=sys.stderr)
            total, idle = sum(work.values()), lambda: compile_clock().seconds
            progress = Progress("sample", count, "row", work=total, idle=idle)
            shown.append(stack.enter_context(progress))

        def show(result: Mapping[str, Any], new: int) -> None:
            nonlocal tokens
            tokens += new
            pace = tokens / max(shown[0].seconds(), 1e-6)
            shown[0].update(work=work[result["id"]], note=f"{pace:,.0f} tokens/s")

        return run_requests(
            model, lines, results, seed=args.seed, settings=settings, batch_size=args.batch_size,
            on_plan=begin, on_result=show,
        )  # fmt: skip
