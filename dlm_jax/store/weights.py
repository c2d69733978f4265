"""A trained model in one safetensors file: its parameters and the JSON that describes it.

The names of the tensors are the paths of the parameters (``blocks/attention/query/kernel``). The
header contains the JSON under ``dlm_jax`` and, under ``crc32_of_file``, the CRC32 of the whole
file, with eight zeros in place of its own digits. It detects any flipped bit.
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
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from dlm_jax.distributed.partitions import map_named, named_leaves
from dlm_jax.store.files import crc_of, refused_unless_full, write_whole
from dlm_jax.types import Params

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
    if target.suffix != SUFFIX:
        raise ValueError(f"{target} does not end in {SUFFIX}; add the suffix")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
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
    with refused_unless_full(target, "name another"):
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
        # The errors of `make_abstract` are about the model, not about the file.
        abstract = None if make_abstract is None else make_abstract(meta)
        wanted = None if abstract is None else describe(abstract, "params")
        with _named(path):
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            saved = {name: ["float32", shape] for name, shape in shapes.items()}
            if wanted is not None:
                saved = without_custom_heads(saved, wanted, meta)
                for name in (*wanted, *saved):
                    ours, theirs = wanted.get(name), saved.get(name)
                    if ours is None or theirs is None or ours[1] != theirs[1]:
                        raise ValueError(
                            f"its config requires {name} as {spell(ours)}, but it is "
                            f"{spell(theirs)}"
                        )

            def read(name: str, _: str) -> jax.Array:
                part = file.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                if kind not in ("F32", "F16"):
                    raise ValueError(
                        f"{name} has type {kind}, which is not one of {', '.join(DTYPES)}"
                    )
                if place is None:
                    return jnp.asarray(file.get_tensor(name), np.float32)
                target = place(name, jax.ShapeDtypeStruct(shape, np.float32))
                if not shape or target.sharding is None:
                    value = file.get_tensor(name).astype(target.dtype)
                    return jax.device_put(value, target.sharding)
                # Each device gets its own part, so that no device has a whole parameter.
                return jax.make_array_from_callback(
                    shape, target.sharding, lambda index: part[index].astype(target.dtype)
                )

            return map_named(read, nested({name: name for name in saved})), meta


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    with _opened(path) as (_, meta):
        return meta


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An open file, whose checksum is right, and its metadata."""
    with contextlib.ExitStack() as stack:
        with _named(path):
            file = stack.enter_context(safe_open(path, framework="np"))
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
        yield file, meta


def _without_digits(match: re.Match[bytes]) -> bytes:
    return match[0].replace(match[1], _NO_DIGITS)


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors raised in the context name the file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"weights file {path} does not exist; check the path") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"weights file {path} cannot be read ({error}); copy it again") from None


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
    if path in SHIPPED or Path(path).suffix == SUFFIX:
        return SHIPPED.get(path, path)
    raise ValueError(
        f"checkpoint directory {path} does not exist; check the path, or use a shipped model: "
        f"{', '.join(SHIPPED)}"
    )
