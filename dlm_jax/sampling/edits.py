"""Structural edits: which gaps get a token and which tokens go, so that a row's length breathes.

Training-free, after `seeds/variable_length_edits.md` as DESIGN 8 and 11 read it. All that is known
of the logits are two numbers of each position, gathered after the last commit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.config.generation import EDIT_SCHEDULES
from dlm_jax.sampling.commit import most
from dlm_jax.sampling.shifting import Cells, Edits, Plan, apply_plan, plan_edits
from dlm_jax.types import live_positions

_NUDGE = 3
_FAR = 2**30


class Snapshot(NamedTuple):
    """What the last forward said of the canvas, at temperature 1; nothing at holes.

    Attributes:
      own_BL: float32 log-probability of the token that stands at each position, in nats.
      right_BL: float32 log-probability, at the same position, of the token to its right.
      best_BL: float32 log-probability of the likeliest token there, or that of the token itself
        where the likeliest may not be written; None where nobody reads it.
      is_due_BL: True where the likeliest is the token to its right; None likewise.
    """

    own_BL: jax.Array
    right_BL: jax.Array
    best_BL: jax.Array | None = None
    is_due_BL: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "insert_ratio_B", "delete_ratio_B", "insert_margin_B", "delete_margin_B",
        "delete_lambda_B", "cooldown_B", "trims_B", "targets_length_B", "capacity_B", "target_B",
    ],
    meta_fields=["scoring"],
)  # fmt: skip
@dataclass(frozen=True)
class EditParams:
    """How each row is edited at one step.

    Attributes:
      insert_ratio_B: float32 in [0, 1], insertions per live unfrozen position, as `ratio_at` says.
      delete_ratio_B: float32 in [0, 1], deletions likewise.
      insert_margin_B: float32, at least 0: what the score of a gap must exceed to count.
      delete_margin_B: float32, at least 0: what an advantage must exceed to count.
      delete_lambda_B: float32, at least 0: weight of the second difference.
      cooldown_B: int32, how far from a mark of the last step nothing is edited; 0 is off.
      trims_B: True for rows where insertions push the tail out of the capacity; False for those
        where they stop at it.
      targets_length_B: True for rows that are nudged towards `target_B` (``to_max_new``).
      capacity_B: int32, most live positions, from the row's length to ``L``.
      target_B: int32, ``initial_length + max_new_tokens``, where the initial length is the number
        of frozen tokens; more than the capacity is the capacity.
      scoring: what speaks for a gap, one of `EDIT_SCORINGS`: ``uncertainty`` beside it
        (`gap_scores`) or ``lead`` (`leads`).
    """

    insert_ratio_B: jax.Array
    delete_ratio_B: jax.Array
    insert_margin_B: jax.Array
    delete_margin_B: jax.Array
    delete_lambda_B: jax.Array
    cooldown_B: jax.Array
    trims_B: jax.Array
    targets_length_B: jax.Array
    capacity_B: jax.Array
    target_B: jax.Array
    scoring: str = "uncertainty"


def ratio_at(
    start_B: jax.Array, end_B: jax.Array, step_B: jax.Array, steps_B: jax.Array, *, schedule: str
) -> jax.Array:
    """float32 ``[B]``: a ratio that goes from `start_B` at the first step to `end_B` at the last.

    With ``t = step / (steps - 1)``, linear is ``start + (end - start) t`` and cosine is ``end +
    (start - end) (1 + cos(pi t)) / 2``; a lone step has the start (DESIGN 8, "Schedules").

    Raises:
      ValueError: the schedule is none of `EDIT_SCHEDULES`.
    """
    share_B = step_B.astype(jnp.float32) / jnp.maximum(steps_B - 1, 1)
    share_B = jnp.minimum(share_B, 1.0)
    if schedule == "linear":
        ratio_B = start_B + (end_B - start_B) * share_B
    elif schedule == "cosine":
        ratio_B = end_B + (start_B - end_B) * 0.5 * (1.0 + jnp.cos(jnp.pi * share_B))
    else:
        known = " or ".join(EDIT_SCHEDULES)
        raise ValueError(f"schedule={schedule!r} is unknown; use {known}")
    return jnp.where(steps_B <= 1, start_B, ratio_B)


def uncertainty(cells: Cells, snapshot: Snapshot, *, mask_id: int) -> jax.Array:
    """float32 ``[B, L]`` in [0, 1]: ``1 - p`` of each token; 0 at holes and frozen positions."""
    is_own_BL = _is_token(cells, mask_id=mask_id) & ~cells.frozen_BL
    # 1 - exp(x) is 0 in float32 where a token is nearly certain, and nothing would be above 0.
    return jnp.where(is_own_BL, -jnp.expm1(snapshot.own_BL), 0.0)


def gap_scores(uncertainty_BL: jax.Array) -> jax.Array:
    """float32 ``[B, L]``: at g + 1 the greater uncertainty of g and g + 1; 0 at 0, which has none.

    A gap between frozen positions or holes scores 0. The document forbids the gap right behind the
    prompt too, though nothing given changes by it; here its right side speaks for it (DESIGN 8).
    """
    score_BG = jnp.maximum(uncertainty_BL[:, :-1], uncertainty_BL[:, 1:])
    return jnp.pad(score_BG, ((0, 0), (1, 0)))


def leads(cells: Cells, snapshot: Snapshot, *, mask_id: int) -> jax.Array:
    """float32 ``[B, L]``: at g + 1 how far the likeliest token is ahead of the one that is there.

    ``max_v p(g + 1, v) - p(g + 1, x_g+1)``: what is missing in front of a token would stand in its
    place. 0 at 0, where the likeliest is the right neighbour, which speaks for a deletion, and at
    holes and frozen positions. Unlike `gap_scores` it is silent where the model is merely unsure,
    and names one gap of the two beside a misfit. For models that have learnt from misprinted text
    (`dlm_jax.diffusion.misprints`), whose predictions say what is due at a position.
    """
    assert snapshot.best_BL is not None and snapshot.is_due_BL is not None
    is_token_BL = _is_token(cells, mask_id=mask_id)
    is_due_BL = _before(is_token_BL) & snapshot.is_due_BL
    is_asked_BL = is_token_BL & ~cells.frozen_BL & ~is_due_BL
    lead_BL = jnp.exp(snapshot.best_BL) - jnp.exp(snapshot.own_BL)
    lead_BL = jnp.where(is_asked_BL, jnp.maximum(lead_BL, 0.0), 0.0)
    return lead_BL.at[:, 0].set(0.0)


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
    x_i)`` and D2 is the D1 of i + 1 (`seeds/variable_length_edits.md`, "Scoring definitions"). A
    difference that names a hole, or what lies beyond the row, counts 0.
    """
    is_token_BL = _is_token(cells, mask_id=mask_id)
    is_pair_BL = is_token_BL & _before(is_token_BL)
    lead_BL = jnp.exp(snapshot.right_BL) - jnp.exp(snapshot.own_BL)
    gain_BL = jnp.where(is_pair_BL, jnp.maximum(lead_BL - margin_B[:, None], 0.0), 0.0)
    return gain_BL + lambda_B[:, None] * _before(gain_BL)


