"""The weights of a directory: safetensors files, one or many, mapped into memory and never copied.

Nothing is unpickled: files that are not safetensors are not opened.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dlm_jax.published.fields import read_json, without_twins

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Numbers that weights may be stored as, by their name in a file."""

_LONGEST_HEADER = 100_000_000
_MOST_AXES = 8


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
      file: its file.
      dtype: of its numbers.
      shape: its axes.
      start: its first byte in the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)


class Shards:
    """The tensors of a directory by name; `read` gives one without copying it.

    Attributes:
      entries: where each of them lies.
    """

    def __init__(self, directory: Path):
        self.entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file, names in _files(directory).items():
            found = _header(file)
            for name in names or found:
                if name not in found:
                    raise ValueError(
                        f"{file} lacks the tensor {name!r}, which {INDEX} says it holds; download "
                        "both again"
                    )
                self.entries[name] = found[name]
            surplus = sorted(set(found) - set(names or found))
            if surplus:
                raise ValueError(
                    f"{file} holds the tensor {surplus[0]!r}, which {INDEX} does not name; "
                    "download both again"
                )

    def read(self, name: str) -> np.ndarray:
        """The tensor, a view of its file."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(self._maps[entry.file], entry.dtype, entry.size, entry.start)
        return flat.reshape(entry.shape)

    def forget(self, name: str) -> None:
        """Gives back the memory that pages of the tensor take in this process."""
        entry = self.entries[name]
        if entry.file in self._maps and hasattr(mmap, "MADV_DONTNEED"):
            first = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            length = entry.start + entry.size * entry.dtype.itemsize - first
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, first, length)


def _files(directory: Path) -> dict[Path, list[str]]:
    """The files and the tensors that each should hold; an empty list is whatever it holds."""
    if not (directory / INDEX).exists():
        if (directory / SINGLE).exists():
            return {directory / SINGLE: []}
        raise ValueError(
            f"{directory} has neither {SINGLE} nor {INDEX}; name a directory with weights as "
            "safetensors (other formats hold code, which is never run)"
        )
    index = read_json(directory / INDEX)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{directory / INDEX} has no field 'weight_map'; download it again")
    files: dict[Path, list[str]] = {}
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith("safetensors"):
            raise ValueError(
                f"{directory / INDEX}: weight_map names {file!r}, which is no safetensors file of "
                "this directory"
            )
        files.setdefault(directory / file, []).append(name)
    return files


def _header(file: Path) -> dict[str, Entry]:
    """Where the tensors of a file lie.

    Raises:
      ValueError: it is missing, no safetensors file, or shorter or longer than it says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            raw = json.loads(stream.read(length), object_pairs_hook=without_twins)
            if not isinstance(raw, dict):
                raise ValueError("its header is no object")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; download the whole directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no safetensors file ({error}); download it again") from None
    raw.pop("__metadata__", None)
    begin, end = 8 + length, 8 + length
    found, places = {}, []
    for name, said in raw.items():
        found[name], last = _entry(file, name, said, begin)
        places.append((found[name].start, last, name))
    for first, last, name in sorted(places):
        if first != end:
            raise ValueError(
                f"{file}: the tensor {name!r} begins at byte {first:,}, and the one before it ends "
                f"at {end:,}; download it again"
            )
        end = last
    if end != size:
        what = "truncated" if size < end else "too long"
        raise ValueError(f"{file} is {what}: {size:,} bytes of {end:,}; download it again")
    return found


def _entry(file: Path, name: str, said: Any, begin: int) -> tuple[Entry, int]:
    """A tensor's place, and the byte behind it."""
    try:
        first, last = said["data_offsets"]
        shape, kind = tuple(said["shape"]), said["dtype"]
        numbers = (first, last, *shape)
        if len(shape) > _MOST_AXES or any(type(n) is not int or n < 0 for n in numbers):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{file}: its header does not describe {name!r}; download it again"
        ) from None
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(
            f"{file}: the tensor {name!r} has dtype {str(kind)[:60]}; only {', '.join(DTYPES)} are "
            "read"
        )
    if last - first != math.prod(shape) * DTYPES[kind].itemsize:
        raise ValueError(f"{file}: the tensor {name!r} has another size than its shape {shape}")
    return Entry(file, DTYPES[kind], shape, begin + first), begin + last
