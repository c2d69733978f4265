"""Where the rows of a batch are in the token files: windows of one text, or a document each.

Both map row numbers to rows `{"tokens": int32 [b, L], "length": int32 [b], "given": int32 [b]}`,
where `given` counts the leading tokens that are a prompt: never noised, and never a target. Both
pickle as their fields: a file is mapped on the first read in each process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dlm_jax.data.token_files import open_tokens

Columns = dict[str, np.ndarray]

TAILS = ("eos", "pad")


class Place(NamedTuple):
    """A row of an epoch: its number in there, and the epoch's random 32 bits."""

    index: int
    epoch_bits: int


class _Mapped:
    """Leaves mapped files behind when pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


@dataclass(frozen=True)
class Windows(_Mapped):
    """Windows of `seq_len` tokens side by side, from an offset that an epoch's bits choose.

    Attributes:
      tokens_path: token file of the text.
      seq_len: tokens of a window.
    """

    tokens_path: str | os.PathLike[str]
    seq_len: int

    @cached_property
    def _windows(self) -> np.ndarray:
        return sliding_window_view(open_tokens(self.tokens_path), self.seq_len)

    @cached_property
    def _num_offsets(self) -> int:
        return len(self._windows) - (len(self) - 1) * self.seq_len

    def __len__(self) -> int:
        # One window less than fit leaves the offset a whole window to move in.
        return max(1, len(self._windows) // self.seq_len)

    def read(self, places: Sequence[Place]) -> Columns:
        """The windows at `places`."""
        starts = [p.epoch_bits % self._num_offsets + p.index * self.seq_len for p in places]
        tokens = self._windows[starts].astype(np.int32)
        length = np.full(len(places), self.seq_len, np.int32)
        return {"tokens": tokens, "length": length, "given": np.zeros_like(length)}


@dataclass(frozen=True)
class DocumentRows(_Mapped):
    """Rows that hold one document each, or one part of a document longer than a row.

    Attributes:
      tokens_path: token file of all documents, one after the other.
      bounds_path: token file `[2n + 1]` of positions in it: row i is given `[b[2i], b[2i+1])` and
        is to be learnt `[b[2i+1], b[2i+2])`.
      seq_len: tokens of a row.
      eos_id: ends a document that leaves room for it.
      pad_id: what fills a canvas beyond its length.
      tail: what stands behind a document: with ``eos``, EOS up to the end of the row, trained as
        padding (`length` is `seq_len`); with ``pad``, one EOS and then PAD.
    """

    tokens_path: Path
    bounds_path: Path
    seq_len: int
    eos_id: int
    pad_id: int
    tail: str

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.asarray(open_tokens(self.tokens_path))

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.asarray(open_tokens(self.bounds_path))

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def read(self, places: Iterable[Place]) -> Columns:
        """The rows at `places`."""
        return self.rows([place.index for place in places])

    def rows(self, numbers: Sequence[int] | np.ndarray) -> Columns:
        """The rows `numbers`."""
        at = 2 * np.asarray(numbers, np.int64)
        start, middle, stop = (self._bounds[at + i].astype(np.int64) for i in range(3))
        columns = np.arange(self.seq_len)
        size = (stop - start)[:, None]
        # Positions behind a row's end may lie behind the file's; what is read there is not used.
        where = np.minimum(start[:, None] + columns, len(self._tokens) - 1)
        fill = self.eos_id if self.tail == "eos" else self.pad_id
        behind = np.where(columns == size, self.eos_id, fill)
        tokens = np.where(columns < size, self._tokens[where], behind).astype(np.int32)
        return {
            "tokens": tokens,
            "length": self._lengths(start, stop),
            "given": (middle - start).astype(np.int32),
        }

    def num_targets(self) -> int:
        """Tokens that are to be learnt: live and not given, in all rows together."""
        bounds = self._bounds.astype(np.int64)
        given = bounds[1::2] - bounds[:-1:2]
        return int(self._lengths(bounds[:-1:2], bounds[2::2]).sum(dtype=np.int64) - given.sum())

    def _lengths(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        if self.tail == "eos":
            return np.full(len(start), self.seq_len, np.int32)
        return np.minimum(stop - start + 1, self.seq_len).astype(np.int32)


class Encoded(NamedTuple):
    """A document in ids: the prompt's are None for plain text."""

    name: str
    prompt: np.ndarray | None
    text: np.ndarray


def cut_into_rows(
    documents: Iterable[Encoded], *, seq_len: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """(stretches of ids that make up the tokens, bounds `[2n + 1]`) of n rows.

    Plain text longer than a row is cut into consecutive rows. The part that ends it has no EOS if
    it fills its row exactly, as a row of EOS alone would teach that texts are often empty.

    Raises:
      ValueError: a prompt and a response that with one EOS exceed a row.
    """
    parts: list[np.ndarray] = []
    bounds = [0]
    for name, prompt, text in documents:
        if prompt is None:
            for first in range(0, len(text), seq_len):
                stop = min(first + seq_len, len(text))
                bounds += [bounds[-1], bounds[-1] + stop - first]
        else:
            needed = len(prompt) + len(text) + 1
            if needed > seq_len:
                raise ValueError(
                    f"{name}: a prompt of {len(prompt)} tokens, a response of {len(text)} and EOS "
                    f"exceed seq_len={seq_len}; shorten them or use seq_len={needed}"
                )
            parts.append(prompt)
            bounds += [bounds[-1] + len(prompt), bounds[-1] + needed - 1]
        parts.append(text)
    return parts, np.array(bounds, np.int64)
