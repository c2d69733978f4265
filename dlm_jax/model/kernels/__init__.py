"""What forms of attention share: grouped heads, parts on several devices, padding to tiles."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.partitions import PLACES, fitting

HIDDEN = -1e30
"""The bias that hides a key."""

SAVED = "attention"
"""Name of the values that rematerialisation may save: attention outputs and kernel residuals."""


def by_device(
    compute: Callable[..., jax.Array],
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    text_BM: jax.Array,
    text_BL: jax.Array | None,
    *,
    splits_queries: bool = True,
) -> jax.Array:
    """The attention ``compute(q, k, v, text_BM, text_BL)``; each device computes its own rows and
    heads.

    A query attends to the keys with the number of its text; if `text_BL` is None, to live keys,
    where `text_BM` is True. With `splits_queries`, devices also split the queries of a row if the
    mesh splits positions.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return compute(q_BLHK, k_BMGK, v_BMGK, text_BM, text_BL)
    if k_BMGK.shape[2] % mesh.shape.get("tensor", 1):
        num_shared = q_BLHK.shape[2] // k_BMGK.shape[2]
        k_BMGK, v_BMGK = (jnp.repeat(x, num_shared, axis=2) for x in (k_BMGK, v_BMGK))
    queries = fitting(PLACES["queries"], q_BLHK.shape, mesh)
    if not splits_queries:
        queries = P(queries[0], None, *queries[2:])
    keys = fitting(PLACES["keys"], k_BMGK.shape, mesh)
    rows = fitting(PLACES["rows"], text_BM.shape, mesh)
    specs = queries, keys, keys, rows, P(*queries[:2])
    split = jax.shard_map(compute, in_specs=specs, out_specs=queries, check_vma=False)
    return split(q_BLHK, k_BMGK, v_BMGK, text_BM, text_BL)


def padded(x: jax.Array, axis: int, unit: int, value: float = 0) -> jax.Array:
    """`x`, extended with `value` along `axis` to a multiple of `unit`."""
    missing = -x.shape[axis] % unit
    widths = [(0, missing if at == axis else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def shared_bias(is_seen_BNM: jax.Array, num_shared: int) -> jax.Array:
    """The bias that hides keys in the scores ``[B, G, num_shared * N, M]`` of grouped heads."""
    if is_seen_BNM.shape[1] > 1:
        is_seen_BNM = jnp.tile(is_seen_BNM, (1, num_shared, 1))
    return jnp.where(is_seen_BNM, 0.0, HIDDEN)[:, None]


def grouped(q_BLHK: jax.Array, num_groups: int) -> jax.Array:
    """Scaled queries ``[B, G, N, K]``, float32.

    The heads of a group are stacked along the query axis, so that every product is one batched
    matmul.
    """
    num_rows, num_positions, _, head_size = q_BLHK.shape
    q_BLGRK = q_BLHK.reshape(num_rows, num_positions, num_groups, -1, head_size)
    q_BGNK = q_BLGRK.transpose(0, 2, 3, 1, 4).reshape(num_rows, num_groups, -1, head_size)
    return q_BGNK.astype(jnp.float32) * head_size**-0.5


def ungrouped(y_BGNK: jax.Array, q_BLHK: jax.Array) -> jax.Array:
    """The attention output in the shape and dtype of the queries."""
    num_rows, num_positions, _, head_size = q_BLHK.shape
    y_BGRLK = y_BGNK.reshape(num_rows, y_BGNK.shape[1], -1, num_positions, head_size)
    return y_BGRLK.transpose(0, 3, 1, 2, 4).reshape(q_BLHK.shape).astype(q_BLHK.dtype)
