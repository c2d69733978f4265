"""SlowFast: slow steps determine a span of confident predictions, and fast steps fill it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most, per_row, rule, static
from dlm_jax.sampling.commit import CommitContext, Proposal
from dlm_jax.sampling.rule_tools import (
    CONFIDENCE,
    THRESHOLD,
    Confident,
    Measure,
    choose,
    place_of_largest,
    reached,
)
from dlm_jax.settings import SettingError


class Cycle(NamedTuple):
    """The phase of each row: the span, the end proposed by the last slow step, and the number of
    slow steps taken.

    ``end_B`` is 0 until slow steps have determined the end. All fields are int32 ``[B]``.
    """

    begin_B: jax.Array
    end_B: jax.Array
    seen_B: jax.Array
    slow_B: jax.Array


@rule
class SlowFast(Confident):
    """Commits holes with confidence >= threshold within a span determined by slow steps.

    A slow step considers all holes after the previous span. The step commits those with confidence
    >= threshold, or else the most confident one, and proposes the last hole with confidence >= tau'
    as the end of the span. Once two consecutive proposals differ by less than sigma, or after K
    slow steps, fast steps commit holes within the span by the same criterion (Wei et al. 2025,
    SlowFast, algorithm 1).
    """

    about = "confident holes within a span that slow steps determine"
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    reach_B: jax.Array = per_row(
        Setting(
            "slow_threshold",
            0.3,
            "order=slow_fast: minimum confidence of the hole at the end of a span, in [0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    steps_B: jax.Array = per_row(
        Setting(
            "slow_steps",
            6,
            "order=slow_fast: maximum number of slow steps before a span",
            low=1,
        )
    )
    spread_B: jax.Array = per_row(
        Setting(
            "slow_spread",
            1.0,
            "order=slow_fast: difference in positions, >= 0, below which two consecutive proposals "
            "fix the end of a span",
            low=0.0,
            high=1e6,
        )
    )
    confidence: Measure = static(CONFIDENCE)

    @classmethod
    def check(cls, row: Any) -> None:
        super().check(row)
        if row.edits:
            raise SettingError(
                "edit", True, "changes the span of order='slow_fast'", "use order='threshold'"
            )

    def init(self, num_rows: int, num_positions: int) -> Any:
        return Cycle(*(jnp.zeros(num_rows, jnp.int32) for _ in Cycle._fields))

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        cycle, sure_BL = _at_block(state, context), proposal.confidence_BL
        scope_BL = self._scope(cycle, context)
        is_sure_BL = scope_BL & reached(sure_BL, self.threshold_B)
        is_chosen_BL = is_sure_BL | most(
            sure_BL, scope_BL, jnp.ones_like(context.step_B), context.preference_BL, 1.0
        )
        return is_chosen_BL, self._next(cycle, context, proposal, is_chosen_BL)

    def _next(
        self, cycle: Cycle, context: CommitContext, proposal: Proposal, is_committed_BL: jax.Array
    ) -> Cycle:
        """The phase of each row after the step."""
        place_1L = jnp.arange(is_committed_BL.shape[1])[None]
        is_far_BL = self._scope(cycle, context) & reached(proposal.confidence_BL, self.reach_B)
        seen_B = jnp.max(jnp.where(is_far_BL, place_1L, cycle.begin_B[:, None]), axis=1) + 1
        slow_B, is_slow_B = cycle.slow_B + 1, cycle.end_B == 0
        # The deviation of two numbers from their mean is half of their distance.
        is_stable_B = (slow_B > 1) & (jnp.abs(seen_B - cycle.seen_B) < 2.0 * self.spread_B)
        mean_B = jnp.where(slow_B > 1, (seen_B + cycle.seen_B) // 2, seen_B)
        found_B = jnp.where(is_stable_B, seen_B, jnp.where(slow_B >= self.steps_B, mean_B, 0))
        end_B = jnp.where(is_slow_B, found_B, cycle.end_B)
        is_left_BL = context.is_hole_BL & ~is_committed_BL & (place_1L >= cycle.begin_B[:, None])
        is_over_B = (end_B > 0) & ~jnp.any(is_left_BL & (place_1L < end_B[:, None]), axis=1)
        return Cycle(
            jnp.where(is_over_B, end_B, cycle.begin_B),
            jnp.where(is_over_B, 0, end_B),
            jnp.where(is_slow_B, seen_B, cycle.seen_B),
            jnp.where(is_over_B, 0, jnp.where(is_slow_B, slow_B, cycle.slow_B)),
        )

    def _scope(self, cycle: Cycle, context: CommitContext) -> jax.Array:
        """The holes of the span or, while its end is unknown, all holes from its start; all holes
        of the block if the span has none.
        """
        is_hole_BL = context.is_hole_BL
        place_1L = jnp.arange(is_hole_BL.shape[1])[None]
        begin_B1, end_B1 = cycle.begin_B[:, None], cycle.end_B[:, None]
        scope_BL = is_hole_BL & (place_1L >= begin_B1) & ((place_1L < end_B1) | (end_B1 == 0))
        return jnp.where(jnp.any(scope_BL, axis=1, keepdims=True), scope_BL, is_hole_BL)


def _at_block(cycle: Cycle, context: CommitContext) -> Cycle:
    """The phase of each row, reset to the first hole at the first step of a block."""
    first_B = place_of_largest(context.is_hole_BL)
    fresh = Cycle(first_B, 0 * first_B, 0 * first_B, 0 * first_B)
    return choose(context.step_B == 0, fresh, cycle)
