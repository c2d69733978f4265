"""Attention kernels on several devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.partitions import PLACES, fitting


def by_device(
    compute: Callable[..., jax.Array],
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    *,
    splits_queries: bool = True,
) -> jax.Array:
    """The attention ``compute(q, k, v, is_live)``; each device computes its own rows and heads.

    With `splits_queries`, devices also split the queries of a row if the mesh splits positions.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return compute(q_BLHK, k_BMGK, v_BMGK, is_live_BM)
    if k_BMGK.shape[2] % mesh.shape.get("tensor", 1):
        num_shared = q_BLHK.shape[2] // k_BMGK.shape[2]
        k_BMGK, v_BMGK = (jnp.repeat(x, num_shared, axis=2) for x in (k_BMGK, v_BMGK))
    queries = fitting(PLACES["queries"], q_BLHK.shape, mesh)
    if not splits_queries:
        queries = P(queries[0], None, *queries[2:])
    keys = fitting(PLACES["keys"], k_BMGK.shape, mesh)
    rows = fitting(PLACES["rows"], is_live_BM.shape, mesh)
    split = jax.shard_map(
        compute, in_specs=(queries, keys, keys, rows), out_specs=queries, check_vma=False
    )
    return split(q_BLHK, k_BMGK, v_BMGK, is_live_BM)
