"""Rows of a corpus, and batches of rows. The global batch does not depend on the number of
processes.

Each row of a batch is a window of a text, or contains one document: `{"tokens": int32 [b, L],
"length": int32 [b], "given": int32 [b]}`, where `given` is the number of leading prompt tokens,
which are never noised and never targets. In a packed row, several documents stand one after
another, and both numbers are those of the documents, `[b, T]`, 0 for missing ones.

An epoch of documents contains each row once, in shuffled order. For an epoch of windows, the
training text is cut into adjacent windows from a new random offset, and the windows are shuffled.
Each token occurs once per epoch (except for fewer than two windows of tokens at the ends of the
text), at a new position in its window. The content of a row is a pure function of the files, the
seed and the row's index in an endless stream. Therefore a process computes only its own rows,
batches are independent, and resuming is O(1).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dlm_jax.data.shards import ShardMixture, TokenShards, joined

Columns = dict[str, np.ndarray]

TAILS = ("eos", "pad")

Place = tuple[int, int]
"""A row's index in its epoch, and the epoch's 32 random bits."""


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Rows that each contain one document, or one part of a document that is longer than a row.

    With `pack`, an epoch contains rows of several documents, the same in every epoch (`pack_rows`).

    Attributes:
      tokens: the ids of all documents, concatenated.
      bounds: positions in `tokens`, `[2n + 1]`: the prompt of row i is `[b[2i], b[2i+1])`, and its
        text is `[b[2i+1], b[2i+2])`.
      seq_len: number of tokens per row.
      eos_id: the id that ends a document if the row has space for it.
      pad_id: the id that fills a canvas beyond its length.
      tail: tokens after the document of a row. ``eos`` fills the row with EOS as targets, so
        `length` is `seq_len`. ``pad`` is one EOS followed by PAD.
      pack: largest number of documents in a row of an epoch.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    seq_len: int
    eos_id: int
    pad_id: int
    tail: str
    pack: int = 1

    @cached_property
    def _packed(self) -> np.ndarray:
        """The documents of each row of an epoch, int64 ``[rows, pack]``, -1 for missing ones."""
        if self.pack == 1:
            return np.arange(len(self.bounds) // 2)[:, None]
        lengths = self._lengths(self.bounds[:-1:2], self.bounds[2::2])
        return pack_rows(lengths, seq_len=self.seq_len, most=self.pack)

    def __len__(self) -> int:
        return len(self._packed)

    def read(self, places: Iterable[Place]) -> Columns:
        numbers_BT = self._packed[[index for index, _ in places]]
        texts = self.rows(np.maximum(numbers_BT, 0).reshape(-1))
        if self.pack == 1:
            return texts
        length_BT, given_BT = (
            np.where(numbers_BT < 0, 0, texts[name].reshape(numbers_BT.shape))
            for name in ("length", "given")
        )
        place_L = np.arange(self.seq_len)
        tokens_BL = np.full((len(numbers_BT), self.seq_len), self.pad_id, np.int32)
        is_live_BL = place_L < length_BT.sum(axis=1)[:, None]
        tokens_BL[is_live_BL] = texts["tokens"][place_L < length_BT.reshape(-1, 1)]
        return {"tokens": tokens_BL, "length": length_BT, "given": given_BT}

    def rows(self, numbers: Sequence[int] | np.ndarray) -> Columns:
        """The documents with these numbers, each in a row of its own."""
        at = 2 * np.asarray(numbers, np.int64)
        start, middle, stop = (self.bounds[at + i] for i in range(3))
        columns = np.arange(self.seq_len)
        size = (stop - start)[:, None]
        # Positions beyond the end of a row may be beyond the end of the ids. The values at these
        # positions are not used.
        where = np.minimum(start[:, None] + columns, len(self.tokens) - 1)
        fill = self.eos_id if self.tail == "eos" else self.pad_id
        behind = np.where(columns == size, self.eos_id, fill)
        tokens = np.where(columns < size, self.tokens[where], behind).astype(np.int32)
        return {
            "tokens": tokens,
            "length": self._lengths(start, stop),
            "given": (middle - start).astype(np.int32),
        }

    def num_targets(self) -> int:
        """The number of targets (live tokens that are not given) in all rows."""
        rows = self.bounds
        given = rows[1::2] - rows[:-1:2]
        return int(self._lengths(rows[:-1:2], rows[2::2]).sum(dtype=np.int64) - given.sum())

    def _lengths(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        if self.tail == "eos":
            return np.full(len(start), self.seq_len, np.int32)
        return np.minimum(stop - start + 1, self.seq_len).astype(np.int32)


def pack_rows(lengths: np.ndarray, *, seq_len: int, most: int) -> np.ndarray:
    """The documents of each row, int64 ``[rows, most]``, filled with -1: best fit, longest first.

    Each document is in one row (Krell et al. 2021, Efficient sequence packing, algorithm 1).
    """
    rows: list[list[int]] = []
    # The open rows by free space, and a number whose bits are the spaces of open rows.
    by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces = 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[number])
        if fitting := spaces >> size:
            space = size + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(number)
        if len(rows[row]) < most:
            by_space[space - size].append(row)
            spaces |= 1 << space - size
    return np.array([row + [-1] * (most - len(row)) for row in rows], np.int64)


Encoded = tuple[str, np.ndarray | None, np.ndarray]
"""The name of a document, the ids of its prompt (None for plain text), and the ids of its text."""


def cut_into_rows(
    documents: Iterable[Encoded], *, seq_len: int, prefix_ids: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all n rows, concatenated, and their bounds, int64 `[2n + 1]`.

    Each row of plain text begins with `prefix_ids`, which are given; prompts are complete. Plain
    text longer than a row is cut into consecutive rows. The last part has no EOS if it fills its
    row exactly, because an extra row with only EOS would train the model to write empty texts.
    """
    prefix = np.array(prefix_ids, np.int32)
    size = seq_len - len(prefix)
    if size < 1:
        raise ValueError(f"seq_len={seq_len} has no space after {len(prefix)} tokens; raise it")
    parts: list[np.ndarray] = [np.zeros(0, np.int32)]
    lengths = [0]
    for name, prompt, text in documents:
        if prompt is None:
            cuts = range(0, len(text), size)
            rows = [(prefix, text[first : first + size]) for first in cuts]
        elif (needed := len(prompt) + len(text) + 1) > seq_len:
            raise ValueError(
                f"{name}: a prompt of {len(prompt)} tokens, a response of {len(text)} and EOS "
                f"exceed seq_len={seq_len}; shorten them or use seq_len={needed}"
            )
        else:
            rows = [(prompt, text)]
        for given, target in rows:
            parts += [given, target]
            lengths += [len(given), len(target)]
    return np.concatenate(parts), np.cumsum(lengths, dtype=np.int64)


