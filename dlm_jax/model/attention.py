"""Attention by the plain formula, or by kernels that do not store all scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from dlm_jax import devices
from dlm_jax.config import RopeScaling, read_scaling
from dlm_jax.devices import platform
from dlm_jax.distributed.partitions import on_own_rows
from dlm_jax.model.kernels import cpu
from dlm_jax.model.kernels.split import heads_by_device, window_by_device
from dlm_jax.types import Window, live_positions

MaySee = Callable[[Any, Any], Any]
"""Maps ``(query positions, key positions)`` to True where a query may attend to a key.

The callable must be static: a module-level function or a frozen dataclass with ``__call__``. It
must accept broadcastable NumPy and JAX integer arrays, and every query must attend to at least one
key. Row lengths are applied separately.
"""

SAVED = "attention"
"""Name of the values that rematerialisation may save: attention outputs and kernel residuals."""

# Below this length, XLA's fusions are as fast as the kernel, which has blocks of at least 128
# positions.
_LEAST_FOR_SPLASH = 256
# Shorter rows have few scores.
_LEAST_FOR_TRITON = 128
# Triton requires powers of two.
_TRITON_SIZES = (16, 32, 64, 128)
# With fewer queries, the TPU compiler computes products on the vector units.
_LEAST_FOR_PRODUCTS = 8
_LANES = 128
# Maximum number of scores that the plain formula stores at a time on one device.
_MAX_SCORES = 2**28


def causal(query: Any, key: Any) -> Any:
    """A position attends to itself and all earlier positions."""
    return key <= query


@dataclass(frozen=True)
class InBlocks:
    """A position attends to its own block of `length` positions and to all earlier blocks."""

    length: int

    def __call__(self, query: Any, key: Any) -> Any:
        return key // self.length <= query // self.length


@dataclass(frozen=True)
class BesideClean:
    """Noisy positions attend to their own noisy block and to all earlier clean blocks."""

    length: int
    num_positions: int

    def __call__(self, query: Any, key: Any) -> Any:
        is_noisy = key < self.num_positions
        is_own = key // self.length == query // self.length
        is_before = (key - self.num_positions) // self.length < query // self.length
        return (is_noisy & is_own) | (~is_noisy & is_before)


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
    kernel for `may_see`. All other cases use the plain formula. The keys of several streams of the
    same rows can be concatenated; `may_see` then distinguishes the streams.
    """
    num_positions, platform = q_BLHK.shape[1], devices.platform()
    # A row of length 0 attends to its first key, so that the result is finite.
    is_live_BL = live_positions(jnp.maximum(length_B, 1), num_positions)
    is_live_BM = jnp.tile(is_live_BL, (1, k_BMGK.shape[1] // num_positions))
    given = (q_BLHK, k_BMGK, v_BMGK, is_live_BM)
    if platform == "tpu" and num_positions >= _LEAST_FOR_SPLASH:
        # Imported here, because importing Pallas takes a third of a second.
        from dlm_jax.model.kernels.splash import splash_attention

        # The kernel already names its output; naming it again would store it twice.
        return splash_attention(*given, may_see=may_see, saved=SAVED)
    is_half = q_BLHK.dtype in (jnp.bfloat16, jnp.float16)
    if platform == "gpu" and is_half and q_BLHK.shape[-1] % 8 == 0 and may_see in (None, causal):
        y_BLHK = cudnn_attention(q_BLHK, k_BMGK, v_BMGK, length_B, is_causal=may_see is not None)
    elif platform == "gpu" and is_half and may_see is not None and _has_masked_kernel(q_BLHK):
        from dlm_jax.model.kernels.triton import triton_attention

        return triton_attention(*given, may_see=may_see, saved=SAVED)
    else:
        y_BLHK = plain_attention(*given, may_see=may_see)
    return checkpoint_name(y_BLHK, SAVED)


def _has_masked_kernel(q_BLHK: jax.Array) -> bool:
    """Whether GPUs have a kernel for masked attention of queries of this shape."""
    mesh, size = devices.mesh_in_use(), q_BLHK.shape[-1]
    is_split = mesh is not None and mesh.shape.get("context", 1) > 1
    return not is_split and q_BLHK.shape[1] >= _LEAST_FOR_TRITON and size in _TRITON_SIZES


def cudnn_attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    is_causal: bool,
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


def plain_attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    *,
    may_see: MaySee | None = None,
) -> jax.Array:
    """Attention by the plain formula, in slices of queries if there are too many scores.

    The backward pass recomputes the scores of each slice.
    """
    num_rows, num_positions, num_heads, _ = q_BLHK.shape
    key_M = jnp.arange(k_BMGK.shape[1])

    def of_queries(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BNHK, query_N = piece
        mask = is_live_BM[:, None, None, :]
        if may_see is not None:
            is_seen = may_see(query_N[:, None], key_M[None])
            mask = mask & (is_seen[None, None] if is_seen.ndim == 2 else is_seen[:, None])
        return jax.nn.dot_product_attention(q_BNHK, k_BMGK, v_BMGK, mask=mask)

    mesh, query_L = devices.mesh_in_use(), jnp.arange(num_positions)
    scores = num_rows * num_heads * num_positions * key_M.size // (mesh.size if mesh else 1)
    slices = math.gcd(num_positions, 2 ** max(0, (scores // _MAX_SCORES).bit_length()))
    if slices == 1:
        return of_queries((q_BLHK, query_L))
    q_SBNHK = jnp.moveaxis(q_BLHK.reshape(num_rows, slices, -1, *q_BLHK.shape[2:]), 1, 0)
    y_SBNHK = jax.lax.map(jax.checkpoint(of_queries), (q_SBNHK, query_L.reshape(slices, -1)))
    return jnp.moveaxis(y_SBNHK, 0, 1).reshape(q_BLHK.shape)


def by_formula(
    q_BNHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    may_see: MaySee | None,
) -> jax.Array:
    """`plain_attention`; on CPUs in the form that is faster there."""
    if platform() != "cpu":
        return plain_attention(q_BNHK, k_BMGK, v_BMGK, is_live_BM, may_see=may_see)
    is_seen_BNM = is_live_BM[:, None]
    if may_see is not None:
        query_N, key_M = jnp.arange(q_BNHK.shape[1]), jnp.arange(k_BMGK.shape[1])
        is_seen = may_see(query_N[:, None], key_M[None])
        is_seen_BNM = is_seen_BNM & (is_seen[None] if is_seen.ndim == 2 else is_seen)
    return cpu.attention_where(q_BNHK, k_BMGK, v_BMGK, is_seen_BNM)


def rotary_angles(
    num_positions: int, head_size: int, theta: float, scaling: str = ""
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each float32 ``[L, K/2]``.

    Pair ``i`` at position ``l`` is rotated by ``l * theta ** (-2i / K)`` (Su et al. 2021, equation
    15). `scaling` is ``model.rope_scaling``; its `RopeScaling.scale` multiplies the result.
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    found = read_scaling(scaling)
    if found is not None:
        frequencies *= jnp.asarray(rotary_multipliers(found, head_size, theta), jnp.float32)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos_LK, sin_LK = jnp.cos(angles), jnp.sin(angles)
    return (cos_LK, sin_LK) if found is None else (cos_LK * found.scale, sin_LK * found.scale)


def rotary_multipliers(scaling: RopeScaling, head_size: int, theta: float) -> np.ndarray:
    """The factor of the frequency of each pair, float64 ``[K/2]``."""

    def pair_with(turns: float) -> float:
        """The index of the pair that makes this number of turns."""
        ratio = scaling.original / (turns * 2 * math.pi)
        return head_size * math.log(ratio) / (2 * math.log(theta))

    pair_K = np.arange(head_size // 2)
    if scaling.kind == "linear":
        unscaled_K = np.zeros(pair_K.size)
    elif scaling.kind == "llama3":
        turns_K = scaling.original * theta ** (-2 * pair_K / head_size) / (2 * math.pi)
        unscaled_K = np.clip((turns_K - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:
        first = max(math.floor(pair_with(scaling.high)), 0)
        last = min(math.ceil(pair_with(scaling.low)), head_size - 1)
        unscaled_K = 1 - np.clip((pair_K - first) / (last - first or 0.001), 0, 1)
    return unscaled_K + (1 - unscaled_K) / scaling.factor


def proportional_angles(
    num_positions: int, head_size: int, theta: float, share: float
) -> tuple[jax.Array, jax.Array]:
    """The angles of `rotary_angles`, with only the first fraction `share` of the pairs rotated."""
    cos_LK, sin_LK = rotary_angles(num_positions, head_size, theta)
    turns_K = jnp.arange(head_size // 2) < int(share * head_size // 2)
    return jnp.where(turns_K[None], cos_LK, 1.0), jnp.where(turns_K[None], sin_LK, 0.0)


def apart(x_BLD: jax.Array) -> jax.Array:
    """Projections of a short window, unchanged, which the TPU compiler splits into heads later.

    It would otherwise produce the heads in the projection, whose kernel it would copy at each step.
    """
    if platform() != "tpu" or x_BLD.shape[1] >= _LEAST_FOR_SPLASH:
        return x_BLD
    return jax.lax.optimization_barrier(x_BLD)


def turned(
    x_BLHK: jax.Array,
    cos_LK: jax.Array,
    sin_LK: jax.Array,
    scale_K: jax.Array | None = None,
    epsilon: float = 0.0,
) -> jax.Array:
    """Queries or keys, normalised (RMSNorm) if `scale_K` is given, then rotated by position.

    Dimensions without an angle are not rotated. In bfloat16, TPUs use a kernel.
    """
    num_positions, _, size = x_BLHK.shape[1:]
    is_whole = 2 * cos_LK.shape[-1] == size and size % _LANES == 0
    is_long = num_positions >= _LEAST_FOR_PRODUCTS
    if platform() == "tpu" and x_BLHK.dtype == jnp.bfloat16 and is_whole and is_long:
        cos_BLK, sin_BLK = (x if x.ndim == 3 else x[None] for x in (cos_LK, sin_LK))
        return _turned_on_tpu(x_BLHK, scale_K, cos_BLK, sin_BLK, epsilon)
    return _turned(x_BLHK, cos_LK, sin_LK, scale_K, epsilon)


def _turned(
    x_BLHK: jax.Array,
    cos_LK: jax.Array,
    sin_LK: jax.Array,
    scale_K: jax.Array | None,
    epsilon: float,
) -> jax.Array:
    """`turned` by its formula."""
    if scale_K is not None:
        x_BLHK = cpu.rms_norm(x_BLHK, scale_K, epsilon=epsilon)
    size = 2 * cos_LK.shape[-1]
    if size == x_BLHK.shape[-1]:
        return cpu.rotate(x_BLHK, cos_LK, sin_LK)
    head, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    return jnp.concatenate([cpu.rotate(head, cos_LK, sin_LK), rest], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _turned_on_tpu(x_BLHK, scale_K, cos_BLK, sin_BLK, epsilon):
    """`turned` by a kernel, on each device for its own rows, positions and heads.

    Angles have no gradient.
    """
    from dlm_jax.model.kernels.mosaic import mosaic_turned

    compute = functools.partial(mosaic_turned, epsilon=epsilon)
    return heads_by_device(compute, x_BLHK, scale_K, cos_BLK, sin_BLK)


def _turned_forward(x_BLHK, scale_K, cos_BLK, sin_BLK, epsilon):
    given = x_BLHK, scale_K, cos_BLK, sin_BLK
    return _turned_on_tpu(*given, epsilon), given


def _turned_backward(epsilon, given, g_BLHK):
    from dlm_jax.model.kernels.mosaic import mosaic_turned_gradients

    scale_K, cos_BLK, sin_BLK = given[1:]
    compute = functools.partial(mosaic_turned_gradients, epsilon=epsilon)
    g_x_BLD, terms_BTHK = heads_by_device(compute, *given, g_BLHK)
    g_scale = None if scale_K is None else jnp.sum(terms_BTHK, axis=(0, 1, 2))
    return g_x_BLD.reshape(g_BLHK.shape), g_scale, jnp.zeros_like(cos_BLK), jnp.zeros_like(sin_BLK)


_turned_on_tpu.defvjp(_turned_forward, _turned_backward)


def attend(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    is_causal: bool,
) -> jax.Array:
    """Attention output ``[B, L, H, K]``, with keys at or beyond ``length_B`` masked.

    Consecutive groups of heads share the ``G`` key/value heads. Outputs at positions beyond the
    length are finite but meaningless. CPU programs use `dlm_jax.model.kernels.cpu`; other programs
    use `attention`.
    """
    may_see = causal if is_causal else None
    if platform() != "cpu":
        return attention(q_BLHK, k_BLGK, v_BLGK, length_B, may_see=may_see)
    is_live_BL = live_positions(jnp.maximum(length_B, 1), q_BLHK.shape[1])
    return checkpoint_name(by_formula(q_BLHK, k_BLGK, v_BLGK, is_live_BL, may_see), SAVED)


def attend_in_blocks(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    block_length: int,
) -> jax.Array:
    """Like `attend`, but a position attends to its own block and all earlier blocks."""
    may_see = InBlocks(block_length)
    if platform() != "cpu":
        return attention(q_BLHK, k_BLGK, v_BLGK, length_B, may_see=may_see)
    is_live_BL = live_positions(length_B, q_BLHK.shape[1])
    return checkpoint_name(by_formula(q_BLHK, k_BLGK, v_BLGK, is_live_BL, may_see), SAVED)


def attention_weights(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    is_causal: bool,
    block_length: int = 0,
) -> jax.Array:
    """The attention weights ``[B, H, L, L]`` of `attend` or, with blocks, of `attend_in_blocks`.

    On all devices, the weights are ``softmax(q k^T / sqrt(K))`` over the visible keys, in float32.
    """
    num_positions, num_heads, size = q_BLHK.shape[1:]
    k_BLHK = jnp.repeat(k_BLGK, num_heads // k_BLGK.shape[2], axis=2)
    scores_BHLL = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BLHK).astype(jnp.float32)
    place_L = jnp.arange(num_positions)
    is_seen_11LL = jnp.ones((1, 1, num_positions, num_positions), bool)
    if is_causal or block_length:
        may_see = InBlocks(block_length) if block_length else causal
        is_seen_11LL = may_see(place_L[:, None], place_L[None])[None, None]
    is_live_BL = live_positions(jnp.maximum(length_B, 1), num_positions)
    is_seen_B1LL = is_seen_11LL & is_live_BL[:, None, None]
    return jax.nn.softmax(jnp.where(is_seen_B1LL, scores_BHLL / math.sqrt(size), -jnp.inf))


def attend_behind(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    start_B: jax.Array,
    window: int,
) -> jax.Array:
    """Like `attend`, for a text followed by a canvas that starts at position ``start_B``.

    A text position attends to itself and earlier positions; a canvas position attends to the text
    and the canvas. With a window, a text position attends to the last `window` text positions, and
    a canvas position to the last ``window - 1`` text positions (DiffusionGemma, 2026). A window of
    0 means no limit.
    """
    start_B11 = start_B[:, None, None]

    def may_see(query: jax.Array, key: jax.Array) -> jax.Array:
        begin = jnp.minimum(query[None], start_B11) - (window or k_BLGK.shape[1])
        is_of_canvas = query[None] >= start_B11
        return (is_of_canvas | (key <= query)[None]) & (key[None] > begin)

    is_live_BL = live_positions(jnp.maximum(length_B, 1), q_BLHK.shape[1])
    return checkpoint_name(by_formula(q_BLHK, k_BLGK, v_BLGK, is_live_BL, may_see), SAVED)


def attend_beside_clean(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    block_length: int,
) -> jax.Array:
    """Attention for two streams of the same rows, the first noisy and the second clean.

    A noisy position attends to the noisy positions of its block and the clean positions of earlier
    blocks. A clean position attends to the clean positions of its own and earlier blocks (Arriola
    et al. 2025, Block diffusion, section 3.1). The streams are concatenated along the row axis,
    ``[2 B, L, ...]``, and have the same lengths.
    """
    half = length_B.shape[0]
    k_BMGK, v_BMGK = (jnp.concatenate([x[:half], x[half:]], axis=1) for x in (k_BLGK, v_BLGK))
    may_see = BesideClean(block_length, q_BLHK.shape[1])
    if platform() != "cpu":
        noisy_BLHK = attention(q_BLHK[:half], k_BMGK, v_BMGK, length_B, may_see=may_see)
    else:
        is_live_BM = jnp.tile(live_positions(length_B, q_BLHK.shape[1]), (1, 2))
        noisy_BLHK = by_formula(q_BLHK[:half], k_BMGK, v_BMGK, is_live_BM, may_see)
    clean_BLHK = attend_in_blocks(
        q_BLHK[half:], k_BLGK[half:], v_BLGK[half:], length_B, block_length=block_length
    )
    return jnp.concatenate([noisy_BLHK, clean_BLHK])


def seen_keys(
    window: Window,
    place_BW: jax.Array,
    length_B: jax.Array,
    num_positions: int,
    *,
    block_length: int,
    num_shared: int,
    first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention biases for the queries at positions `place_BW` of the window.

    The first bias applies to the cached keys of the row, and the second to the keys of the window.
    The shapes are ``[B, 1, N or 1, L]`` and ``[B, 1, N or 1, W]``. See `shared_bias` for the
    values. Keys at positions before `first` are hidden.
    """
    place_1L = jnp.arange(num_positions)[None]
    begin_B1, end_B1, length_B1 = window.begin_N[:, None], window.end_N[:, None], length_B[:, None]

    def is_own(place: jax.Array) -> jax.Array:
        return (place >= begin_B1) & (place < end_B1)

    is_kept_BL = (place_1L >= first) & (place_1L < length_B1) & ~is_own(place_1L)
    is_new_BW = (place_BW >= first) & (place_BW < length_B1) & is_own(place_BW)
    is_kept_BWL = is_kept_BL[:, None, :] & _sees(place_BW, place_1L, block_length)
    is_new_BWW = is_new_BW[:, None, :] & _sees(place_BW, place_BW, block_length)
    return cpu.shared_bias(is_kept_BWL, num_shared), cpu.shared_bias(is_new_BWW, num_shared)


def seen_behind(
    window: Window,
    place_BW: jax.Array,
    length_B: jax.Array,
    num_positions: int,
    *,
    reach: int,
    is_canvas: bool,
    num_shared: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention biases, as in `seen_keys`, for a window of text or a canvas after cached text.

    Each query attends to the same keys as in `attend_behind`, with `reach` as the window and a
    canvas that starts at ``window.begin_N``.
    """
    begin_B1, end_B1, length_B1 = window.begin_N[:, None], window.end_N[:, None], length_B[:, None]
    query_BN = begin_B1 if is_canvas else place_BW  # all queries of a canvas see the same keys

    def sees(key_BM: jax.Array) -> jax.Array:
        key_B1M, query_BN1 = key_BM[:, None, :], query_BN[:, :, None]
        is_near_BNM = key_B1M > query_BN1 - reach if reach else key_B1M >= 0
        return is_near_BNM if is_canvas else is_near_BNM & (key_B1M <= query_BN1)

    place_1L = jnp.arange(num_positions)[None]
    is_kept_BL = place_1L < jnp.minimum(begin_B1, length_B1)
    is_new_BW = (place_BW >= begin_B1) & (place_BW < jnp.minimum(end_B1, length_B1))
    seen = is_kept_BL[:, None] & sees(place_1L), is_new_BW[:, None] & sees(place_BW)
    return cpu.shared_bias(seen[0], num_shared), cpu.shared_bias(seen[1], num_shared)


KeyValue = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class CachedLayer:
    """One layer of a cache of keys and values.

    Attributes:
      leaves: keys and values of all layers and rows, each ``[R, depth, G, L, K]``.
      layer: index of the layer.
      row_N: row of the cache of each row of the window; None means the same rows.
      num_seen: number of positions, from the first, that the window may attend to.
    """

    leaves: KeyValue
    layer: jax.Array
    row_N: jax.Array | None
    num_seen: int

    def read(self) -> KeyValue:
        """The keys and values, each ``[B, G, num_seen, K]``."""

        def of_layer(leaf: jax.Array) -> jax.Array:
            leaf = jax.lax.dynamic_index_in_dim(as_it_lies(leaf), self.layer, 1, keepdims=False)
            return as_it_lies(leaf)

        kept = of_layer(self.leaves[0]), of_layer(self.leaves[1])
        if self.row_N is not None:
            kept = on_own_rows(rows_of, kept, self.row_N)
        return kept[0][:, :, : self.num_seen], kept[1][:, :, : self.num_seen]


def rows_of(kept: KeyValue, row_N: jax.Array) -> KeyValue:
    """The local rows with the global indices `row_N`."""
    row_N = row_N % kept[0].shape[0]
    return kept[0][row_N], kept[1][row_N]


def as_it_lies(x: jax.Array) -> jax.Array:
    """Constrains `x` to a row-major memory layout.

    Without `on_own_rows`, the compiler would not partition the constraint, and each device would
    gather all rows.
    """

    def held(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return on_own_rows(held, x)


def attend_beside_kept(
    q_BWHK: jax.Array,
    kept: KeyValue | CachedLayer,
    own_BGWK: KeyValue,
    seen: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Attention output ``[B, W, H, K]`` of a window over cached and new keys and values.

    One softmax is computed over both parts without a concatenation. Products accumulate in float32.
    For a `CachedLayer` in half precision, GPUs and TPUs use a kernel that reads it in place. Other
    cached keys and values are ``[B, G, L, K]`` each. `seen` are the biases of `seen_keys`.
    """
    if isinstance(kept, CachedLayer):
        kernel = _window_kernel(q_BWHK, kept, own_BGWK, seen)
        if kernel is not None:
            return _in_place(kernel, q_BWHK, kept, own_BGWK, seen)
        kept = kept.read()
    q_BGNK = cpu.grouped(q_BWHK, own_BGWK[0].shape[1])
    num_queries = q_BGNK.shape[2]
    if platform() == "tpu" and num_queries < _LEAST_FOR_PRODUCTS:
        q_BGNK = _with_queries(q_BGNK, _LEAST_FOR_PRODUCTS)
        of_kept, of_own = (_with_queries(bias, _LEAST_FOR_PRODUCTS) for bias in seen)
        seen = of_kept, of_own
    pairs = tuple(zip((kept, own_BGWK), seen, strict=True))
    scores = [_product(q_BGNK, key, 3) + bias for (key, _), bias in pairs]
    top_BGN1 = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - top_BGN1) for s in scores]
    total_BGN1 = sum(_total(w, own_BGWK[1].dtype) for w in weights)
    parts = [_product(w, value, 2) for w, ((_, value), _) in zip(weights, pairs, strict=True)]
    y_BGNK = (parts[0] + parts[1]) / total_BGN1
    return cpu.ungrouped(y_BGNK[:, :, :num_queries], q_BWHK)


def _window_kernel(
    q_BWHK: jax.Array, kept: CachedLayer, own_BGWK: KeyValue, seen: tuple[jax.Array, jax.Array]
) -> Callable[..., jax.Array] | None:
    """The kernel for this window, if the target devices have one."""
    leaf, target = kept.leaves[0], platform()
    if target == "tpu" and leaf.dtype == jnp.bfloat16 and kept.num_seen >= _LANES:
        from dlm_jax.model.kernels.mosaic import mosaic_window, window_fits

        return mosaic_window if window_fits(q_BWHK, leaf, own_BGWK[0], seen) else None
    if target == "gpu" and leaf.dtype in (jnp.bfloat16, jnp.float16):
        from dlm_jax.model.kernels.triton import TILE, triton_window

        if kept.num_seen >= TILE and leaf.shape[-1] in _TRITON_SIZES:
            return triton_window
    return None


def _in_place(
    kernel: Callable[..., jax.Array],
    q_BWHK: jax.Array,
    kept: CachedLayer,
    own_BGWK: KeyValue,
    seen: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """`attend_beside_kept` by a kernel; each device computes its own rows and heads."""
    num_rows = q_BWHK.shape[0]
    row_B = jnp.arange(num_rows, dtype=jnp.int32) if kept.row_N is None else kept.row_N
    layer_B = jnp.full(num_rows, kept.layer, jnp.int32)

    def of_rows(
        q: jax.Array, leaves: KeyValue, own: KeyValue, seen: Any, row: jax.Array, *rest: jax.Array
    ) -> jax.Array:
        row = (row % leaves[0].shape[0]).astype(jnp.int32)
        return kernel(q, leaves, own, seen, row, *rest)

    return window_by_device(of_rows, q_BWHK, kept.leaves, own_BGWK, seen, row_B, layer_B)


def _with_queries(x_BGNM: jax.Array, least: int) -> jax.Array:
    """`x_BGNM` padded to `least` queries; unchanged if all queries share one entry."""
    num_queries = x_BGNM.shape[2]
    if num_queries == 1 and x_BGNM.shape[1] == 1:
        return x_BGNM
    return jnp.pad(x_BGNM, ((0, 0), (0, 0), (0, least - num_queries), (0, 0)))


def _total(weights_BGNM: jax.Array, dtype: Any) -> jax.Array:
    """The sum of each query's weights, float32 ``[B, G, N, 1]``.

    On a TPU, a product with a matrix of ones takes a sixth of the time of a sum over lanes. The
    barrier hides the ones, because the compiler would turn the product into that sum.
    """
    if platform() != "tpu":
        return jnp.sum(weights_BGNM, axis=-1, keepdims=True)
    ones_MK = jnp.ones((weights_BGNM.shape[-1], _LANES), dtype)
    total_BGNK = jax.lax.dot_general(
        weights_BGNM.astype(dtype),
        jax.lax.optimization_barrier(ones_MK),
        (((3,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return total_BGNK[..., :1]


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


def _sees(query_BN: jax.Array, key_BM: jax.Array, block_length: int) -> jax.Array:
    """Returns whether each query may attend to each key, ``[B, N, M]``; all True if `block_length`
    is 0.
    """
    query_BN1, key_B1M = query_BN[:, :, None], key_BM[:, None, :]
    if block_length == 0:
        return jnp.ones((query_BN.shape[0], 1, key_BM.shape[1]), bool)
    return key_B1M // block_length <= query_BN1 // block_length
