"""What speaks for an insertion or a deletion: numbers of each position, from the last forward.

Training-free; all that is known of the logits are two numbers of each position, gathered after the
last commit (`docs/design.md`, readings of variable-length edits).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits.moves import Cells
from dlm_jax.types import live_positions

LEAST = -100.0
"""Nats that an impossible token counts, so that texts which share one can be compared."""
_FAR = 2**30


class Snapshot(NamedTuple):
    """What the last forward said of the canvas, at temperature 1; nothing at holes.

    Attributes:
      own_BL: float32 log-probability of the token that stands at each position, in nats.
      right_BL: float32 log-probability, at the same position, of the token to its right.
      best_BL: float32 log-probability of the likeliest other token there (of any where one was
        drawn), or that of the token itself where it may not be written; None where no rule reads
        it.
      is_due_BL: True where that is the token to its right; None likewise.
      best_id_BL: int32 id of it, -1 where it may not be written; None likewise.
    """

    own_BL: jax.Array
    right_BL: jax.Array
    best_BL: jax.Array | None = None
    is_due_BL: jax.Array | None = None
    best_id_BL: jax.Array | None = None


def uncertainty(cells: Cells, snapshot: Snapshot, *, mask_id: int) -> jax.Array:
    """float32 ``[B, L]`` in [0, 1]: ``1 - p`` of each token; 0 at holes and frozen positions."""
    is_own_BL = is_token(cells, mask_id=mask_id) & ~cells.frozen_BL
    # 1 - exp(x) is 0 in float32 where a token is nearly certain, and nothing would be above 0.
    return jnp.where(is_own_BL, -jnp.expm1(snapshot.own_BL), 0.0)


def gap_scores(uncertainty_BL: jax.Array) -> jax.Array:
    """float32 ``[B, L]``: at g + 1 the greater uncertainty of g and g + 1; 0 at 0, which has none.

    A gap between frozen positions or holes scores 0. The gap right behind
    the prompt is legal: nothing given changes by it.
    """
    score_BG = jnp.maximum(uncertainty_BL[:, :-1], uncertainty_BL[:, 1:])
    return jnp.pad(score_BG, ((0, 0), (1, 0)))


def leads(cells: Cells, snapshot: Snapshot, *, mask_id: int) -> jax.Array:
    """float32 ``[B, L]``: at g + 1 how far the likeliest token is ahead of the one that is there.

    ``max_v p(g + 1, v) - p(g + 1, x_g+1)``: what is missing in front of a token would stand in its
    place. 0 where the likeliest is the right neighbour, which speaks for a deletion, and at holes
    and frozen positions. At 0 it speaks for another first token: there is no gap. Unlike
    `gap_scores` it is silent where the model is merely unsure, and names one gap of the two beside
    a misfit. For models that have learnt from misprinted text (`dlm_jax.diffusion.misprints`),
    whose predictions say what is due at a position.
    """
    assert snapshot.best_BL is not None
    lead_BL = jnp.exp(snapshot.best_BL) - jnp.exp(snapshot.own_BL)
    is_asked_BL = may_be_led(cells, snapshot, mask_id=mask_id)
    return jnp.where(is_asked_BL, jnp.maximum(lead_BL, 0.0), 0.0)


def may_be_led(cells: Cells, snapshot: Snapshot, *, mask_id: int) -> jax.Array:
    """True at tokens that were not given and whose likeliest rival is not the right neighbour."""
    assert snapshot.is_due_BL is not None
    is_token_BL = is_token(cells, mask_id=mask_id)
    return is_token_BL & ~cells.frozen_BL & ~(right_of(is_token_BL) & snapshot.is_due_BL)


def deletion_scores(
    cells: Cells,
    snapshot: Snapshot,
    margin_B: jax.Array,
    lambda_B: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """float32 ``[B, L]``: how much the model would have the tokens behind each one a place earlier.

    ``max(0, D1 - margin) + lambda max(0, D2 - margin)``, where D1 at i is ``p(i, x_i+1) - p(i,
    x_i)`` and D2 is the D1 of i + 1. A difference that names a hole, or what lies beyond the row,
    counts 0.
    """
    is_token_BL = is_token(cells, mask_id=mask_id)
    is_pair_BL = is_token_BL & right_of(is_token_BL)
    lead_BL = jnp.exp(snapshot.right_BL) - jnp.exp(snapshot.own_BL)
    gain_BL = jnp.where(is_pair_BL, jnp.maximum(lead_BL - margin_B[:, None], 0.0), 0.0)
    return gain_BL + lambda_B[:, None] * right_of(gain_BL)


def fit_of_next(cells: Cells, snapshot: Snapshot, mask_id: int) -> jax.Array:
    """float32 ``[B, L]`` in [-1, 1]: D1 of `deletion_scores`; -1 where it names a hole."""
    is_token_BL = is_token(cells, mask_id=mask_id)
    lead_BL = jnp.exp(snapshot.right_BL) - jnp.exp(snapshot.own_BL)
    return jnp.where(is_token_BL & right_of(is_token_BL), lead_BL, -1.0)


def is_token(cells: Cells, *, mask_id: int) -> jax.Array:
    """True at live positions that are no holes; given ones never are."""
    is_live_BL = live_positions(cells.length_B, cells.tokens_BL.shape[1])
    return is_live_BL & (cells.frozen_BL | (cells.tokens_BL != mask_id))


def is_near(mark_BL: jax.Array, reach_B: jax.Array) -> jax.Array:
    """True within reach of a mark; nowhere with a reach of 0."""
    place_BL = jnp.broadcast_to(jnp.arange(mark_BL.shape[1]), mark_BL.shape)
    left_BL = jax.lax.cummax(jnp.where(mark_BL, place_BL, -_FAR), axis=1)
    right_BL = jax.lax.cummin(jnp.where(mark_BL, place_BL, _FAR), axis=1, reverse=True)
    distance_BL = jnp.minimum(place_BL - left_BL, right_BL - place_BL)
    return (distance_BL <= reach_B[:, None]) & (reach_B > 0)[:, None]


def right_of(x_BL: jax.Array) -> jax.Array:
    """What stands right of each position; 0 or False at the last."""
    return jnp.pad(x_BL[:, 1:], ((0, 0), (0, 1)))


def left_of(x_BL: jax.Array) -> jax.Array:
    """What stands left of each position; 0 or False at the first."""
    return jnp.pad(x_BL[:, :-1], ((0, 0), (1, 0)))
