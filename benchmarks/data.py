"""Time of one batch of the input pipeline for both layouts, compared with a training step.

    python -m benchmarks.data_pipeline [--rows 32] [--positions 256] [--batches 2000]

Reads the built-in corpus as bytes in the caller's thread, without reading ahead, and prints the
processor time of that thread, the median over blocks of batches, in microseconds. The last column
is the duration of a step of which this time is 2%.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time

from dlm_jax.data import BUILTIN_CORPUS, LAYOUTS, load_corpus, train_batches

BLOCKS = 20
SHARE_OF_STEP = 0.02


def microseconds_per_batch(layout: str, *, rows: int, positions: int, batches: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        corpus = load_corpus(BUILTIN_CORPUS, seq_len=positions, layout=layout, cache_dir=folder)
        stream = train_batches(
            corpus.train_rows, seq_len=positions, batch_size=rows, seed=0, prefetch=0
        )
        per_block = max(1, batches // BLOCKS)
        next(stream)
        seconds = []
        for _ in range(BLOCKS):
            start = time.thread_time()
            for _ in itertools.islice(stream, per_block):
                pass
            seconds.append((time.thread_time() - start) / per_block)
    return 1e6 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one batch of the pipeline.")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--batches", type=int, default=2000)
    args = parser.parse_args()
    print(f"{'layout':<12}{'us/batch':>10}{'2% of a step of':>20}")
    for layout in LAYOUTS:
        cost = microseconds_per_batch(
            layout, rows=args.rows, positions=args.positions, batches=args.batches
        )
        print(f"{layout:<12}{cost:>10.0f}{cost / SHARE_OF_STEP / 1e3:>17.1f} ms")


if __name__ == "__main__":
    main()
