"""Time until the first program of a request file is compiled.

``python benchmarks/request_start.py`` writes files whose lines have equal or individual settings,
and prints the seconds from reading a file to the plan of its programs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import dlm_jax
from dlm_jax.batch import Results, read_requests
from dlm_jax.batch.runner import BatchPlan, run_requests


class _Planned(Exception):
    """Replaces the first compilation, which is not measured."""


def _stop(plan: BatchPlan) -> None:
    raise _Planned(len(plan.work))


def seconds_until_planned(model: dlm_jax.Model, source: Path) -> float:
    known = list(model.sample.table.settings)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        lines = read_requests(source, known=known)
        with Results(Path(folder) / "out.jsonl", fingerprint="benchmark") as results:
            try:
                run_requests(model, lines, results, on_plan=_stop)
            except _Planned:
                return time.perf_counter() - began
    raise RuntimeError("nothing was planned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = dlm_jax.load()
    print("| settings | lines | seconds until the programs are known | lines/s |")
    print("| --- | --- | --- | --- |")
    for name, temperatures in (("the same", 1), ("each its own", args.lines)):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.jsonl"
            requests = (
                {"prompt": f"ROMEO {n}:", "seed": n, "gen_length": 16, "top_k": 40,
                 "temperature": 0.5 + (n % temperatures) / args.lines}
                for n in range(args.lines)
            )  # fmt: skip
            source.write_text("".join(json.dumps(request) + "\n" for request in requests))
            best = min(seconds_until_planned(model, source) for _ in range(args.repeats))
        print(f"| {name} | {args.lines:,} | {best:.2f} | {args.lines / best:,.0f} |")


if __name__ == "__main__":
    main()
