"""Rows whose tokens are missing, doubled, stray or wrong, and what should stand at each position.

What the masks of denoising never teach: that text may have to move. `sampling/edits.py` reads from
a model how likely the right neighbour is in a token's place, and how unlikely the token itself is;
both mean something only to a model that has seen text that is a place off.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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


def misprint(
    key: jax.Array,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    is_free_BL: jax.Array,
    ratio_B: jax.Array,
) -> Misprints:
    """Each free position is misprinted with its row's probability, in one of three ways.

    Its token is missing, or another stands there, or a stray one stands in front of it: half of
    those double the token before, the others are, like the wrong ones, tokens of the row. Nothing
    is stray behind what is missing, and a stray token that equals the one behind it is no misprint.

    Args:
      key: of all the draws.
      tokens_BL: int32 clean rows.
      length_B: int32 live tokens of each row.
      is_free_BL: True at live tokens that may be misprinted.
      ratio_B: float32 in [0, 1].
    """
    num_positions = tokens_BL.shape[1]
    hit_key, kind_key, other_key, double_key = jax.random.split(key, 4)
    is_hit_BL = (jax.random.uniform(hit_key, tokens_BL.shape) < ratio_B[:, None]) & is_free_BL
    kind_BL = jax.random.randint(kind_key, tokens_BL.shape, 0, 3)
    is_missing_BL = is_hit_BL & (kind_BL == 0)
    is_wrong_BL = is_hit_BL & (kind_BL == 1)
    is_stray_BL = is_hit_BL & (kind_BL == 2) & ~_after(is_missing_BL, False)

    place_BL = jnp.floor(jax.random.uniform(other_key, tokens_BL.shape) * length_B[:, None])
    other_BL = jnp.take_along_axis(tokens_BL, place_BL.astype(jnp.int32), axis=1)
    is_double_BL = jax.random.bernoulli(double_key, 0.5, tokens_BL.shape)
    before_BL = jnp.where(is_double_BL, _after(tokens_BL, 0), other_BL)
    # Nothing stands in front of the first token that could be doubled.
    before_BL = before_BL.at[:, 0].set(other_BL[:, 0])
    printed_BL = jnp.where(is_wrong_BL, other_BL, tokens_BL)

    index_BL = jnp.broadcast_to(jnp.arange(num_positions), tokens_BL.shape)
    is_kept_BL = (index_BL < length_B[:, None]) & ~is_missing_BL
    last_kept_BL = jax.lax.cummax(jnp.where(is_kept_BL, index_BL, -1), axis=1)
    due_BL = jnp.take_along_axis(tokens_BL, _after(last_kept_BL, -1) + 1, axis=1)

    until_BL = jnp.cumsum(is_kept_BL.astype(jnp.int32) + is_stray_BL, axis=1)
    kept_BL = jnp.where(is_kept_BL, until_BL - 1, num_positions)
    stray_BL = jnp.where(is_stray_BL, until_BL - 2, num_positions)

    def set_row(old_L: jax.Array, at: jax.Array, new_L: jax.Array) -> jax.Array:
        return old_L.at[at].set(new_L, mode="drop")

    put = jax.vmap(set_row)
    shown_BL = put(put(tokens_BL, kept_BL, printed_BL), stray_BL, before_BL)
    true_BL = put(put(tokens_BL, kept_BL, due_BL), stray_BL, tokens_BL)
    # A kept token behind a stray one is where it belongs.
    return Misprints(shown_BL, true_BL, jnp.minimum(until_BL[:, -1], num_positions))


def _after(x_BL: jax.Array, first: int | bool) -> jax.Array:
    """What stands left of each position; `first` at the first."""
    return jnp.pad(x_BL[:, :-1], ((0, 0), (1, 0)), constant_values=first)