def select_edits(
    cells: Cells,
    snapshot: Snapshot,
    params: EditParams,
    *,
    mask_id: int,
    space_id: int,
    is_open_BL: jax.Array | None = None,
) -> Edits:
    """The edits of each row at this step, chosen on one snapshot: best scores, lower positions.

    Only scores above 0 are chosen. A gap must have a live position on its right. What goes is
    live, unfrozen, no hole, not the last of its row, and no space but at a position that an edit
    inserted: neither given nor generated spaces go. Nothing is chosen within the cooldown of a
    mark; a gap is where its token would go. Insertions and deletions know nothing of each other,
    but that rows that do not trim insert no more than they have room for after the deletions.
    Neither do rows that are nudged to grow: the document caps their insertions, all of them, at
    the free capacity, so that a row below its target loses nothing to get there.

    Args:
      cells: the canvas.
      snapshot: what the last forward said of it.
      params: how each row is edited.
      mask_id: the id of MASK.
      space_id: the id of the space; -1 for a vocabulary without one.
      is_open_BL: True where tokens may go or be put in front of what is there; None: everywhere.
        Ratios count all of the row.
    """
    is_live_BL = live_positions(cells.length_B, cells.tokens_BL.shape[1])
    num_free_B = jnp.sum(is_live_BL & ~cells.frozen_BL, axis=1)
    num_insert_B, num_delete_B, is_short_B = _budgets(cells, params, num_free_B)
    if is_open_BL is not None:
        is_live_BL &= is_open_BL
    is_free_BL = is_live_BL & ~cells.frozen_BL
    is_cool_BL = ~_is_near(cells.mark_BL, params.cooldown_B)

    misfit_BL = deletion_scores(
        cells, snapshot, params.delete_margin_B, params.delete_lambda_B, mask_id=mask_id
    )
    is_kept_space_BL = (cells.tokens_BL == space_id) & ~cells.inserted_BL
    may_go_BL = is_free_BL & (cells.tokens_BL != mask_id) & ~is_kept_space_BL
    may_go_BL &= is_cool_BL & (misfit_BL > 0)
    delete_BL = most(misfit_BL, may_go_BL, num_delete_B)

    if params.scoring == "lead":
        gap_BL = leads(cells, snapshot, mask_id=mask_id)
    else:
        gap_BL = gap_scores(uncertainty(cells, snapshot, mask_id=mask_id))
    gap_BL -= params.insert_margin_B[:, None]
    may_grow_BL = is_live_BL & is_cool_BL & (gap_BL > 0)
    wanted_B = jnp.minimum(num_insert_B, jnp.sum(may_grow_BL, axis=1))
    room_B = params.capacity_B - cells.length_B + jnp.sum(delete_BL, axis=1)
    may_spill_B = params.trims_B & ~is_short_B
    granted_B = jnp.where(may_spill_B, wanted_B, jnp.minimum(wanted_B, room_B))
    return Edits(most(gap_BL, may_grow_BL, granted_B), delete_BL, wanted_B - granted_B)


