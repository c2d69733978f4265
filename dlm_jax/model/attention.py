"""Which keys a query attends to, by type of attention, and the angles of its rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import RopeScaling, read_scaling
from dlm_jax.model import ops
from dlm_jax.model.kernels.split import shared_bias
from dlm_jax.types import Window, live_positions


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


def attention_weights(
    q_BLHK: jax.Array, k_BLGK: jax.Array, length_B: jax.Array, may_see: ops.MaySee | None
) -> jax.Array:
    """The weights ``softmax(q k^T / sqrt(K))`` of `ops.attention`, float32 ``[B, H, L, L]``."""
    num_positions, num_heads, size = q_BLHK.shape[1:]
    k_BLHK = jnp.repeat(k_BLGK, num_heads // k_BLGK.shape[2], axis=2)
    scores_BHLL = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BLHK).astype(jnp.float32)
    is_seen_B1LL = live_positions(jnp.maximum(length_B, 1), num_positions)[:, None, None]
    if may_see is not None:
        place_L = jnp.arange(num_positions)
        is_seen_B1LL = is_seen_B1LL & may_see(place_L[:, None], place_L[None])[None, None]
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
    """`ops.attention` for a text followed by a canvas that starts at position ``start_B``.

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
    return ops.formula_attention(q_BLHK, k_BLGK, v_BLGK, is_live_BL, may_see=may_see)


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
    noisy_BLHK = ops.attention(q_BLHK[:half], k_BMGK, v_BMGK, length_B, may_see=may_see)
    clean_BLHK = ops.attention(
        q_BLHK[half:], k_BLGK[half:], v_BLGK[half:], length_B, may_see=InBlocks(block_length)
    )
    return jnp.concatenate([noisy_BLHK, clean_BLHK])


def seen_keys(
    window: Window,
    place_BW: jax.Array,
    length_B: jax.Array,
    num_positions: int,
    *,
    sees: Callable[[jax.Array, jax.Array], Any],
    num_shared: int,
    first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention biases for the queries at positions `place_BW` of the window.

    The first bias applies to the cached keys of the row outside the window, and the second to the
    keys of the window. The shapes are ``[B, 1, N or 1, L]`` and ``[B, 1, N or 1, W]``. See
    `shared_bias` for the values. `sees` maps positions of queries ``[B, W, 1]`` and of keys ``[B,
    1, M]`` to True where a query may attend to a key. Keys at positions before `first` are hidden.
    """
    begin_B1, end_B1 = window.begin_N[:, None], window.end_N[:, None]
    place_1L = jnp.arange(num_positions)[None]

    def bias(key_BM: jax.Array, *, is_new: bool) -> jax.Array:
        is_own_BM = (key_BM >= begin_B1) & (key_BM < end_B1)
        is_there_BM = (key_BM >= first) & (key_BM < length_B[:, None]) & (is_own_BM == is_new)
        is_seen = sees(place_BW[:, :, None], key_BM[:, None, :])
        return shared_bias(is_there_BM[:, None, :] & is_seen, num_shared)

    return bias(place_1L, is_new=False), bias(place_BW, is_new=True)