RowSource = np.ndarray | DocumentRows | TokenShards | ShardMixture
"""A source of rows: the ids of a text, documents, shards of a corpus, or a mixture of corpora."""


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
) -> Generator[Columns, None, None]:
    """An endless iterator over this process's parts of the global batches from `start_step` on.

    An element is `{"tokens": int32 [b, seq_len], "length": int32 [b], "given": int32 [b]}`
    (`[b, pack]` for packed rows), where b is `batch_size / process_count`. Process p holds rows
    `[p*b, (p+1)*b)` of the global batch. The first `given` tokens of a row are a prompt.

    Args:
      source: `Corpus.train_rows`, or ids to cut into windows.
      seq_len: number of tokens per row, at least 1.
      batch_size: number of rows in the global batch.
      seed: seed of the row order, in [0, 2**32).
      process_index: index of this process, in [0, process_count).
      process_count: number of processes among which the global batch is divided.
      start_step: step of the first batch.
      prefetch: number of batches that a thread reads ahead; 0: the calling thread reads.
    """
    if batch_size % process_count:
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of the {process_count} processes; "
            f"use {max(1, batch_size // process_count) * process_count}"
        )
    mixture = source if isinstance(source, ShardMixture) else None
    parts = source.sources if isinstance(source, ShardMixture) else (source,)
    rows = [_rows(part, seq_len) for part in parts]
    size = batch_size // process_count

    def place(part: int, row: int) -> Place:
        """The `Place` of row `row` in the endless stream of a part."""
        epoch, index = divmod(row, len(rows[part]))
        shuffle_seed, epoch_bits = _epoch_bits(seed, epoch, part)
        return _shuffled(index, size=len(rows[part]), seed=shuffle_seed), epoch_bits

    def read(step: int) -> Columns:
        first = step * batch_size + process_index * size
        numbers = range(first, first + size)
        if mixture is None:
            return rows[0].read([place(0, row) for row in numbers])
        located = [mixture.locate(row, seed) for row in numbers]
        read = [rows[part].read([place(part, row)]) for part, row in located]
        return {name: np.concatenate([row[name] for row in read]) for name in read[0]}

    return _in_order(read, start_step, prefetch)