def edit(
    cells: Cells,
    snapshot: Snapshot,
    params: EditParams,
    *,
    mask_id: int,
    space_id: int,
    pad_id: int,
    edit_id: jax.Array | int,
    is_open_BL: jax.Array | None = None,
) -> tuple[Cells, Plan]:
    """The canvas after this step's edits, and the map that other arrays move through.

    Args:
      cells: the canvas.
      snapshot: what the last forward said of it.
      params: how each row is edited.
      mask_id: the id of MASK.
      space_id: the id of the space; -1 for a vocabulary without one.
      pad_id: the id of PAD.
      edit_id: what is inserted, the space or MASK; for all rows, or int32 ``[B]``.
      is_open_BL: where edits may happen, see `select_edits`.
    """
    edits = select_edits(
        cells, snapshot, params, mask_id=mask_id, space_id=space_id, is_open_BL=is_open_BL
    )
    plan = plan_edits(edits, cells, params.capacity_B)
    after = Cells(
        tokens_BL=apply_plan(plan, cells.tokens_BL, edit_id, pad_id),
        frozen_BL=apply_plan(plan, cells.frozen_BL, False, True),
        inserted_BL=apply_plan(plan, cells.inserted_BL, True, False),
        mark_BL=plan.mark_BL,
        length_B=plan.length_B,
    )
    return after, plan


def _budgets(
    cells: Cells, params: EditParams, num_free_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many insertions and deletions a row may have, and where it is nudged to grow."""
    num_insert_B, num_delete_B = (
        jnp.floor(ratio_B * num_free_B + 1e-3).astype(jnp.int32)
        for ratio_B in (params.insert_ratio_B, params.delete_ratio_B)
    )
    surplus_B = cells.length_B - jnp.minimum(params.target_B, params.capacity_B)
    nudge_B = jnp.where(params.targets_length_B, jnp.clip(surplus_B, -_NUDGE, _NUDGE), 0)
    num_insert_B += jnp.maximum(-nudge_B, 0)
    return num_insert_B, num_delete_B + jnp.maximum(nudge_B, 0), nudge_B < 0


def _is_token(cells: Cells, *, mask_id: int) -> jax.Array:
    """True at live positions that are no holes; given ones never are."""
    is_live_BL = live_positions(cells.length_B, cells.tokens_BL.shape[1])
    return is_live_BL & (cells.frozen_BL | (cells.tokens_BL != mask_id))


def _is_near(mark_BL: jax.Array, reach_B: jax.Array) -> jax.Array:
    """True within reach of a mark; nowhere with a reach of 0."""
    place_BL = jnp.broadcast_to(jnp.arange(mark_BL.shape[1]), mark_BL.shape)
    left_BL = jax.lax.cummax(jnp.where(mark_BL, place_BL, -_FAR), axis=1)
    right_BL = jax.lax.cummin(jnp.where(mark_BL, place_BL, _FAR), axis=1, reverse=True)
    distance_BL = jnp.minimum(place_BL - left_BL, right_BL - place_BL)
    return (distance_BL <= reach_B[:, None]) & (reach_B > 0)[:, None]


def _before(x_BL: jax.Array) -> jax.Array:
    """What stands right of each position; 0 or False at the last."""
    return jnp.pad(x_BL[:, 1:], ((0, 0), (0, 1)))
