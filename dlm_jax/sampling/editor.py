"""How the rows of a batch are edited while they are denoised, and what that has come to."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits import EditParams, ratio_at
from dlm_jax.sampling.shifting import Cells, Plan, apply_plan
from dlm_jax.types import Canvas, live_positions

PUT = -2
"""Step of a token that no step committed: an edit or re-noise put it there."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "insert_start_B", "insert_end_B", "delete_start_B", "delete_end_B",
        "insert_margin_B", "delete_margin_B",
        "lambda_B", "cooldown_B", "trims_B", "targets_length_B", "puts_mask_B",
    ],
    meta_fields=["schedule", "scoring"],
)  # fmt: skip
@dataclass(frozen=True)
class Editor:
    """How each row is edited.

    Attributes:
      insert_start_B: float32 in [0, 1], insertions per unfrozen position before the first step.
      insert_end_B: the same before the last step.
      delete_start_B: likewise, deletions.
      delete_end_B: likewise.
      insert_margin_B: float32, at least 0: what the score of a gap must exceed to count.
      delete_margin_B: float32, at least 0: what an advantage must exceed to count for a deletion.
      lambda_B: float32, at least 0: weight of the advantage one position on.
      cooldown_B: int32, how far from the last step's edits nothing is edited; 0 is off.
      trims_B: True for rows where insertions push the tail out of the capacity.
      targets_length_B: True for rows that are nudged towards their target length.
      puts_mask_B: True for rows where MASK is inserted, not the space.
      schedule: of the ratios, one of `EDIT_SCHEDULES`.
      scoring: of the gaps, one of `EDIT_SCORINGS`.
    """

    insert_start_B: jax.Array
    insert_end_B: jax.Array
    delete_start_B: jax.Array
    delete_end_B: jax.Array
    insert_margin_B: jax.Array
    delete_margin_B: jax.Array
    lambda_B: jax.Array
    cooldown_B: jax.Array
    trims_B: jax.Array
    targets_length_B: jax.Array
    puts_mask_B: jax.Array
    schedule: str = "cosine"
    scoring: str = "uncertainty"

    def is_active(self) -> jax.Array:
        """True ``[B]`` for rows whose length may change."""
        return self.targets_length_B | (
            (self.insert_start_B > 0) | (self.insert_end_B > 0)
            | (self.delete_start_B > 0) | (self.delete_end_B > 0)
        )  # fmt: skip

    def at(self, step_B: jax.Array, steps_B: jax.Array, edited: Edited) -> EditParams:
        """What holds before the step of that number, out of `steps_B`."""
        insert_B, delete_B = (
            ratio_at(start_B, end_B, step_B, steps_B, schedule=self.schedule)
            for start_B, end_B in (
                (self.insert_start_B, self.insert_end_B),
                (self.delete_start_B, self.delete_end_B),
            )
        )
        return EditParams(
            insert_ratio_B=insert_B,
            delete_ratio_B=delete_B,
            insert_margin_B=self.insert_margin_B,
            delete_margin_B=self.delete_margin_B,
            delete_lambda_B=self.lambda_B,
            cooldown_B=self.cooldown_B,
            trims_B=self.trims_B,
            targets_length_B=self.targets_length_B,
            capacity_B=edited.capacity_B,
            target_B=edited.target_B,
            scoring=self.scoring,
        )


class Edited(NamedTuple):
    """What the edits of a row have come to.

    Attributes:
      inserted_BL: True at positions that an edit made, whatever has been written there since.
      mark_BL: True at the marks of the last step's edits.
      origin_BL: int32, where each position stood when `Advance` was called last; -1: it was not
        there.
      capacity_B: int32, most live positions.
      target_B: int32, the length that rows are nudged towards.
      warms_B: True for rows whose draft is looked at, and edited, before their first step.
      insertions_B: int32, of all steps.
      deletions_B: int32, likewise.
      lost_B: int32, insertions left out for want of room, and tokens pushed out of the capacity.
    """

    inserted_BL: jax.Array
    mark_BL: jax.Array
    origin_BL: jax.Array
    capacity_B: jax.Array
    target_B: jax.Array
    warms_B: jax.Array
    insertions_B: jax.Array
    deletions_B: jax.Array
    lost_B: jax.Array

    def after(self, cells: Cells, plan: Plan) -> Edited:
        """With the edits of a plan, which left `cells`."""
        lost_B = plan.edits.refused_B + plan.trimmed_B
        return self._replace(
            inserted_BL=cells.inserted_BL,
            mark_BL=cells.mark_BL,
            origin_BL=apply_plan(plan, self.origin_BL, -1),
            warms_B=jnp.zeros_like(self.warms_B),
            insertions_B=self.insertions_B + jnp.sum(plan.is_new_BL, axis=1, dtype=jnp.int32),
            deletions_B=self.deletions_B + jnp.sum(plan.edits.delete_BL, axis=1, dtype=jnp.int32),
            lost_B=self.lost_B + lost_B.astype(jnp.int32),
        )


def start_edited(
    editor: Editor,
    canvas: Canvas,
    mask_id: int,
    capacity_B: jax.Array | None,
    max_new_B: jax.Array | None,
) -> Edited:
    """Before the first step; arguments are those of `dlm_jax.sampling.state.start`."""
    tokens_BL, length_B, frozen_BL = canvas
    num_rows, num_positions = tokens_BL.shape
    is_free_BL = live_positions(length_B, num_positions) & ~frozen_BL
    free_B = jnp.sum(is_free_BL, axis=1)
    new_B = free_B if max_new_B is None else jnp.where(max_new_B > 0, max_new_B, free_B)
    capacity_B = length_B if capacity_B is None else jnp.maximum(capacity_B, length_B)
    has_draft_B = jnp.any(is_free_BL & (tokens_BL != mask_id), axis=1)
    none_B, none_BL = jnp.zeros(num_rows, jnp.int32), jnp.zeros(tokens_BL.shape, bool)
    return Edited(
        inserted_BL=none_BL,
        mark_BL=none_BL,
        origin_BL=places(tokens_BL),
        capacity_B=jnp.minimum(capacity_B, num_positions).astype(jnp.int32),
        target_B=(length_B - free_B + new_B).astype(jnp.int32),
        warms_B=editor.is_active() & has_draft_B,
        insertions_B=none_B,
        deletions_B=none_B,
        lost_B=none_B,
    )


def places(x_BL: jax.Array) -> jax.Array:
    """int32 ``[B, L]``: the number of each position."""
    return jnp.broadcast_to(jnp.arange(x_BL.shape[1], dtype=jnp.int32), x_BL.shape)
