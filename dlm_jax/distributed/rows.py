"""Where the rows of a batch lie: on one device, split over several, or whole on each."""

from __future__ import annotations

import math

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.distributed.activations import ROWS
from dlm_jax.types import Params


def split_rows(params: Params) -> NamedSharding | None:
    """How to split rows over the devices that hold `params`: the axes `data` and `fsdp`.

    None for one device, and for several processes: each of these runs all rows, so that each can
    read the results.
    """
    mesh = getattr(_sharding_of(params), "mesh", None)
    if mesh is None or mesh.size == 1 or mesh.is_multi_process:
        return None
    axes = tuple(axis for axis in ROWS if axis in mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(axes))


def num_shares(rows: NamedSharding | None) -> int:
    """Parts into which `split_rows` splits the rows, 1 if it does not."""
    return 1 if rows is None else math.prod(rows.mesh.shape[axis] for axis in rows.spec[0])


def placement(rows: NamedSharding | None, params: Params) -> jax.sharding.Sharding | None:
    """Where the state goes: split as `rows` says, or to where the parameters are, whole.

    Placed from the start, the state comes back from a call as it went in: no second compilation.
    """
    if rows is not None:
        return rows
    sharding = _sharding_of(params)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _sharding_of(params: Params) -> jax.sharding.Sharding | None:
    """That of some parameter; None if there is none on a device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    return next((sharding for sharding in shardings if sharding is not None), None)
