"""An edit rule that makes the edits with the best scores within a budget, with optional length
targets.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import exceeds, most
from dlm_jax.sampling.edits.edit_rule import EditContext, EditRule
from dlm_jax.sampling.edits.moves import Edits
from dlm_jax.sampling.edits.scores import (
    deletion_scores,
    fit_of_next,
    gap_scores,
    token_uncertainty,
)
from dlm_jax.sampling.positions import distance
from dlm_jax.sampling.program import SCHEDULES, check_space, ratio_at
from dlm_jax.settings import UNSET, Setting, per_row, require, rule, static
from dlm_jax.types import left_of, right_of

_NUDGE = 3
EDIT_TOKENS, OVERFLOWS = ("space", "mask"), ("trim", "refuse")
LENGTH_TARGETS = ("none", "to_max_new")


def _number(
    name: str, default: float, help: str, high: float = 1.0, *, is_preset: bool = False
) -> Any:
    return per_row(Setting(name, default, help, low=0.0, high=high, is_preset=is_preset))


def _choice(name: str, help: str, names: tuple[str, ...]) -> Any:
    return per_row(Setting(name, names[0], help, choices={name: name for name in names}))


@rule
class Uncertainty(EditRule):
    """Inserts tokens next to uncertain ones, and deletes a token if the following token fits better
    at its position.
    """

    about = "uncertainty of the tokens next to the gap"

    insert_start_B: jax.Array = _number(
        "insert_ratio_start", 0.04, "edit: insertions per generated token before the first step"
    )
    insert_end_B: jax.Array = _number(
        "insert_ratio_end", 0.0, "edit: insertions per generated token before the last step"
    )
    delete_start_B: jax.Array = _number(
        "delete_ratio_start", 0.04, "edit: deletions per generated token before the first step"
    )
    delete_end_B: jax.Array = _number(
        "delete_ratio_end", 0.0, "edit: deletions per generated token before the last step"
    )
    insert_margin_B: jax.Array = _number(
        "insert_margin", 0.0, "edit: score that an insertion must exceed", 1e6, is_preset=True
    )
    delete_margin_B: jax.Array = _number(
        "delete_margin", 0.02, "edit: lead of the next token that a deletion must exceed", 1e6
    )
    lambda_B: jax.Array = _number(
        "delete_lambda", 0.3, "edit: weight of the next position in a deletion's score", 1e6
    )
    cooldown_B: jax.Array = per_row(
        Setting("cooldown_distance", 1, "edit: minimum distance to the last edits", 0, 2**20 - 1)
    )
    overflow_B: jax.Array = _choice(
        "overflow", "edit: insertions beyond max_length drop the tail or are not made", OVERFLOWS
    )
    target_mode_B: jax.Array = _choice(
        "length_target_mode",
        "edit: to_max_new adds up to three edits a step towards max_new_tokens",
        LENGTH_TARGETS,
    )
    token_B: jax.Array = _choice(
        "edit_token", "edit: inserted token; mask is a hole that is filled later", EDIT_TOKENS
    )
    schedule: str = static(
        Setting("edit_schedule", "cosine", "edit: schedule of the ratios", choices=SCHEDULES)
    )

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """True if a ratio or a target can add or delete tokens."""
        return _inserts(row) or max(row.delete_ratio_start, row.delete_ratio_end) > 0

    @classmethod
    def check(cls, row: Any) -> None:
        is_space = _inserts(row) and row.edit_token == "space"
        remedy = "use edit_token='mask', or --preset variable_length (Model.preset in Python)"
        is_fine = not is_space or row.resample or row.remasks
        require(is_fine, "edit", UNSET, "inserts spaces that no rule rewrites", remedy)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if _inserts(row) and row.edit_token == "space":
            check_space("edit_token", row, facts, "inserts")

    def is_active(self) -> jax.Array:
        ratios = self.insert_start_B, self.insert_end_B, self.delete_start_B, self.delete_end_B
        return (self.target_mode_B > 0) | (jnp.stack(ratios) > 0).any(0)

    def score(self, context: EditContext) -> tuple[jax.Array, jax.Array]:
        """The scores of insertions and of deletions at each position."""
        is_token_BL = context.is_token_BL
        uncertain_BL = token_uncertainty(context.own_BL, is_token_BL & ~context.frozen_BL)
        misfit_BL = deletion_scores(
            context.own_BL,
            context.right_BL,
            is_token_BL,
            margin=self.delete_margin_B,
            lookahead=self.lambda_B,
        )
        return gap_scores(uncertain_BL), misfit_BL

    def select(self, context: EditContext, scores: tuple[jax.Array, jax.Array]) -> Edits:
        """The edits of each row at this step: those with the best scores in one snapshot.

        The edits that the ratios allow have scores above 0. Those that a target requires are made
        for any score, because the tokens of a good text have no score at all; tokens with the
        worst-fitting successors are deleted last. A gap must have a live position on its right. A
        deleted token must be live and unfrozen, and it must be neither a hole nor the last token in
        its row. A space is deleted only at a position that an edit inserted. Positions within the
        cooldown distance of a mark are skipped; for a gap, this is the position of its new token.
        Insertions and deletions are selected independently. In rows that do not trim, insertions
        are limited to the free capacity after the deletions. The same limit applies in rows that
        grow towards a target, so that no token is dropped.
        """
        gap_BL, misfit_BL = scores
        far_BL, cooldown_B1 = distance(~context.mark_BL, context.mark_BL), self.cooldown_B[:, None]
        is_cool_BL = (far_BL > cooldown_B1) | (cooldown_B1 == 0)

        # Budgets: the edits that the ratios allow, and the change that a target requires.
        num_free_B = jnp.sum(context.is_live_BL & ~context.frozen_BL, axis=1)
        num_insert_B, num_delete_B = (
            jnp.floor(ratio_B * num_free_B + 1e-3).astype(jnp.int32)
            for ratio_B in (
                ratio_at(start_B, end_B, context.step_B, context.steps_B, schedule=self.schedule)
                for start_B, end_B in (
                    (self.insert_start_B, self.insert_end_B),
                    (self.delete_start_B, self.delete_end_B),
                )
            )
        )
        surplus_B = context.length_B - jnp.minimum(context.target_B, context.capacity_B)
        nudge_B = jnp.clip(surplus_B, -_NUDGE, _NUDGE)
        nudge_B = jnp.where(self.target_mode_B > 0, nudge_B, 0)
        grow_B, shrink_B = jnp.maximum(-nudge_B, 0), jnp.maximum(nudge_B, 0)

        # Deletions.
        is_misfit_BL = exceeds(misfit_BL, 0.0, 1.0)
        may_go_BL = context.is_removable_BL & is_cool_BL & right_of(context.is_live_BL)
        fit_BL = fit_of_next(context.own_BL, context.right_BL, context.is_token_BL)
        worth_BL = jnp.where(is_misfit_BL, misfit_BL, fit_BL - 2)
        num_misfit_B = jnp.sum(may_go_BL & is_misfit_BL, axis=1)
        num_delete_B = jnp.maximum(jnp.minimum(num_delete_B + shrink_B, num_misfit_B), shrink_B)
        delete_BL = most(worth_BL, may_go_BL, num_delete_B, context.preference_BL, 1.0)

        # Insertions.
        gap_BL = gap_BL - self.insert_margin_B[:, None]
        is_doubted_BL = exceeds(gap_BL, 0.0, 1.0)
        is_free_gap_BL = ~context.frozen_BL | ~left_of(context.frozen_BL)
        is_free_gap_BL = is_free_gap_BL.at[:, 0].set(False)  # there is no gap before the row
        may_grow_BL = context.is_live_BL & context.is_open_BL & is_cool_BL & is_free_gap_BL
        num_doubted_B = jnp.sum(may_grow_BL & is_doubted_BL, axis=1)
        num_insert_B = jnp.maximum(jnp.minimum(num_insert_B + grow_B, num_doubted_B), grow_B)
        due_B = jnp.minimum(num_insert_B, jnp.sum(may_grow_BL, axis=1))
        room_B = context.capacity_B - context.length_B + jnp.sum(delete_BL, axis=1)
        may_spill_B = (self.overflow_B == OVERFLOWS.index("trim")) & (grow_B == 0)
        granted_B = jnp.where(may_spill_B, due_B, jnp.minimum(due_B, room_B))
        worth_BL = jnp.where(is_doubted_BL, gap_BL, gap_BL - 1)
        insert_BL = most(worth_BL, may_grow_BL, granted_B, context.preference_BL, 1.0)
        is_mask_B = self.token_B == EDIT_TOKENS.index("mask")
        token_B = jnp.where(is_mask_B, context.mask_id, context.space_id)
        return Edits(insert_BL, delete_BL, token_B, refused_B=due_B - granted_B)


def _inserts(row: Any) -> bool:
    """True if a ratio or a target can add tokens to a row with these settings."""
    ratios = max(row.insert_ratio_start, row.insert_ratio_end)
    return ratios > 0 or row.length_target_mode != "none"
