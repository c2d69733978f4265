"""Equivalent forms of some layers that are faster on XLA's CPU backend.

These forms are traced only if the devices in use (`dlm_jax.devices`) are CPUs; GPU and TPU programs
use the plain formulas. The results differ only by the order of operations.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dlm_jax.devices import platform

_HIDDEN = -1e30


def linear(x: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """``x @ kernel``, shape ``[..., F]``.

    On CPU, the leading axes are merged first, so that the kernel's gradient is one matrix product
    that reads both operands in place. If one product contracted two axes, XLA would copy
    an operand into transposed order and recompute its producer inside the strided copy.
    """
    if platform() != "cpu" or x.ndim < 3:
        return x @ kernel_DF
    y_NF = x.reshape(-1, x.shape[-1]) @ kernel_DF
    return y_NF.reshape(*x.shape[:-1], kernel_DF.shape[-1])


_SMALLEST_BLOCK, _LARGEST_BLOCK = 1024, 8192
# Smaller tables fit into the cache, and more rows amortise the copy of the whole table.
_LARGE_TABLE, _FEW_ROWS = 2**23, 256


def linear_by_rows(x_ND: jax.Array, table_VD: jax.Array) -> jax.Array:
    """``x @ table.T``, shape ``[N, V]``.

    On CPU, XLA copies the whole table for a product with 2 or more rows. The products of few rows
    with a large table are therefore a batch of products with blocks of the table, which are read in
    place.
    """
    is_large = table_VD.size >= _LARGE_TABLE and table_VD.shape[0] >= 2 * _SMALLEST_BLOCK
    if platform() != "cpu" or not is_large or not 1 < x_ND.shape[0] <= _FEW_ROWS:
        return linear(x_ND, table_VD.T)
    return _linear_by_rows(x_ND, table_VD)


@jax.custom_vjp
def _linear_by_rows(x_ND: jax.Array, table_VD: jax.Array) -> jax.Array:
    num_ids = table_VD.shape[0]
    most = min(_LARGEST_BLOCK, num_ids // 2)
    for size in range(most, _SMALLEST_BLOCK - 1, -1):
        if num_ids % size == 0:
            table_CUD = table_VD.reshape(-1, size, table_VD.shape[1])
            x_CND = jnp.broadcast_to(x_ND, (table_CUD.shape[0], *x_ND.shape))
            y_CUN = lax.dot_general(table_CUD, x_CND, (((2,), (2,)), ((0,), (0,))))
            return y_CUN.reshape(num_ids, -1).T

    # No equal blocks: each is copied, and the last one overlaps the one before it.
    def write(number: int, y_VN: jax.Array) -> jax.Array:
        first = jnp.minimum(number * most, num_ids - most)
        block_UD = lax.dynamic_slice_in_dim(table_VD, first, most)
        return lax.dynamic_update_slice_in_dim(y_VN, block_UD @ x_ND.T, first, axis=0)

    y_VN = jnp.zeros((num_ids, x_ND.shape[0]), jnp.result_type(x_ND, table_VD))
    return lax.fori_loop(0, -(-num_ids // most), write, y_VN).T


def _linear_by_rows_forward(x_ND, table_VD):
    return _linear_by_rows(x_ND, table_VD), (x_ND, table_VD)


def _linear_by_rows_backward(given, g_NV):
    x_ND, table_VD = given
    return (g_NV @ table_VD).astype(x_ND.dtype), (g_NV.T @ x_ND).astype(table_VD.dtype)


_linear_by_rows.defvjp(_linear_by_rows_forward, _linear_by_rows_backward)


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the last axis.

    The norm is computed in float32 and returned in the dtype of `x`. `scale` has the size of the
    last axis, or the rank of `x` with size 1 along all other axes. On CPU, an explicit backward
    pass stores `x` and one number per position, and reduces the gradient of `scale` once.
    """
    x32 = x.astype(jnp.float32)
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
    if platform() != "cpu":
        return (x32 * _per_root_mean_square(x32, epsilon) * scale).astype(x.dtype)
    y: jax.Array = _rms_norm(x32, scale, epsilon)
    return y.astype(x.dtype)


def _per_root_mean_square(x: jax.Array, epsilon: float) -> jax.Array:
    return lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    return x * _per_root_mean_square(x, epsilon) * scale


