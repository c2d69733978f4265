"""Edit rules, and the scores of insertions and deletions at each position.

The scores require no training and use two logits per position, gathered after the last commit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dlm_jax.sampling.commit.commit_rule import exceeds, most
from dlm_jax.sampling.edits.edit_rule import LEAST, EditContext, EditRule
from dlm_jax.sampling.edits.moves import Edits
from dlm_jax.sampling.positions import distance, place_of_largest
from dlm_jax.sampling.program import SCHEDULES, check_space, ratio_at
from dlm_jax.settings import UNSET, Setting, per_row, require, rule, static
from dlm_jax.types import left_of, right_of

_NUDGE = 3
EDIT_TOKENS, LENGTH_TARGETS = ("space", "mask"), ("none", "to_max_new")
OVERFLOWS = ("trim", "refuse")


def token_uncertainty(logprob: ArrayLike, is_scored: ArrayLike) -> jax.Array:
    """The probability in [0, 1] that each token is another one, ``1 - p``; 0 where not scored.

    Args:
      logprob: float32 ``[..., L]``, log-probability in nats of the token at each position, at
        temperature 1. Values where `is_scored` is False are ignored.
      is_scored: bool ``[..., L]``, True at tokens that can be wrong: not at holes, given tokens and
        positions beyond the row.

    Source: variable-length refinement, ``uncertainty_from_logprobs``. Given tokens have
    uncertainty 0, because no token needs to be inserted between them.
    """
    # 1 - exp(x) would be 0 in float32 for nearly certain tokens, so that no score would exceed 0.
    return jnp.where(is_scored, -jnp.expm1(logprob), 0.0)


def gap_scores(uncertainty: ArrayLike) -> jax.Array:
    """The score in [0, 1] of an insertion into each gap, ``[..., L]``: at g + 1, the larger of the
    uncertainties ``[..., L]`` at g and g + 1. The score at position 0 is 0.

    A gap between given tokens or holes has score 0. An insertion directly after the prompt is
    allowed, because it changes no given token.

    Source: variable-length refinement, ``score_gaps_for_insertion``, which has entry g for the gap.
    """
    value = jnp.asarray(uncertainty)
    score = jnp.maximum(value[..., :-1], value[..., 1:])
    return jnp.pad(score, [*[(0, 0)] * (value.ndim - 1), (1, 0)])


def may_be_led(context: EditContext) -> jax.Array:
    """True at generated tokens where the most likely other token is not the right neighbour."""
    assert context.best_id_BL is not None
    is_token_BL, is_due_BL = context.is_token_BL, context.best_id_BL == right_of(context.tokens_BL)
    goes_next_BL = right_of(is_token_BL) & is_due_BL
    return is_token_BL & ~context.frozen_BL & ~goes_next_BL


def deletion_scores(
    logprob: ArrayLike,
    right_logprob: ArrayLike,
    is_token: ArrayLike,
    *,
    margin: ArrayLike,
    lookahead: ArrayLike,
) -> jax.Array:
    """The score of deleting each token, ``[..., L]``, at least 0: how much better the suffix fits
    one position to the left.

    The score at i is ``max(0, D1 - margin) + lookahead max(0, D2 - margin)``, where D1 is ``p(i,
    x_i+1) - p(i, x_i)`` and D2 is the value of D1 at i + 1. Differences that involve a hole or a
    position beyond the row are 0. The last token has no right neighbour and score 0.

    Args:
      logprob: float32 ``[..., L]``, log-probability in nats, at temperature 1, of the token at each
        position.
      right_logprob: float32 ``[..., L]``, log-probability at each position of the token to its
        right. Values of both arrays where `is_token` is False are ignored.
      is_token: bool ``[..., L]``, True at live positions that are not holes.
      margin: ``[...]``, differences of at most the margin do not count, >= 0.
      lookahead: ``[...]``, the weight of the second difference, >= 0.

    Source: variable-length refinement, ``deletion_scores_from_probs``, with ``lam`` as `lookahead`.
    ``probs[0, 1:-1, n]`` there is an outer product; here, each position reads its own distribution.
    """
    margin, lookahead = (jnp.asarray(value)[..., None] for value in (margin, lookahead))
    gain = jnp.maximum(fit_of_next(logprob, right_logprob, is_token) - margin, 0.0)
    return gain + lookahead * right_of(gain)


def fit_of_next(logprob: ArrayLike, right_logprob: ArrayLike, is_token: ArrayLike) -> jax.Array:
    """``[..., L]`` in [-1, 1]: D1, as defined in `deletion_scores`; -1 where D1 involves a hole."""
    is_pair = jnp.asarray(is_token) & right_of(jnp.asarray(is_token))
    return jnp.where(is_pair, jnp.exp(right_logprob) - jnp.exp(logprob), -1.0)


def _number(name: str, default: float, help: str, high: float = 1.0) -> Any:
    return per_row(Setting(name, default, help, low=0.0, high=high))


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
        Insertions and deletions are selected independently. In rows that refuse an overflow or grow
        towards a target, insertions are limited to the free capacity after the deletions, so that
        no token is dropped.
        """
        gap_BL, misfit_BL = scores
        far_BL, cooldown_B1 = distance(~context.mark_BL, context.mark_BL), self.cooldown_B[:, None]
        is_cool_BL = (far_BL > cooldown_B1) | (cooldown_B1 == 0)

        # Budgets: the edits that the ratios allow, and the change that a target requires.
        num_free_B = jnp.sum(context.is_live_BL & ~context.frozen_BL, axis=1)

        def budget(start_B: jax.Array, end_B: jax.Array) -> jax.Array:
            steps = context.step_B, context.steps_B
            ratio_B = ratio_at(start_B, end_B, *steps, schedule=self.schedule)
            return jnp.floor(ratio_B * num_free_B + 1e-3).astype(jnp.int32)

        num_insert_B = budget(self.insert_start_B, self.insert_end_B)
        num_delete_B = budget(self.delete_start_B, self.delete_end_B)
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
        token_B1 = jnp.where(is_mask_B, context.mask_id, context.space_id)[:, None]
        token_BL = jnp.broadcast_to(token_B1, insert_BL.shape)
        return Edits(insert_BL, delete_BL, token_BL, refused_B=due_B - granted_B)


