"""Attention behind one function: who may attend to whom, and which kernel computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.model import cpu


def rotary_angles(num_positions: int, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each float32 ``[L, K/2]``.

    Position ``l`` turns pair ``i`` by ``l * theta ** (-2i / K)`` (Su et al. 2021, equation 15).
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BLHK: jax.Array, cos_LK: jax.Array, sin_LK: jax.Array) -> jax.Array:
    """Queries or keys turned by their position; pairs are ``(i, i + K/2)`` (half rotation)."""
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_LK[None, :, None, :], sin_LK[None, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLHK.dtype)


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
    length are finite and meaningless. On GPU, half-precision inputs whose head size is a multiple
    of 8 take cuDNN's fused kernel; on CPU, `cpu.attention`; everything else, XLA.
    """
    backend = jax.default_backend()
    if backend == "cpu":
        return cpu.attention(q_BLHK, k_BLGK, v_BLGK, length_B, is_causal=is_causal)
    is_half = q_BLHK.dtype in (jnp.bfloat16, jnp.float16)
    fused = backend == "gpu" and is_half and q_BLHK.shape[-1] % 8 == 0
    # A row of length 0 would be fully masked; one visible key keeps every kernel finite.
    visible_B = jnp.maximum(length_B, 1)
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        key_value_seq_lengths=visible_B,
        query_seq_lengths=jnp.full_like(visible_B, q_BLHK.shape[1]) if fused else None,
        is_causal=is_causal,
        implementation="cudnn" if fused else None,
    )
