"""A fill that draws matches from left to right, weighted by their completion probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import CommitRule, per_row, rule
from dlm_jax.sampling import (
    GIVEN,
    NEVER,
    SAMPLER_TEMPERATURE,
    Seen,
    fold,
    grown_logits,
    head_chunk,
    left_of,
    put,
    right_of,
)
from dlm_jax.sampling.propose import Constrained, FillInput, FillOutput
from dlm_jax.settings import require


@rule
class ConstrainedWaves(Constrained):
    """Draws the open positions of a row from left to right, as a match of its structure.

    At position i, a token x has probability ``h_i(x) beta_i(s(x)) / sum_y h_i(y) beta_i(s(y))``.
    Here ``h_i`` is the distribution of the sampler head, given the visible tokens and the
    candidates to the left, after the chain, ``s(x)`` is the state of the automaton after the token,
    and ``beta_i`` is the probability that the trunk's independent distributions at later positions
    complete the match from this state. A greedy row takes the largest ``h_i(x) beta_i(s(x))``,
    where ``beta_i`` is the probability of the most likely completion. At a position with neither a
    visible token nor a candidate next to it, ``h_i`` is the distribution of the LM head. A wave
    consists of one position in all rows.

    Ids removed by truncation, holes outside the step and EOS are treated as in `Constrained`. Rows
    without structure use `Wavefront`.
    """

    about = "left to right by the sampler head in rows with a structure; wavefront in other rows"
    needs = ("head:sampler",)
    otherwise = "wavefront"

    temperature_B: jax.Array = per_row(SAMPLER_TEMPERATURE)

    @classmethod
    def check(cls, row: Any) -> None:
        super().check(row)
        commit = row.table.commit[row.order]
        why = f"stores values of the LM head, but fill={cls.name!r} draws from the sampler head"
        has_state = commit.init is not CommitRule.init
        require(not has_state, "order", row.order, why, "for example, use order='threshold'")

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> Any:
        heat_B = np.array([row.sampler_temperature for row in rows], np.float32)
        return dataclasses.replace(super().columns(rows, facts), temperature_B=heat_B)

    def propose(self, fill: FillInput) -> FillOutput:
        """The candidates, with log-probability and confidence under the head that drew them."""
        out, seen = self._read(fill)
        places = self._places(fill, out.proposal.tokens_BL, seen)
        is_open_BL, index_L = places.is_open_BL, jnp.arange(places.is_open_BL.shape[1])
        is_seen_BL = fill.is_seen_BL & ~fill.is_open_BL
        level_BL = jnp.where(is_open_BL, index_L[None], jnp.where(is_seen_BL, GIVEN, NEVER))
        is_alone_BL = is_open_BL & (left_of(level_BL, NEVER) == NEVER)
        is_alone_BL &= right_of(level_BL, NEVER) != GIVEN
        by_head = self._column(fill, level_BL)

        def wave(carry: tuple[jax.Array, jax.Array], at_one: Any) -> tuple[Any, Any]:
            state_B, tokens_BL = carry
            index, behind_BS, (arc_wait_BD, class_wait_BC), trunk, is_alone_B, at_place = at_one
            is_open_B = at_place.is_open_BL
            own = by_head(index, tokens_BL, is_open_B & ~is_alone_B, trunk)
            takes_best_B = is_open_B & at_place.takes_best_BL
            label_BK = self._labels(own.weight, takes_best_B[:, None])[:, 0]
            label_BK = jnp.where(is_open_B[:, None], label_BK, at_place.label_BLK)
            arc_B, next_B = self._next(state_B, behind_BS, arc_wait_BD, label_BK)
            made = self._of_arcs(own, arc_B[:, None], class_wait_BC[:, None])
            token_B, logprob_B, sure_B = (x_B1[:, 0] for x_B1 in made)
            token_B = jnp.where(is_open_B, token_B, tokens_BL[:, index])
            state_B = jnp.where(at_place.is_text_BL, next_B, state_B)
            return (state_B, tokens_BL.at[:, index].set(token_B)), (logprob_B, sure_B)

        by_place = jax.tree.map(
            lambda x_BL: x_BL.swapaxes(0, 1),
            (self._arrivals(fill, places), seen, is_alone_BL, places),
        )
        old = out.proposal
        (_, tokens_BL), made = jax.lax.scan(
            wave, (self.arcs.start, old.tokens_BL), (index_L, self._messages(places), *by_place)
        )
        logprob_BL, sure_BL = (
            jnp.where(is_open_BL, new_LB.T, old_BL)
            for new_LB, old_BL in zip(made, (old.logprob_BL, old.confidence_BL), strict=True)
        )
        is_fine_B = jnp.all(jnp.isfinite(logprob_BL) | ~is_open_BL, axis=1)
        counts = {"waves": is_open_BL.sum(axis=1), "bootstrapped": is_alone_BL.sum(axis=1)}
        return out._replace(
            proposal=old._replace(
                tokens_BL=tokens_BL, logprob_BL=logprob_BL, confidence_BL=sure_BL
            ),
            is_finite_B=out.is_finite_B & is_fine_B,
            counts=counts,
        )

    def _column(
        self, fill: FillInput, level_BL: jax.Array
    ) -> Callable[[jax.Array, jax.Array, jax.Array, Seen], Seen]:
        """``(index, candidates_BL, is_read_B, seen) -> seen``: the head's `Seen`, ``[B, 1, C]``.

        Other rows keep the given `seen`, ``[B, C]``.
        """
        grown = grown_logits(fill, level_BL, self.temperature_B)
        first_BC, num_positions = self._first_blocks(), level_BL.shape[1]

        def column(
            index: jax.Array, candidates_BL: jax.Array, is_read_B: jax.Array, seen: Seen
        ) -> Seen:
            def read(now: Seen, row_N: jax.Array, is_real_N: jax.Array) -> Seen:
                places_N = row_N * num_positions + index
                logits = grown(candidates_BL, places_N)
                new = self._see(fill, first_BC, places_N, is_real_N, *logits)
                return put(now, row_N, is_real_N, new)

            begin = jax.tree.map(lambda x_BC: x_BC[:, None], seen)
            return fold(is_read_B[:, None], head_chunk(fill), read, begin)

        return column
