"""What a saved model says about its arrays, and a saved model in one safetensors file.

Orbax and safetensors load most files with flipped bits without an error. The manifest of a
checkpoint or a weights file therefore has a checksum of the numbers of every array, which is
compared when the arrays are read: every byte is read once, for any mesh and any number of
processes. The manifest itself ends with its CRC32.

In a weights file, the names of the tensors are the paths of the parameters
(``blocks/attention/query/kernel``), and the header has the JSON of the manifest under ``dlm_jax``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.store.files import Damaged, refuse_failures, write_whole

FORMAT = 2

Leaves = dict[str, list[Any]]
"""[dtype, shape] of each array in a pytree, by path."""

Place = Callable[[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]
"""Maps the path and stored type of a parameter to its dtype and sharding."""


def new_manifest(state: Any, meta: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a checkpoint of `state`. Every process must call this function.

    The identity of the run is ``run`` in the metadata, or empty if the metadata has no ``run``.
    """
    writers = ("jax", "orbax-checkpoint", "numpy")
    facts = {
        "format": FORMAT,
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in writers),
        "run": meta.get("run", ""),
        "leaves": describe(state),
        "sums": checksums(state),
        "meta": json.loads(json.dumps(meta)),
    }
    return facts | {"crc": _crc_of(facts)}


def checked_manifest(text: str | bytes, where: str) -> dict[str, Any]:
    """The manifest with this JSON text; `where` names the model in errors.

    Raises:
      Damaged: the text has changed.
      ValueError: another version wrote the model.
    """
    try:
        facts = json.loads(text)
        is_intact = facts.pop("crc") == _crc_of(facts)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise Damaged("it has a wrong checksum")
    if facts["format"] != FORMAT:
        raise ValueError(
            f"{where} has format {facts['format']}, but this program reads {FORMAT}; "
            f"use the program that wrote it (with {facts['versions']})"
        )
    return facts


def _crc_of(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def plan_reading(
    manifest: dict[str, Any], abstract: Any, place: Place | None, where: str, *, under: str = ""
) -> tuple[Any, Any]:
    """The parameters as they are stored `under` a path, in their shardings, and as they are wanted.

    `abstract` are the expected shapes, or None. Heads that the run was given are read with them.

    Raises:
      ValueError: a parameter is missing or has another shape.
    """
    saved = {
        name.removeprefix(under): leaf
        for name, leaf in manifest["leaves"].items()
        if name.startswith(under)
    }
    if not saved:
        raise ValueError(f"{where} has no params; pass one written by train.py")

    def stored(name: str, sharding: Any = None) -> jax.ShapeDtypeStruct:
        dtype, shape = saved[name]
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)

    wanted: dict[str, Any] = {}
    for name in saved:
        *parents, last = name.split("/")
        node = wanted
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = stored(name)
    if abstract is not None:
        # Custom heads train a model, but are no part of its network.
        heads = (manifest["meta"].get("own") or {}).get("heads", ())
        known = {n: leaf for n, leaf in saved.items() if n.split("/")[0] in heads}
        for name, (dtype, shape) in describe(abstract).items():
            known[name] = [saved.get(name, [dtype])[0], shape]
        check_leaves(known, saved, where)
        wanted = {name: abstract.get(name, tree) for name, tree in wanted.items()}
    if place is not None:
        wanted = map_named(place, wanted)
    return map_named(lambda name, leaf: stored(name, leaf.sharding), wanted), wanted


def check_leaves(wanted: Leaves, saved: Leaves, where: str) -> None:
    """Raises ValueError for the first array that differs in dtype or shape from the saved one."""
    for name in (*wanted, *saved):
        if wanted.get(name) != saved.get(name):
            here, there = (
                f"{leaf[0]}{leaf[1]}".replace(" ", "") if leaf else "absent"
                for leaf in (wanted.get(name), saved.get(name))
            )
            raise ValueError(
                f"{name} is {here} in this run but {there} in {where}; use its training config, or "
                "another directory"
            )


def describe(tree: Any) -> Leaves:
    return {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in named_leaves(tree)}


_LARGE = 1 << 22
"""The size from which an array is summed on its devices, for which a sum is compiled."""


def checksums(tree: Any) -> dict[str, int]:
    """A checksum of the numbers of each array, by path. Every process must call this function.

    The checksum does not depend on the sharding. Every flipped bit changes it.
    """
    sums = {}
    for name, leaf in named_leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        is_here = isinstance(array, np.ndarray) or (
            array.is_fully_addressable or array.is_fully_replicated
        )
        is_small = array.size < _LARGE and is_here
        sums[name] = _sum(np.asarray(array), np) if is_small else _sum_on_devices(array)
    return {name: int(value) for name, value in sums.items()}


def digest_of(params: Any) -> str:
    """A digest (16 hex digits) of a pytree of arrays with any sharding."""
    facts = json.dumps([describe(params), checksums(params)])
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _sum(array: Any, xp: Any) -> Any:
    """The sum modulo 2^32 of a hash of each number and its index, one-to-one in the number."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    unsigned = {1: np.uint8, 2: np.uint16}.get(array.dtype.itemsize, np.uint32)
    words = array.reshape(array.shape or (1,)).view(unsigned).astype(np.uint32)
    index, stride = xp.zeros((1,) * words.ndim, np.uint32), 1
    for axis in reversed(range(words.ndim)):
        along = xp.arange(words.shape[axis], dtype=np.uint32) * np.uint32(stride % 2**32)
        index = index + xp.expand_dims(
            along, [other for other in range(words.ndim) if other != axis]
        )
        stride *= words.shape[axis]
    words = (words ^ (index * np.uint32(0x9E3779B9))) * np.uint32(0x85EBCA6B)
    return xp.sum(words ^ (words >> 15), dtype=np.uint32)


_sum_on_devices = jax.jit(functools.partial(_sum, xp=jnp))


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
