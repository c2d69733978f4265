"""The operations of the models, in the form that is fastest on the target devices.

No other file of the models asks for the platform (`dlm_jax.devices`). The forms of an operation
differ only by the order of their sums. Pallas takes a third of a second to import, so its kernels
are imported where they are called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from dlm_jax.devices import is_on_one_cpu, mesh_in_use, platform
from dlm_jax.distributed.partitions import ROWS, fitting, on_own_rows
from dlm_jax.model.kernels import SAVED, cpu, grouped, padded, ungrouped
from dlm_jax.types import live_positions, text_starts

MaySee = Callable[[Any, Any], Any]
"""Maps ``(query positions, key positions)`` to True where a query may attend to a key.

The callable must be static: a module-level function or a frozen dataclass with ``__call__``. It
must accept broadcastable NumPy and JAX integer arrays, and every query must attend to at least one
key. Row lengths are applied separately.
"""

# Below this length, XLA's fusions are as fast as the kernel, which has blocks of at least 128
# positions.
_LEAST_FOR_SPLASH = 256
# Queries whose scores the formula computes at a time.
_MOST_QUERIES = 1024
# Shorter rows have few scores.
_LEAST_FOR_TRITON = 128
# Triton requires powers of two.
_TRITON_SIZES = (16, 32, 64, 128)
_LANES = 128
# Fewer positions do not fill a tile of the kernel of rotations.
_LEAST_FOR_ROTARY = 8
# Layers that are unrolled in a training step and in a decoding step; each takes a quarter of a
# second to compile.
_LONGEST_UNROLLED, _LONGEST_UNROLLED_CACHE = 16, 48
_FEW_ROWS = 8


def causal(query: Any, key: Any) -> Any:
    """A position attends to itself and all earlier positions."""
    return key <= query


def unmasked(query: Any, key: Any) -> Any:
    """A position attends to all positions."""
    return (query >= 0) & (key >= 0)


def linear(x: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """``x @ kernel``, shape ``[..., F]``.

    On CPUs, the leading axes are merged first, so that the kernel's gradient is one matrix product
    that reads both operands in place, 1.4 times as fast.
    """
    if platform() != "cpu" or x.ndim < 3:
        return x @ kernel_DF
    y_NF = x.reshape(-1, x.shape[-1]) @ kernel_DF
    return y_NF.reshape(*x.shape[:-1], kernel_DF.shape[-1])


def linear_by_rows(x_ND: jax.Array, table_VD: jax.Array) -> jax.Array:
    """``x @ table.T``, shape ``[N, V]``."""
    if platform() == "cpu" and (size := cpu.block_of(x_ND, table_VD)):
        return cpu.linear_by_rows(x_ND, table_VD, size)
    return linear(x_ND, table_VD.T)


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the last axis.

    The norm is computed in float32 and returned in the dtype of `x`. `scale` has the size of the
    last axis, or the rank of `x` with size 1 along all other axes.
    """
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
    form = cpu.rms_norm if platform() == "cpu" else cpu.rms_norm_formula
    y: jax.Array = form(x.astype(jnp.float32), scale, epsilon)
    return y.astype(x.dtype)


def scan_layers(
    layer: Callable[[jax.Array, Any, Any], jax.Array], x: jax.Array, layers: Any, context: Any
) -> jax.Array:
    """``x = layer(x, parameters, context)`` for each of the stacked parameters, in one
    `jax.lax.scan`. `layer` must not close over traced arrays.

    On CPUs, the loop is unrolled if it is differentiated and short, because a scan copies the
    values for the backward pass into a stack and back.
    """
    with jax.named_scope("layers"):
        if platform() == "cpu" and jax.tree.leaves(layers)[0].shape[0] <= _LONGEST_UNROLLED:
            return cpu.unrolled_scan(layer, x, layers, context)
        return jax.lax.scan(lambda x, params: (layer(x, params, context), None), x, layers)[0]


