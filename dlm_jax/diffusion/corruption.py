"""The forward process: when to corrupt how much, and which positions that hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class Schedule(Protocol):
    """How much is hidden at time ``t`` in (0, 1], and the weight of the cross-entropy there.

    ``alpha(t)``, the share still visible, falls from 1 to 0. The bound is the same for every
    schedule (Kingma et al. 2021, section 5.1); the variance of its estimate is not.
    """

    def masked_ratio(self, t: jax.Array) -> jax.Array:
        """Probability ``1 - alpha(t)`` that a token is MASK at time ``t``."""
        ...

    def weight(self, t: jax.Array) -> jax.Array:
        """``-alpha'(t) / (1 - alpha(t))``."""
        ...


@dataclass(frozen=True)
class LinearSchedule:
    """``alpha(t) = 1 - t``.

    Shi et al. 2024 (MD4), table 1; Sahoo et al. 2024 (MDLM), section 3.
    """

    def masked_ratio(self, t: jax.Array) -> jax.Array:
        """``t``."""
        return t

    def weight(self, t: jax.Array) -> jax.Array:
        """``1 / t``."""
        return 1.0 / t


@dataclass(frozen=True)
class PolynomialSchedule:
    """``alpha(t) = 1 - t^power``: above 1, more of the time is spent with little hidden.

    Shi et al. 2024 (MD4), table 1.
    """

    power: float

    def masked_ratio(self, t: jax.Array) -> jax.Array:
        """``t^power``."""
        return t**self.power

    def weight(self, t: jax.Array) -> jax.Array:
        """``power / t``."""
        return self.power / t


@dataclass(frozen=True)
class CosineSchedule:
    """``alpha(t) = 1 - cos(pi/2 (1 - t))``: more of the time is spent with much hidden.

    Shi et al. 2024 (MD4), table 1.
    """

    def masked_ratio(self, t: jax.Array) -> jax.Array:
        """``cos(pi/2 (1 - t))``, written as a sine that is exact near 0."""
        return jnp.sin(0.5 * jnp.pi * t)

    def weight(self, t: jax.Array) -> jax.Array:
        """``pi/2 tan(pi/2 (1 - t))``."""
        return 0.5 * jnp.pi / jnp.tan(0.5 * jnp.pi * t)


SCHEDULES: dict[str, Callable[[float], Schedule]] = {
    "linear": lambda power: LinearSchedule(),
    "cosine": lambda power: CosineSchedule(),
    "polynomial": PolynomialSchedule,
}
"""Noise schedules by their name in a config; the polynomial one uses the power."""


def stratified_times(key: jax.Array, num_rows: int, *, smallest: float = 0.0) -> jax.Array:
    """One time per row ``[B]`` in (smallest, 1], low-discrepancy: one in each of ``B`` strata.

    Row ``i`` gets ``1 - frac(u + i / B)`` of a single uniform ``u``, so every time is uniform on
    its own while their mean hardly varies (Kingma et al. 2021, appendix I.1). `smallest` keeps the
    weight ``1 / t`` bounded; the part of the integral below it is left out.
    """
    offset = jax.random.uniform(key)
    spread = (offset + jnp.arange(num_rows, dtype=jnp.float32) / num_rows) % 1.0
    return smallest + (1.0 - smallest) * (1.0 - spread)


def mask_independently(key: jax.Array, ratio: jax.Array, is_free_BL: jax.Array) -> jax.Array:
    """True where a free token is hidden, ``[B, L]``: each with its row's probability.

    Or with its own, where `ratio` is ``[B, L]`` instead of ``[B]``.
    """
    ratio_BL = ratio if ratio.ndim == 2 else ratio[:, None]
    return (jax.random.uniform(key, is_free_BL.shape) < ratio_BL) & is_free_BL


def mask_exactly(key: jax.Array, count_B: jax.Array, is_free_BL: jax.Array) -> jax.Array:
    """True at `count_B` free positions of each row, ``[B, L]``, every such set equally likely.

    A count above their number hides them all.
    """
    order_BL = jnp.where(is_free_BL, jax.random.uniform(key, is_free_BL.shape), jnp.inf)
    rank_BL = jnp.argsort(jnp.argsort(order_BL, axis=1), axis=1)
    return (rank_BL < count_B[:, None]) & is_free_BL
