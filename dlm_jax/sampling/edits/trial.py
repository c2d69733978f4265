"""An edit rule that compares the likelihoods of edited texts with that of the current text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import exceeds, most
from dlm_jax.sampling.edits.edit_rule import EditContext, EditRule
from dlm_jax.sampling.edits.moves import Edits, moved, position_map_of
from dlm_jax.sampling.edits.scores import may_be_led
from dlm_jax.sampling.positions import at_places, fold, hidden, logits, place_of_largest, put
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.vocab import log_prob
from dlm_jax.settings import Setting, per_row, require, rule, static
from dlm_jax.types import Params, live_positions, right_of

_LEAST = -100.0
"""Log-probability in nats that is assigned to impossible tokens. The value is finite, so that texts
that share such a token can be compared."""


def gain_of_edits(
    program: Program, params: Params, context: EditContext, edits: Edits, is_real_KB: jax.Array
) -> jax.Array:
    """float32 ``[K, B]``; see `EditContext.gain`.

    All rows are scored together if any row has a trial.
    """

    def edit(*one: jax.Array) -> tuple[jax.Array, jax.Array]:
        edits = Edits(*one)
        position_map = position_map_of(
            edits, context.frozen_BL, context.length_B, context.capacity_B
        )
        tokens_BL = moved(position_map, context.tokens_BL, edits.token, program.pad_id)
        return tokens_BL, position_map.length_B

    def gain() -> jax.Array:
        tokens_KBL, length_KB = jax.vmap(edit)(*edits[:3])
        tokens_KBL = jnp.concatenate([context.tokens_BL[None], tokens_KBL])
        length_KB = jnp.concatenate([context.length_B[None], length_KB])
        logprob_KB = _logprob_of_texts(program, params, tokens_KBL, length_KB)
        return logprob_KB[1:] - logprob_KB[:1]

    no_gain_KB = jnp.zeros(is_real_KB.shape, jnp.float32)
    gain_KB = jax.lax.cond(jnp.any(is_real_KB), gain, lambda: no_gain_KB)
    return jnp.where(is_real_KB, gain_KB, -jnp.inf)


def _logprob_of_texts(
    program: Program, params: Params, tokens_KBL: jax.Array, length_KB: jax.Array
) -> jax.Array:
    """float32 ``[K, B]``: the summed log-probability of the tokens of each text; holes add 0."""
    num_texts, num_rows, num_positions = tokens_KBL.shape
    # The rows come first in the merged axis, so each device scores its own rows.
    tokens_TL = jnp.moveaxis(tokens_KBL, 0, 1).reshape(-1, num_positions)
    length_T = length_KB.T.reshape(-1)
    is_scored_TL = live_positions(length_T, num_positions) & (tokens_TL != program.mask_id)
    hidden_TLD = hidden(program.network, params, tokens_TL, length_T)

    def sums(params: Params, texts: tuple[jax.Array, ...]) -> jax.Array:
        hidden_TLD, tokens_TL, is_scored_TL = texts

        def score(sum_TL: jax.Array, places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
            logits_NV = logits(program.network, params, at_places(hidden_TLD, places_N))
            logprob_N = jnp.maximum(log_prob(logits_NV, at_places(tokens_TL, places_N)), _LEAST)
            return put(sum_TL, places_N, is_real_N, logprob_N)

        none_TL = jnp.zeros(tokens_TL.shape, jnp.float32)
        return fold(is_scored_TL, program.chunk, score, none_TL).sum(axis=1)

    sum_T = program.by_rows(sums)(params, (hidden_TLD, tokens_TL, is_scored_TL))
    return sum_T.reshape(num_rows, num_texts).T


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
            jnp.maximum(x_BL, _LEAST)
            for x_BL in (context.own_BL, context.right_BL, context.best_BL)
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
