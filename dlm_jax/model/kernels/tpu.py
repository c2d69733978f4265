"""Kernels for TPUs: attention, attention of a window beside a cache, and the rotation of heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    FullMask,
    Mask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import PartitionSpec as P

from dlm_jax.devices import mesh_in_use, num_cores
from dlm_jax.distributed.partitions import PLACES, fitting
from dlm_jax.model.kernels import HIDDEN, SAVED, by_device, padded

_LANES = 128
# Rows of a tile in half precision.
_SUBLANES = 16
# Tiles of splash attention by the schedules of the TPU compiler (benchmarks/results/scaling.md).
# Tiles have twice as many keys without a mask: the kernel writes one partial gradient of the
# queries per tile of keys. Longer tiles of wider keys exceed the on-chip memory of the compiler's
# default options.
_MAX_BLOCK = 1024
_MAX_KEY_BYTES = 256
_MAX_KEYS = 1024
_MAX_QUERIES = 512
# Scores of new keys that one head computes at a time.
_MAX_SCORES = 2**19
# Queries of all heads that one step of the grid computes; more heads hide the latency of products.
_MAX_TOGETHER = 256
# Bytes of a tile of keys and of values, which are read while the tile before is computed.
_MAX_BYTES = 2**22
# Bytes of all tiles and intermediate values of a window.
_MEMORY = 15 * 2**20
# Elements of a tile of queries or keys that are rotated.
_MAX_ELEMENTS = 2**19


def splash_attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    text_BM: jax.Array,
    text_BL: jax.Array | None = None,
    *,
    may_see: Callable[[Any, Any], Any] | None = None,
) -> jax.Array:
    """Computes `dlm_jax.model.ops.attention`; each device computes its own rows and heads.

    Pallas's splash kernel never writes the scores to main memory. Scores and sums are float32.
    Queries and keys are padded to multiples of 128.
    """

    def compute(q: jax.Array, k: jax.Array, v: jax.Array, text: Any, own: Any) -> jax.Array:
        num_queries, num_heads, head_size = q.shape[1:]
        q, k, v, text = (padded(x, 1, _LANES) for x in (q, k, v, text))
        own = jnp.ones(q.shape[:2], jnp.int32) if own is None else padded(own, 1, _LANES)
        shape = (q.shape[1], k.shape[1])
        mask = FullMask(shape) if may_see is None else _Places(shape, may_see)
        block_q, block_k = map(tile_of, shape)
        is_long = may_see is None and head_size * k.dtype.itemsize <= _MAX_KEY_BYTES
        block_keys = 2 * block_k if is_long and shape[1] % (2 * block_k) == 0 else block_k
        kernel = make_splash_mha(
            mask=MultiHeadMask([mask] * num_heads),
            block_sizes=BlockSizes(
                block_q=block_q,
                block_kv=block_keys,
                block_kv_compute=block_k,
                block_q_dkv=block_q,
                block_kv_dkv=block_keys,
                block_kv_dkv_compute=block_k,
                use_fused_bwd_kernel=True,
            ),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
        )
        # The kernel does not scale the scores, so the queries are scaled, in float32.
        q = (q.astype(jnp.float32) * head_size**-0.5).astype(q.dtype)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        segments = SegmentIds(q=own, kv=text.astype(jnp.int32))
        y: Any = jax.vmap(kernel)(q, k, v, segments)
        return y.swapaxes(1, 2)[:, :num_queries]

    def on_cores(q: jax.Array, k: jax.Array, v: jax.Array, *texts: Any) -> jax.Array:
        # The cores of a chip split the rows, and in the backward pass nothing else. With an odd
        # number of rows on two cores, half the heads of a row make a row.
        num_rows, num_heads = q.shape[0], q.shape[2]
        if num_cores() == 1 or num_rows % 2 == 0 or num_heads % 2 or k.shape[2] % 2:
            return compute(q, k, v, *texts)

        def halves(x: jax.Array) -> jax.Array:
            x = x.reshape(*x.shape[:2], 2, -1, x.shape[3])
            return jnp.moveaxis(x, 2, 1).reshape(2 * num_rows, x.shape[1], *x.shape[3:])

        twice = (x if x is None else jnp.repeat(x, 2, axis=0) for x in texts)
        y = compute(halves(q), halves(k), halves(v), *twice)
        return jnp.moveaxis(y.reshape(num_rows, 2, *y.shape[1:]), 1, 2).reshape(q.shape)

    given = q_BLHK, k_BMGK, v_BMGK, text_BM, text_BL
    return by_device(on_cores, *given, splits_queries=may_see is None)


def tile_of(num_positions: int) -> int:
    """The largest multiple of `_LANES`, at most `_MAX_BLOCK`, that divides `num_positions`."""
    lanes = num_positions // _LANES
    return _LANES * max(n for n in range(1, _MAX_BLOCK // _LANES + 1) if lanes % n == 0)


class _Places(Mask):
    """The mask that `may_see` defines; only partially masked blocks are materialised."""

    def __init__(self, shape: tuple[int, int], may_see: Callable[[Any, Any], Any]):
        self._shape, self._may_see = shape, may_see

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, index: Any) -> np.ndarray:
        ends = (at.indices(size) for size, at in zip(self._shape, index, strict=True))
        query, key = (np.arange(start, stop) for start, stop, _ in ends)
        return np.asarray(self._may_see(query[:, None], key[None]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Places) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._shape, self._may_see))


def mosaic_window(
    q_BWHK: jax.Array,
    kept_RDGLK: tuple[jax.Array, jax.Array],
    own_BGWK: tuple[jax.Array, jax.Array],
    seen: tuple[jax.Array, jax.Array],
    row_B: jax.Array,
    layer_B: jax.Array,
    group_B: jax.Array,
) -> jax.Array:
    """Computes `dlm_jax.model.kernels.triton.triton_window`, for any number of cached positions.

    Values and outputs have the heads of a position side by side in memory, as projections do.
    """
    num_rows, num_queries, num_heads, size = q_BWHK.shape
    num_groups, num_kept = own_BGWK[0].shape[1], seen[0].shape[3]
    shared = num_heads // num_groups
    queries, keys, groups = _tiles(q_BWHK, num_groups, kept_RDGLK[0], num_kept)
    q = padded(q_BWHK.swapaxes(1, 2), 2, queries)
    q = q.reshape(num_rows, num_groups, shared, -1, size)
    k, v = (padded(x, 2, _SUBLANES) for x in own_BGWK)
    v = v.swapaxes(1, 2).reshape(num_rows, -1, num_groups * size)
    # The heads of a group share the biases of one.
    of_kept, of_own = (x[:, :, :num_queries] for x in seen)
    of_kept, of_own = (padded(x, 2, queries) if x.shape[2] > 1 else x for x in (of_kept, of_own))
    of_kept, of_own = padded(of_kept, 3, keys, HIDDEN), padded(of_own, 3, _SUBLANES, HIDDEN)

    kept = pl.BlockSpec(
        (None, None, groups, keys, size),
        lambda b, g, i, t, row, layer, first: (row[b], layer[b], first[b] // groups + g, t, 0),
    )
    grid = num_rows, num_groups // groups, q.shape[3] // queries, pl.cdiv(num_kept, keys)
    sums = pltpu.VMEM((groups, shared * queries, _LANES), jnp.float32)
    pairs = math.prod(q_BWHK.shape[:3]) * (of_kept.shape[3] + of_own.shape[3])
    read = 2 * grid[2] * k.nbytes * of_kept.shape[3] // k.shape[2]
    moved = 2 * (q_BWHK.nbytes + k.nbytes) + of_kept.nbytes + of_own.nbytes
    y = pl.pallas_call(
        functools.partial(_kernel, num_kept=num_kept),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[
                pl.BlockSpec(
                    (None, groups, shared, queries, size), lambda b, g, i, t, *_: (b, g, 0, i, 0)
                ),
                kept,
                kept,
                pl.BlockSpec((None, groups, k.shape[2], size), lambda b, g, i, t, *_: (b, g, 0, 0)),
                pl.BlockSpec((None, v.shape[1], groups * size), lambda b, g, i, t, *_: (b, 0, g)),
                _bias_block(of_kept, queries, keys),
                _bias_block(of_own, queries, None),
            ],
            out_specs=pl.BlockSpec(
                (None, queries, groups * shared * size), lambda b, g, i, t, *_: (b, i, g)
            ),
            scratch_shapes=[pltpu.VMEM((groups, shared * queries, size), jnp.float32), sums, sums],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, q.shape[3], num_heads * size), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * size, transcendentals=pairs, bytes_accessed=read + moved
        ),
        name="window_attention",
    )(row_B, layer_B, group_B, q, *kept_RDGLK, k, v, of_kept, of_own)
    return y[:, :num_queries].reshape(q_BWHK.shape)


def _bias_block(bias_B1NM: jax.Array, queries: int, keys: int | None) -> pl.BlockSpec:
    """A tile of biases; all queries may share one, and None means all keys."""
    num_queries, num_keys = bias_B1NM.shape[2:]
    return pl.BlockSpec(
        (None, None, min(queries, num_queries), keys or num_keys),
        lambda b, g, i, t, *_: (b, 0, 0 if num_queries == 1 else i, t if keys else 0),
    )


def _tiles(
    q_BWHK: jax.Array, num_groups: int, leaf_RDGLK: jax.Array, num_kept: int
) -> tuple[int, int, int]:
    """Queries of a head, cached keys, and groups of a tile."""
    num_queries, num_heads, size = q_BWHK.shape[1:]
    shared = num_heads // num_groups
    most = max(_SUBLANES, min(_MAX_QUERIES, _MAX_SCORES // num_queries) // shared)
    queries = _tile(num_queries, most, _SUBLANES)
    is_whole = num_kept == leaf_RDGLK.shape[3] <= _MAX_KEYS
    keys = num_kept if is_whole else _tile(num_kept, _MAX_KEYS, _LANES)
    of_group = 2 * keys * size * leaf_RDGLK.dtype.itemsize
    most = max(1, min(_MAX_TOGETHER // (shared * queries), _MAX_BYTES // of_group))
    # Values lie side by side, in whole lanes.
    fitting = [
        n
        for n in range(1, num_groups + 1)
        if num_groups % n == 0 and (n * size % _LANES == 0 or n == num_groups)
    ]
    return queries, keys, max((n for n in fitting if n <= most), default=fitting[0])


def window_fits(
    q_BWHK: jax.Array, leaf_RDGLK: jax.Array, k_BGWK: jax.Array, seen: tuple[jax.Array, jax.Array]
) -> bool:
    """Whether the tiles of `mosaic_window` fit the on-chip memory of one operation."""
    num_groups, num_kept = k_BGWK.shape[1], seen[0].shape[3]
    queries, keys, groups = _tiles(q_BWHK, num_groups, leaf_RDGLK, num_kept)
    num_new, size = k_BGWK.shape[2], pl.cdiv(q_BWHK.shape[3], _LANES) * _LANES
    rows = groups * q_BWHK.shape[2] // num_groups * queries
    shared = rows // groups
    masks = 8 if seen[0].shape[2] == 1 else queries
    # Tiles are read twice: one while another is computed.
    tiles = 2 * 2 * size * (2 * rows + 2 * groups * (keys + num_new))
    tiles += 2 * 4 * masks * (keys + num_new)
    sums, scores = 4 * rows * (size + 2 * _LANES), 4 * 2 * shared * max(keys, num_new)
    return tiles + sums + scores <= _MEMORY


def _kernel(*refs, num_kept):
    _, _, _, q_ref, kept_k_ref, kept_v_ref, k_ref, v_ref, of_kept_ref, of_own_ref, *rest = refs
    y_ref, sum_ref, top_ref, total_ref = rest
    groups, shared, queries, size = q_ref.shape
    tile, keys = pl.program_id(3), kept_k_ref.shape[1]

    def add(group, k_MK, v_MK, bias_NM):
        q_NK = q_ref[group].reshape(shared * queries, size)
        q_NK = (q_NK.astype(jnp.float32) * size**-0.5).astype(q_NK.dtype)
        if shared > 1 and bias_NM.shape[0] > 1:
            bias_NM = jnp.concatenate([bias_NM] * shared)
        scores_NM = _dot(q_NK, k_MK, 1) + bias_NM
        before_N1 = top_ref[group][:, :1]
        top_N1 = jnp.maximum(before_N1, jnp.max(scores_NM, axis=1, keepdims=True))
        weights_NM, fade_N1 = jnp.exp(scores_NM - top_N1), jnp.exp(before_N1 - top_N1)
        total_N1 = total_ref[group][:, :1] * fade_N1 + jnp.sum(weights_NM, axis=1, keepdims=True)
        sum_ref[group] = sum_ref[group] * fade_N1 + _dot(weights_NM.astype(v_MK.dtype), v_MK, 0)
        top_ref[group] = jnp.broadcast_to(top_N1, top_ref.shape[1:])
        total_ref[group] = jnp.broadcast_to(total_N1, total_ref.shape[1:])

    @pl.when(tile == 0)
    def _():
        sum_ref[...], total_ref[...] = jnp.zeros_like(sum_ref), jnp.zeros_like(total_ref)
        top_ref[...] = jnp.full_like(top_ref, HIDDEN)
        for group in range(groups):
            of_group = pl.ds(group * size, size)
            add(group, k_ref[group], v_ref[:, of_group], of_own_ref[...])

    for group in range(groups):
        k_MK, v_MK = kept_k_ref[group], kept_v_ref[group]
        if num_kept % keys:  # positions beyond the cache are undefined
            is_kept_M1 = tile * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0) < num_kept
            k_MK, v_MK = (jnp.where(is_kept_M1, x, jnp.zeros_like(x)) for x in (k_MK, v_MK))
        add(group, k_MK, v_MK, of_kept_ref[...])

    @pl.when(tile == pl.num_programs(3) - 1)
    def _():
        for head in range(groups * shared):
            group, at = head // shared, pl.ds(head % shared * queries, queries)
            y_NK = sum_ref[group, at] / total_ref[group, at][:, :1]
            y_ref[:, head * size : (head + 1) * size] = y_NK.astype(y_ref.dtype)


def _dot(a_NK, b, axis):
    """Float32 product over the last axis of `a_NK` and `axis` of `b`."""
    return jax.lax.dot_general(
        a_NK, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _tile(number: int, most: int, unit: int) -> int:
    """The size of the tiles, a multiple of `unit`, that share `number` with the least padding."""
    count = pl.cdiv(number, most)
    return pl.cdiv(pl.cdiv(number, count), unit) * unit


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def mosaic_rotary(
    x_BLHK: jax.Array,
    scale_K: jax.Array,
    cos_BLK: jax.Array,
    sin_BLK: jax.Array,
    epsilon: float | None,
) -> jax.Array:
    """Computes `dlm_jax.model.ops.rotate_heads`; each device rotates its own positions and heads.

    XLA would store the normalised heads in float32, and the halves of each. The head size is a
    multiple of 128, the angles have the shape ``[1 or B, L, K / 2]`` and no gradient, and an
    `epsilon` of None omits the norm.
    """
    return _rotary_by_device(x_BLHK, scale_K, cos_BLK, sin_BLK, epsilon=epsilon)


def _rotary_forward(x_BLHK, scale_K, cos_BLK, sin_BLK, epsilon):
    given = x_BLHK, scale_K, cos_BLK, sin_BLK
    return mosaic_rotary(*given, epsilon), given


def _rotary_backward(epsilon, given, g_BLHK):
    g_x_BLD, terms_BTHK = _rotary_by_device(*given, g_BLHK, epsilon=epsilon)
    g_scale_K = jnp.sum(terms_BTHK, axis=(0, 1, 2)).astype(given[1].dtype)
    return g_x_BLD.reshape(g_BLHK.shape), g_scale_K, *map(jnp.zeros_like, given[2:])


mosaic_rotary.defvjp(_rotary_forward, _rotary_backward)


def _rotary_by_device(x_BLHK, scale_K, cos_BLK, sin_BLK, *g_BLHK, epsilon):
    # Without the barrier, the TPU compiler would split the heads in a projection, and copy them.
    x_BLD = jax.lax.optimization_barrier(x_BLHK.reshape(*x_BLHK.shape[:2], -1))
    compute, mesh = functools.partial(_rotary, epsilon=epsilon), mesh_in_use()
    given = x_BLD, scale_K, cos_BLK, sin_BLK, *g_BLHK
    if mesh is None:
        return compute(*given)
    rows, positions, heads, _ = fitting(PLACES["queries"], x_BLHK.shape, mesh)
    of_heads = P(rows, positions, heads)
    of_angles = P(rows if cos_BLK.shape[0] > 1 else None, positions)
    specs = of_heads, P(), of_angles, of_angles, *[of_heads] * len(g_BLHK)
    return jax.shard_map(compute, in_specs=specs, out_specs=of_heads, check_vma=False)(*given)


def _rotary(
    x_BLD: jax.Array,
    scale_K: jax.Array,
    cos_BLK: jax.Array,
    sin_BLK: jax.Array,
    *g_BLHK: jax.Array,
    epsilon: float | None,
) -> Any:
    """The rotated heads, each stored apart, or with their gradient the gradient by `x_BLD`, and the
    terms ``[B, T, H, K]`` of that by `scale_K`. One step computes a tile of positions of all heads.
    """
    num_rows, num_positions, size = *x_BLD.shape[:2], 2 * cos_BLK.shape[2]
    num_heads, is_shared = x_BLD.shape[2] // size, cos_BLK.shape[0] == 1
    most = _MAX_ELEMENTS // (num_heads * size) // _SUBLANES * _SUBLANES
    positions = min(num_positions, max(_SUBLANES, most))
    grid = num_rows, pl.cdiv(num_positions, positions)
    given = (
        x_BLD,
        scale_K[None],
        jnp.concatenate([cos_BLK, cos_BLK], axis=-1),
        jnp.concatenate([-sin_BLK, sin_BLK], axis=-1),
        *(x.swapaxes(1, 2) for x in g_BLHK),
    )
    flat = pl.BlockSpec((None, positions, num_heads * size), lambda b, i: (b, i, 0))
    heads = pl.BlockSpec((None, num_heads, positions, size), lambda b, i: (b, 0, i, 0))
    table = pl.BlockSpec((None, positions, size), lambda b, i: (0 if is_shared else b, i, 0))
    if g_BLHK:
        kernel = functools.partial(_rotary_gradients_kernel, num_positions=num_positions)
        terms = pl.BlockSpec((None, None, num_heads, size), lambda b, i: (b, i, 0, 0))
        outputs = (flat, x_BLD.shape, x_BLD.dtype), (terms, (*grid, num_heads, size), jnp.float32)
    else:
        kernel = _rotary_kernel
        outputs = ((heads, (num_rows, num_heads, num_positions, size), x_BLD.dtype),)
    y = pl.pallas_call(
        functools.partial(kernel, epsilon=epsilon),
        grid=grid,
        in_specs=[
            flat,
            pl.BlockSpec((1, size), lambda b, i: (0, 0)),
            table,
            table,
            *[heads] * len(g_BLHK),
        ],
        out_specs=[spec for spec, *_ in outputs],
        out_shape=[jax.ShapeDtypeStruct(*of_output) for _, *of_output in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=sum(x.nbytes for x in (*given, x_BLD))
        ),
        name="rotary_gradients" if g_BLHK else "rotary",
    )(*given)
    return y if g_BLHK else y[0].swapaxes(1, 2)


def _rotary_kernel(x_ref, scale_ref, cos_ref, sin_ref, y_ref, *, epsilon):
    size = cos_ref.shape[1]
    for head in range(y_ref.shape[0]):
        x_NK = x_ref[:, pl.ds(head * size, size)].astype(jnp.float32)
        if epsilon is not None:
            x_NK = x_NK * _per_root(x_NK, epsilon) * scale_ref[...]
        y_NK = x_NK * cos_ref[...] + pltpu.roll(x_NK, size // 2, 1) * sin_ref[...]
        y_ref[head] = y_NK.astype(y_ref.dtype)


def _rotary_gradients_kernel(
    x_ref, scale_ref, cos_ref, sin_ref, g_ref, g_x_ref, terms_ref, *, epsilon, num_positions
):
    heads, positions, size = g_ref.shape
    for head in range(heads):
        at, g_NK = pl.ds(head * size, size), g_ref[head].astype(jnp.float32)
        g_NK = g_NK * cos_ref[...] + pltpu.roll(g_NK * sin_ref[...], size // 2, 1)
        if epsilon is not None:
            x_NK = x_ref[:, at].astype(jnp.float32)
            per_root_N1 = _per_root(x_NK, epsilon)
            unit_NK = x_NK * per_root_N1
            terms_NK = g_NK * unit_NK
            if num_positions % positions:  # positions beyond the row are undefined
                place_N1 = jax.lax.broadcasted_iota(jnp.int32, (positions, 1), 0)
                is_own_N1 = pl.program_id(1) * positions + place_N1 < num_positions
                terms_NK = jnp.where(is_own_N1, terms_NK, 0.0)
            terms_ref[pl.ds(head, 1)] = jnp.sum(terms_NK, axis=0, keepdims=True)
            g_NK = g_NK * scale_ref[...]
            mean_N1 = jnp.mean(g_NK * unit_NK, axis=1, keepdims=True)
            g_NK = per_root_N1 * (g_NK - unit_NK * mean_N1)
        g_x_ref[:, at] = g_NK.astype(g_x_ref.dtype)
    if epsilon is None:
        terms_ref[...] = jnp.zeros_like(terms_ref)


def _per_root(x_NK, epsilon):
    return jax.lax.rsqrt(jnp.mean(jnp.square(x_NK), axis=1, keepdims=True) + epsilon)
