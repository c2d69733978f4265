"""Batches of token windows: the same global batch at a step for any number of processes.

An epoch cuts the training text into windows side by side, from a random offset that is new every
epoch, in shuffled order: it shows each token once (less than two windows at the ends are left
out), at another place in its window each time. Windows at independent offsets would leave 37% of
the text unseen after as many tokens. Where a row starts is a pure function of (file, seed, its
number in the endless stream of rows), so a process computes its own rows only, batch s needs
nothing of batch s-1, and resuming is O(1).

Not grain's own chain `shuffle().repeat().batch()`: it takes every row of every process through
every link (16 us a row), and its index shuffle walks a domain far larger than the few hundred
windows of a small corpus (25-90 us a row), so short epochs are shuffled by a table.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import grain
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dlm_jax.data.token_files import open_tokens

Batch = dict[str, np.ndarray]

# Epochs of fewer windows than this are shuffled by a table (8 MiB), longer ones by grain's cipher,
# which needs no memory; its own `shuffle` uses as many rounds.
_TABLE_LIMIT = 1 << 20
_CIPHER_ROUNDS = 4


def train_dataset(
    tokens_path: str | os.PathLike[str],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.MapDataset:
    """A dataset whose element s is this process's part of the global batch of step s.

    An element is `{"tokens": int32 [b, seq_len], "length": int32 [b]}`, b rows being
    `batch_size / process_count`: process p holds rows `[p*b, (p+1)*b)` of the global batch.

    Args:
      tokens_path: a token file (`Corpus.train_path`).
      seq_len: window length in tokens, >= 1.
      batch_size: rows of the global batch.
      seed: order of the windows, in [0, 2**32).
      process_index: which process this is, in [0, process_count).
      process_count: processes that share the global batch.

    Raises:
      ValueError: a size below 1, `batch_size` not a multiple of `process_count`, a seed out of
        range, or a file that is damaged or shorter than one window.
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
        raise ValueError(f"seed={seed} is outside [0, 2**32); use a smaller one")
    num_tokens = len(open_tokens(tokens_path))
    if num_tokens < seq_len:
        raise ValueError(
            f"{os.fspath(tokens_path)} holds {num_tokens} tokens, fewer than one window of "
            f"seq_len={seq_len}; give more text or use seq_len={max(1, num_tokens)} at most"
        )
    # One window less than fit leaves the offset a whole window to move in.
    num_windows = max(1, (num_tokens - seq_len + 1) // seq_len)
    rows = batch_size // process_count
    read = _ReadBatch(
        path=os.fspath(tokens_path),
        seq_len=seq_len,
        num_windows=num_windows,
        max_offset=num_tokens - num_windows * seq_len,
        seed=seed,
        batch_size=batch_size,
        first_row=process_index * rows,
        num_rows=rows,
    )
    return grain.MapDataset.range(sys.maxsize).map(read)


def train_batches(
    tokens_path: str | os.PathLike[str],
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    start_step: int = 0,
    prefetch: int = 4,
) -> grain.DatasetIterator:
    """An endless iterator over `train_dataset` from step `start_step` on, read ahead by a thread.

    Its `get_state()` is a small dict that `set_state` takes (batches read ahead do not count), so
    grain's checkpoint handlers save it; `start_step` does the same from the step number alone.

    Args:
      tokens_path: a token file (`Corpus.train_path`).
      seq_len: window length in tokens, >= 1.
      batch_size: rows of the global batch, a multiple of `process_count`.
      seed: order of the windows, in [0, 2**32).
      process_index: which process this is, in [0, process_count).
      process_count: processes that share the global batch.
      start_step: step of the first batch, >= 0.
      prefetch: batches to read ahead; 0 reads in the caller's thread.

    Raises:
      ValueError: as `train_dataset`, or a negative `start_step` or `prefetch`.
    """
    for field, value in (("start_step", start_step), ("prefetch", prefetch)):
        if value < 0:
            raise ValueError(f"{field}={value} is negative; use 0 or more")
    dataset = train_dataset(
        tokens_path,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )
    # One thread: a batch takes far less than a step, and more would fight the step for the GIL.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    batches = iter(dataset.to_iter_dataset(options))
    grain.experimental.set_next_index(batches, start_step)
    return batches


def validation_windows(
    tokens_path: str | os.PathLike[str],
    *,
    seq_len: int,
    pad_id: int,
    max_windows: int | None = None,
    multiple_of: int = 1,
) -> Batch:
    """Consecutive windows that do not overlap and cover the file, as one batch of N rows.

    `{"tokens": int32 [N, seq_len], "length": int32 [N]}`. The last window may be short: PAD from
    `length` on.

    Args:
      tokens_path: a token file (`Corpus.val_path`).
      seq_len: window length in tokens, >= 1.
      pad_id: what fills a row beyond its length.
      max_windows: at most so many windows, spread evenly over the file; None takes all.
      multiple_of: rows of length 0 are appended until N is a multiple of this, so that a batch
        divides evenly over devices.

    Raises:
      ValueError: a size below 1, or a file that is damaged or empty.
    """
    sizes = {"seq_len": seq_len, "max_windows": max_windows, "multiple_of": multiple_of}
    for field, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{field}={value} is less than 1; use a positive number")
    tokens = open_tokens(tokens_path)
    if not len(tokens):
        raise ValueError(f"{os.fspath(tokens_path)} holds no tokens; hold out more text")
    num_windows = -(-len(tokens) // seq_len)
    taken = min(num_windows, max_windows or num_windows)
    windows = np.arange(taken) * num_windows // taken
    num_rows = -(-taken // multiple_of) * multiple_of
    batch = np.full((num_rows, seq_len), pad_id, np.int32)
    length = np.zeros(num_rows, np.int32)
    for row, start in enumerate(windows * seq_len):
        window = tokens[start : start + seq_len]
        length[row] = len(window)
        batch[row, : len(window)] = window
    return {"tokens": batch, "length": length}


@dataclass(frozen=True)
class _ReadBatch:
    """Maps a step to rows `[first_row, first_row + num_rows)` of its global batch.

    Pickles as its fields: the file is mapped on the first read in each process.
    """

    path: str
    seq_len: int
    num_windows: int
    max_offset: int
    seed: int
    batch_size: int
    first_row: int
    num_rows: int

    @cached_property
    def _windows(self) -> np.ndarray:
        return sliding_window_view(open_tokens(self.path), self.seq_len)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_windows"}

    def __call__(self, step: int) -> Batch:
        first = step * self.batch_size + self.first_row
        starts = [self._start(row) for row in range(first, first + self.num_rows)]
        tokens = self._windows[starts].astype(np.int32)
        return {"tokens": tokens, "length": np.full(self.num_rows, self.seq_len, np.int32)}

    def _start(self, row: int) -> int:
        """First token of the window that is number `row` of the endless stream of rows."""
        epoch, index = divmod(row, self.num_windows)
        shuffle_seed, offset_bits = _epoch_bits(self.seed, epoch)
        window = _shuffled(index, size=self.num_windows, seed=shuffle_seed)
        return offset_bits % (self.max_offset + 1) + window * self.seq_len


def _shuffled(index: int, *, size: int, seed: int) -> int:
    """Where a permutation of `range(size)`, chosen by the 32-bit `seed`, takes `index`."""
    if size < _TABLE_LIMIT:
        return int(_permutation(size, seed)[index])
    return grain.experimental.index_shuffle(
        index, max_index=size - 1, seed=seed, rounds=_CIPHER_ROUNDS
    )


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int) -> np.ndarray:
    # Raw bits, whose stream NumPy promises never to change; of `Generator` it does not.
    return np.argsort(np.random.Philox(seed).random_raw(size), kind="stable")


@lru_cache(maxsize=16)
def _epoch_bits(seed: int, epoch: int) -> tuple[int, int]:
    """Two random 32-bit numbers: the seed of an epoch's shuffle, and what places its windows.

    Hashed, for with `seed + epoch` one run's second epoch would be another run's first.
    """
    shuffle_seed, offset_bits = np.random.SeedSequence([seed, epoch]).generate_state(2)
    return int(shuffle_seed), int(offset_bits)
