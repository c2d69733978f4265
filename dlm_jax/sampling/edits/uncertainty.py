"""Edit rules that apply the edits with the best scores within a budget, with optional length
targets.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import exceeds, most
from dlm_jax.sampling.edits import scores
from dlm_jax.sampling.edits.edit_rule import EditContext, EditRule
from dlm_jax.sampling.edits.moves import Edits
from dlm_jax.sampling.row import SCHEDULES, check_space, ratio_at
from dlm_jax.settings import UNSET, Setting, SettingError, per_row, rule, static
from dlm_jax.types import left_of, live_positions, right_of

_NUDGE = 3
EDIT_TOKENS, OVERFLOWS = ("space", "mask"), ("trim", "refuse")
LENGTH_TARGETS = ("none", "to_max_new", "exact")
_EXACT = 2


def _ratio(name: str, default: float, help: str) -> Setting:
    return Setting(name, default, help, low=0.0, high=1.0)


def _weight(name: str, default: float, help: str) -> Setting:
    return Setting(name, default, help, low=0.0, high=1e6)


@rule
class Uncertainty(EditRule):
    """Inserts tokens next to uncertain ones, and deletes a token if the following token fits better
    at its position.
    """

    about = "uncertainty of the tokens next to the gap"

    insert_start_B: jax.Array = per_row(
        _ratio(
            "insert_ratio_start",
            0.04,
            "edit: number of insertions per generated token before the first step, in [0, 1]",
        )
    )
    insert_end_B: jax.Array = per_row(
        _ratio(
            "insert_ratio_end",
            0.0,
            "edit: number of insertions per generated token before the last step",
        )
    )
    delete_start_B: jax.Array = per_row(
        _ratio(
            "delete_ratio_start",
            0.04,
            "edit: number of deletions per generated token before the first step",
        )
    )
    delete_end_B: jax.Array = per_row(
        _ratio(
            "delete_ratio_end",
            0.0,
            "edit: number of deletions per generated token before the last step",
        )
    )
    insert_margin_B: jax.Array = per_row(
        _weight("insert_margin", 0.0, "edit: lower bound (exclusive) on the score of an insertion")
    )
    delete_margin_B: jax.Array = per_row(
        _weight(
            "delete_margin",
            0.02,
            "edit: lower bound (exclusive) on the probability of the next token minus that of a "
            "deleted token, >= 0",
        )
    )
    lambda_B: jax.Array = per_row(
        _weight(
            "delete_lambda",
            0.3,
            "edit: weight, in a deletion's score, of the probability difference at "
            "the next position",
        )
    )
    cooldown_B: jax.Array = per_row(
        Setting(
            "cooldown_distance",
            1,
            "edit: minimum distance to the edits of the last step; 0 disables it",
            low=0,
            high=2**20 - 1,
        )
    )
    overflow_B: jax.Array = per_row(
        Setting(
            "overflow",
            "trim",
            "edit: insertions beyond max_length drop the tail (trim) or are not made (refuse)",
            choices={name: name for name in OVERFLOWS},
        )
    )
    target_mode_B: jax.Array = per_row(
        Setting(
            "length_target_mode",
            "none",
            "edit: to_max_new moves the length towards max_new_tokens by up to three edits a "
            "step, in addition to the ratios; exact reaches it in the remaining steps, without "
            "the ratios",
            choices={name: name for name in LENGTH_TARGETS},
        )
    )
    token_B: jax.Array = per_row(
        Setting(
            "edit_token",
            "space",
            "edit: inserted token: space, or mask (a hole that is filled later)",
            choices={name: name for name in EDIT_TOKENS},
        )
    )
    schedule: str = static(
        Setting(
            "edit_schedule",
            "cosine",
            "edit: schedule of the ratios from start to end: linear or cosine",
            choices=SCHEDULES,
        )
    )

    @classmethod
    def inserts(cls, row: Any) -> bool:
        """True if a ratio or a target can add tokens."""
        ratios = max(row.insert_ratio_start, row.insert_ratio_end)
        return row.edit and (ratios > 0 or row.length_target_mode != "none")

    @classmethod
    def deletes(cls, row: Any) -> bool:
        """True if a ratio or a target can delete tokens."""
        ratios = max(row.delete_ratio_start, row.delete_ratio_end)
        return row.edit and (ratios > 0 or row.length_target_mode != "none")

    @classmethod
    def check(cls, row: Any) -> None:
        inserts, deletes = cls.inserts(row), cls.deletes(row)
        if inserts and row.edit_token == "space" and not (row.resample or row.remasks):
            raise SettingError(
                "edit",
                UNSET,
                "inserts spaces that no rule rewrites",
                "use edit_token='mask', or the settings that rewrite every token at every step: "
                "--preset variable_length, in Python Model.preset('variable_length')",
            )
        for name, does in (("insert", inserts), ("delete", deletes)):
            margin = getattr(row, f"{name}_margin")
            if does and margin >= 1:
                warnings.warn(
                    f"{name}_margin={margin} is never exceeded, so no token is "
                    f"{name.removesuffix('e')}ed: probabilities differ by at most 1; use 0.02",
                    stacklevel=3,
                )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if cls.inserts(row) and row.edit_token == "space":
            check_space("edit_token", row, facts, "inserts")

    def is_active(self) -> jax.Array:
        return (self.target_mode_B > 0) | (
            (self.insert_start_B > 0)
            | (self.insert_end_B > 0)
            | (self.delete_start_B > 0)
            | (self.delete_end_B > 0)
        )

    def inserted_id(self, *, mask_id: int, space_id: int) -> jax.Array:
        """MASK or the space, depending on each row's settings."""
        return jnp.where(self.token_B == EDIT_TOKENS.index("mask"), mask_id, space_id)

    def gap_scores(self, context: EditContext) -> jax.Array:
        is_scored_BL = scores.is_token(context) & ~context.cells.frozen_BL
        return scores.gap_scores(scores.token_uncertainty(context.snapshot.own_BL, is_scored_BL))

    def budgets(
        self, context: EditContext, num_free_B: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The numbers of insertions and deletions that the ratios allow in each row, and the change
        of its length that a target requires at this step.
        """
        ratios = (
            ratio_at(start_B, end_B, context.step_B, context.steps_B, schedule=self.schedule)
            for start_B, end_B in (
                (self.insert_start_B, self.insert_end_B),
                (self.delete_start_B, self.delete_end_B),
            )
        )
        num_insert_B, num_delete_B = (
            jnp.floor(ratio_B * num_free_B + 1e-3).astype(jnp.int32) for ratio_B in ratios
        )
        surplus_B = context.cells.length_B - jnp.minimum(context.target_B, context.capacity_B)
        left_B = jnp.maximum(context.steps_B - context.step_B, 1)
        is_exact_B = self.target_mode_B == _EXACT
        # The edits for an exact target are spread over the remaining edit steps and replace the
        # ratios.
        share_B = jnp.sign(surplus_B) * -(-jnp.abs(surplus_B) // left_B)
        nudge_B = jnp.where(is_exact_B, share_B, jnp.clip(surplus_B, -_NUDGE, _NUDGE))
        change_B = jnp.where(self.target_mode_B > 0, -nudge_B, 0)
        num_insert_B = jnp.where(is_exact_B, 0, num_insert_B)
        num_delete_B = jnp.where(is_exact_B, 0, num_delete_B)
        return num_insert_B, num_delete_B, change_B

    def select(self, context: EditContext) -> Edits:
        """The edits of each row at this step: those with the best scores in one snapshot.

        The edits that the ratios allow have scores above 0. Those that a target requires are made
        for any score, because the tokens of a good text have no score at all; tokens with the
        worst-fitting successors are deleted last. A gap must have a live position on its right. A
        deleted token must be live and unfrozen, and it must be neither a hole nor the last token in
        its row. A space is deleted only at a position that an edit inserted. Positions within the
        cooldown distance of a mark are skipped, except in rows with an exact target; for a gap,
        this is the position of its new token. Insertions and deletions are selected independently.
        In rows that do not trim, insertions are limited to the free capacity after the deletions.
        The same limit applies in rows that grow towards a target, so that no token is dropped.
        """
        cells, mask_id = context.cells, context.mask_id
        is_row_BL = live_positions(cells.length_B, cells.tokens_BL.shape[1])
        num_free_B = jnp.sum(is_row_BL & ~cells.frozen_BL, axis=1)
        num_insert_B, num_delete_B, change_B = self.budgets(context, num_free_B)
        grow_B, shrink_B = jnp.maximum(change_B, 0), jnp.maximum(-change_B, 0)
        is_live_BL = is_row_BL & context.is_open_BL
        is_exact_B1 = (self.target_mode_B == _EXACT)[:, None]
        is_cool_BL = ~scores.is_near(cells.mark_BL, self.cooldown_B) | is_exact_B1

        predicted = context.snapshot.own_BL, context.snapshot.right_BL, scores.is_token(context)
        misfit_BL = scores.deletion_scores(
            *predicted, margin=self.delete_margin_B, lookahead=self.lambda_B
        )
        is_misfit_BL = exceeds(misfit_BL, 0.0, 1.0)
        is_kept_space_BL = (cells.tokens_BL == context.space_id) & ~cells.inserted_BL
        may_go_BL = is_live_BL & ~cells.frozen_BL & (cells.tokens_BL != mask_id) & ~is_kept_space_BL
        may_go_BL &= is_cool_BL & right_of(is_row_BL)
        worth_BL = jnp.where(is_misfit_BL, misfit_BL, scores.fit_of_next(*predicted) - 2)
        num_misfit_B = jnp.sum(may_go_BL & is_misfit_BL, axis=1)
        num_delete_B = jnp.maximum(jnp.minimum(num_delete_B + shrink_B, num_misfit_B), shrink_B)
        delete_BL = most(worth_BL, may_go_BL, num_delete_B, context.preference_BL, 1.0)

        gap_BL = self.gap_scores(context) - self.insert_margin_B[:, None]
        is_doubted_BL = exceeds(gap_BL, 0.0, 1.0)
        is_free_gap_BL = ~cells.frozen_BL | ~left_of(cells.frozen_BL)
        is_free_gap_BL = is_free_gap_BL.at[:, 0].set(False)  # there is no gap before the row
        may_grow_BL = is_live_BL & is_cool_BL & is_free_gap_BL
        num_doubted_B = jnp.sum(may_grow_BL & is_doubted_BL, axis=1)
        num_insert_B = jnp.maximum(jnp.minimum(num_insert_B + grow_B, num_doubted_B), grow_B)
        wanted_B = jnp.minimum(num_insert_B, jnp.sum(may_grow_BL, axis=1))
        room_B = context.capacity_B - cells.length_B + jnp.sum(delete_BL, axis=1)
        may_spill_B = (self.overflow_B == OVERFLOWS.index("trim")) & (grow_B == 0)
        granted_B = jnp.where(may_spill_B, wanted_B, jnp.minimum(wanted_B, room_B))
        worth_BL = jnp.where(is_doubted_BL, gap_BL, gap_BL - 1)
        insert_BL = most(worth_BL, may_grow_BL, granted_B, context.preference_BL, 1.0)
        return Edits(insert_BL, delete_BL, wanted_B - granted_B)
