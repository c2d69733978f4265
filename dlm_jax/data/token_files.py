"""Token files: one flat .npy array of ids with a checksum behind it, whole or not there at all.

Where rows begin in a token file is stored in the same way (`rows.DocumentRows`).

A file is an ordinary .npy of the smallest type that holds the vocabulary, so that any program
reads it and a training process maps it into memory; the last 4 bytes, which readers of
.npy ignore, are the crc32 of everything before. A file appears under its name whole: killed or
concurrent writers leave no half of it.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from dlm_jax.storage import refused_unless_full, replacing

_CHECKSUM_BYTES = 4
_CHUNK_BYTES = 1 << 24


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16, int32 and int64 that holds the ids below `vocab_size`."""
    types = {1 << 8: np.uint8, 1 << 16: np.uint16, 1 << 31: np.int32}
    return np.dtype(next((t for limit, t in types.items() if vocab_size <= limit), np.int64))


def default_cache_dir() -> Path:
    """`$DLM_JAX_CACHE`, or `~/.cache/dlm_jax` when that is not set.

    Raises:
      ValueError: neither is there, as the user has no home.
    """
    named = os.environ.get("DLM_JAX_CACHE")
    folder = Path(os.path.expanduser(named or "~/.cache/dlm_jax"))
    if not named and not folder.is_absolute():
        raise ValueError(
            "there is no home directory to keep token files in; set DLM_JAX_CACHE to a folder "
            "with space that you may write"
        )
    return folder


def write_tokens(path: Path, ids: np.ndarray, *, vocab_size: int) -> None:
    """Write `ids` `[n]` to `path`, replacing what is there in one move.

    Raises:
      ValueError: the folder cannot be made or written; the message names the remedy.
      OSError: the disk is full.
    """
    remedy = "set DLM_JAX_CACHE to a folder with space that you may write"
    with refused_unless_full(f"the token file {path}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.save(file, np.ascontiguousarray(ids, id_dtype(vocab_size)))
            file.seek(0)
            checksum = _crc32(file, os.fstat(file.fileno()).st_size)
            file.seek(0, os.SEEK_END)
            file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))


def open_tokens(path: str | os.PathLike[str]) -> np.ndarray:
    """The ids in a token file `[n]`, mapped read-only; header and size are checked.

    Raises:
      ValueError: the file is missing, or no token file, or cut short.
    """
    remedy = "load the corpus again to rebuild it"
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        expected = tokens.offset + tokens.nbytes + _CHECKSUM_BYTES
        is_whole = tokens.ndim == 1 and os.path.getsize(path) == expected
    except FileNotFoundError:
        raise ValueError(f"the token file {os.fspath(path)} does not exist; {remedy}") from None
    except Exception as error:  # whatever NumPy's reader of headers raises at a damaged one
        raise ValueError(f"{os.fspath(path)} is not a whole token file; {remedy}") from error
    if not is_whole:
        raise ValueError(f"{os.fspath(path)} is not a whole token file; {remedy}")
    return tokens


def is_intact(path: Path) -> bool:
    """Whether `path` is a whole token file whose checksum is right (1-2 GB/s)."""
    try:
        open_tokens(path)
        with path.open("rb") as file:
            checksum = _crc32(file, path.stat().st_size - _CHECKSUM_BYTES)
            return file.read() == checksum.to_bytes(_CHECKSUM_BYTES, "little")
    except (ValueError, OSError):
        return False


def _crc32(file: IO[bytes], num_bytes: int) -> int:
    """crc32 of the next `num_bytes` of `file`, which is left right behind them."""
    checksum, left = 0, num_bytes
    while left > 0:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            break
        checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
    return checksum
