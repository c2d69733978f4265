"""Token files: one flat .npy array of ids with a checksum at the end.

The row boundaries of a token file are stored in the same format (`rows.DocumentRows`).

A token file is an ordinary .npy file with the smallest integer type for the vocabulary. Any program
can read it, and training processes map it into memory. The last 4 bytes, which .npy readers ignore,
are the CRC32 of the rest. Files are written atomically, even by concurrent writers.

Each row of a batch is a window of a text, or contains one document.

Both kinds of sources map row numbers to rows `{"tokens": int32 [b, L], "length": int32 [b],
"given": int32 [b]}`, where `given` is the number of leading prompt tokens, which are never noised
and never targets. Only the fields of a source are pickled; each process maps the file on first
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dlm_jax.store.files import crc_of, refused_unless_full, replacing

_CHECKSUM_BYTES = 4
# The CRC32 of any bytes followed by their own CRC32.
_CRC_OF_WHOLE = 0x2144DF1C


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest type of uint8, uint16, int32 and int64 for ids below `vocab_size`."""
    types = {1 << 8: np.uint8, 1 << 16: np.uint16, 1 << 31: np.int32}
    return np.dtype(next((t for limit, t in types.items() if vocab_size <= limit), np.int64))


def default_cache_dir() -> Path:
    """The directory `$DLM_JAX_CACHE`, or `~/.cache/dlm_jax` if the variable is not set."""
    named = os.environ.get("DLM_JAX_CACHE")
    folder = Path(os.path.expanduser(named or "~/.cache/dlm_jax"))
    if not named and not folder.is_absolute():
        raise ValueError(
            "there is no home directory for token files; set DLM_JAX_CACHE to a writable "
            "directory with free space"
        )
    return folder


def write_tokens(path: Path, ids: np.ndarray, *, vocab_size: int) -> None:
    """Writes `ids` `[n]` to `path`, replacing an existing file atomically.

    Raises:
      OSError: the disk is full.
    """
    remedy = "set DLM_JAX_CACHE to a writable directory with free space"
    with refused_unless_full(f"the token file {path}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.save(file, np.ascontiguousarray(ids, id_dtype(vocab_size)))
            file.seek(0)
            checksum = crc_of(file)
            file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))


def open_tokens(path: str | os.PathLike[str]) -> np.ndarray:
    """Maps the ids in a token file, `[n]`, read-only, after checking the header and the size."""
    remedy = "load the corpus again to rebuild it"
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        expected = tokens.offset + tokens.nbytes + _CHECKSUM_BYTES
        is_whole = tokens.ndim == 1 and os.path.getsize(path) == expected
    except FileNotFoundError:
        raise ValueError(f"the token file {os.fspath(path)} does not exist; {remedy}") from None
    except Exception as error:  # NumPy's header reader raises various errors for a damaged header
        raise ValueError(f"{os.fspath(path)} is not a complete token file; {remedy}") from error
    if not is_whole:
        raise ValueError(f"{os.fspath(path)} is not a complete token file; {remedy}")
    return tokens


def is_intact(path: Path) -> bool:
    """Returns whether `path` is a complete token file with the correct checksum (checked at 1-2
    GB/s).
    """
    try:
        open_tokens(path)
        with path.open("rb") as file:
            return crc_of(file) == _CRC_OF_WHOLE
    except (ValueError, OSError):
        return False


Columns = dict[str, np.ndarray]

TAILS = ("eos", "pad")


Place = tuple[int, int]
"""A row's index in its epoch, and the epoch's 32 random bits."""


class Mapped:
    """A source that drops its mapped files (fields that begin with an underscore) when pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


@dataclass(frozen=True)
class TokenFile(Mapped):
    """The ids in a token file, mapped on first read."""

    path: str | os.PathLike[str]

    @property
    def name(self) -> str:
        return os.fspath(self.path)

    @cached_property
    def _ids(self) -> np.ndarray:
        return open_tokens(self.path)

    def __len__(self) -> int:
        return len(self._ids)

    def read_into(self, ids: np.ndarray, start: int) -> None:
        ids[:] = self._ids[start : start + len(ids)]


@dataclass(frozen=True)
class DocumentRows(Mapped):
    """Rows that each contain one document, or one part of a document that is longer than a row.

    Attributes:
      tokens_path: token file with all documents, concatenated.
      bounds_path: token file `[2n + 1]` with positions in `tokens_path`: the prompt of row i is
        `[b[2i], b[2i+1])`, and its text is `[b[2i+1], b[2i+2])`.
      seq_len: number of tokens per row.
      eos_id: the id that ends a document if the row has space for it.
      pad_id: the id that fills a canvas beyond its length.
      tail: tokens after the document of a row. ``eos`` fills the row with EOS as targets, so
        `length` is `seq_len`. ``pad`` is one EOS followed by PAD.
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
        return self.rows([index for index, _ in places])

    def rows(self, numbers: Sequence[int] | np.ndarray) -> Columns:
        at = 2 * np.asarray(numbers, np.int64)
        start, middle, stop = (self._bounds[at + i].astype(np.int64) for i in range(3))
        columns = np.arange(self.seq_len)
        size = (stop - start)[:, None]
        # Positions beyond the end of a row may be beyond the end of the file. The values at these
        # positions are not used.
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
        """The number of targets (live tokens that are not given) in all rows."""
        bounds = self._bounds.astype(np.int64)
        given = bounds[1::2] - bounds[:-1:2]
        return int(self._lengths(bounds[:-1:2], bounds[2::2]).sum(dtype=np.int64) - given.sum())

    def _lengths(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        if self.tail == "eos":
            return np.full(len(start), self.seq_len, np.int32)
        return np.minimum(stop - start + 1, self.seq_len).astype(np.int32)


Encoded = tuple[str, np.ndarray | None, np.ndarray]
"""The name of a document, the ids of its prompt (None for plain text), and the ids of its text."""


def cut_into_rows(
    documents: Iterable[Encoded], *, seq_len: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns chunks whose concatenation is the tokens of all n rows, and the bounds, `[2n + 1]`.

    Plain text longer than a row is cut into consecutive rows. The last part has no EOS if it fills
    its row exactly, because an extra row with only EOS would train the model to write empty texts.
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