def unrolls_cache(num_layers: int) -> bool:
    """Whether each layer has its own cache, and the layers of a decoding step are unrolled.

    On CPUs, a scan would copy the parameters and the cache of each layer at every step: with 6
    layers of width 256, a causal model would take 5.3 times as long per token of one row. On
    accelerators, a loop compiles one layer, and the kernels read the cache of all layers in place.
    """
    return platform() == "cpu" and num_layers <= _LONGEST_UNROLLED_CACHE


def slices(stacked: Any) -> list[Any]:
    """The parameters of each layer of a stack.

    Arrays on one CPU device are not copied: the layers are views of their memory.
    """

    def of_leaf(leaf: jax.Array) -> list[jax.Array]:
        if not is_on_one_cpu(leaf):
            return [leaf[at] for at in range(leaf.shape[0])]
        place = leaf.sharding if leaf.committed else None
        return [jax.device_put(one, place) for one in np.asarray(leaf)]

    leaves, tree = jax.tree.flatten(stacked)
    return [jax.tree.unflatten(tree, layer) for layer in zip(*map(of_leaf, leaves), strict=True)]


def write_rows(
    old: jax.Array, new: jax.Array, *, axis: int, row_N: jax.Array | None, place_N: jax.Array
) -> jax.Array:
    """`old` with `new` at the rows `row_N` (None: all rows) and the positions `place_N` of `axis`.

    A few rows are written one by one, in place, and many by a scatter, which would copy whole
    windows on TPUs.
    """
    num_rows = new.shape[0]
    if row_N is None and (num_rows > _FEW_ROWS or platform() != "cpu"):
        of_row = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
        return jax.vmap(of_row)(old, new, place_N)

    def write(n: int | jax.Array, old: jax.Array) -> jax.Array:
        start: list[Any] = [jnp.zeros((), jnp.int32)] * old.ndim
        start[0], start[axis] = n if row_N is None else row_N[n], place_N[n]
        return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(new, n, 1), start)

    if num_rows > _FEW_ROWS and platform() == "tpu":
        return jax.lax.fori_loop(0, num_rows, write, old)
    if num_rows > _FEW_ROWS:
        place_NW = place_N[:, None] + jnp.arange(new.shape[axis])[None]
        assert row_N is not None
        where = (row_N[:, None], *[slice(None)] * (axis - 1), place_NW)
        return old.at[where].set(jnp.moveaxis(new, axis, 1))
    for n in range(num_rows):
        old = write(n, old)
    return old


def attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    length_B: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """Attention output ``[B, L, H, K]``; each query attends to the live keys that `may_see` allows.

    TPUs use the splash kernel. GPUs use cuDNN in half precision, or a Triton kernel if cuDNN has no
    kernel for `may_see`. All other cases use a formula. Consecutive groups of heads share the ``G``
    key/value heads. The keys of several streams of the same rows can be concatenated; `may_see`
    then distinguishes the streams. With the lengths of texts, ``[B, T]``, a query attends only to
    its own text. Outputs at positions beyond the length are finite.
    """
    num_positions, size, target = q_BLHK.shape[1], q_BLHK.shape[-1], platform()
    text_BL, is_packed = None, length_B.ndim == 2
    if is_packed:
        # The positions behind the last text attend to each other.
        text_BL = text_BM = 1 + text_starts(length_B, num_positions)
    else:
        # A row of length 0 attends to its first key, so that the result is finite.
        is_live_BL = live_positions(jnp.maximum(length_B, 1), num_positions)
        text_BM = jnp.tile(is_live_BL, (1, k_BMGK.shape[1] // num_positions))
    given = (q_BLHK, k_BMGK, v_BMGK, text_BM, text_BL)
    if target == "tpu" and num_positions >= _LEAST_FOR_SPLASH:
        from dlm_jax.model.kernels.tpu import splash_attention

        # The kernel already names its output; naming it again would store it twice.
        return splash_attention(*given, may_see=may_see)
    is_half_on_gpu = target == "gpu" and q_BLHK.dtype in (jnp.bfloat16, jnp.float16)
    if is_half_on_gpu and size % 8 == 0 and may_see in (None, causal) and not is_packed:
        y_BLHK = cudnn_attention(q_BLHK, k_BMGK, v_BMGK, length_B, may_see is not None)
        return checkpoint_name(y_BLHK, SAVED)
    is_long = num_positions >= _LEAST_FOR_TRITON and not _splits_positions()
    is_masked = may_see is not None or is_packed
    if is_half_on_gpu and is_masked and is_long and size in _TRITON_SIZES:
        from dlm_jax.model.kernels.triton import triton_attention

        return triton_attention(*given, may_see=may_see or unmasked)
    return formula_attention(*given, may_see=may_see)


def _splits_positions() -> bool:
    mesh = mesh_in_use()
    return mesh is not None and mesh.shape.get("context", 1) > 1


def cudnn_attention(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, length_B: jax.Array, is_causal: bool
) -> jax.Array:
    """Attention with cuDNN's fused kernel, for half precision and head sizes divisible by 8."""
    visible_B = jnp.maximum(length_B, 1)
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        query_seq_lengths=jnp.full_like(visible_B, q_BLHK.shape[1]),
        key_value_seq_lengths=visible_B,
        is_causal=is_causal,
        implementation="cudnn",
    )


def formula_attention(
    q_BNHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    text_BM: jax.Array,
    text_BN: jax.Array | None = None,
    *,
    may_see: MaySee | None,
) -> jax.Array:
    """`attention` without a kernel; `may_see` may also return an array with an axis of rows.

    `text_BM` is True at live keys, or has the number of each key's text, and `text_BN` that of each
    query's text. The scores of at most `_MOST_QUERIES` positions exist at a time.
    """

    def attend(q_BNHK: jax.Array, query_N: jax.Array, text_BN: jax.Array | None) -> jax.Array:
        is_seen_BNM = text_BM[:, None]
        if text_BN is not None:
            is_seen_BNM = text_BN[:, :, None] == is_seen_BNM
        if may_see is not None:
            is_seen = may_see(query_N[:, None], jnp.arange(k_BMGK.shape[1])[None])
            is_seen_BNM = is_seen_BNM & (is_seen[None] if is_seen.ndim == 2 else is_seen)
        if platform() == "cpu":
            return cpu.attention_where(q_BNHK, k_BMGK, v_BMGK, is_seen_BNM)
        return jax.nn.dot_product_attention(q_BNHK, k_BMGK, v_BMGK, mask=is_seen_BNM[:, None])

    num_queries = q_BNHK.shape[1]
    if num_queries <= _MOST_QUERIES or _splits_positions():
        return checkpoint_name(attend(q_BNHK, jnp.arange(num_queries), text_BN), SAVED)

    def cut(x_BN: jax.Array) -> jax.Array:
        x_BN = padded(x_BN, 1, _MOST_QUERIES)
        return x_BN.reshape(x_BN.shape[0], -1, _MOST_QUERIES, *x_BN.shape[2:]).swapaxes(0, 1)

    blocks = cut(q_BNHK)
    places = jnp.arange(blocks.shape[0] * _MOST_QUERIES).reshape(-1, _MOST_QUERIES)
    given = blocks, places, None if text_BN is None else cut(text_BN)
    blocks = jax.lax.map(lambda given: attend(*given), given).swapaxes(0, 1)
    y_BNHK = blocks.reshape(q_BNHK.shape[0], -1, *q_BNHK.shape[2:])[:, :num_queries]
    return checkpoint_name(y_BNHK, SAVED)


def split_heads(x_BLD: jax.Array, head_size: int) -> jax.Array:
    """Projections ``[B, L, H, K]``.

    For a short window, the TPU compiler would produce the heads in the projection, whose kernel it
    would copy at each step.
    """
    if platform() == "tpu" and x_BLD.shape[1] < _LEAST_FOR_SPLASH:
        x_BLD = jax.lax.optimization_barrier(x_BLD)
    return x_BLD.reshape(*x_BLD.shape[:2], -1, head_size)


def rotate_heads(
    x_BLHK: jax.Array,
    cos_LK: jax.Array,
    sin_LK: jax.Array,
    scale_K: jax.Array | None = None,
    epsilon: float = 0.0,
) -> jax.Array:
    """Queries or keys, normalised (RMSNorm) if `scale_K` is given, then rotated by position.

    Dimensions without an angle are not rotated. In bfloat16, TPUs use a kernel.
    """
    size, is_half = 2 * cos_LK.shape[-1], x_BLHK.dtype == jnp.bfloat16
    is_whole, is_long = size == x_BLHK.shape[-1], x_BLHK.shape[1] >= _LEAST_FOR_ROTARY
    if platform() == "tpu" and is_half and is_whole and is_long and size % _LANES == 0:
        from dlm_jax.model.kernels.tpu import mosaic_rotary

        angles = (x if x.ndim == 3 else x[None] for x in (cos_LK, sin_LK))
        if scale_K is None:
            return mosaic_rotary(x_BLHK, jnp.ones(size), *angles, None)
        return mosaic_rotary(x_BLHK, scale_K, *angles, epsilon)
    if scale_K is not None:
        x_BLHK = rms_norm(x_BLHK, scale_K, epsilon=epsilon)
    if is_whole:
        return _rotate(x_BLHK, cos_LK, sin_LK)
    head, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    return jnp.concatenate([_rotate(head, cos_LK, sin_LK), rest], axis=-1)


def _rotate(x_BLHK: jax.Array, cos_LK: jax.Array, sin_LK: jax.Array) -> jax.Array:
    """Rotated heads, computed in float32 and returned in the input's dtype.

    Dimensions ``i`` and ``i + K/2`` form a pair (half rotation). The angles are ``[L, K/2]``, or
    ``[B, L, K/2]`` if positions differ between rows. On CPUs, the halves are swapped by reversing
    an axis of size 2: a concatenation, fused into a loop, would add a branch per element.
    """
    cos, sin = ((x if x.ndim == 3 else x[None])[:, :, None, :] for x in (cos_LK, sin_LK))
    x = x_BLHK.astype(jnp.float32)
    if platform() != "cpu":
        first, second = jnp.split(x, 2, axis=-1)
        halves = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(halves, axis=-1).astype(x_BLHK.dtype)
    pairs = x.reshape(*x.shape[:-1], 2, -1)
    swapped = jax.lax.rev(pairs, (3,)) * jnp.stack([-sin, sin], axis=-2)
    return (pairs * cos[..., None, :] + swapped).reshape(x.shape).astype(x_BLHK.dtype)


KeyValue = tuple[jax.Array, jax.Array]


def by_group(x_BLGK: jax.Array) -> jax.Array:
    return x_BLGK.transpose(0, 2, 1, 3)


def rows_of(kept: KeyValue, row_N: jax.Array) -> KeyValue:
    """The local rows with the global indices `row_N`."""
    row_N = row_N % kept[0].shape[0]
    return kept[0][row_N], kept[1][row_N]


def as_it_lies(x: jax.Array) -> jax.Array:
    """Constrains `x` to a row-major memory layout.

    The TPU compiler would transpose the whole cache at every step. Without `on_own_rows`, it would
    not partition the constraint, and each device would gather all rows.
    """

    def held(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return on_own_rows(held, x)


def window_attention(
    q_BWHK: jax.Array,
    cache: KeyValue,
    own_BGWK: KeyValue,
    seen: tuple[jax.Array, jax.Array],
    *,
    layer: jax.Array | None = None,
    row_B: jax.Array | None = None,
) -> jax.Array:
    """Attention output ``[B, W, H, K]`` of a window over cached and new keys and values.

    One softmax is computed over both parts without a concatenation. Products accumulate in float32.
    In half precision, GPUs and TPUs use a kernel that reads the cache in place.

    Args:
      q_BWHK: queries.
      cache: cached keys and values, each ``[R, layers, G, L, K]``, or ``[R, G, L, K]`` without
        `layer`.
      own_BGWK: new keys and values.
      seen: the biases of `Trunk.attend_beside` for the cached keys, of which only the first are
        read if there are fewer biases, and for the new keys.
      layer: index of the layer.
      row_B: row of the cache of each row of the window; None means the same rows.
    """
    if layer is not None:
        kernel = _window_kernel(q_BWHK, cache[0], own_BGWK[0], seen)
        if kernel is not None:
            return _window_by_device(kernel, q_BWHK, cache, own_BGWK, seen, row_B, layer)
        cache = _of_layer(cache[0], layer), _of_layer(cache[1], layer)
    if row_B is not None:
        cache = on_own_rows(rows_of, cache, row_B)
    num_seen = seen[0].shape[-1]
    old = cache[0][:, :, :num_seen], cache[1][:, :, :num_seen]
    q_BGNK = grouped(q_BWHK, own_BGWK[0].shape[1])
    pairs = tuple(zip((old, own_BGWK), seen, strict=True))
    scores = [_product(q_BGNK, key, 3) + bias for (key, _), bias in pairs]
    top_BGN1 = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - top_BGN1) for s in scores]
    total_BGN1 = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    parts = [_product(w, value, 2) for w, ((_, value), _) in zip(weights, pairs, strict=True)]
    y_BGNK = (parts[0] + parts[1]) / total_BGN1
    return ungrouped(y_BGNK, q_BWHK)


