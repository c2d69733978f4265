"""Muon whose matrices are dealt out over the devices, so that each is orthogonalised once.

Left to the compiler, the products of the Newton-Schulz iteration run on every device that holds a
copy, or as products of split matrices with a sum over the devices in each. Here every device gets
whole matrices of its own, in half precision on accelerators, and what comes out goes back to where
the parameters are.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from optax import contrib

from dlm_jax import devices
from dlm_jax.distributed.sharding import partition, path_name

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that an iteration applies to the singular values (Jordan et al. 2024)."""

_STEPS = 5
# Stacked kernels are [..., fan_in, fan_out]; the leading axes are a batch of matrices.
_DIMENSIONS = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def orthogonalized_momentum(*, beta: float) -> optax.GradientTransformation:
    """The direction of Muon's step, before weight decay and learning rate.

    Nesterov momentum whose matrices are orthogonalised and scaled by ``sqrt(max(1, fan_out /
    fan_in))``. On a single device it is optax's own, operation for operation; the state is the same
    on any.
    """
    make = functools.partial(
        contrib.scale_by_muon,
        ns_coeffs=COEFFICIENTS,
        beta=beta,
        weight_dimension_numbers=_dimensions,
    )
    # Without a step, what is left of optax's is the momentum divided by its norm.
    whole, momentum = make(ns_steps=_STEPS), make(ns_steps=0)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mesh = devices.mesh_in_use()
        if mesh is None:
            updates, state = whole.update(updates, state, params)
        else:
            updates, state = momentum.update(updates, state, params)
            updates = orthogonalized(updates, mesh)
        return jax.tree.map(_scaled_by_shape, updates), state

    return optax.GradientTransformation(whole.init, update)


def _dimensions(updates: Any) -> Any:
    return jax.tree.map(lambda _: _DIMENSIONS, updates)


def _scaled_by_shape(update: jax.Array) -> jax.Array:
    fan_in, fan_out = update.shape[-2:]
    return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * update


def orthogonalized(updates: Any, mesh: AbstractMesh) -> Any:
    """Every matrix of the tree after the Newton-Schulz iteration, each computed by one device.

    Args:
      updates: matrices ``[..., fan_in, fan_out]`` of norm 1 at most, stacked by layers and perhaps
        experts, whose paths `dlm_jax.distributed.sharding.RULES` knows.
      mesh: the devices in use.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(updates)
    specs = [_whole_spec(partition(path_name(path), leaf.shape, mesh), leaf) for path, leaf in flat]
    dtype = jnp.float32 if devices.platform() == "cpu" else jnp.bfloat16

    def of_device(leaves: list[jax.Array]) -> list[jax.Array]:
        # Equal shapes with equal splits travel together. A matrix and its transpose have the same
        # iteration, so those that split their first axis over `tensor` are turned.
        groups: dict[Any, list[int]] = defaultdict(list)
        turned = [spec[-2] == "tensor" for spec in specs]
        parts = [
            (leaf.swapaxes(-1, -2) if turn else leaf).astype(dtype)
            for leaf, turn in zip(leaves, turned, strict=True)
        ]
        for place, (part, spec, turn) in enumerate(zip(parts, specs, turned, strict=True)):
            axes = (spec[-1], spec[-2]) if turn else (spec[-2], spec[-1])
            stacked = tuple(axis for axis in spec[:-2] if axis)
            groups[part.shape[-2:], axes, stacked].append(place)
        for (_, axes, stacked), places in groups.items():
            together = jnp.concatenate(
                [parts[place].reshape(-1, *parts[place].shape[-2:]) for place in places]
            )
            together = _dealt(together, axes, stacked, mesh)
            counts = [math.prod(parts[place].shape[:-2]) for place in places]
            cuts = list(_running(counts))
            for place, piece in zip(places, jnp.split(together, cuts[:-1]), strict=True):
                parts[place] = piece.reshape(parts[place].shape)
        return [
            (part.swapaxes(-1, -2) if turn else part).astype(leaf.dtype)
            for part, turn, leaf in zip(parts, turned, leaves, strict=True)
        ]

    split = jax.shard_map(of_device, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.tree.unflatten(structure, split([leaf for _, leaf in flat]))


def _whole_spec(spec: P, leaf: jax.Array) -> P:
    """`spec` with an entry for every dimension."""
    return P(*spec, *[None] * (leaf.ndim - len(spec)))


def _running(counts: list[int]) -> list[int]:
    return [sum(counts[: place + 1]) for place in range(len(counts))]


def _dealt(
    x_NIO: jax.Array, axes: tuple[Any, Any], stacked: tuple[str, ...], mesh: AbstractMesh
) -> jax.Array:
    """The part of a device of the orthogonalised matrices, of its part of the matrices.

    Args:
      x_NIO: parts of N matrices; inside `jax.shard_map`.
      axes: mesh axes that split the second and the third dimension, or None.
      stacked: mesh axes over which the devices have different matrices.
      mesh: the devices.
    """
    split = {dimension: axis for dimension, axis in zip((1, 2), axes, strict=True) if axis}
    copies = tuple(name for name in mesh.axis_names if name not in (*split.values(), *stacked))
    num, sharing = x_NIO.shape[0], mesh.size // math.prod(mesh.shape[name] for name in stacked)
    x_NIO = jnp.pad(x_NIO, ((0, -num % sharing), (0, 0), (0, 0)))
    share = x_NIO.shape[0] // math.prod(mesh.shape[name] for name in copies)
    first = jax.lax.axis_index(copies) * share if copies else 0
    x_NIO = jax.lax.dynamic_slice_in_dim(x_NIO, first, share)
    for dimension, axis in split.items():
        x_NIO = _exchanged(x_NIO, axis, 0, dimension)
    x_NIO = _iterated(x_NIO)
    for dimension, axis in reversed(split.items()):
        x_NIO = _exchanged(x_NIO, axis, dimension, 0)
    if copies:
        x_NIO = jax.lax.all_gather(x_NIO, copies, tiled=True)
    return x_NIO[:num]


def _exchanged(x_NIO: jax.Array, axis: str, split: int, joined: int) -> jax.Array:
    if devices.platform() == "cpu":
        # XLA's CPU backend gives the parts it sends layouts of their own, and then refuses them.
        x_NIO = jax.lax.optimization_barrier(x_NIO)
    return jax.lax.all_to_all(x_NIO, axis, split, joined, tiled=True)


def _iterated(x_NIO: jax.Array) -> jax.Array:
    """The quintic Newton-Schulz iteration on whole matrices, on their shorter side."""
    is_tall = x_NIO.shape[1] > x_NIO.shape[2]
    x = x_NIO.swapaxes(1, 2) if is_tall else x_NIO
    first, second, third = COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.swapaxes(1, 2)
        x = first * x + (second * gram + third * (gram @ gram)) @ x
    return x.swapaxes(1, 2) if is_tall else x
