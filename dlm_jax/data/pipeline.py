"""Batches of rows. The global batch of a step does not depend on the number of processes.

An epoch of documents contains each row once, in shuffled order. For an epoch of windows, the
training text is cut into adjacent windows from a new random offset, and the windows are shuffled.
Each token occurs once per epoch (except for fewer than two windows of tokens at the ends of the
text), at a new position in its window. Windows at independent offsets would miss 37% of the text
after the same number of tokens. The content of a row is a pure function of the files, the seed and
the row's index in an endless stream. Therefore a process computes only its own rows, batches are
independent, and resuming is O(1).

Grain's `shuffle().repeat().batch()` is not used, because it passes every row of every process
through every stage (16 us per row). Grain's index shuffle permutes a range far larger than the few
hundred windows of a small corpus (25-90 us per row), so short epochs are shuffled with a table.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import grain
import numpy as np

from dlm_jax.data.rows import Columns, DocumentRows, Mapped, Place, TokenFile
from dlm_jax.data.shards import ShardMixture, TokenShards, joined

RowSource = str | os.PathLike[str] | DocumentRows | TokenShards | ShardMixture
"""A source of rows: a token file, documents, shards of a corpus, or a mixture of corpora."""

# Epochs with fewer rows are shuffled with a table (8 MiB), and longer epochs with grain's cipher,
# which needs no memory. The number of rounds of the cipher is that of grain's `shuffle`.
_TABLE_LIMIT = 1 << 20
_CIPHER_ROUNDS = 4


def train_dataset(
    source: RowSource,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.MapDataset:
    """A dataset whose element s is this process's part of the global batch of step s.

    An element is `{"tokens": int32 [b, seq_len], "length": int32 [b], "given": int32 [b]}`, where
    b is `batch_size / process_count`. Process p holds rows `[p*b, (p+1)*b)` of the global batch.
    The first `given` tokens of a row are a prompt.

    Args:
      source: `Corpus.train_rows`, or a token file to cut into windows.
      seq_len: number of tokens per row, at least 1.
      batch_size: number of rows in the global batch.
      seed: seed of the row order, in [0, 2**32).
      process_index: index of this process, in [0, process_count).
      process_count: number of processes among which the global batch is divided.
    """
    for field, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{field}={value} is less than 1; use a positive number")
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index={process_index} is outside [0, {process_count}); "
            "number the processes from 0"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of the {process_count} processes; "
            f"use {max(1, batch_size // process_count) * process_count}"
        )
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed={seed} is outside [0, 2**32); use a seed in this range")
    rows = batch_size // process_count
    parts = source.sources if isinstance(source, ShardMixture) else (source,)
    read = _ReadBatch(
        parts=tuple(_rows(part, seq_len) for part in parts),
        mixture=source if isinstance(source, ShardMixture) else None,
        seed=seed,
        batch_size=batch_size,
        first_row=process_index * rows,
        num_rows=rows,
    )
    return grain.MapDataset.range(sys.maxsize).map(read)


def train_batches(
    source: RowSource,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    start_step: int = 0,
    prefetch: int = 4,
    took: Callable[[float], None] | None = None,
) -> grain.DatasetIterator:
    """An endless iterator over `train_dataset` that starts at `start_step` and prefetches in a
    thread.

    `get_state()` returns a small dict for `set_state` that does not count prefetched batches, so
    grain's checkpoint handlers can save the iterator. Alternatively, pass the step number as
    `start_step` to resume a run. If `prefetch` is 0, the calling thread reads the batches. The
    thread that reads the batches calls `took` with the seconds that each batch took.
    """
    for field, value in (("start_step", start_step), ("prefetch", prefetch)):
        if value < 0:
            raise ValueError(f"{field}={value} is negative; use 0 or more")
    dataset = read = train_dataset(
        source,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )
    if took is not None:

        def timed(step: int) -> Any:
            start = time.perf_counter()
            batch = dataset[step]
            took(time.perf_counter() - start)
            return batch

        read = grain.MapDataset.range(sys.maxsize).map(timed)
    # One thread is enough, because a batch takes far less time than a step; more threads would
    # compete for the GIL.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    batches = iter(read.to_iter_dataset(options))
    grain.experimental.set_next_index(batches, start_step)
    return batches


def validation_windows(
    source: RowSource,
    *,
    seq_len: int,
    pad_id: int,
    max_windows: int | None = None,
    multiple_of: int = 1,
) -> Columns:
    """Held-out rows, in order, as one batch of N rows.

    Documents are returned as stored, and a token file as consecutive windows that cover the file
    without overlap. The last window can be short; positions from `length` on are PAD.

    Args:
      source: `Corpus.val_rows`, or a token file to cut into windows.
      seq_len: number of tokens per row, at least 1.
      pad_id: the id that fills a row beyond its length.
      max_windows: maximum number of rows, spread evenly over the file; None means all.
      multiple_of: divisor of N. Rows of length 0 are appended until N is a multiple of
        `multiple_of`, so that a batch can be divided evenly among devices.
    """
    sizes = {"seq_len": seq_len, "max_windows": max_windows, "multiple_of": multiple_of}
    for field, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{field}={value} is less than 1; use a positive number")
    if isinstance(source, ShardMixture):
        source = joined(source.sources)
    if isinstance(source, DocumentRows):
        rows = _rows(source, seq_len)
        batch = source.rows(_spread(len(rows), max_windows))
    else:
        batch = _windows_in_order(_ids(source), seq_len, pad_id, max_windows)
    num_empty = -len(batch["length"]) % multiple_of
    fills = {"tokens": pad_id, "length": 0, "given": 0}
    return {
        name: np.pad(
            array, [(0, num_empty)] + [(0, 0)] * (array.ndim - 1), constant_values=fills[name]
        )
        for name, array in batch.items()
    }


def _spread(count: int, limit: int | None) -> np.ndarray:
    """At most `limit` numbers below `count`, evenly spaced and ascending."""
    taken = min(count, limit or count)
    return np.arange(taken) * count // taken


Ids = TokenFile | TokenShards
"""A long sequence of ids, read in slices."""


@dataclass(frozen=True)
class Windows(Mapped):
    """Consecutive windows of `seq_len` ids, starting at an offset that the epoch's bits
    determine.
    """

    ids: Ids
    seq_len: int

    @cached_property
    def _num_starts(self) -> int:
        return len(self.ids) - self.seq_len + 1

    def __len__(self) -> int:
        # An epoch has one window fewer than fit, so that the offset can vary by a whole window.
        return max(1, self._num_starts // self.seq_len)

    def read(self, places: Sequence[Place]) -> Columns:
        num_offsets = self._num_starts - (len(self) - 1) * self.seq_len
        tokens = np.empty((len(places), self.seq_len), np.int32)
        for row, (index, epoch_bits) in zip(tokens, places, strict=True):
            self.ids.read_into(row, epoch_bits % num_offsets + index * self.seq_len)
        length = np.full(len(places), self.seq_len, np.int32)
        return {"tokens": tokens, "length": length, "given": np.zeros_like(length)}


def _ids(source: str | os.PathLike[str] | TokenShards) -> Ids:
    return source if isinstance(source, TokenShards) else TokenFile(source)


def _windows_in_order(ids: Ids, seq_len: int, pad_id: int, limit: int | None) -> Columns:
    if not len(ids):
        raise ValueError(f"{ids.name} has no tokens; hold out more text")
    starts = _spread(-(-len(ids) // seq_len), limit) * seq_len
    batch = np.full((len(starts), seq_len), pad_id, np.int32)
    length = np.minimum(seq_len, len(ids) - starts).astype(np.int32)
    for row, size, start in zip(batch, length, starts, strict=True):
        ids.read_into(row[:size], int(start))
    return {"tokens": batch, "length": length, "given": np.zeros_like(length)}


def _rows(
    source: str | os.PathLike[str] | DocumentRows | TokenShards, seq_len: int
) -> Windows | DocumentRows:
    """Returns the rows of `source`, after checking that there is at least one and that rows have
    `seq_len` tokens.
    """
    if isinstance(source, DocumentRows):
        if seq_len != source.seq_len:
            raise ValueError(
                f"the documents were cut into rows of {source.seq_len} tokens, not of "
                f"seq_len={seq_len}; load the corpus with that seq_len"
            )
        return source
    ids = _ids(source)
    if len(ids) < seq_len:
        raise ValueError(
            f"{ids.name} has {len(ids)} tokens, fewer than one window of "
            f"seq_len={seq_len}; use more text or a seq_len of at most {max(1, len(ids))}"
        )
    return Windows(ids, seq_len)


@dataclass(frozen=True)
class _ReadBatch:
    """Maps a step to rows `[first_row, first_row + num_rows)` of the step's global batch."""

    parts: tuple[Windows | DocumentRows, ...]
    mixture: ShardMixture | None
    seed: int
    batch_size: int
    first_row: int
    num_rows: int

    def __call__(self, step: int) -> Columns:
        first = step * self.batch_size + self.first_row
        numbers = range(first, first + self.num_rows)
        if self.mixture is None:
            return self.parts[0].read([self._place(0, row) for row in numbers])
        found = [self.mixture.locate(row, self.seed) for row in numbers]
        read = [self.parts[part].read([self._place(part, row)]) for part, row in found]
        return {name: np.concatenate([row[name] for row in read]) for name in read[0]}

    def _place(self, part: int, row: int) -> Place:
        """The `Place` of row `row` in the endless stream of a part."""
        size = len(self.parts[part])
        epoch, index = divmod(row, size)
        shuffle_seed, epoch_bits = _epoch_bits(self.seed, epoch, part)
        return _shuffled(index, size=size, seed=shuffle_seed), epoch_bits


def _shuffled(index: int, *, size: int, seed: int) -> int:
    """The image of `index` under a permutation of `range(size)` given by the 32-bit `seed`."""
    if size < _TABLE_LIMIT:
        return int(_permutation(size, seed)[index])
    return grain.experimental.index_shuffle(
        index, max_index=size - 1, seed=seed, rounds=_CIPHER_ROUNDS
    )


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int) -> np.ndarray:
    # Raw bits are used because NumPy guarantees their stream, but not that of `Generator`.
    return np.argsort(np.random.Philox(seed).random_raw(size), kind="stable")


@lru_cache(maxsize=64)
def _epoch_bits(seed: int, epoch: int, part: int) -> tuple[int, int]:
    """Two random 32-bit numbers for an epoch: the seed of its shuffle, and its offset.

    The numbers are hashes of the seed and the epoch. With `seed + epoch`, the second epoch of one
    run would equal the first epoch of another run.
    """
    entropy = [seed, epoch, part] if part else [seed, epoch]
    shuffle_seed, offset_bits = np.random.SeedSequence(entropy).generate_state(2)
    return int(shuffle_seed), int(offset_bits)
