"""A trained model in one safetensors file: its parameters, with the manifest of a checkpoint.

The names of the tensors are the paths of the parameters (``blocks/attention/query/kernel``), and
the header contains the JSON of the manifest under ``dlm_jax``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.store.files import Damaged, refuse_failures, write_whole
from dlm_jax.store.manifest import checked_manifest, checksums, new_manifest

SUFFIX = ".safetensors"
DTYPES = ("float32", "float16")
_KEY = "dlm_jax"


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
    if target.suffix != SUFFIX or dtype not in DTYPES:
        raise ValueError(
            f"{target} in {dtype} cannot be written; use a name with {SUFFIX}, and one of "
            f"{', '.join(DTYPES)}"
        )
    tensors = {}
    for name, leaf in named_leaves(params):
        value = np.asarray(leaf)
        if not (np.abs(value) <= np.finfo(dtype).max).all():
            raise ValueError(f"parameter {name} does not fit in {dtype}; use float32")
        tensors[name] = np.asarray(value, dtype, order="C")
    manifest = json.dumps(new_manifest(tensors, meta), ensure_ascii=False)
    content = safetensors.numpy.save(tensors, {_KEY: manifest})
    with refuse_failures(str(target), "name another file"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The writer of the safetensors library creates files that other users cannot read.
        write_whole(target, content)
    return target.stat().st_size


@contextlib.contextmanager
def open_weights(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An open file and its manifest.

    Raises:
      ValueError: the file is missing, damaged or of another program, also while it is read.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            if "crc32_of_file" in header:
                raise ValueError(
                    f"{path} was written before version 0.3, which saved other runs; train it again"
                )
            if _KEY not in header:
                raise Damaged("it was not written by dlm_jax: its header has no metadata")
            yield file, checked_manifest(header[_KEY], f"weights file {path}")
    except FileNotFoundError:
        raise ValueError(f"weights file {path} does not exist; check the path") from None
    except (SafetensorError, OSError, Damaged) as error:
        raise ValueError(f"weights file {path} cannot be read ({error}); copy it again") from None


def read_tensors(file: Any, manifest: dict[str, Any], given: Any) -> Any:
    """The tensors of an open file in the shardings of `given`, as NumPy arrays where it has none.

    Raises:
      Damaged: a tensor differs from the manifest.
    """
    found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    kinds = {"F32": "float32", "F16": "float16"}
    leaves = {n: [kinds.get(part.get_dtype()), part.get_shape()] for n, part in found.items()}
    if leaves != manifest["leaves"]:
        raise Damaged("its tensors are not those of its manifest")

    def read(name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if not leaf.shape or leaf.sharding is None:
            return file.get_tensor(name)
        # Each device gets its own part, so that no device has a whole parameter.
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: found[name][index]
        )

    tensors = map_named(read, given)
    for name, value in checksums(tensors).items():
        if value != manifest["sums"][name]:
            raise Damaged(f"{name} has a wrong checksum")
    return tensors


SHIPPED: Mapping[str, Path] = {
    path.stem: path
    for path in sorted((Path(__file__).parent.parent / "shipped").glob(f"*{SUFFIX}"))
}
"""Files of the shipped models by name. ``--checkpoint`` accepts these names as well as paths."""

DEFAULT = "shakespeare"
"""The default model: a small Shakespeare model with byte-pair tokens."""


def path_of_model(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """The path itself, if it exists, or that of a shipped model; None means `DEFAULT`."""
    if path is None:
        return SHIPPED[DEFAULT]
    if not isinstance(path, str) or Path(path).name != path or Path(path).exists():
        return path
    if path in SHIPPED or Path(path).suffix == SUFFIX:
        return SHIPPED.get(path, path)
    raise ValueError(
        f"checkpoint directory {path} does not exist; check the path, or use a shipped model: "
        f"{', '.join(SHIPPED)}"
    )
