"""A trained model in one file: its parameters and the JSON that describes it (safetensors).

The names of the tensors are the paths of the parameters (``blocks/attention/query/kernel``); the
header holds the JSON under ``dlm_jax`` and a CRC32 of all tensors, which safetensors lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

SUFFIX = ".safetensors"
DTYPES = ("float32", "float16")

_KEY = "dlm_jax"
_CHECKSUM = "crc32"


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


def load_weights(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """The parameters as float32 on the default device, and the JSON, of a `save_weights` file.

    Raises:
      ValueError: the file is missing, damaged, or not one of ours.
    """
    target = Path(path)
    try:
        with safe_open(target, framework="np") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"weights file {target} does not exist; name one") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"weights file {target} cannot be read ({error}); copy it again") from None
    if _KEY not in header:
        raise ValueError(f"weights file {target} was not written by dlm_jax; its header lacks it")
    if header.get(_CHECKSUM) != f"{_checksum(tensors):08x}":
        raise ValueError(f"weights file {target} is damaged: its checksum is wrong; copy it again")
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = name.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.numpy.asarray(tensor, np.float32)
    return params, json.loads(header[_KEY])


def _checksum(tensors: Mapping[str, np.ndarray]) -> int:
    """CRC32 over names, shapes and bytes."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(f"{name}{tensors[name].shape}".encode(), crc)
        crc = zlib.crc32(tensors[name].tobytes(), crc)
    return crc
