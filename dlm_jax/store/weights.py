"""A trained model in one safetensors file: its parameters and the JSON that describes it.

The names of the tensors are the paths of the parameters (``blocks/attention/query/kernel``). The
header contains the JSON under ``dlm_jax`` and, under ``crc32_of_file``, the CRC32 of the whole
file, with eight zeros in place of its own digits. It detects any flipped bit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
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
from dlm_jax.store.files import crc_of, refuse_failures, write_whole

SUFFIX = ".safetensors"
DTYPES = ("float32", "float16")

_KEY = "dlm_jax"
_CHECKSUM = "crc32_of_file"
_DIGITS = re.compile(rb'"crc32_of_file": ?"([0-9a-f]{8})"')
_NO_DIGITS = b"0" * 8


Leaves = dict[str, list[Any]]
"""[dtype, shape] of each array in a pytree, by path."""

Place = Callable[[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]
"""Maps the path and stored type of a parameter to its dtype and sharding."""


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
        tensors[name] = np.ascontiguousarray(value, dtype)
    header = {_KEY: json.dumps(meta), _CHECKSUM: _NO_DIGITS.decode()}
    content = safetensors.numpy.save(tensors, metadata=header)
    match = _DIGITS.search(content)
    assert match is not None
    digits = f"{zlib.crc32(content):08x}".encode()
    with refuse_failures(str(target), "name another file"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The writer of the safetensors library creates files that other users cannot read.
        write_whole(target, content[: match.start(1)] + digits + content[match.end(1) :])
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
      place: sharding and dtype of each parameter. By default, parameters are float32 arrays on the
        default device.
    """
    with _opened(path) as (file, meta):
        abstract = None if make_abstract is None else make_abstract(meta)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        if abstract is not None:
            slices = without_heads(slices, abstract)
            wanted = describe(abstract).items()
            check_leaves(
                {name: ["float32", shape] for name, (_, shape) in wanted},
                {name: ["float32", part.get_shape()] for name, part in slices.items()},
                f"weights file {path}",
            )

        def read(name: str, part: Any) -> jax.Array:
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            if kind not in ("F32", "F16"):
                raise ValueError(
                    f"{name} in {path} has type {kind}, which is not one of {', '.join(DTYPES)}"
                )
            target = jax.ShapeDtypeStruct(shape, np.float32)
            target = target if place is None else place(name, target)
            if not shape or target.sharding is None:
                return jax.device_put(file.get_tensor(name).astype(target.dtype), target.sharding)
            # Each device gets its own part, so that no device has a whole parameter.
            return jax.make_array_from_callback(
                shape, target.sharding, lambda index: part[index].astype(target.dtype)
            )

        return map_named(read, nested(slices)), meta


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    with _opened(path) as (_, meta):
        return meta


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An open file, whose checksum is right, and its metadata."""
    try:
        file = safe_open(path, framework="np")
        header = file.metadata() or {}
        if _KEY not in header:
            raise ValueError("it was not written by dlm_jax: its header has no metadata")
        with Path(path).open("rb") as stream:
            size = stream.read(8)
            head = size + stream.read(int.from_bytes(size, "little"))
            crc = crc_of(stream, zlib.crc32(_DIGITS.sub(_without_digits, head, count=1)))
        if header.get(_CHECKSUM) != f"{crc:08x}":
            raise ValueError("it is damaged: its checksum is wrong")
        meta = json.loads(header[_KEY])
        if not isinstance(meta, dict):
            raise ValueError("its metadata is not an object")
    except FileNotFoundError:
        raise ValueError(f"weights file {path} does not exist; check the path") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"weights file {path} cannot be read ({error}); copy it again") from None
    with file:
        yield file, meta


def _without_digits(match: re.Match[bytes]) -> bytes:
    return match[0].replace(match[1], _NO_DIGITS)


def without_heads(saved: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """The saved arrays without custom heads, which train a model but are no part of its network."""
    known = {part for name, _ in named_leaves(wanted) for part in name.split("/")}
    return {
        name: leaf
        for name, leaf in saved.items()
        if all(part in known or not part.endswith("_head") for part in name.split("/"))
    }


def check_leaves(wanted: Leaves, saved: Leaves, where: str) -> None:
    """Raises ValueError for the first array that differs in dtype or shape from the saved one."""
    for name in (*wanted, *saved):
        here, there = wanted.get(name), saved.get(name)
        if here != there:
            raise ValueError(
                f"{name} is {_spell(here)} in this run but {_spell(there)} in {where}; "
                "use its training config, or another directory"
            )


def _spell(leaf: list[Any] | None) -> str:
    """The dtype and shape of an array in a message, ``float32[2,16]``, or ``absent``."""
    return "absent" if leaf is None else f"{leaf[0]}{leaf[1]}".replace(" ", "")


def describe(tree: Any) -> Leaves:
    return {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in named_leaves(tree)}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict with these paths."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


_LARGE = 1 << 18
"""The size from which an array is summed on its devices: a compilation takes as long as this."""


def checksums(tree: Any) -> dict[str, int]:
    """A checksum of the numbers of each array, by path. Every process must call this function.

    The checksum does not depend on the sharding. Every flipped bit changes it.
    """
    sums = {}
    for name, leaf in named_leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)
        is_here = array.is_fully_addressable or array.is_fully_replicated
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