def _rms_norm_forward(x, scale, epsilon):
    per_root = _per_root_mean_square(x, epsilon)
    return x * per_root * scale, (x, per_root, scale)


def _rms_norm_backward(epsilon, residuals, g):
    del epsilon
    x, per_root, scale = residuals
    unit = x * per_root
    g_unit = g * scale
    g_x = per_root * (g_unit - unit * jnp.mean(g_unit * unit, axis=-1, keepdims=True))
    g_scale = jnp.sum((g * unit).reshape(-1, x.shape[-1]), axis=0).reshape(scale.shape)
    return g_x.astype(x.dtype), g_scale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def rotate(x_BLHK: jax.Array, cos_LK: jax.Array, sin_LK: jax.Array) -> jax.Array:
    """Queries or keys rotated by position, computed in float32 and returned in the input's dtype.

    Dimensions ``i`` and ``i + K/2`` form a pair (half rotation). `cos_LK` and `sin_LK` are ``[L,
    K/2]``, or ``[B, L, K/2]`` if positions differ between rows. On CPU, the halves are swapped by
    reversing an axis of size 2, which keeps the index affine. A concatenation of the halves, fused
    into a loop, would add a branch per element.
    """
    cos, sin = ((x if x.ndim == 3 else x[None])[:, :, None, :] for x in (cos_LK, sin_LK))
    x = x_BLHK.astype(jnp.float32)
    if platform() != "cpu":
        first, second = jnp.split(x, 2, axis=-1)
        halves = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(halves, axis=-1).astype(x_BLHK.dtype)
    pairs = x.reshape(*x.shape[:-1], 2, -1)
    turned = pairs * cos[..., None, :] + lax.rev(pairs, (3,)) * jnp.stack([-sin, sin], axis=-2)
    return turned.reshape(x.shape).astype(x_BLHK.dtype)


