"""The manifest of a checkpoint: identity and checksums, which Orbax does not store.

Orbax loads most files with flipped bits without an error. The manifest therefore has a checksum of
the numbers of every array, which is compared when the arrays are on their devices: every byte is
read once, for any mesh and any number of processes. The manifest itself ends with its CRC32.

The manifest is an item of the checkpoint beside the arrays, so Orbax completes both together.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.store.files import AnyPath, Damaged
from dlm_jax.types import Params

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
        "leaves": describe(state, "state"),
        "sums": checksums(state),
        "meta": json.loads(json.dumps(meta)),
    }
    return facts | {"crc": _crc_of(facts)}


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`.

    Raises:
      Damaged: the manifest is missing or has changed.
      ValueError: another version wrote the checkpoint.
    """
    file = path / "manifest" / "metadata"
    try:
        facts = json.loads(file.read_bytes())
        is_intact = facts.pop("crc") == _crc_of(facts)
    except OSError as error:
        if (path / "manifest.json").exists():
            raise ValueError(
                f"checkpoint {path} was written by dlm_jax 0.2, which this version does not read; "
                "continue the run with 0.2, or export its model with dlm_jax.export of 0.2"
            ) from None
        raise Damaged(f"{file} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise Damaged(f"{file} has a wrong checksum")
    if facts["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {facts['format']}, but this program reads {FORMAT}; "
            f"use the program that wrote it (with {facts['versions']})"
        )
    return facts


def _crc_of(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


_LARGE = 1 << 18
"""The size from which an array is summed on its devices: a compilation takes as long as this."""


def checksums(tree: Any) -> dict[str, int]:
    """A checksum of the numbers of each array, by path. Every process must call this function.

    The checksum does not depend on the sharding. Every flipped bit changes it.
    """
    sums = {}
    for name, leaf in named_leaves(tree):
        array = plain(leaf)
        is_here = array.is_fully_addressable or array.is_fully_replicated
        is_small = array.size < _LARGE and is_here
        sums[name] = _sum(np.asarray(array), np) if is_small else _sum_on_devices(array)
    return {name: int(value) for name, value in sums.items()}


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


def check_same_leaves(wanted: Leaves, saved: Leaves, path: AnyPath) -> None:
    """Raises `ValueError` for the first array that differs."""
    for name in list(wanted) + list(saved):
        here, there = wanted.get(name), saved.get(name)
        if here != there:
            raise ValueError(
                f"{name} is {spell(here)} in this run but {spell(there)} in checkpoint {path}; "
                f"use the training config of the checkpoint, or another directory"
            )


def without_custom_heads(saved: Leaves, wanted: Leaves, meta: dict[str, Any]) -> Leaves:
    """The saved arrays without custom heads of the run that are not in `wanted`.

    Custom heads train a model but are not part of its network.
    """
    if not (meta.get("own") or {}).get("heads"):
        return saved
    known = {part for name in wanted for part in name.split("/")}

    def is_extra(name: str) -> bool:
        return any(part.endswith("_head") and part not in known for part in name.split("/"))

    return {name: leaf for name, leaf in saved.items() if not is_extra(name)}


def spell(leaf: list[Any] | None) -> str:
    """Describes an array in a message: its dtype and shape, ``float32[2,16]``, or ``absent``."""
    return "absent" if leaf is None else f"{leaf[0]}{leaf[1]}".replace(" ", "")


def describe(tree: Any, what: str) -> Leaves:
    """Dtype and shape of every array in a pytree, by path; `what` names the pytree in errors."""
    leaves: Leaves = {}
    for name, leaf in named_leaves(tree):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"{what} {name} is a {type(leaf).__name__}; use a JAX array")
        leaves[name] = [str(leaf.dtype), list(leaf.shape)]
    return leaves


def plain(leaf: Any) -> jax.Array:
    """The leaf as an array of numbers: the data of a typed key."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict with these paths; raises ValueError for conflicting names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name} is nested in another tensor")
        if last in node:
            raise ValueError(f"other tensors are nested in {name}")
        node[last] = value
    return tree


def check_not_quantised(tree: Any) -> None:
    """Raises ValueError for an 8-bit matrix, as created by `dlm_jax.load` with ``quantize``."""
    for name, leaf in named_leaves(tree):
        if name.endswith("/kernel/values") and leaf.dtype == jnp.int8:
            raise ValueError(
                f"parameter {name.removesuffix('/values')} is quantised, but only float "
                f"parameters can be saved; load the model without quantize"
            )


def not_finite(params: Params) -> str | None:
    """Path of the first parameter that contains NaN or infinity; None if all are finite.

    Every parameter is read once, without a copy (about 1 GB/s on a CPU). Each process reads the
    shards on its own devices.
    """
    for path, leaf in named_leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        parts = (
            {str(shard.index): shard.data for shard in leaf.addressable_shards}.values()
            if isinstance(leaf, jax.Array)
            else [leaf]
        )
        if not all(_is_finite(part) for part in parts):
            return path
    return None


def _is_finite(part: jax.Array | np.ndarray) -> bool:
    # NumPy reads a host array in place. A JAX function would be compiled for each shape.
    if isinstance(part, jax.Array) and any(d.platform != "cpu" for d in part.devices()):
        return bool(jnp.isfinite(part).all())
    return bool(np.isfinite(np.asarray(part)).all())
