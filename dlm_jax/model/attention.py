"""Attention behind one function: who may attend to whom, and which kernel computes it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.devices import platform
from dlm_jax.model import cpu, forms
from dlm_jax.types import Window, live_positions


def rotary_angles(num_positions: int, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each float32 ``[L, K/2]``.

    Position ``l`` turns pair ``i`` by ``l * theta ** (-2i / K)`` (Su et al. 2021, equation 15).
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def turned(x_BLHK: jax.Array, cos_LK: jax.Array, sin_LK: jax.Array) -> jax.Array:
    """Queries or keys turned by their position, as far into each head as there are angles."""
    size = 2 * cos_LK.shape[-1]
    if size == x_BLHK.shape[-1]:
        return cpu.rotate(x_BLHK, cos_LK, sin_LK)
    head, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    return jnp.concatenate([cpu.rotate(head, cos_LK, sin_LK), rest], axis=-1)


def attend(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    is_causal: bool,
) -> jax.Array:
    """Attention output ``[B, L, H, K]``, where keys at or beyond ``length_B`` are invisible.

    Heads share the ``G`` key/value heads in consecutive groups. Outputs at positions beyond the
    length are finite and meaningless. The devices in use decide how it is computed: on a CPU in the
    order of work that suits it, elsewhere see `dlm_jax.model.forms.attention`.
    """
    if platform() != "cpu":
        may_see = forms.causal if is_causal else None
        return forms.attention(q_BLHK, k_BLGK, v_BLGK, length_B, may_see=may_see)
    y_BLHK = cpu.attention(q_BLHK, k_BLGK, v_BLGK, length_B, is_causal=is_causal)
    return checkpoint_name(y_BLHK, forms.SAVED)


def attend_in_blocks(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    block_length: int,
) -> jax.Array:
    """As `attend`, where a position sees its own block of the row and all blocks before it."""
    if platform() != "cpu":
        may_see = forms.InBlocks(block_length)
        return forms.attention(q_BLHK, k_BLGK, v_BLGK, length_B, may_see=may_see)
    place_L = jnp.arange(q_BLHK.shape[1])
    is_seen_BLL = _sees(place_L[None], place_L[None], block_length)
    is_seen_BLL = is_seen_BLL & live_positions(length_B, place_L.size)[:, None, :]
    y_BLHK = cpu.attention_where(q_BLHK, k_BLGK, v_BLGK, is_seen_BLL)
    return checkpoint_name(y_BLHK, forms.SAVED)


def attend_beside_clean(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    block_length: int,
) -> jax.Array:
    """Attention of two streams of the same rows, the first half of them noisy, the second clean.

    A noisy position sees the noisy ones of its own block, and the clean ones of the blocks before;
    a clean position the clean ones of its own block and those before (Arriola et al. 2025, Block
    diffusion, section 3.1).

    Args:
      q_BLHK: of both streams, one behind the other along the rows: ``[2 B, L, H, K]``.
      k_BLGK: likewise, ``[2 B, L, G, K]``.
      v_BLGK: likewise.
      length_B: of the rows of one stream.
      block_length: positions of a block.
    """
    half = length_B.shape[0]
    k_BMGK, v_BMGK = (jnp.concatenate([x[:half], x[half:]], axis=1) for x in (k_BLGK, v_BLGK))
    may_see = forms.BesideClean(block_length, q_BLHK.shape[1])
    if platform() != "cpu":
        noisy_BLHK = forms.attention(q_BLHK[:half], k_BMGK, v_BMGK, length_B, may_see=may_see)
    else:
        place_M = jnp.arange(k_BMGK.shape[1])
        is_live_BL = live_positions(length_B, q_BLHK.shape[1])
        is_live_B1M = jnp.tile(is_live_BL, (1, 2))[:, None, :]
        is_seen_BLM = may_see(place_M[: q_BLHK.shape[1], None], place_M[None])[None] & is_live_B1M
        noisy_BLHK = cpu.attention_where(q_BLHK[:half], k_BMGK, v_BMGK, is_seen_BLM)
    clean_BLHK = attend_in_blocks(
        q_BLHK[half:], k_BLGK[half:], v_BLGK[half:], length_B, block_length=block_length
    )
    return jnp.concatenate([noisy_BLHK, clean_BLHK])


class SeenKeys(NamedTuple):
    """Which keys the positions of a window see, as `shared_bias` hides the others.

    Attributes:
      kept_bias: of the keys that are kept, ``[B, 1, N or 1, L]``.
      own_bias: of the window's own, ``[B, 1, N or 1, W]``.
    """

    kept_bias: jax.Array
    own_bias: jax.Array


def seen_keys(
    window: Window,
    place_BW: jax.Array,
    length_B: jax.Array,
    num_positions: int,
    *,
    block_length: int,
    num_shared: int,
) -> SeenKeys:
    """What the positions `place_BW` of a window see of a canvas and of themselves."""
    place_1L = jnp.arange(num_positions)[None]
    begin_B1, end_B1, length_B1 = window.begin_N[:, None], window.end_N[:, None], length_B[:, None]

    def is_own(place: jax.Array) -> jax.Array:
        return (place >= begin_B1) & (place < end_B1)

    is_kept_BL = (place_1L < length_B1) & ~is_own(place_1L)
    is_new_BW = (place_BW < length_B1) & is_own(place_BW)
    is_kept_BWL = is_kept_BL[:, None, :] & _sees(place_BW, place_1L, block_length)
    is_new_BWW = is_new_BW[:, None, :] & _sees(place_BW, place_BW, block_length)
    return SeenKeys(
        cpu.shared_bias(is_kept_BWL, num_shared), cpu.shared_bias(is_new_BWW, num_shared)
    )


def attend_beside_kept(
    q_BWHK: jax.Array,
    kept_BGLK: tuple[jax.Array, jax.Array],
    own_BGWK: tuple[jax.Array, jax.Array],
    seen: SeenKeys,
) -> jax.Array:
    """Attention output ``[B, W, H, K]`` of a window to keys and values that are kept, and its own.

    One softmax over both; neither is copied beside the other. Products are accumulated in float32.
    """
    q_BGNK = cpu.grouped(q_BWHK, own_BGWK[0].shape[1])
    pairs = ((kept_BGLK, seen.kept_bias), (own_BGWK, seen.own_bias))
    scores = [_product(q_BGNK, key, 3) + bias for (key, _), bias in pairs]
    top_BGN1 = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - top_BGN1) for s in scores]
    total_BGN1 = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    parts = [_product(w, value, 2) for w, ((_, value), _) in zip(weights, pairs, strict=True)]
    return cpu.ungrouped((parts[0] + parts[1]) / total_BGN1, q_BWHK)


def _product(a_BGNM: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Product over the last axis and that of `b`, of operands in the dtype of `b`."""
    return jax.lax.dot_general(
        a_BGNM.astype(b.dtype), b, (((3,), (axis,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _sees(query_BN: jax.Array, key_BM: jax.Array, block_length: int) -> jax.Array:
    """True ``[B, N, M]`` where a query's position may see a key's; 0: it sees all of them."""
    query_BN1, key_B1M = query_BN[:, :, None], key_BM[:, None, :]
    if block_length == 0:
        return jnp.ones((query_BN.shape[0], 1, key_BM.shape[1]), bool)
    return key_B1M // block_length <= query_BN1 // block_length
