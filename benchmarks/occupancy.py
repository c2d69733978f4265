"""Slot occupancy for a file of requests with lengths that vary tenfold, compared with whole
batches.

    python benchmarks/occupancy.py

The shipped model runs requests of 13 to 128 new tokens, with one step per token, in 32 slots.
Occupancy is the share of the slot steps that had a row while requests waited. Without refilling,
each batch would run until its longest row ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import dlm_jax
from dlm_jax.batch.request_file import RequestFile
from dlm_jax.batch.result_file import Results
from dlm_jax.batch.runner import run_requests
from dlm_jax.cli.common import start_jax


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=32)
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load()
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(13), np.log(128), args.requests)).astype(int)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "in.jsonl"
        source.write_text(
            "".join(json.dumps({"gen_length": int(n), "steps": int(n)}) + "\n" for n in lengths)
        )
        lines = RequestFile(source, known=[])
        began = time.perf_counter()
        with Results(Path(directory) / "out.jsonl", fingerprint="") as results:
            report = run_requests(model, lines, results, batch_size=args.slots,
                                  settings={"chain": ("temperature", "min_p")})  # fmt: skip
        seconds = time.perf_counter() - began
    canvas = np.where(lengths > 64, 128, 64)
    taken = offered = 0
    for size in (64, 128):
        rows = lengths[canvas == size]
        batches = [rows[at : at + args.slots] for at in range(0, rows.size, args.slots)][:-1]
        taken += sum(int(batch.sum()) for batch in batches)
        offered += sum(int(batch.max()) * args.slots for batch in batches)
    print("| driver | occupancy while requests wait |")
    print("| --- | --- |")
    print(f"| refilled slots | {report.occupancy:.3f} |")
    print(f"| whole batches | {taken / offered:.3f} |")
    print(
        f"{report.rows} rows, {report.tokens} tokens in {seconds:.1f} s "
        f"({report.rows / seconds:.1f} rows/s); programs: {', '.join(report.programs)}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
