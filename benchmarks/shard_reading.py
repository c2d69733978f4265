"""Processor time of the readers of many hosts for a sharded corpus.

    python benchmarks/shard_reading.py [--hosts 8] [--shards 100] [--positions 4096] [--rate 1e6]

The program writes a corpus of random ids and reads the batches of each host in the caller's thread.
For each host and for all hosts together, it prints the processor time per token and the share of
two cores that reading `--rate` tokens per second takes. It also prints the growth of the process's
memory relative to a corpus of a tenth of the size.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from dlm_jax.data import ByteTokenizer, load_corpus, train_batches
from dlm_jax.data.pipeline import id_dtype
from dlm_jax.data.shard import RECORD_TOKENS, ShardingJob, _Writer
from dlm_jax.data.shards import Index
from dlm_jax.store.files import located

CORES = 2


def write_corpus(root: Path, *, num_shards: int, shard_tokens: int) -> None:
    root.mkdir()
    coder, rng = ByteTokenizer(), np.random.default_rng(0)
    job = ShardingJob((), coder, num_shards, 0.0, str(root))
    made = {"train": [], "val": []}
    for part, count in (("train", num_shards), ("val", 1)):
        for number in range(count):
            writer = _Writer(root / job.name(part, number), coder)
            text = rng.integers(97, 123, shard_tokens - 1, np.uint8).tobytes().decode("ascii")
            writer.add("random", text)
            made[part].append(writer.close())
    dtype = id_dtype(coder.vocab_size).newbyteorder("<").str
    Index(coder, dtype, RECORD_TOKENS, tuple(made["train"]), tuple(made["val"])).write(
        located(root)
    )


def nanoseconds_a_token(root: Path, args: argparse.Namespace) -> list[float]:
    """Processor time of the reader of each host; readers run one after the other."""
    corpus = load_corpus(str(root), seq_len=args.positions, cache_dir=root / "cache")
    found = []
    for host in range(args.hosts):
        batches = train_batches(
            corpus.train_rows, seq_len=args.positions, batch_size=args.rows * args.hosts, seed=0,
            process_index=host, process_count=args.hosts, prefetch=0,
        )  # fmt: skip
        next(batches)
        start = time.process_time()
        for _ in itertools.islice(batches, args.batches):
            pass
        tokens = args.batches * args.rows * args.positions
        found.append(1e9 * (time.process_time() - start) / tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of reading shards.")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--shard-tokens", type=int, default=2_000_000)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e6, help="tokens per second of each host")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        write_corpus(small, num_shards=args.shards, shard_tokens=args.shard_tokens // 10)
        write_corpus(large, num_shards=args.shards, shard_tokens=args.shard_tokens)
        nanoseconds_a_token(small, args)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cost = nanoseconds_a_token(large, args)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{'reader':<14}{'ns/token':>10}{f'share of {CORES} cores':>20}")
    for name, one in (
        ("one, median", statistics.median(cost)),
        ("one, slowest", max(cost)),
        (f"all {args.hosts}", sum(cost)),
    ):
        print(f"{name:<14}{one:>10.1f}{one * 1e-9 * args.rate / CORES:>19.2%}")
    print(f"memory grew by {grown / 1024:.1f} MiB from a tenth of the corpus to all of it")


if __name__ == "__main__":
    main()
