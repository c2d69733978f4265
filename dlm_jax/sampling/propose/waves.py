"""Where a wavefront begins, and how many waves it takes from there."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.protocol import most, reaches

NEVER = 2**30
"""Further than any position of a canvas."""


def by_density(
    ratio_B: jax.Array, power_B: jax.Array, is_seen_BL: jax.Array, length_B: jax.Array
) -> jax.Array:
    """``ratio d ** power``, d being the share of the row's positions that are not seen."""
    density_B = 1.0 - is_seen_BL.sum(1) / jnp.maximum(length_B, 1)
    return ratio_B * jnp.where(power_B == 0, 1.0, density_B**power_B)


def bootstrap(
    is_far_BL: jax.Array,
    sureness_BL: jax.Array,
    ratio_B: jax.Array,
    is_spread_B: jax.Array,
    preference_BL: jax.Array | None = None,
) -> jax.Array:
    """True at the positions where each row begins, ``[B, L]``: see `Wavefront`.

    Args:
      is_far_BL: True at open positions of runs without a visible token at either end.
      sureness_BL: float32 log-probability, higher is surer.
      ratio_B: float32 share of them that begins; one at least.
      is_spread_B: True for rows that take the surest of equal windows instead of the surest of all.
      preference_BL: uint32, which of equally sure positions begins, as of `most`.
    """
    total_B = jnp.sum(is_far_BL, axis=1)
    count_B = jnp.floor(ratio_B * total_B + 1e-3).astype(jnp.int32)
    count_B = jnp.minimum(jnp.maximum(count_B, 1), total_B)
    rank_BL = jnp.cumsum(is_far_BL, axis=1) - 1
    window_BL = _share(rank_BL, count_B[:, None], total_B[:, None])
    is_first_BL = jnp.where(
        is_spread_B[:, None],
        _surest_of_each(sureness_BL, is_far_BL, window_BL, preference_BL),
        most(sureness_BL, is_far_BL, count_B, preference_BL, 1.0),
    )
    begins_BL = is_far_BL & ~jnp.pad(is_far_BL[:, :-1], ((0, 0), (1, 0)))
    run_BL = jnp.cumsum(begins_BL, axis=1) - 1
    is_begun_BL = _any_of_each(is_first_BL, is_far_BL, run_BL)
    return is_first_BL | _surest_of_each(
        sureness_BL, is_far_BL & ~is_begun_BL, run_BL, preference_BL
    )


def _share(rank: jax.Array, count: jax.Array, total: jax.Array) -> jax.Array:
    """``floor(rank count / total)`` of numbers up to 2^20, whose product does not fit 32 bits."""
    rank, count = rank.astype(jnp.uint32), count.astype(jnp.uint32)
    total = jnp.maximum(total, 1).astype(jnp.uint32)
    thousands = rank // 1024 * count
    rest = thousands % total * 1024 + rank % 1024 * count
    return (thousands // total * 1024 + rest // total).astype(jnp.int32)


def _surest_of_each(
    score_BL: jax.Array,
    is_in_BL: jax.Array,
    group_BL: jax.Array,
    preference_BL: jax.Array | None,
) -> jax.Array:
    """True at each group's highest score among the positions that are in; ties as of `most`."""
    place_BL = jnp.broadcast_to(jnp.arange(score_BL.shape[1]), score_BL.shape)
    best_BL = _over_groups(jnp.where(is_in_BL, score_BL, -jnp.inf), is_in_BL, group_BL, "max")
    if preference_BL is None:
        is_best_BL = is_in_BL & (score_BL >= best_BL)
    else:
        is_best_BL = is_in_BL & reaches(score_BL, best_BL, 1.0)
        liked_BL = jnp.where(is_best_BL, preference_BL, jnp.uint32(0))
        is_best_BL &= liked_BL == _over_groups(liked_BL, is_in_BL, group_BL, "max")
    first_BL = _over_groups(jnp.where(is_best_BL, place_BL, NEVER), is_in_BL, group_BL, "min")
    return is_best_BL & (place_BL == first_BL)


def _any_of_each(is_true_BL: jax.Array, is_in_BL: jax.Array, group_BL: jax.Array) -> jax.Array:
    """True at the positions that are in and whose group holds a True."""
    return is_in_BL & (_over_groups(is_true_BL.astype(jnp.int32), is_in_BL, group_BL, "max") > 0)


def _over_groups(
    value_BL: jax.Array, is_in_BL: jax.Array, group_BL: jax.Array, how: str
) -> jax.Array:
    """What the values of each position's group come to; groups are numbered within their row."""
    num_rows, num_positions = value_BL.shape
    key_BL = group_BL + num_positions * jnp.arange(num_rows)[:, None]
    key_P = jnp.where(is_in_BL, key_BL, value_BL.size).reshape(-1)
    reduce = jax.ops.segment_max if how == "max" else jax.ops.segment_min
    found = reduce(value_BL.reshape(-1), key_P, value_BL.size + 1)
    return found[key_P].reshape(value_BL.shape)


def distance(
    is_walked_BL: jax.Array, is_source_BL: jax.Array, is_one_sided_B: jax.Array | bool = False
) -> jax.Array:
    """Steps to the nearest source through walked positions; `NEVER` where none is reached.

    In one-sided rows to the source on the left, if there is one.
    """

    def from_left(is_walked_BL: jax.Array, is_source_BL: jax.Array) -> jax.Array:
        place_BL = jnp.broadcast_to(jnp.arange(is_walked_BL.shape[1]), is_walked_BL.shape)
        wall_BL = jax.lax.cummax(jnp.where(is_walked_BL, -1, place_BL), axis=1)
        is_source_BL = jnp.take_along_axis(is_source_BL, jnp.maximum(wall_BL, 0), axis=1)
        return jnp.where(is_source_BL & (wall_BL >= 0), place_BL - wall_BL, NEVER)

    left_BL = from_left(is_walked_BL, is_source_BL)
    right_BL = from_left(is_walked_BL[:, ::-1], is_source_BL[:, ::-1])[:, ::-1]
    is_from_left_BL = jnp.reshape(is_one_sided_B, (-1, 1)) & (left_BL < NEVER)
    return jnp.where(is_from_left_BL, left_BL, jnp.minimum(left_BL, right_BL))
