"""Corruption of texts: noise schedules, selection of positions, and shown tokens.

A denoising pattern selects some of the free positions in each row. A selected position shows MASK,
a random token or its own token. Unlike MASK, random and unchanged tokens also train predictions at
visible positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Schedule:
    """A noise schedule: the masked fraction at time ``t`` in (0, 1], and the weight of the
    cross-entropy.

    ``alpha(t)``, the visible fraction, decreases from 1 to 0. The bound is the same for every
    schedule (Kingma et al. 2021, section 5.1); only the variance of its estimate differs.

    Attributes:
      masked_ratio: ``1 - alpha(t)``, the probability of MASK at time ``t``.
      weight: ``-alpha'(t) / (1 - alpha(t))``.
    """

    masked_ratio: Callable[[jax.Array], jax.Array]
    weight: Callable[[jax.Array], jax.Array]


LINEAR = Schedule(lambda t: t, lambda t: 1.0 / t)
"""``alpha(t) = 1 - t``: Shi et al. 2024 (MD4), table 1; Sahoo et al. 2024 (MDLM), section 3."""

COSINE = Schedule(
    # cos(pi/2 (1 - t)), computed as a sine, which is accurate near 0.
    lambda t: jnp.sin(0.5 * jnp.pi * t),
    lambda t: 0.5 * jnp.pi / jnp.tan(0.5 * jnp.pi * t),
)
"""``alpha(t) = 1 - cos(pi/2 (1 - t))``, which makes high masked fractions more frequent (MD4)."""


@functools.cache
def polynomial(power: float) -> Schedule:
    """``alpha(t) = 1 - t^power``. Powers above 1 make low masked fractions more frequent (MD4)."""
    return Schedule(lambda t: t**power, lambda t: power / t)


SCHEDULES: dict[str, Callable[[float], Schedule]] = {
    "linear": lambda power: LINEAR,
    "cosine": lambda power: COSINE,
    "polynomial": polynomial,
}
"""Noise schedules by config name. Only the polynomial schedule uses the power."""


def stratified_times(key: jax.Array, num_rows: int, *, smallest: float = 0.0) -> jax.Array:
    """Low-discrepancy times ``[B]`` in (smallest, 1], one in each of ``B`` strata.

    The time of row ``i`` is ``1 - frac(u + i / B)``, with a single uniform ``u``. Each time is
    marginally uniform, and the mean of the times has low variance (Kingma et al. 2021, appendix
    I.1). `smallest` limits the weight ``1 / t``; the integral below `smallest` is omitted.
    """
    offset = jax.random.uniform(key)
    spread = (offset + jnp.arange(num_rows, dtype=jnp.float32) / num_rows) % 1.0
    return smallest + (1.0 - smallest) * (1.0 - spread)


def mask_independently(key: jax.Array, ratio: jax.Array, is_free_BL: jax.Array) -> jax.Array:
    """True ``[B, L]`` at the free tokens to hide. Each token is hidden with the probability of its
    row.

    If `ratio` is ``[B, L]`` instead of ``[B]``, each position has its own probability.
    """
    ratio_BL = ratio if ratio.ndim == 2 else ratio[:, None]
    return (jax.random.uniform(key, is_free_BL.shape) < ratio_BL) & is_free_BL


def mask_exactly(key: jax.Array, count_B: jax.Array, is_free_BL: jax.Array) -> jax.Array:
    """True at `count_B` free positions in each row, ``[B, L]``. All sets of this size are equally
    likely.

    If the count exceeds the number of free positions, all of them are selected.
    """
    order_BL = jnp.where(is_free_BL, jax.random.uniform(key, is_free_BL.shape), jnp.inf)
    rank_BL = jnp.argsort(jnp.argsort(order_BL, axis=1), axis=1)
    return (rank_BL < count_B[:, None]) & is_free_BL


def select_sticky(
    key: jax.Array,
    ratio_B: jax.Array,
    is_free_BL: jax.Array,
    *,
    alone: float,
    beside: float,
) -> jax.Array:
    """True at ``ceil(ratio * free)`` positions in each row, ``[B, L]``, in clusters.

    Each round selects every free position with probability `beside` if a neighbour was selected in
    an earlier round, and with probability `alone` (above 0) otherwise. Rounds are repeated until
    enough positions in the row are selected. Surplus positions are dropped at random.
    """
    num_free_B = jnp.sum(is_free_BL, axis=1)
    wanted_B = jnp.ceil(ratio_B * num_free_B - 1e-3).astype(jnp.int32)
    drop_key, round_key = jax.random.split(key)

    def is_short(is_selected_BL: jax.Array) -> jax.Array:
        return jnp.sum(is_selected_BL, axis=1) < wanted_B

    def one_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, is_selected_BL = carry
        padded = jnp.pad(is_selected_BL, ((0, 0), (1, 1)))
        has_neighbour_BL = padded[:, :-2] | padded[:, 2:]
        chance_BL = jnp.where(has_neighbour_BL, beside, alone)
        uniform_BL = jax.random.uniform(jax.random.fold_in(round_key, number), chance_BL.shape)
        is_new_BL = (uniform_BL < chance_BL) & is_free_BL & is_short(is_selected_BL)[:, None]
        return number + 1, is_selected_BL | is_new_BL

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(is_free_BL))
    _, is_selected_BL = jax.lax.while_loop(lambda c: jnp.any(is_short(c[1])), one_round, start)
    return mask_exactly(drop_key, wanted_B, is_selected_BL)


def select_spans(key: jax.Array, is_free_BL: jax.Array, *, count: int) -> jax.Array:
    """True in `count` spans of free positions in each row, ``[B, L]``.

    The spans are drawn as ``2 * count`` uniform positions. Each pair of the sorted positions is the
    inclusive start and end of a span.
    """
    num_free_B1 = jnp.sum(is_free_BL, axis=1, keepdims=True)
    uniform_BE = jax.random.uniform(key, (is_free_BL.shape[0], 2 * count))
    ends_BE = jnp.sort(jnp.floor(uniform_BE * num_free_B1).astype(jnp.int32), axis=1)
    place_BL1 = (jnp.cumsum(is_free_BL, axis=1) - 1)[:, :, None]
    is_inside_BLC = (place_BL1 >= ends_BE[:, None, 0::2]) & (place_BL1 <= ends_BE[:, None, 1::2])
    return jnp.any(is_inside_BLC, axis=2) & is_free_BL


def show(
    key: jax.Array,
    tokens_BL: jax.Array,
    is_selected_BL: jax.Array,
    *,
    mask_share: float | jax.Array,
    random_share: float | jax.Array,
    mask_id: int,
    random_ids: tuple[int, ...],
) -> jax.Array:
    """The canvas ``[B, L]`` with the selected positions corrupted independently.

    A selected position shows MASK with probability `mask_share`, a uniform draw from `random_ids`
    (possibly the true token) with probability `random_share`, and otherwise its own token.
    """
    kind_key, id_key = jax.random.split(key)
    kind_BL = jax.random.uniform(kind_key, tokens_BL.shape)
    choice_BL = jax.random.randint(id_key, tokens_BL.shape, 0, len(random_ids))
    random_BL = jnp.asarray(random_ids, tokens_BL.dtype)[choice_BL]
    corrupted_BL = jnp.where(kind_BL < mask_share + random_share, random_BL, tokens_BL)
    corrupted_BL = jnp.where(kind_BL < mask_share, mask_id, corrupted_BL)
    return jnp.where(is_selected_BL, corrupted_BL, tokens_BL)