def _inserts(row: Any) -> bool:
    """True if a ratio or a target can add tokens to a row with these settings."""
    ratios = max(row.insert_ratio_start, row.insert_ratio_end)
    return ratios > 0 or row.length_target_mode != "none"


@rule
class Likelihood(EditRule):
    """Tries insertions, replacements and deletions, and applies the edit with the highest score.

    Each position has up to three candidates: inserting the most likely token before the current
    one, replacing the current token with it, and deleting the current token. An insertion before
    the first token is allowed. Banned ids are never written. If the most likely token equals the
    right neighbour, replacement is not a candidate, because the current token is probably repeated
    or stray.

    The lead of a candidate is the log-probability in nats of the most likely token (for deletions,
    of the next token) minus that of the current token; it can be negative. The candidates with the
    highest leads are tried individually in one forward pass. The score of an edit is the gain in
    the summed log-probability of all tokens, plus `lead_gain_B` times the lead. The best edit is
    applied if its score exceeds `gain_B`. A step therefore makes at most one edit per row, and it
    never inserts a hole. A row at its capacity does not grow. Guidance affects only the leads. The
    rule requires models trained to proofread, because other models are not trained on the
    likelihood of visible tokens.
    """

    about = "the trial insertion, deletion or replacement with the highest score"
    needs = ("likeliest",)

    gain_B: jax.Array = per_row(
        Setting("edit_gain", 0.0, "likelihood: least score in nats", 0.0, 1e6, is_preset=True)
    )
    lead_gain_B: jax.Array = per_row(
        Setting("edit_lead_gain", 0.25, "likelihood: weight of leads", 0.0, 1e6, is_preset=True)
    )
    num_trials: int = static(
        Setting("edit_trials", 6, "likelihood: trial edits per step", 1, 64, is_preset=True)
    )

    @classmethod
    def check(cls, row: Any) -> None:
        why = f"has no length_target_mode={row.length_target_mode!r}"
        is_fine = row.length_target_mode == "none"
        require(is_fine, "edit_scoring", "likelihood", why, "use edit_scoring='uncertainty' for it")

    def score(self, context: EditContext) -> tuple[Edits, jax.Array, jax.Array]:
        """The trial edits, ``[K, ...]``, their scores, ``[K, B]``, and their priorities in ties.

        Deletions win ties at a position. Frozen tokens, holes, a row's last token, and spaces that
        no edit inserted are not deleted. Of adjacent equal tokens, only the last is a candidate for
        deletion, because deleting any of them gives the same text.
        """
        assert context.best_id_BL is not None and context.best_BL is not None
        assert context.preference_BL is not None and context.gain is not None
        num_rows, num_positions = context.tokens_BL.shape
        # Leads of the most likely other token, and of the next token over the current one.
        is_token_BL = context.is_token_BL
        own_BL, right_BL, best_BL = (
            jnp.maximum(x_BL, LEAST) for x_BL in (context.own_BL, context.right_BL, context.best_BL)
        )
        lead_BL = jnp.where(is_token_BL & ~context.frozen_BL, best_BL - own_BL, -jnp.inf)
        misfit_BL = jnp.where(is_token_BL & right_of(is_token_BL), right_BL - own_BL, -jnp.inf)
        is_new_BL = context.is_live_BL & context.is_open_BL & (context.best_id_BL >= 0)
        is_new_BL &= context.best_id_BL != context.tokens_BL
        goes_BL = context.is_removable_BL & jnp.isfinite(misfit_BL)
        is_same_BL = context.tokens_BL == right_of(context.tokens_BL)
        goes_BL &= ~(is_same_BL & right_of(goes_BL))
        has_room_B1 = (context.length_B < context.capacity_B)[:, None]
        is_swap_BL = is_new_BL & context.is_removable_BL & may_be_led(context)
        worth_BLK = jnp.stack(
            [
                jnp.where(goes_BL, misfit_BL, -jnp.inf),
                jnp.where(is_new_BL & has_room_B1, lead_BL, -jnp.inf),
                jnp.where(is_swap_BL, lead_BL, -jnp.inf),
            ],
            axis=2,
        )
        # Edits at the same position are ordered by kind.
        liked_BL1 = (context.preference_BL & ~jnp.uint32(3))[:, :, None]
        liked_BP = (liked_BL1 | jnp.uint32([[[2, 1, 0]]])).reshape(num_rows, -1)
        worth_BP = worth_BLK.reshape(num_rows, -1)
        number = min(self.num_trials, worth_BP.shape[1])
        is_best_BP = most(
            worth_BP, jnp.isfinite(worth_BP), jnp.full(num_rows, number), liked_BP, 1.0
        )
        from_end_1P = jnp.arange(worth_BP.shape[1], 0, -1)[None]
        from_end_BK, place_BK = jax.lax.top_k(jnp.where(is_best_BP, from_end_1P, 0), number)
        is_real_KB, kind_KB1 = from_end_BK.T > 0, (place_BK % 3).T[:, :, None]
        is_there_KBL = (place_BK // 3).T[:, :, None] == jnp.arange(num_positions)[None, None]
        is_there_KBL &= is_real_KB[:, :, None]
        edits = Edits(
            insert_gap_BL=is_there_KBL & (kind_KB1 != 0),
            delete_BL=is_there_KBL & (kind_KB1 != 1),
            token=jnp.broadcast_to(context.best_id_BL, is_there_KBL.shape),
        )
        worth_KB, liked_KB = (
            jnp.take_along_axis(x_BP, place_BK, axis=1).T for x_BP in (worth_BP, liked_BP)
        )
        worth_KB = jnp.where(is_real_KB, worth_KB, 0.0)
        score_KB = context.gain(edits, is_real_KB) + self.lead_gain_B[None] * worth_KB
        return edits, score_KB, liked_KB

    def select(self, context: EditContext, scores: tuple[Edits, jax.Array, jax.Array]) -> Edits:
        edits, score_KB, liked_KB = scores
        length_B, is_real_KB = context.length_B, score_KB != -jnp.inf
        # A gain is a sum over the row's tokens, so the scale is the row's length.
        scale_B = length_B.astype(jnp.float32)
        one_B = jnp.ones_like(length_B)
        best_BK = most(score_KB.T, is_real_KB.T, one_B, liked_KB.T, scale_B[:, None])
        best_1B1 = place_of_largest(best_BK)[None, :, None]
        is_taken_B1 = exceeds(jnp.max(score_KB, axis=0), self.gain_B, scale_B)[:, None]
        insert_BL, delete_BL, token_BL = (
            jnp.take_along_axis(x_KBL, best_1B1, axis=0)[0] for x_KBL in edits[:3]
        )
        return Edits(
            insert_BL & is_taken_B1,
            delete_BL & is_taken_B1,
            token_BL,
            forwards_B=jnp.any(is_real_KB, axis=0) * (1 + score_KB.shape[0]),
        )
