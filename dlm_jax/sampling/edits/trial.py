"""Compares the likelihoods of edited texts with that of the current text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import exceeds, most
from dlm_jax.sampling.draw import log_prob
from dlm_jax.sampling.edits import scores
from dlm_jax.sampling.edits.edit_rule import EditContext, EditRule, Tried
from dlm_jax.sampling.edits.moves import Cells, Edits, moved_cells, position_map_of
from dlm_jax.sampling.edits.scores import LEAST
from dlm_jax.sampling.positions import at_places, fold, hidden, logits, place_of_largest, put
from dlm_jax.sampling.program import Program
from dlm_jax.settings import Setting, SettingError, per_row, rule, static
from dlm_jax.types import Params, live_positions, right_of


def tried(
    program: Program, params: Params, context: EditContext, rule: EditRule
) -> tuple[Tried, jax.Array]:
    """The rule's candidates with their gains, and the number of texts scored per row.

    All rows are scored together if any row has a candidate.
    """
    edits, is_real_KB = rule.candidates(context)
    is_asking_B = jnp.any(is_real_KB, axis=0)
    as_it_is = jax.tree.map(jnp.zeros_like, context.cells.tokens_BL)
    none = Edits(as_it_is > 0, as_it_is > 0, as_it_is[:, 0], as_it_is)
    all_of_them = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), none, edits)

    def text(edits: Edits) -> Cells:
        position_map = position_map_of(edits, context.cells, context.capacity_B)
        assert edits.token_BL is not None
        return moved_cells(position_map, context.cells, edits.token_BL, pad_id=program.pad_id)

    def score() -> jax.Array:
        texts = jax.vmap(text)(all_of_them)
        score_KB = _likelihood(program, params, texts)
        return score_KB[1:] - score_KB[:1]

    no_gain_KB = jnp.zeros(is_real_KB.shape, jnp.float32)
    gain_KB = jax.lax.cond(jnp.any(is_asking_B), score, lambda: no_gain_KB)
    num_texts = is_real_KB.shape[0] + 1
    return Tried(edits, is_real_KB, jnp.where(is_real_KB, gain_KB, -jnp.inf)), (
        is_asking_B * num_texts
    )


def _likelihood(program: Program, params: Params, texts: Cells) -> jax.Array:
    """float32 ``[K, B]``: the summed log-probability of the tokens of each text; holes add 0."""
    num_texts, num_rows, num_positions = texts.tokens_BL.shape
    # The rows come first in the merged axis, so each device scores its own rows.
    tokens_TL = jnp.moveaxis(texts.tokens_BL, 0, 1).reshape(-1, num_positions)
    length_T = texts.length_B.T.reshape(-1)
    is_asked_TL = live_positions(length_T, num_positions) & (tokens_TL != program.mask_id)
    hidden_TLD = hidden(program.network, params, tokens_TL, length_T)

    def sums(params: Params, texts: tuple[jax.Array, ...]) -> jax.Array:
        hidden_TLD, tokens_TL, is_asked_TL = texts

        def score(sum_TL: jax.Array, places_N: jax.Array, is_real_N: jax.Array) -> jax.Array:
            logits_NV = logits(program.network, params, at_places(hidden_TLD, places_N))
            logprob_N = jnp.maximum(log_prob(logits_NV, at_places(tokens_TL, places_N)), LEAST)
            return put(sum_TL, places_N, is_real_N, logprob_N)

        none_TL = jnp.zeros(tokens_TL.shape, jnp.float32)
        return fold(is_asked_TL, program.chunk, score, none_TL).sum(axis=1)

    sum_T = program.by_rows(sums)(params, (hidden_TLD, tokens_TL, is_asked_TL))
    return sum_T.reshape(num_rows, num_texts).T


_NUM_KINDS = 3


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
        Setting(
            "edit_gain",
            0.0,
            "likelihood: minimum score of an edit in nats, >= 0",
            low=0.0,
            high=1e6,
        )
    )
    lead_gain_B: jax.Array = per_row(
        Setting(
            "edit_lead_gain",
            0.25,
            "likelihood: weight, in an edit's score, of its lead (log-probability of the new token "
            "minus that of the current one), >= 0",
            low=0.0,
            high=1e6,
        )
    )
    num_trials: int = static(
        Setting(
            "edit_trials",
            6,
            "likelihood: number of trial edits per step; each requires a forward pass",
            low=1,
            high=64,
            is_preset=True,
        )
    )

    @classmethod
    def check(cls, row: Any) -> None:
        if row.edit and row.length_target_mode != "none":
            raise SettingError(
                "edit_scoring",
                "likelihood",
                f"has no length_target_mode={row.length_target_mode!r}",
                "use edit_scoring='uncertainty' for it",
            )

    def candidates(self, context: EditContext) -> tuple[Edits, jax.Array]:
        """The best candidates in each row. Deletions win ties at a position.

        Frozen tokens, holes, a row's last token, and spaces that no edit inserted are not deleted.
        Of adjacent equal tokens, only the last is a candidate for deletion, because deleting any of
        them gives the same text.
        """
        cells, snapshot, mask_id = context.cells, context.snapshot, context.mask_id
        assert snapshot.best_id_BL is not None
        num_rows, num_positions = cells.tokens_BL.shape
        is_open_BL = live_positions(cells.length_B, num_positions) & context.is_open_BL
        lead_BL, misfit_BL = _leads(context)
        is_new_BL = is_open_BL & (snapshot.best_id_BL >= 0)
        is_new_BL &= snapshot.best_id_BL != cells.tokens_BL
        is_kept_space_BL = (cells.tokens_BL == context.space_id) & ~cells.inserted_BL
        may_go_BL = is_open_BL & ~cells.frozen_BL & (cells.tokens_BL != mask_id)
        may_go_BL &= ~is_kept_space_BL
        goes_BL = may_go_BL & jnp.isfinite(misfit_BL)
        # Deleting any one of several adjacent equal tokens gives the same text, so only the last of
        # them is a candidate.
        is_same_BL = cells.tokens_BL == right_of(cells.tokens_BL)
        goes_BL &= ~(is_same_BL & right_of(goes_BL))
        has_room_B1 = (cells.length_B < context.capacity_B)[:, None]
        is_swap_BL = is_new_BL & may_go_BL & scores.may_be_led(context)
        worth_BLK = jnp.stack(
            [
                jnp.where(goes_BL, misfit_BL, -jnp.inf),
                jnp.where(is_new_BL & has_room_B1, lead_BL, -jnp.inf),
                jnp.where(is_swap_BL, lead_BL, -jnp.inf),
            ],
            axis=2,
        )
        assert context.preference_BL is not None
        kinds_1K = jnp.arange(_NUM_KINDS)[None]
        liked_BP = _liked(context.preference_BL[:, :, None], kinds_1K[None]).reshape(num_rows, -1)
        worth_BP = worth_BLK.reshape(num_rows, -1)
        number = min(self.num_trials, _NUM_KINDS * num_positions)
        is_best_BP = most(
            worth_BP, jnp.isfinite(worth_BP), jnp.full(num_rows, number), liked_BP, 1.0
        )
        from_end_1P = jnp.arange(worth_BP.shape[1], 0, -1)[None]
        from_end_BK, place_BK = jax.lax.top_k(jnp.where(is_best_BP, from_end_1P, 0), number)
        kind_KB1 = (place_BK % _NUM_KINDS).T[:, :, None]
        is_there_KBL = (place_BK // _NUM_KINDS).T[:, :, None] == jnp.arange(num_positions)[
            None, None
        ]
        is_real_KB = from_end_BK.T > 0
        is_there_KBL &= is_real_KB[:, :, None]
        return Edits(
            is_there_KBL & (kind_KB1 != 0),
            is_there_KBL & (kind_KB1 != 1),
            jnp.zeros(is_real_KB.shape, jnp.int32),
            jnp.broadcast_to(snapshot.best_id_BL, is_there_KBL.shape),
        ), is_real_KB

    def select(self, context: EditContext) -> Edits:
        tried, length_B = context.tried, context.cells.length_B
        assert tried is not None and context.preference_BL is not None
        insert_KBL, delete_KBL = tried.edits.insert_gap_BL, tried.edits.delete_BL
        lead_BL, misfit_BL = _leads(context)
        own_KBL = jnp.where(insert_KBL, lead_BL, jnp.where(delete_KBL, misfit_BL, 0.0))
        gain_KB = tried.gain_KB + self.lead_gain_B[None] * jnp.sum(own_KBL, axis=2)
        kind_KB = jnp.any(insert_KBL, axis=2) * (1 + jnp.any(delete_KBL, axis=2))
        there_KBL = jnp.where(insert_KBL | delete_KBL, context.preference_BL[None], jnp.uint32(0))
        liked_KB = _liked(jnp.max(there_KBL, axis=2), kind_KB)
        # A gain is a sum over the row's tokens, so the scale is the row's length.
        best_BK = most(
            gain_KB.T,
            tried.is_real_KB.T,
            jnp.ones_like(length_B),
            liked_KB.T,
            length_B[:, None].astype(jnp.float32),
        )
        best_B = place_of_largest(best_BK)
        is_taken_B = exceeds(jnp.max(gain_KB, axis=0), self.gain_B, length_B.astype(jnp.float32))
        edits = jax.tree.map(
            lambda x: jnp.take_along_axis(x, best_B.reshape(1, -1, *[1] * (x.ndim - 2)), 0)[0],
            tried.edits,
        )
        return edits._replace(
            insert_gap_BL=edits.insert_gap_BL & is_taken_B[:, None],
            delete_BL=edits.delete_BL & is_taken_B[:, None],
        )


def _liked(preference: jax.Array, kind: jax.Array) -> jax.Array:
    """uint32 priority of tied edits. Edits at the same position are ordered by kind."""
    return (preference & ~jnp.uint32(3)) | (jnp.uint32(2) - kind.astype(jnp.uint32))


def _leads(context: EditContext) -> tuple[jax.Array, jax.Array]:
    """Leads in nats over the current token: that of the most likely other token, and that of the
    next token.

    Undefined leads are -inf. Both leads are undefined at holes. The first is also undefined at
    given tokens, and the second before a hole.
    """
    cells, snapshot = context.cells, context.snapshot
    assert snapshot.best_BL is not None
    is_token_BL = scores.is_token(context)
    is_pair_BL = is_token_BL & right_of(is_token_BL)
    own_BL, right_BL, best_BL = (
        jnp.maximum(x_BL, scores.LEAST)
        for x_BL in (snapshot.own_BL, snapshot.right_BL, snapshot.best_BL)
    )
    lead_BL = jnp.where(is_token_BL & ~cells.frozen_BL, best_BL - own_BL, -jnp.inf)
    return lead_BL, jnp.where(is_pair_BL, right_BL - own_BL, -jnp.inf)
