"""Attention for GPUs in tiles: with masks, and of windows beside a cache.

cuDNN has no kernel for block-causal and two-stream masks, of which only tiles with a visible pair
are computed, and none that reads the cache in place. These kernels never write the scores to main
memory. They follow Dao 2023, FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dlm_jax.model.kernels import HIDDEN, SAVED, by_device, grouped, padded, ungrouped

TILE = 64
"""Number of queries and of keys in a tile."""
_LEAST_TILE = 16
_LOG2_E = math.log2(math.e)

MaySee = Callable[[Any, Any], Any]


def triton_attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    text_BM: jax.Array,
    text_BL: jax.Array | None = None,
    *,
    may_see: MaySee,
) -> jax.Array:
    """Computes `dlm_jax.model.ops.attention`; each device computes its own rows and heads.

    Scores and sums are float32. Queries and keys are padded to multiples of `TILE`.
    """

    def of_rows(*given: Any) -> jax.Array:
        parts: list[Any] = [x if x is None else padded(x, 1, TILE) for x in given]
        q, k, v, text, own = parts
        y: jax.Array = _attend(q, k, v, text.astype(jnp.int32), own, may_see)
        return y[:, : given[0].shape[1]]

    return by_device(of_rows, q_BLHK, k_BMGK, v_BMGK, text_BM, text_BL)


@functools.lru_cache(maxsize=64)
def visible_tiles(num_queries: int, num_keys: int, may_see: MaySee) -> np.ndarray:
    """True at the tiles that contain a visible pair, ``[queries / TILE, keys / TILE]``."""
    key_M = np.arange(num_keys)
    rows = []
    for begin in range(0, num_queries, TILE):
        is_seen_NM = np.asarray(may_see(np.arange(begin, begin + TILE)[:, None], key_M[None]))
        rows.append(is_seen_NM.reshape(TILE, -1, TILE).any(axis=(0, 2)))
    return np.stack(rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, text, own, may_see):
    return _attend_forward(q, k, v, text, own, may_see)[0]


def _attend_forward(q, k, v, text, own, may_see):
    num_rows, num_queries, num_heads, _ = q.shape
    shared = num_heads // k.shape[2]
    lse = jax.ShapeDtypeStruct((num_rows, num_heads, num_queries), jnp.float32)
    tiles = _listed(visible_tiles(num_queries, k.shape[1], may_see))
    given = *tiles, _tile(q), _whole(k, shared), _whole(v, shared), _row(text), _row(own, TILE)
    y, lse = _call(_forward_kernel, may_see, given, (_tile(q), _numbers(lse)))
    y, lse = checkpoint_name(y, SAVED), checkpoint_name(lse, SAVED)
    return y, (q, k, v, text, own, y, lse)


def _attend_backward(may_see, residuals, g):
    q, k, v, text, own, y, lse = residuals
    num_heads, shared, length = q.shape[2], q.shape[2] // k.shape[2], q.shape[1]
    # The mean of the gradients of a query's scores.
    mean = jnp.einsum("blhk,blhk->bhl", y.astype(jnp.float32), g.astype(jnp.float32))
    is_visible = visible_tiles(length, k.shape[1], may_see)
    given = *_listed(is_visible), _tile(q), _whole(k, shared), _whole(v, shared)
    given = *given, _row(text), _row(own, TILE), _tile(g), _numbers(lse), _numbers(mean)
    (g_q,) = _call(_queries_kernel, may_see, given, (_tile(q),))
    of_heads = (*k.shape[:2], num_heads, k.shape[3])
    per_head = jax.ShapeDtypeStruct(of_heads, jnp.float32 if shared > 1 else k.dtype)
    given = *_listed(is_visible.T), _whole(q), _tile(k, shared), _tile(v, shared)
    given = *given, _row(text, TILE), _row(own), _whole(g)
    given = *given, _numbers(lse, length), _numbers(mean, length)
    g_k, g_v = _call(_keys_kernel, may_see, given, (_tile(per_head), _tile(per_head)))
    if shared > 1:
        g_k, g_v = (x.reshape(*k.shape[:3], shared, -1).sum(axis=3) for x in (g_k, g_v))
    return g_q, g_k.astype(k.dtype), g_v.astype(v.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)

Operand = tuple[pl.BlockSpec | None, Any]
"""An array, or the shape of an output, and the block of it that one program of the grid reads."""


def _call(
    kernel: Any, may_see: MaySee, given: Sequence[Operand], outputs: Sequence[Operand]
) -> Any:
    """The kernel on a grid of the tiles, rows and heads of its first output, ``[B, L, H, K]``."""
    num_rows, num_positions, num_heads, _ = outputs[0][1].shape
    return pl.pallas_call(
        functools.partial(kernel, may_see=may_see),
        grid=(num_positions // TILE, num_rows, num_heads),
        in_specs=[spec for spec, _ in given],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="masked_attention" + kernel.__name__.removesuffix("_kernel"),
    )(*(x for _, x in given))


def _listed(is_visible: np.ndarray) -> tuple[Operand, Operand]:
    """The visible tiles of each row of tiles, in order, and their number."""
    count = is_visible.sum(axis=1)
    order = np.argsort(~is_visible, axis=1, kind="stable")[:, : count.max()]
    return (
        (pl.BlockSpec((None, order.shape[1]), lambda i, b, h: (i, 0)), jnp.asarray(order, "int32")),
        (pl.BlockSpec((1,), lambda i, b, h: (i,)), jnp.asarray(count, "int32")),
    )


def _tile(x: Any, shared: int = 1) -> Operand:
    """A tile of one head of ``[B, L, H / shared, K]``."""
    size = x.shape[3]
    return pl.BlockSpec((None, TILE, None, size), lambda i, b, h: (b, i, h // shared, 0)), x


def _whole(x: Any, shared: int = 1) -> Operand:
    """All positions of one head of ``[B, L, H / shared, K]``."""
    shape = (None, x.shape[1], None, x.shape[3])
    return pl.BlockSpec(shape, lambda i, b, h: (b, 0, h // shared, 0)), x


def _row(x: Any, size: int | None = None) -> Operand:
    """All positions, or a tile, of ``[B, L]``, or no operand."""
    if x is None:
        return None, None
    return pl.BlockSpec((None, size or x.shape[1]), lambda i, b, h: (b, i if size else 0)), x


def _numbers(x: Any, whole: int | None = None) -> Operand:
    """A tile, or all `whole` positions, of one head of ``[B, H, L]``."""
    return pl.BlockSpec((None, None, whole or TILE), lambda i, b, h: (b, h, 0 if whole else i)), x


def _positions(tile: Any) -> jax.Array:
    return tile * TILE + jnp.arange(TILE, dtype=jnp.int32)


def _dot(a_NK: jax.Array, b_KM: jax.Array) -> jax.Array:
    """Product of two tiles, float32."""
    return jnp.dot(a_NK, b_KM, preferred_element_type=jnp.float32)


def _scores(
    q_NK: jax.Array,
    k_MK: jax.Array,
    text_M: jax.Array,
    own_N: jax.Array | None,
    query_N: jax.Array,
    key_M: jax.Array,
    may_see: MaySee,
) -> jax.Array:
    """Scaled scores ``[N, M]`` of a tile in units of log 2, float32."""
    scores_NM = _dot(q_NK, k_MK.T) * (_LOG2_E * q_NK.shape[1] ** -0.5)
    is_seen_NM = (text_M > 0)[None] if own_N is None else own_N[:, None] == text_M[None]
    is_seen_NM = may_see(query_N[:, None], key_M[None]) & is_seen_NM
    return jnp.where(is_seen_NM, scores_NM, HIDDEN)


def _read(ref, at):
    return None if ref is None else ref[at]


def _if_seen(text_M, own_N, compute, carry):
    """``compute(carry)``, unless the queries and the keys have no text in common."""
    if own_N is None:
        return compute(carry)
    # The numbers of texts ascend.
    is_seen = (jnp.min(text_M) <= jnp.max(own_N)) & (jnp.max(text_M) >= jnp.min(own_N))
    return jax.lax.cond(is_seen, compute, lambda carry: carry, carry)


def _added(carry, scores_NM, v_MK):
    """The sums of a softmax with a further tile: outputs, largest scores, and total weights."""
    y_NK, top_N, total_N = carry
    new_N = jnp.maximum(top_N, jnp.max(scores_NM, axis=1))
    weights_NM, fade_N = jnp.exp2(scores_NM - new_N[:, None]), jnp.exp2(top_N - new_N)
    y_NK = y_NK * fade_N[:, None] + _dot(weights_NM.astype(v_MK.dtype), v_MK)
    return y_NK, new_N, total_N * fade_N + jnp.sum(weights_NM, axis=1)


def _forward_kernel(
    order_ref, count_ref, q_ref, k_ref, v_ref, text_ref, own_ref, y_ref, lse_ref, *, may_see
):
    q_NK, own_N, query_N = q_ref[...], _read(own_ref, ...), _positions(pl.program_id(0))

    def of_tile(n, carry):
        tile = order_ref[n]
        at = pl.ds(tile * TILE, TILE)
        text_M, places = text_ref[at], (query_N, _positions(tile))

        def add(carry):
            scores_NM = _scores(q_NK, k_ref[at, :], text_M, own_N, *places, may_see)
            return _added(carry, scores_NM, v_ref[at, :])

        return _if_seen(text_M, own_N, add, carry)

    nothing = jnp.zeros(q_NK.shape, jnp.float32), jnp.full(TILE, HIDDEN), jnp.zeros(TILE)
    y_NK, top_N, total_N = jax.lax.fori_loop(0, count_ref[0], of_tile, nothing)
    y_ref[...] = (y_NK / total_N[:, None]).astype(y_ref.dtype)
    lse_ref[...] = top_N + jnp.log2(total_N)


def _gradients(scores_NM, g_NK, v_MK, lse_N, mean_N):
    """The weights of a tile, and the gradients of its scaled scores."""
    weights_NM = jnp.exp2(scores_NM - lse_N[:, None])
    return weights_NM, weights_NM * (_dot(g_NK, v_MK.T) - mean_N[:, None])


def _queries_kernel(*refs, may_see):
    order_ref, count_ref, q_ref, k_ref, v_ref, text_ref, own_ref, *rest = refs
    g_ref, lse_ref, mean_ref, g_q_ref = rest
    q_NK, own_N, query_N = q_ref[...], _read(own_ref, ...), _positions(pl.program_id(0))
    g_NK, lse_N, mean_N = g_ref[...], lse_ref[...], mean_ref[...]

    def of_tile(n, g_q_NK):
        tile = order_ref[n]
        at = pl.ds(tile * TILE, TILE)
        text_M, places = text_ref[at], (query_N, _positions(tile))

        def add(g_q_NK):
            k_MK = k_ref[at, :]
            scores_NM = _scores(q_NK, k_MK, text_M, own_N, *places, may_see)
            _, g_NM = _gradients(scores_NM, g_NK, v_ref[at, :], lse_N, mean_N)
            return g_q_NK + _dot(g_NM.astype(k_MK.dtype), k_MK)

        return _if_seen(text_M, own_N, add, g_q_NK)

    nothing = jnp.zeros(q_NK.shape, jnp.float32)
    g_q_NK = jax.lax.fori_loop(0, count_ref[0], of_tile, nothing)
    g_q_ref[...] = (g_q_NK * q_NK.shape[1] ** -0.5).astype(g_q_ref.dtype)


def _keys_kernel(*refs, may_see):
    order_ref, count_ref, q_ref, k_ref, v_ref, text_ref, own_ref, *rest = refs
    g_ref, lse_ref, mean_ref, g_k_ref, g_v_ref = rest
    k_MK, v_MK, text_M = k_ref[...], v_ref[...], text_ref[...]
    key_M = _positions(pl.program_id(0))

    def of_tile(n, carry):
        tile = order_ref[n]
        at = pl.ds(tile * TILE, TILE)
        own_N, places = _read(own_ref, at), (_positions(tile), key_M)

        def add(carry):
            g_k_MK, g_v_MK = carry
            q_NK, g_NK = q_ref[at, :], g_ref[at, :]
            scores_NM = _scores(q_NK, k_MK, text_M, own_N, *places, may_see)
            weights_NM, g_NM = _gradients(scores_NM, g_NK, v_MK, lse_ref[at], mean_ref[at])
            g_k_MK += _dot(g_NM.astype(q_NK.dtype).T, q_NK)
            return g_k_MK, g_v_MK + _dot(weights_NM.astype(g_NK.dtype).T, g_NK)

        return _if_seen(text_M, own_N, add, carry)

    nothing = jnp.zeros(k_MK.shape, jnp.float32)
    g_k_MK, g_v_MK = jax.lax.fori_loop(0, count_ref[0], of_tile, (nothing, nothing))
    g_k_ref[...] = (g_k_MK * k_MK.shape[1] ** -0.5).astype(g_k_ref.dtype)
    g_v_ref[...] = g_v_MK.astype(g_v_ref.dtype)


def triton_window(
    q_BWHK: jax.Array,
    kept_RDGLK: tuple[jax.Array, jax.Array],
    own_BGWK: tuple[jax.Array, jax.Array],
    seen: tuple[jax.Array, jax.Array],
    row_B: jax.Array,
    layer_B: jax.Array,
    group_B: jax.Array,
) -> jax.Array:
    """Attention output ``[B, W, H, K]`` of a window over cached and new keys and values.

    The kernel reads one layer of the cache in place and computes all tiles. It has no gradient. At
    least `TILE` cached positions, the last size of ``seen[0]``, are required.

    Args:
      q_BWHK: queries.
      kept_RDGLK: cached keys and values of all layers.
      own_BGWK: new keys and values.
      seen: biases of the scores of cached and new keys: 0, or the large negative number that hides
        a key (`dlm_jax.model.trunk.Trunk.attend_beside`).
      row_B: row of the cache.
      layer_B: layer of the cache, the same for all rows.
      group_B: first group of heads in the cache, the same for all rows.
    """
    q_BGNK = grouped(q_BWHK, own_BGWK[0].shape[1]).astype(own_BGWK[0].dtype)
    num_rows, num_groups, num_queries, size = q_BGNK.shape
    queries = min(TILE, max(_LEAST_TILE, 1 << (num_queries - 1).bit_length()))
    news = min(TILE, max(_LEAST_TILE, 1 << (own_BGWK[0].shape[2] - 1).bit_length()))
    q = padded(q_BGNK, 2, queries)
    k, v = (padded(x, 2, news) for x in own_BGWK)
    of_kept, of_own = (padded(x, 2, queries) if x.shape[2] > 1 else x for x in seen)
    of_own = padded(of_own, 3, news, HIDDEN)

    def bias(x: jax.Array) -> pl.BlockSpec:
        is_one = x.shape[2] == 1
        shape = (None, None, None if is_one else queries, x.shape[3])
        return pl.BlockSpec(shape, lambda b, g, i: (b, 0, 0 if is_one else i, 0))

    number = pl.BlockSpec((1,), lambda b, g, i: (b,))
    tile = pl.BlockSpec((None, None, queries, size), lambda b, g, i: (b, g, i, 0))
    new = pl.BlockSpec((None, None, k.shape[2], size), lambda b, g, i: (b, g, 0, 0))
    y: jax.Array = pl.pallas_call(
        functools.partial(_window_kernel, news=news),
        grid=(num_rows, num_groups, q.shape[2] // queries),
        in_specs=[number] * 3
        + [tile, pl.no_block_spec, pl.no_block_spec, new, new, bias(of_kept), bias(of_own)],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="window_attention",
    )(row_B, layer_B, group_B, q, *kept_RDGLK, k, v, of_kept, of_own)
    return ungrouped(y[:, :, :num_queries], q_BWHK)


def _window_kernel(*refs, news):
    row_ref, layer_ref, group_ref, q_ref, kept_k_ref, kept_v_ref, *rest = refs
    k_ref, v_ref, of_kept_ref, of_own_ref, y_ref = rest
    row, layer, group = row_ref[0], layer_ref[0], group_ref[0] + pl.program_id(1)
    q_NK, num_kept = q_ref[...], of_kept_ref.shape[-1]

    def add(carry, k_MK, v_MK, bias_NM):
        return _added(carry, _dot(q_NK, k_MK.T) * _LOG2_E + bias_NM, v_MK)

    def of_kept(n, carry):
        # The last tile overlaps the tile before it.
        begin = jnp.minimum(n * TILE, num_kept - TILE)
        at = pl.ds(begin, TILE)
        is_new_M = begin + jnp.arange(TILE, dtype=jnp.int32) >= n * TILE
        bias_NM = jnp.where(is_new_M[None], _bias(of_kept_ref, at), HIDDEN)
        where = row, layer, group, at
        return add(carry, kept_k_ref[where], kept_v_ref[where], bias_NM)

    def of_own(n, carry):
        at = pl.ds(n * news, news)
        return add(carry, k_ref[at, :], v_ref[at, :], _bias(of_own_ref, at))

    queries = q_NK.shape[0]
    carry = jnp.zeros(q_NK.shape, jnp.float32), jnp.full(queries, HIDDEN), jnp.zeros(queries)
    carry = jax.lax.fori_loop(0, pl.cdiv(num_kept, TILE), of_kept, carry)
    y_NK, _, total_N = jax.lax.fori_loop(0, k_ref.shape[0] // news, of_own, carry)
    y_ref[...] = (y_NK / total_N[:, None]).astype(y_ref.dtype)


def _bias(ref, at):
    """The bias of a tile of keys, ``[N or 1, M]``."""
    return ref[:, at] if len(ref.shape) == 2 else ref[at][None]
