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
    of 8 take cuDNN's fused kernel; everything else, XLA, in the order of work that suits a CPU
    there.
    """
    is_half = q_BLHK.dtype in (jnp.bfloat16, jnp.float16)
    if jax.default_backend() != "gpu" or not is_half or q_BLHK.shape[-1] % 8:
        return cpu.attention(q_BLHK, k_BLGK, v_BLGK, length_B, is_causal=is_causal)
    # A row of length 0 would be fully masked; one visible key keeps it finite.
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
