"""Plain forms of the layers that have a faster exact form on CPU.

(The interface the model uses: linear, rms_norm, attention. Replace the bodies, keep the names.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """``x @ kernel``, shape ``[..., F]``."""
    return x @ kernel_DF


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the last axis; `scale` broadcasts to `x`."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon) * scale


def attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    is_causal: bool,
) -> jax.Array:
    """Attention output ``[B, L, H, K]``; keys at or beyond ``length_B`` are invisible."""
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        key_value_seq_lengths=jnp.maximum(length_B, 1),
        is_causal=is_causal,
    )


def compiler_options(*, is_training: bool) -> dict[str, Any]:
    """Options for ``jax.jit`` that make such a program faster on CPU; none elsewhere."""
    return {}
