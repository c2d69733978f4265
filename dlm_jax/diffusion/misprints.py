"""Rows whose tokens are missing, doubled, stray or wrong, and what should stand at each position.

What the masks of denoising never teach: that text may have to move. `sampling/edits` reads from
a model how likely the right neighbour is in a token's place, and how unlikely the token itself is;
both mean something only to a model that has seen text that is a place off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.config.objective import MISPRINTS, USUAL_MISPRINTS
from dlm_jax.types import live_positions


class Misprints(NamedTuple):
    """Misprinted rows.

    Attributes:
      shown_BL: int32 canvas.
      true_BL: int32, what should stand at each position as the text around it has it: behind a
        missing token that token, at a stray one the token that follows, elsewhere the position's
        own.
      length_B: int32 live tokens of each row, as many as fit.
    """

    shown_BL: jax.Array
    true_BL: jax.Array
    length_B: jax.Array


class _Damage(NamedTuple):
    """What happens to each clean token; the last two are None where it never does."""

    is_missing_BL: jax.Array
    is_wrong_BL: jax.Array
    is_stray_BL: jax.Array
    is_swapped_BL: jax.Array | None
    has_two_strays_BL: jax.Array | None


def misprint(
    key: jax.Array,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    is_free_BL: jax.Array,
    ratio_B: jax.Array,
    *,
    kinds: Sequence[str] = USUAL_MISPRINTS,
) -> Misprints:
    """Each free position is misprinted with its row's probability, in one of several ways.

    Its token is missing, or another stands there (*wrong*), or a *stray* one stands in front of it:
    half of those double the token before, the others are, like the wrong ones, tokens of the row.
    Nothing is stray behind what is missing, and a stray token that equals the one behind it is no
    misprint. Or it changes places with the token behind it (*transposed*), or the same happens to
    both of them (*missing_pair*, *wrong_pair*); one behind it that is given, or misprinted itself,
    is spared, and then nothing is transposed. Of two stray tokens (*stray_pair*) half double the
    two before.

    Args:
      key: of all the draws.
      tokens_BL: int32 clean rows.
      length_B: int32 live tokens of each row.
      is_free_BL: True at live tokens that may be misprinted.
      ratio_B: float32 in [0, 1].
      kinds: of `dlm_jax.config.objective.MISPRINTS`, each as likely; one that is named twice is
        twice as likely.
    """
    num_positions = tokens_BL.shape[1]
    hit_key, kind_key, other_key, double_key = jax.random.split(key, 4)
    is_hit_BL = (jax.random.uniform(hit_key, tokens_BL.shape) < ratio_B[:, None]) & is_free_BL
    kind_BL = jax.random.randint(kind_key, tokens_BL.shape, 0, len(kinds))
    damage = _damage(is_hit_BL, kind_BL, is_free_BL, kinds)

    place_BL = jnp.floor(jax.random.uniform(other_key, tokens_BL.shape) * length_B[:, None])
    other_BL = jnp.take_along_axis(tokens_BL, place_BL.astype(jnp.int32), axis=1)
    is_double_BL = jax.random.bernoulli(double_key, 0.5, tokens_BL.shape)
    before_BL = jnp.where(is_double_BL, _after(tokens_BL, 0), other_BL)
    # Nothing stands in front of the first token that could be doubled.
    before_BL = before_BL.at[:, 0].set(other_BL[:, 0])
    printed_BL = _printed(tokens_BL, other_BL, damage)

    is_kept_BL = live_positions(length_B, num_positions) & ~damage.is_missing_BL
    due_BL = _due(tokens_BL, is_kept_BL)
    number_BL = is_kept_BL.astype(jnp.int32) + damage.is_stray_BL
    if damage.has_two_strays_BL is not None:
        number_BL += damage.has_two_strays_BL
    until_BL = jnp.cumsum(number_BL, axis=1)
    kept_BL = jnp.where(is_kept_BL, until_BL - 1, num_positions)
    stray_BL = jnp.where(damage.is_stray_BL, until_BL - 2, num_positions)
    shown_BL = _put(_put(tokens_BL, kept_BL, printed_BL), stray_BL, before_BL)
    true_BL = _put(_put(tokens_BL, kept_BL, due_BL), stray_BL, tokens_BL)
    if damage.has_two_strays_BL is not None:
        first_BL = jnp.where(is_double_BL, _after(_after(tokens_BL, 0), 0), _after(other_BL, 0))
        first_BL = first_BL.at[:, :2].set(other_BL[:, :2])
        pair_BL = jnp.where(damage.has_two_strays_BL, until_BL - 3, num_positions)
        shown_BL, true_BL = _put(shown_BL, pair_BL, first_BL), _put(true_BL, pair_BL, tokens_BL)
    # A kept token behind a stray one is where it belongs.
    return Misprints(shown_BL, true_BL, jnp.minimum(until_BL[:, -1], num_positions))


def _damage(
    is_hit_BL: jax.Array, kind_BL: jax.Array, is_free_BL: jax.Array, kinds: Sequence[str]
) -> _Damage:
    """What happens where, from the positions that are hit and the number of the kind of each."""
    unknown = sorted(set(kinds) - set(MISPRINTS))
    if unknown:
        raise ValueError(f"kinds has {unknown[0]!r}; known are {', '.join(MISPRINTS)}")

    def of(name: str) -> jax.Array:
        if name not in kinds:
            return jnp.zeros_like(is_hit_BL)
        numbers = [number for number, kind in enumerate(kinds) if kind == name]
        return is_hit_BL & jnp.isin(kind_BL, jnp.array(numbers))

    # The second of two: one that may be misprinted, and is not misprinted itself.
    is_second_BL = is_free_BL & ~is_hit_BL

    def with_pairs(name: str) -> jax.Array:
        is_pair_BL = of(f"{name}_pair")
        return of(name) | is_pair_BL | (_after(is_pair_BL, False) & is_second_BL)

    is_missing_BL = with_pairs("missing")
    may_stray_BL = ~_after(is_missing_BL, False)
    return _Damage(
        is_missing_BL,
        with_pairs("wrong"),
        (of("stray") | of("stray_pair")) & may_stray_BL,
        of("transposed") & _before(is_second_BL, False) if "transposed" in kinds else None,
        of("stray_pair") & may_stray_BL if "stray_pair" in kinds else None,
    )


def _printed(tokens_BL: jax.Array, other_BL: jax.Array, damage: _Damage) -> jax.Array:
    """What is printed for each token that is not missing: itself, another, or its neighbour."""
    printed_BL = jnp.where(damage.is_wrong_BL, other_BL, tokens_BL)
    if damage.is_swapped_BL is None:
        return printed_BL
    printed_BL = jnp.where(damage.is_swapped_BL, _before(tokens_BL, 0), printed_BL)
    is_other_BL = _after(damage.is_swapped_BL, False)
    return jnp.where(is_other_BL, _after(tokens_BL, 0), printed_BL)


def _due(tokens_BL: jax.Array, is_kept_BL: jax.Array) -> jax.Array:
    """What should stand at each kept token: the one behind the last kept before it."""
    index_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    last_kept_BL = jax.lax.cummax(jnp.where(is_kept_BL, index_BL, -1), axis=1)
    return jnp.take_along_axis(tokens_BL, _after(last_kept_BL, -1) + 1, axis=1)


def _put(old_BL: jax.Array, at_BL: jax.Array, new_BL: jax.Array) -> jax.Array:
    """With the new values at those positions of each row; none where they lie outside."""

    def one_row(old_L: jax.Array, at_L: jax.Array, new_L: jax.Array) -> jax.Array:
        return old_L.at[at_L].set(new_L, mode="drop")

    return jax.vmap(one_row)(old_BL, at_BL, new_BL)


def _before(x_BL: jax.Array, last: int | bool) -> jax.Array:
    """What stands right of each position; `last` at the last."""
    return jnp.pad(x_BL[:, 1:], ((0, 0), (0, 1)), constant_values=last)


def _after(x_BL: jax.Array, first: int | bool) -> jax.Array:
    """What stands left of each position; `first` at the first."""
    return jnp.pad(x_BL[:, :-1], ((0, 0), (1, 0)), constant_values=first)
