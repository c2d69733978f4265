"""A trained model in one safetensors file: its parameters and the JSON that describes it.

The names of the tensors are the paths of the parameters (``blocks/attention/query/kernel``). The
header contains the JSON under ``dlm_jax`` and, under ``crc32_of_file``, the CRC32 of the whole
file, including the header. The CRC32 is computed with eight zeros in place of its own digits, and
detects any flipped bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.store.files import crc_of, refused_unless_full, write_whole
from dlm_jax.store.manifest import (
    Place,
    check_not_quantised,
    describe,
    nested,
    spell,
    without_custom_heads,
)

SUFFIX = ".safetensors"
DTYPES = ("float32", "float16")

_KEY = "dlm_jax"
_CHECKSUM = "crc32_of_file"
_DIGITS = re.compile(rb'"crc32_of_file": ?"([0-9a-f]{8})"')
_NO_DIGITS = "0" * 8
_NUMPY_OF = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}


def save_weights(
    path: str | os.PathLike[str], params: Any, meta: dict[str, Any], *, dtype: str = "float32"
) -> int:
    """Writes the file atomically and returns its size in bytes.

    Args:
      path: path of the file, which ends in ``.safetensors``.
      params: nested dict of arrays.
      meta: a JSON dict, as in a checkpoint.
      dtype: one of `DTYPES`, for all tensors; float16 halves the size of the file.

    Raises:
      OSError: the disk is full.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ValueError(f"{target} does not end in {SUFFIX}; add the suffix")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    check_not_quantised(params)
    tensors = {}
    for name, leaf in named_leaves(params):
        value = np.asarray(leaf)
        if not (np.abs(value) <= np.finfo(dtype).max).all():
            raise ValueError(f"parameter {name} does not fit in {dtype}; use float32")
        tensors[name] = np.ascontiguousarray(value, dtype)
    header = {_KEY: json.dumps(meta), _CHECKSUM: _NO_DIGITS}
    content = bytearray(safetensors.numpy.save(tensors, metadata=header))
    place = _place_of_digits(content)
    content[place : place + 8] = f"{zlib.crc32(content):08x}".encode()
    with refused_unless_full(target, "name another"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The writer of the safetensors library creates files that other users cannot read.
        write_whole(target, content)
    return target.stat().st_size


def load_weights(
    path: str | os.PathLike[str],
    make_abstract: Callable[[dict[str, Any]], Any] | None = None,
    *,
    place: Place | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The parameters and metadata of a `save_weights` file.

    Args:
      path: path of the file.
      make_abstract: maps the metadata to the expected shapes, which must match the file.
      place: sharding and dtype of each parameter. The shards of a parameter are read separately. By
        default, parameters are float32 arrays on the default device.
    """
    with _opened(path) as (file, meta):
        # The errors of `make_abstract` are about the model, not about the file.
        wanted = None if make_abstract is None else describe(make_abstract(meta), "params")
        with _named(path):
            found = {name: _described(file, name) for name in file.keys()}  # noqa: SIM118
            nested(found)
            if wanted is not None:
                found = without_custom_heads(found, wanted, meta)
                _check_shapes(wanted, found)
            return nested({name: _placed(file, name, place) for name in found}), meta


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    with _opened(path) as (_, meta):
        return meta


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An open file and its metadata."""
    with contextlib.ExitStack() as stack:
        with _named(path):
            file = stack.enter_context(safe_open(path, framework="np"))
            header = file.metadata() or {}
            if _KEY not in header:
                raise ValueError("it was not written by dlm_jax: its header has no metadata")
            if header.get(_CHECKSUM) != f"{_checksum_of(Path(path)):08x}":
                raise ValueError("it is damaged: its checksum is wrong")
            meta = json.loads(header[_KEY])
            if not isinstance(meta, dict):
                raise ValueError("its metadata is not an object")
        yield file, meta


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors raised in the context name the file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"weights file {path} does not exist; check the path") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"weights file {path} cannot be read ({error}); copy it again") from None


def _described(file: Any, name: str) -> list[Any]:
    """Type and shape of a tensor in the file; ValueError for a type that is not in `DTYPES`."""
    content = file.get_slice(name)
    kind = content.get_dtype()
    if kind not in _NUMPY_OF:
        raise ValueError(f"{name} has type {kind}, which is not one of {', '.join(DTYPES)}")
    return [str(_NUMPY_OF[kind]), list(content.get_shape())]


def _check_shapes(wanted: Mapping[str, list[Any]], found: Mapping[str, list[Any]]) -> None:
    """Raises ValueError unless both have the same parameters with the same shapes."""
    for name in (*wanted, *found):
        ours, theirs = wanted.get(name), found.get(name)
        if ours is None or theirs is None or ours[1] != theirs[1]:
            raise ValueError(
                f"its config requires {name} as {spell(ours)}, but it is {spell(theirs)}"
            )


def _placed(file: Any, name: str, place: Place | None) -> jax.Array:
    """A tensor in the file, loaded shard by shard onto its devices."""
    content = file.get_slice(name)
    shape = tuple(content.get_shape())
    if place is None:
        return jax.numpy.asarray(file.get_tensor(name), np.float32)
    wanted = place(name, jax.ShapeDtypeStruct(shape, _NUMPY_OF[content.get_dtype()]))
    if not shape or wanted.sharding is None:
        return jax.device_put(file.get_tensor(name).astype(wanted.dtype), wanted.sharding)
    return jax.make_array_from_callback(
        shape, wanted.sharding, lambda index: np.asarray(content[index]).astype(wanted.dtype)
    )


def _checksum_of(path: Path) -> int:
    """CRC32 of a file in which the digits of the checksum are replaced by zeros."""
    with path.open("rb") as file:
        size = file.read(8)
        head = bytearray(size + file.read(int.from_bytes(size, "little")))
        place = _place_of_digits(head)
        head[place : place + 8] = _NO_DIGITS.encode()
        return crc_of(file, zlib.crc32(head))


def _place_of_digits(content: bytes | bytearray) -> int:
    """The position of the checksum in the header of a file."""
    found = _DIGITS.search(content, 0, 8 + int.from_bytes(content[:8], "little"))
    if found is None:
        raise ValueError("it is damaged: it has no checksum")
    return found.start(1)


SHIPPED: Mapping[str, Path] = {
    path.stem: path
    for path in sorted((Path(__file__).parent.parent / "shipped").glob(f"*{SUFFIX}"))
}
"""Files of the shipped models by name. ``--checkpoint`` accepts these names as well as paths."""

DEFAULT = "shakespeare"
"""The default model: a small Shakespeare model with byte-pair tokens."""


def path_of_model(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """The path itself, or the path of the shipped model with this name; None means `DEFAULT`.

    Existing paths take precedence over names.
    """
    if path is None:
        return SHIPPED[DEFAULT]
    if not isinstance(path, str) or Path(path).name != path or Path(path).exists():
        return path
    if path in SHIPPED:
        return SHIPPED[path]
    if Path(path).suffix == SUFFIX:
        return path
    raise ValueError(
        f"checkpoint directory {path} does not exist; check the path, or use a shipped model: "
        f"{', '.join(SHIPPED)}"
    )
