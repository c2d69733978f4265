"""Texts for a file of requests: what ``sample.py --prompts in.jsonl --output out.jsonl`` does."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

import dlm_jax
from dlm_jax.batch.requests import read_requests, share
from dlm_jax.batch.results import Results, fingerprint
from dlm_jax.batch.run import describe_model, describe_settings, run_requests
from dlm_jax.cli.common import refusals
from dlm_jax.inference.own_rules import with_rules


def sample_file(model: dlm_jax.Model, args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Runs a file of requests; exit code 1 if some were refused, 130 if it was stopped."""
    if args.max_length is not None:
        settings = settings | {"max_length": args.max_length}
    with refusals():
        known = with_rules(tuple(settings.get("rules", ()))).settings
        lines = read_requests(args.prompts, known=[*known, "infill"])
        own = share(lines, args.process_id, args.num_processes)
        mark = fingerprint(
            args.prompts,
            model=describe_model(model),
            settings=describe_settings(settings)
            | {"seed": args.seed, "batch_size": args.batch_size},
        )
        results = Results(
            args.output, fingerprint=mark, index=args.process_id, count=args.num_processes
        )
    began = time.perf_counter()
    with results:
        todo = [line for line in own if line.id not in results.done]
        if len(todo) < len(own):
            print(f"{len(own) - len(todo)} of {len(own)} requests are done", file=sys.stderr)
        with tqdm(total=len(todo), desc="sample", unit="row", delay=1) as bar:
            tokens = 0

            def show(result: Mapping[str, Any], new: int) -> None:
                nonlocal tokens
                tokens += new
                bar.update()
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):,.0f} tokens/s")

            try:
                report = run_requests(
                    model, own, results, seed=args.seed, settings=settings,
                    batch_size=args.batch_size, on_result=show,
                )  # fmt: skip
            except KeyboardInterrupt:
                print("stopped; the same command goes on from here", file=sys.stderr)
                return 130
        with refusals():
            is_complete = results.finish([line.id for line in lines])
    seconds = time.perf_counter() - began
    print(
        f"{report.rows} rows, {report.errors} refused, {report.tokens} tokens in {seconds:.2f} s "
        f"({report.rows / seconds:,.1f} rows/s, {report.tokens / seconds:,.0f} tokens/s with "
        f"compilation), slots {report.occupancy:.0%} occupied while rows of their program waited; "
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