def _of_layer(leaf_RDGLK: jax.Array, layer: jax.Array) -> jax.Array:
    leaf = jax.lax.dynamic_index_in_dim(as_it_lies(leaf_RDGLK), layer, 1, keepdims=False)
    return as_it_lies(leaf)


def _window_kernel(
    q_BWHK: jax.Array, leaf: jax.Array, k_BGWK: jax.Array, seen: tuple[jax.Array, jax.Array]
) -> Callable[..., jax.Array] | None:
    """The kernel that reads the cache in place, on each device for its own rows and heads."""
    num_seen, target = seen[0].shape[-1], platform()
    kernel: Callable[..., jax.Array] | None = None
    if target == "tpu" and leaf.dtype == jnp.bfloat16 and num_seen >= _LANES:
        from dlm_jax.model.kernels.tpu import mosaic_window, window_fits

        kernel = mosaic_window if window_fits(q_BWHK, leaf, k_BGWK, seen) else None
    elif target == "gpu" and leaf.dtype in (jnp.bfloat16, jnp.float16):
        from dlm_jax.model.kernels.triton import TILE, triton_window

        fits = num_seen >= TILE and leaf.shape[-1] in _TRITON_SIZES
        kernel = triton_window if fits else None
    return kernel


def _window_by_device(
    kernel: Callable[..., jax.Array],
    q_BWHK: jax.Array,
    cache: KeyValue,
    own_BGWK: KeyValue,
    seen: tuple[jax.Array, jax.Array],
    row_B: jax.Array | None,
    layer: jax.Array,
) -> jax.Array:
    """Each device computes its own rows and heads, and holds all heads of its rows of the cache."""

    def of_device(q: jax.Array, leaves: Any, own: Any, seen: Any, row: Any, layer: Any) -> Any:
        group = 0 if heads is None else jax.lax.axis_index(heads) * own[0].shape[1]
        group_B = jnp.full(q.shape[0], group, jnp.int32)
        row_B = (row % leaves[0].shape[0]).astype(jnp.int32)
        return kernel(q, leaves, own, seen, row_B, layer, group_B)

    num_rows, heads, mesh = q_BWHK.shape[0], None, mesh_in_use()
    row_B = jnp.arange(num_rows, dtype=jnp.int32) if row_B is None else row_B
    given = q_BWHK, cache, own_BGWK, seen, row_B, jnp.full(num_rows, layer, jnp.int32)
    if mesh is None:
        return of_device(*given)
    common = math.gcd(num_rows, cache[0].shape[0])
    rows, heads = fitting(P(ROWS, "tensor"), (common, own_BGWK[0].shape[1]), mesh)
    of_heads, of_rows = P(rows, None, heads), P(rows)
    specs = of_heads, of_rows, P(rows, heads), of_rows, of_rows, of_rows
    return jax.shard_map(of_device, in_specs=specs, out_specs=of_heads, check_vma=False)(*given)


def _product(a_BGNM: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Float32 product over the last axis of `a_BGNM` and `axis` of `b`.

    `a_BGNM` is first cast to the dtype of `b`.
    """
    return jax.lax.dot_general(
        a_BGNM.astype(b.dtype),
        b,
        (((3,), (axis,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
