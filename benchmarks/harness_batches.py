"""Measures harness likelihoods by batch size: ``python benchmarks/harness_batches.py``."""

from __future__ import annotations

import argparse
import time

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.harness.lm import Likelihoods, pair_of
from dlm_jax.harness.tasks.shipped import rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--documents", type=int, default=2)
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load()
    pairs = [
        pair_of(model, row["context"], choice)
        for row in rows("shakespeare_cloze")[: args.documents]
        for choice in row["choices"]
    ]
    found, first = set(), 0.0
    print("| batch size | s | of batch size 1 |")
    print("| --- | --- | --- |")
    for size in (1, 8, 32):
        made = Likelihoods(model, num_draws=args.draws, batch_size=size)
        made.nats(pairs[:1])
        began = time.perf_counter()
        found.add(made.nats(pairs).tobytes())
        seconds = time.perf_counter() - began
        first = first or seconds
        print(f"| {size} | {seconds:.2f} | {first / seconds:.1f} |", flush=True)
    print(f"the same bits: {len(found) == 1}")


if __name__ == "__main__":
    main()
