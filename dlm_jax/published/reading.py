"""Weights of a published model straight into device arrays, one tensor at a time.

A stacked parameter is made where it lives and its layers are written into it in place, so that the
host holds no more than one tensor beside it and the pages of the files, which are given back.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from dlm_jax.published.names import Piece, leaves, shape_of
from dlm_jax.published.shards import Shards
from dlm_jax.types import Params

# What XLA asks of memory on the CPU that it does not copy.
_ALIGNMENT = 64
_ROWS = 512
_THREADS = min(8, os.cpu_count() or 1)

Place = Callable[[str, tuple[int, ...]], Sharding | None]
"""``(path, shape) -> sharding`` of a parameter; None is the default device."""


def check_tensors(
    shards: Shards,
    pieces: Mapping[str, list[Piece]],
    abstract: Params,
    *,
    redundant: tuple[str, ...] = (),
    where: str,
) -> None:
    """Raises ValueError for a tensor that is missing, surplus, or of another shape.

    Args:
      shards: what is there.
      pieces: what is wanted, by path.
      abstract: the parameters' shapes.
      redundant: tensors that may be there and say nothing new.
      where: the directory, for errors.
    """
    shapes = dict(leaves(abstract))
    wanted: dict[str, tuple[int, ...]] = {}
    for path, parts in pieces.items():
        for piece in parts:
            shape = shape_of(piece, shapes[path].shape)
            rows = shape[0] if piece.rows is None else piece.rows[1]
            before = wanted.get(piece.tensor, (0,))[0]
            wanted[piece.tensor] = (max(rows, before), *shape[1:])
    missing = sorted(set(wanted) - set(shards.entries))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(
            f"{where} lacks the tensor {missing[0]!r}{more}, which config.json implies"
        )
    idle = ("rotary_emb.inv_freq",)
    surplus = sorted(
        name
        for name in set(shards.entries) - set(wanted) - set(redundant)
        if not name.endswith(idle)
    )
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise ValueError(
            f"{where} holds the tensor {surplus[0]!r}{more}, which config.json rules out"
        )
    for name, shape in wanted.items():
        if shards.entries[name].shape != shape:
            raise ValueError(
                f"{where}: the tensor {name!r} has shape {shards.entries[name].shape}, and "
                f"config.json asks for {shape}"
            )


def read_params(
    shards: Shards,
    pieces: Mapping[str, list[Piece]],
    abstract: Params,
    *,
    dtype: np.dtype | None,
    place: Place,
) -> Params:
    """The parameters, in the dtype of their tensors or in `dtype`, where `place` puts them."""

    def read(keys: Any, leaf: Any) -> jax.Array:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        parts = pieces[path]
        kind = _stored_dtype(shards, parts) if dtype is None else dtype
        sharding = place(path, leaf.shape)
        if sharding is None and jax.default_backend() == "cpu":
            return _on_host(shards, parts, leaf.shape, kind)
        if len(parts) == 1 and parts[0].place == ():
            return _put(shards, parts[0], leaf.shape, kind, sharding)
        return _stacked(shards, parts, leaf.shape, kind, sharding)

    return jax.tree_util.tree_map_with_path(read, abstract)


def _stored_dtype(shards: Shards, parts: list[Piece]) -> np.dtype:
    """That of the tensors of a parameter, or float32, which holds all, where they differ."""
    kinds = {shards.entries[piece.tensor].dtype for piece in parts}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def _on_host(
    shards: Shards, parts: list[Piece], shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """A parameter on the CPU: its pieces are put where they stay, by some threads at once."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    whole = memory[first : first + size].view(dtype).reshape(shape)

    def fill(piece: Piece) -> None:
        stored = shards.read(piece.tensor)
        if piece.rows is not None:
            stored = stored[slice(*piece.rows)]
        _copy(stored.astype(dtype, copy=False), whole[piece.place], piece.is_transposed)
        shards.forget(piece.tensor)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(fill, piece) for piece in parts]:
            done.result()
    # Nobody writes into this memory again, so that the array may be it.
    return jax.device_put(whole)


def _copy(stored: np.ndarray, target: np.ndarray, is_transposed: bool) -> None:
    # Numbers of NumPy's own kinds are copied much faster than bfloat16.
    bits = {2: np.uint16, 4: np.uint32}[stored.dtype.itemsize]
    stored, target = stored.view(bits), target.view(bits)
    if not is_transposed:
        np.copyto(target, stored)
        return
    # What the backend transposes as it takes it in it does half as fast again as NumPy does in
    # squares that fit a cache; some rows at a time, for which it needs no fresh memory.
    (device,) = jax.local_devices(backend="cpu")[:1]
    for row in range(0, stored.shape[0], _ROWS):
        turned = jax.device_put(stored[row : row + _ROWS].T, device)
        np.copyto(target[:, row : row + _ROWS], np.asarray(turned))


def _stacked(
    shards: Shards,
    parts: list[Piece],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
) -> jax.Array:
    depth = len(parts[0].place)
    inner = None if sharding is None else _without_axes(sharding, depth, len(shape))
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    for piece in parts:
        part = _put(shards, piece, shape[depth:], dtype, inner)
        stack = _write(stack, part, np.array(piece.place, np.int32), sharding)
    return stack


def _write(
    stack: jax.Array, part: jax.Array, place: np.ndarray, sharding: Sharding | None
) -> jax.Array:
    return _writer(sharding)(stack, part, place)


@functools.cache
def _writer(sharding: Sharding | None) -> Callable[..., jax.Array]:
    def write(stack: jax.Array, part: jax.Array, place: jax.Array) -> jax.Array:
        start = (*place, *(0,) * part.ndim)
        return jax.lax.dynamic_update_slice(
            stack, part.reshape((1,) * len(place) + part.shape), start
        )

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _put(
    shards: Shards,
    piece: Piece,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding | None,
) -> jax.Array:
    """One piece as a device array in the orientation of its parameter."""
    stored = shards.read(piece.tensor)
    if piece.rows is not None:
        stored = stored[slice(*piece.rows)]
    view = stored.T if piece.is_transposed else stored

    def part(index: Any) -> np.ndarray:
        return view[index].astype(dtype, copy=False)

    if sharding is None:
        made = jnp.array(part(...), copy=True)
    else:
        made = jax.make_array_from_callback(shape, sharding, part)
    made.block_until_ready()
    shards.forget(piece.tensor)
    return made


def _without_axes(sharding: Sharding, count: int, ndim: int) -> Sharding:
    """The sharding of one entry of the first `count` axes."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*spec[count:]), memory_kind=sharding.memory_kind
    )