def _in_order(
    read: Callable[[int], Columns], step: int, prefetch: int
) -> Generator[Columns, None, None]:
    if not prefetch:
        yield from map(read, itertools.count(step))
    # One thread is enough, because a batch takes far less time than a step; more threads would
    # compete for the GIL.
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(read, step + number) for number in range(prefetch))
        try:
            for later in itertools.count(step + prefetch):
                batch = ahead.popleft().result()
                ahead.append(pool.submit(read, later))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def validation_windows(
    source: RowSource,
    *,
    seq_len: int,
    pad_id: int,
    max_windows: int | None = None,
    multiple_of: int = 1,
) -> Columns:
    """Held-out rows, in order, as one batch of N rows.

    Documents are returned as stored, and ids as consecutive windows that cover them without
    overlap. The last window can be short; positions from `length` on are PAD.

    Args:
      source: `Corpus.val_rows`, or ids to cut into windows.
      seq_len: number of tokens per row, at least 1.
      pad_id: the id that fills a row beyond its length.
      max_windows: maximum number of rows, spread evenly over the source; None means all.
      multiple_of: divisor of N. Rows of length 0 are appended until N is a multiple of
        `multiple_of`, so that a batch can be divided evenly among devices.
    """
    if isinstance(source, ShardMixture):
        source = joined(source.sources)
    if isinstance(source, DocumentRows):
        batch = source.rows(_spread(len(_rows(source, seq_len)), max_windows))
    else:
        starts = _spread(-(-len(source) // seq_len), max_windows) * seq_len
        tokens = np.full((len(starts), seq_len), pad_id, np.int32)
        length = np.minimum(seq_len, len(source) - starts).astype(np.int32)
        for row, size, start in zip(tokens, length, starts, strict=True):
            row[:size] = source[start : start + size]
        batch = {"tokens": tokens, "length": length, "given": np.zeros_like(length)}
    for name, fill in (("tokens", pad_id), ("length", 0), ("given", 0)):
        shape = (-len(batch[name]) % multiple_of, *batch[name].shape[1:])
        batch[name] = np.concatenate([batch[name], np.full(shape, fill, np.int32)])
    return batch


def _spread(count: int, limit: int | None) -> np.ndarray:
    """At most `limit` numbers below `count`, evenly spaced and ascending."""
    taken = min(count, limit or count)
    return np.arange(taken) * count // taken


@dataclass(frozen=True, eq=False)
class Windows:
    """Consecutive windows of `seq_len` ids, starting at an offset that the epoch's bits
    determine.
    """

    ids: np.ndarray | TokenShards
    seq_len: int

    def __len__(self) -> int:
        # An epoch has one window fewer than fit, so that the offset can vary by a whole window.
        return max(1, (len(self.ids) - self.seq_len + 1) // self.seq_len)

    def read(self, places: Sequence[Place]) -> Columns:
        num_offsets = len(self.ids) - len(self) * self.seq_len + 1
        tokens = np.empty((len(places), self.seq_len), np.int32)
        for row, (index, epoch_bits) in zip(tokens, places, strict=True):
            start = epoch_bits % num_offsets + index * self.seq_len
            row[:] = self.ids[start : start + self.seq_len]
        length = np.full(len(places), self.seq_len, np.int32)
        return {"tokens": tokens, "length": length, "given": np.zeros_like(length)}


def _rows(source: np.ndarray | DocumentRows | TokenShards, seq_len: int) -> Windows | DocumentRows:
    """The rows of `source`, which has at least one, and whose rows have `seq_len` tokens."""
    if isinstance(source, DocumentRows):
        return source
    check_fills_a_row("the source", len(source), seq_len)
    return Windows(source, seq_len)


def check_fills_a_row(name: str, num_tokens: int, seq_len: int) -> None:
    if num_tokens < seq_len:
        raise ValueError(
            f"{name} has {num_tokens} training tokens, fewer than one window of "
            f"seq_len={seq_len}; use more text or a smaller seq_len"
        )


# Epochs with fewer rows are shuffled with a table (8 MiB), and longer epochs with grain's cipher,
# which needs no memory. The number of rounds of the cipher is that of grain's `shuffle`.
_TABLE_LIMIT = 1 << 20
_CIPHER_ROUNDS = 4


def _shuffled(index: int, *, size: int, seed: int) -> int:
    """The image of `index` under a permutation of `range(size)` given by the 32-bit `seed`."""
    if size < _TABLE_LIMIT:
        return int(_permutation(size, seed)[index])
    import grain

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
