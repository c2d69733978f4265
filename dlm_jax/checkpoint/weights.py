"""A trained model in one file: its parameters and the JSON that describes it (safetensors).

The names of the tensors are the paths of the parameters (``blocks/attention/query/kernel``); the
header holds the JSON under ``dlm_jax`` and a CRC32 of all tensors, which safetensors lacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from dlm_jax.checkpoint.files import Place

SUFFIX = ".safetensors"
DTYPES = ("float32", "float16")

_KEY = "dlm_jax"
_CHECKSUM = "crc32"
_PART = 1 << 26
_NUMPY_OF = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}


class _NotOursError(Exception):
    pass


class _DamagedError(Exception):
    pass


def save_weights(
    path: str | os.PathLike[str], params: Any, meta: dict[str, Any], *, dtype: str = "float32"
) -> int:
    """Number of bytes written; the file appears whole, in one move.

    Args:
      path: ends in ``.safetensors``.
      params: nested dict of arrays.
      meta: a JSON dict, as a checkpoint holds it.
      dtype: one of `DTYPES`, for all tensors; float16 halves the file.

    Raises:
      ValueError: another suffix or dtype, a parameter that float16 cannot hold, or a folder that
        cannot be written.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ValueError(f"{target} does not end in {SUFFIX}; name it so")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    tensors = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        value = np.asarray(leaf)
        if not (np.abs(value) <= np.finfo(dtype).max).all():
            raise ValueError(f"parameter {name} does not fit {dtype}; use float32")
        tensors[name] = np.ascontiguousarray(value, dtype)
    header = {_KEY: json.dumps(meta), _CHECKSUM: f"{_checksum(tensors):08x}"}
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not the library's own writer, which makes the file unreadable for others.
        temporary.write_bytes(safetensors.numpy.save(tensors, metadata=header))
        os.replace(temporary, target)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}; name another") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return target.stat().st_size


def load_weights(
    path: str | os.PathLike[str], *, place: Place | None = None
) -> tuple[Any, dict[str, Any]]:
    """The parameters and the JSON of a `save_weights` file.

    Args:
      path: of the file.
      place: where each parameter goes, and as what; of a parameter that devices split each part is
        read for itself. By default whole onto the default device, as float32.

    Raises:
      ValueError: the file is missing, damaged, or not one of ours.
    """
    target = Path(path)
    params: dict[str, Any] = {}
    try:
        with safe_open(target, framework="np") as file:
            header = file.metadata() or {}
            if _KEY not in header:
                raise _NotOursError
            names = list(file.keys())
            if header.get(_CHECKSUM) != f"{_checksum_of(file, names):08x}":
                raise _DamagedError
            for name in names:
                *parents, last = name.split("/")
                node = params
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = _placed(file, name, place)
    except FileNotFoundError:
        raise ValueError(f"weights file {target} does not exist; name one") from None
    except _NotOursError:
        raise ValueError(
            f"weights file {target} was not written by dlm_jax; its header lacks it"
        ) from None
    except _DamagedError:
        raise ValueError(
            f"weights file {target} is damaged: its checksum is wrong; copy it again"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"weights file {target} cannot be read ({error}); copy it again") from None
    return params, json.loads(header[_KEY])


def _placed(file: Any, name: str, place: Place | None) -> jax.Array:
    """A tensor of the file, each of its parts read for the devices that hold it."""
    content = file.get_slice(name)
    shape = tuple(content.get_shape())
    stored = _NUMPY_OF.get(content.get_dtype(), np.dtype(np.float32))
    if place is None:
        return jax.numpy.asarray(file.get_tensor(name), np.float32)
    wanted = place(name, jax.ShapeDtypeStruct(shape, stored))
    if not shape or wanted.sharding is None:
        return jax.device_put(file.get_tensor(name).astype(wanted.dtype), wanted.sharding)
    return jax.make_array_from_callback(
        shape, wanted.sharding, lambda index: np.asarray(content[index]).astype(wanted.dtype)
    )


def _checksum(tensors: Mapping[str, np.ndarray]) -> int:
    """CRC32 over names, shapes and bytes."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(f"{name}{tensors[name].shape}".encode(), crc)
        crc = zlib.crc32(tensors[name].tobytes(), crc)
    return crc


def _checksum_of(file: Any, names: Sequence[str]) -> int:
    """The same of the tensors of a file, of which it reads a part at a time."""
    crc = 0
    for name in sorted(names):
        content = file.get_slice(name)
        shape = tuple(content.get_shape())
        crc = zlib.crc32(f"{name}{shape}".encode(), crc)
        if not shape:
            crc = zlib.crc32(file.get_tensor(name).tobytes(), crc)
        elif 0 not in shape:
            rows = max(1, _PART // (math.prod(shape[1:]) * 4))
            for first in range(0, shape[0], rows):
                part = np.ascontiguousarray(content[first : min(first + rows, shape[0])])
                crc = zlib.crc32(part.tobytes(), crc)
    return crc
