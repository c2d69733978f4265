"""The forward process: when to corrupt how much, and the corrupted canvas."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dlm_jax.types import live_positions


@dataclass(frozen=True)
class LinearSchedule:
    """``alpha(t) = 1 - t``: the share of tokens still visible at time ``t`` in (0, 1].

    Shi et al. 2024 (MD4), table 1; Sahoo et al. 2024 (MDLM), section 3.
    """

    def masked_ratio(self, t: jax.Array) -> jax.Array:
        """Probability ``1 - alpha(t)`` that a token is MASK at time ``t``."""
        return t

    def weight(self, t: jax.Array) -> jax.Array:
        """``-alpha'(t) / (1 - alpha(t))``: what the cross-entropy at time ``t`` counts for."""
        return 1.0 / t


def stratified_times(key: jax.Array, num_rows: int, *, smallest: float = 0.0) -> jax.Array:
    """One time per row ``[B]`` in (smallest, 1], low-discrepancy: one in each of ``B`` strata.

    Row ``i`` gets ``1 - frac(u + i / B)`` of a single uniform ``u``, so every time is uniform on
    its own while their mean hardly varies (Kingma et al. 2021, appendix I.1). `smallest` keeps the
    weight ``1 / t`` bounded; the part of the integral below it is left out.
    """
    offset = jax.random.uniform(key)
    spread = (offset + jnp.arange(num_rows, dtype=jnp.float32) / num_rows) % 1.0
    return smallest + (1.0 - smallest) * (1.0 - spread)


def mask_independently(
    key: jax.Array, ratio_B: jax.Array, length_B: jax.Array, num_positions: int
) -> jax.Array:
    """True where a live token is hidden, ``[B, L]``: each with its row's probability."""
    uniform = jax.random.uniform(key, (ratio_B.shape[0], num_positions))
    return (uniform < ratio_B[:, None]) & live_positions(length_B, num_positions)


def mask_exactly(
    key: jax.Array, count_B: jax.Array, length_B: jax.Array, num_positions: int
) -> jax.Array:
    """True at `count_B` live positions of each row, ``[B, L]``, every such set equally likely.

    A count above the length hides the whole row.
    """
    is_live = live_positions(length_B, num_positions)
    order = jax.random.uniform(key, is_live.shape)
    rank = jnp.argsort(jnp.argsort(jnp.where(is_live, order, jnp.inf), axis=1), axis=1)
    return (rank < count_B[:, None]) & is_live
