"""Time to read the lines of a request file and to make requests of them.

``python benchmarks/request_start.py`` writes files whose lines have equal or individual settings.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import dlm_jax
from dlm_jax.batch import RequestFile
from dlm_jax.batch.runner import accept_lines


def seconds_to_read(model: dlm_jax.Model, source: Path) -> float:
    began = time.perf_counter()
    lines = RequestFile(source, known=list(model.sample.table.settings))
    for line in accept_lines(model, lines, settings={}):
        assert not line.error, line.error
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = dlm_jax.load()
    print("| settings | lines | seconds | lines/s |")
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
            best = min(seconds_to_read(model, source) for _ in range(args.repeats))
        print(f"| {name} | {args.lines:,} | {best:.2f} | {args.lines / best:,.0f} |")


if __name__ == "__main__":
    main()