def attention_where(
    q_BNHK: jax.Array, k_BMGK: jax.Array, v_BMGK: jax.Array, is_seen_BNM: jax.Array
) -> jax.Array:
    """Attention output ``[B, N, H, K]``; queries attend to the keys where `is_seen_BNM` is True.

    Consecutive groups of heads share the ``G`` key/value heads. The first two axes of `is_seen_BNM`
    can have size 1. The output of a query without a visible key is finite. Scores and probabilities
    are float32; the result has the dtype of `q_BNHK`. The probabilities, float32 ``[B, H, N, M]``,
    are saved for the backward pass.
    """
    y_BGNK = _attend(
        grouped(q_BNHK, k_BMGK.shape[2]),
        k_BMGK.astype(jnp.float32).transpose(0, 2, 1, 3),
        v_BMGK.astype(jnp.float32).transpose(0, 2, 1, 3),
        shared_bias(is_seen_BNM, q_BNHK.shape[2] // k_BMGK.shape[2]),
    )
    return ungrouped(y_BGNK, q_BNHK)


def shared_bias(is_seen_BNM: jax.Array, num_shared: int) -> jax.Array:
    """The bias that hides keys in the scores ``[B, G, num_shared * N, M]`` of grouped heads."""
    if is_seen_BNM.shape[1] > 1:
        is_seen_BNM = jnp.tile(is_seen_BNM, (1, num_shared, 1))
    return jnp.where(is_seen_BNM, 0.0, _HIDDEN)[:, None]


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


def _batched(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Matrix products over two leading batch axes, contracting one axis of each operand."""
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((0, 1), (0, 1))))


@jax.custom_vjp
def _attend(q_BGNK: jax.Array, k_BGMK: jax.Array, v_BGMK: jax.Array, bias: jax.Array) -> jax.Array:
    """Softmax attention ``[B, G, N, K]`` for scaled queries, float32."""
    return _attend_forward(q_BGNK, k_BGMK, v_BGMK, bias)[0]


def _attend_forward(q_BGNK, k_BGMK, v_BGMK, bias):
    scores_BGNM = _batched(q_BGNK, k_BGMK, 3, 3) + bias
    weights_BGNM = jnp.exp(scores_BGNM - jnp.max(scores_BGNM, axis=-1, keepdims=True))
    # Dividing after the product costs K divisions per query instead of M.
    per_total_BGN1 = 1.0 / jnp.sum(weights_BGNM, axis=-1, keepdims=True)
    y_BGNK = _batched(weights_BGNM, v_BGMK, 3, 2) * per_total_BGN1
    return y_BGNK, (q_BGNK, k_BGMK, v_BGMK, weights_BGNM, per_total_BGN1, y_BGNK)


def _attend_backward(residuals, g_BGNK):
    q_BGNK, k_BGMK, v_BGMK, weights_BGNM, per_total_BGN1, y_BGNK = residuals
    mean_BGN1 = jnp.sum(g_BGNK * y_BGNK, axis=-1, keepdims=True) * per_total_BGN1
    g_BGNK = g_BGNK * per_total_BGN1
    g_scores_BGNM = weights_BGNM * (_batched(g_BGNK, v_BGMK, 3, 3) - mean_BGN1)
    # Transpose the small operand, not the N by M matrix.
    g_v_BGMK = _batched(g_BGNK.swapaxes(2, 3), weights_BGNM, 3, 2).swapaxes(2, 3)
    g_k_BGMK = _batched(q_BGNK.swapaxes(2, 3), g_scores_BGNM, 3, 2).swapaxes(2, 3)
    return _batched(g_scores_BGNM, k_BGMK, 3, 2), g_k_BGMK, g_v_BGMK, None


_attend.defvjp(_attend_forward, _attend_backward)


def run_blocks(
    block: Callable[[jax.Array, Any, Any], jax.Array], x: jax.Array, blocks: Any, context: Any
) -> jax.Array:
    """Applies ``x = block(x, parameters, context)`` for each layer of `blocks`; returns the last
    `x`.

    The layers run in one `jax.lax.scan`. On CPU, the loop is unrolled if it is differentiated and
    has at most 16 layers, because a scan copies the values for the backward pass into a stack and
    back, which takes a quarter of a training step. `block` must not close over traced arrays; pass
    them in `context`.
    """
    depth = jax.tree.leaves(blocks)[0].shape[0]
    if platform() != "cpu" or depth > 16:
        return _scan(block, x, blocks, context, unroll=1)
    return _run_blocks(block, x, blocks, context)


def over_layers(
    body: Callable[[jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, layers: Any
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan` over the layers of a group, which is unrolled on CPU.

    On accelerators, a loop gathers the parameters of one layer at a time and compiles one layer.
    """
    if platform() != "cpu":
        return lax.scan(body, x, layers)
    made = []
    for place in range(jax.tree.leaves(layers)[0].shape[0]):
        x, own = body(x, jax.tree.map(lambda leaf, at=place: leaf[at], layers))
        made.append(own)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def _scan(block: Any, x: jax.Array, blocks: Any, context: Any, *, unroll: int) -> jax.Array:
    def body(x: jax.Array, parameters: Any) -> tuple[jax.Array, None]:
        return block(x, parameters, context), None

    with jax.named_scope("layers"):
        return lax.scan(body, x, blocks, unroll=unroll)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_blocks(block: Any, x: jax.Array, blocks: Any, context: Any) -> jax.Array:
    return _scan(block, x, blocks, context, unroll=1)


def _run_blocks_forward(block, x, blocks, context):
    depth = jax.tree.leaves(blocks)[0].shape[0]
    return jax.vjp(functools.partial(_scan, block, unroll=depth), x, blocks, context)


def _run_blocks_backward(block, pull_back, g):
    del block
    return pull_back(g)


_run_blocks.defvjp(_run_blocks_forward, _run_blocks_backward)


def keep_freed_memory() -> bool:
    """Makes the process retain freed memory instead of returning it to the kernel.

    The result is True on success. XLA allocates all temporaries of a CPU program as one block,
    which glibc maps and unmaps in every call. In a training step with 1M parameters, this causes
    78,000 page faults, which take a quarter of the time. Call this function once, before the first
    computation, in a program that trains on CPU. The whole process is affected, so libraries must
    not call it. The function has no effect on other devices or without glibc.
    """
    if jax.default_backend() != "cpu" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # malloc.h: M_ARENA_MAX=-8 (only the main heap can grow past 64 MiB), M_MMAP_MAX=-4,
    # M_TRIM_THRESHOLD=-1 (value -1: never trim).
    return all([mallopt(-8, 1), mallopt(-4, 0), mallopt(-1, -1)])
