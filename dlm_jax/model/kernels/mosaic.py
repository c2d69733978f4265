"""Attention for TPUs of a window beside a cache, which the kernel reads in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_HIDDEN = -1e30
_LANES = 128
# Rows of a tile in half precision.
_SUBLANES = 16
_MAX_KEYS = 1024
_MAX_QUERIES = 512
# Scores of new keys that one head computes at a time.
_MAX_SCORES = 2**19
# Queries of all heads that one step of the grid computes; more heads hide the latency of products.
_MAX_TOGETHER = 256
# Bytes of a tile of keys and of values, which are read while the tile before is computed.
_MAX_BYTES = 2**22


def mosaic_window(
    q_BGNK: jax.Array,
    kept_RDGLK: tuple[jax.Array, jax.Array],
    own_BGWK: tuple[jax.Array, jax.Array],
    seen: tuple[jax.Array, jax.Array],
    row_B: jax.Array,
    layer_B: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention output ``[B, G, N, K]`` of a window over cached and new keys and values.

    As `dlm_jax.model.kernels.triton.triton_window`, for any number of cached positions.
    """
    num_rows, num_groups, num_queries, size = q_BGNK.shape
    num_kept, num_new = (x.shape[3] for x in seen)
    queries, keys, heads = _tiles(q_BGNK, kept_RDGLK[0], num_kept, num_new)
    q = _padded(q_BGNK, 2, queries)
    k, v = (_padded(x, 2, _SUBLANES) for x in own_BGWK)
    of_kept, of_own = (_padded(x, 2, queries) if x.shape[2] > 1 else x for x in seen)
    of_kept = _padded(of_kept, 3, keys, _HIDDEN)
    of_own = _padded(of_own, 3, _SUBLANES, _HIDDEN)

    def bias(x: jax.Array, keys: int | None) -> pl.BlockSpec:
        rows = 1 if x.shape[2] == 1 else queries
        return pl.BlockSpec(
            (None, None, rows, keys or x.shape[3]),
            lambda b, g, i, t, *_: (b, 0, 0 if rows == 1 else i, t if keys else 0),
        )

    tile = pl.BlockSpec((None, heads, queries, size), lambda b, g, i, t, *_: (b, g, i, 0))
    new = pl.BlockSpec((None, heads, k.shape[2], size), lambda b, g, i, t, *_: (b, g, 0, 0))
    kept = pl.BlockSpec(
        (None, None, heads, keys, size),
        lambda b, g, i, t, row, layer: (row[b], layer[b], g, t, 0),
    )
    grid = num_rows, num_groups // heads, q.shape[2] // queries, pl.cdiv(num_kept, keys)
    pairs = num_rows * num_groups * num_queries * (num_kept + num_new)
    read = 2 * num_rows * num_groups * grid[2] * num_kept * size * k.dtype.itemsize
    moved = 2 * (q.nbytes + k.nbytes) + of_kept.nbytes + of_own.nbytes
    sums = pltpu.VMEM((heads, queries, _LANES), jnp.float32)
    y: jax.Array = pl.pallas_call(
        functools.partial(_kernel, num_kept=num_kept),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[tile, kept, kept, new, new, bias(of_kept, keys), bias(of_own, None)],
            out_specs=tile,
            scratch_shapes=[pltpu.VMEM((heads, queries, size), jnp.float32), sums, sums],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * size, transcendentals=pairs, bytes_accessed=read + moved
        ),
        interpret=interpret,
        name="window_attention",
    )(row_B, layer_B, q, *kept_RDGLK, k, v, of_kept, of_own)  # fmt: skip
    return y[:, :, :num_queries]


def _tiles(
    q_BGNK: jax.Array, leaf_RDGLK: jax.Array, num_kept: int, num_new: int
) -> tuple[int, int, int]:
    """Queries, cached keys and heads of a tile."""
    num_groups, num_queries, size = q_BGNK.shape[1:]
    queries = _tile(num_queries, min(_MAX_QUERIES, _MAX_SCORES // num_new), _SUBLANES)
    is_whole = num_kept == leaf_RDGLK.shape[3] <= _MAX_KEYS
    keys = num_kept if is_whole else _tile(num_kept, _MAX_KEYS, _LANES)
    of_head = 2 * keys * size * leaf_RDGLK.dtype.itemsize
    most = max(1, min(_MAX_TOGETHER // queries, _MAX_BYTES // of_head))
    heads = max(n for n in range(1, most + 1) if num_groups % n == 0)
    return queries, keys, heads


def _kernel(
    row_ref, layer_ref, q_ref, kept_k_ref, kept_v_ref, k_ref, v_ref, of_kept_ref, of_own_ref,
    y_ref, sum_ref, top_ref, total_ref, *, num_kept
):  # fmt: skip
    tile, heads, keys = pl.program_id(3), q_ref.shape[0], kept_k_ref.shape[1]

    def add(head, k_MK, v_MK, bias_NM):
        scores_NM = _dot(q_ref[head], k_MK, 1) + bias_NM
        before_N1 = top_ref[head][:, :1]
        top_N1 = jnp.maximum(before_N1, jnp.max(scores_NM, axis=1, keepdims=True))
        weights_NM, fade_N1 = jnp.exp(scores_NM - top_N1), jnp.exp(before_N1 - top_N1)
        total_N1 = total_ref[head][:, :1] * fade_N1 + jnp.sum(weights_NM, axis=1, keepdims=True)
        sum_ref[head] = sum_ref[head] * fade_N1 + _dot(weights_NM.astype(v_MK.dtype), v_MK, 0)
        top_ref[head] = jnp.broadcast_to(top_N1, top_ref.shape[1:])
        total_ref[head] = jnp.broadcast_to(total_N1, total_ref.shape[1:])

    @pl.when(tile == 0)
    def _():
        sum_ref[...], total_ref[...] = jnp.zeros_like(sum_ref), jnp.zeros_like(total_ref)
        top_ref[...] = jnp.full_like(top_ref, _HIDDEN)
        for head in range(heads):
            add(head, k_ref[head], v_ref[head], of_own_ref[...])

    for head in range(heads):
        k_MK, v_MK = kept_k_ref[head], kept_v_ref[head]
        if num_kept % keys:  # positions beyond the cache are undefined
            is_kept_M1 = tile * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0) < num_kept
            k_MK, v_MK = (jnp.where(is_kept_M1, x, jnp.zeros_like(x)) for x in (k_MK, v_MK))
        add(head, k_MK, v_MK, of_kept_ref[...])

    @pl.when(tile == pl.num_programs(3) - 1)
    def _():
        for head in range(heads):
            y_ref[head] = (sum_ref[head] / total_ref[head][:, :1]).astype(y_ref.dtype)


def _dot(a_NK, b, axis):
    """Float32 product over the last axis of `a_NK` and `axis` of `b`."""
    return jax.lax.dot_general(
        a_NK, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _tile(number: int, most: int, unit: int) -> int:
    """The size of the tiles, a multiple of `unit`, that share `number` with the least padding."""
    count = pl.cdiv(number, most)
    return pl.cdiv(pl.cdiv(number, count), unit) * unit


def _padded(x: jax.Array, axis: int, unit: int, value: Any = 0) -> jax.Array:
    """`x`, extended along `axis` to a multiple of `unit`."""
    missing = -x.shape[axis] % unit
    widths = [(0, missing if at == axis else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x
