"""Sharded corpora made by the command, and batches to compare."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from dlm_jax.data import shard, train_batches, train_bpe

TEXTS = [f"document {i} says " + "ab" * (i % 23) for i in range(60)]


def write_jsonl(path: Path, texts=TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_shards(tmp_path: Path, name: str = "corpus", *, texts=TEXTS, **flags: object) -> Path:
    """A sharded corpus of `texts`, made by the command."""
    source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
    given = {"out": tmp_path / name, "shards": 5, "workers": 1, "held-out": 0.2} | flags
    options = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    assert shard.main([str(source), *options]) == 0
    return tmp_path / name


def write_tokenizer(path: Path) -> Path:
    path.write_text(train_bpe("".join(TEXTS), 280).content)
    return path


def make_two(tmp_path: Path) -> list[Path]:
    """Two sharded corpora of other letters."""
    low = make_shards(tmp_path, "low", texts=["abc" * (i + 1) for i in range(40)])
    return [low, make_shards(tmp_path, "high", texts=["xyz" * (i + 1) for i in range(30)])]


def batch_at(source, step, **sizes):
    """The global batch of one step."""
    return next(train_batches(source, start_step=step, prefetch=0, **sizes))


def take(batches, count):
    return list(itertools.islice(batches, count))


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() == {"tokens", "length", "given"}
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
            assert a[name].dtype == b[name].dtype == np.int32
