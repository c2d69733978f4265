"""Prophet: commits all remaining holes in one step when their predictions are clear."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most_confident, per_row, rule, static
from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit import CommitContext, DrawnTokens, Proposal
from dlm_jax.sampling.rule_tools import CONFIDENCE, Confident, Measure, linear_quota, reaches
from dlm_jax.settings import SettingError

_MOST = 30.0
"""Upper bound on the gap of a hole, which is infinite if the second token has probability 0."""


@rule
class Prophet(Confident):
    """Commits a quota of the most confident holes, or all holes if the mean gap reaches
    ``tau(progress)``.

    The gap of a hole is the difference between its two largest logits, and the mean is taken over
    the holes of the block. The bound tau decreases in three stages (Li et al. 2025, Prophet,
    equations 4 and 5: 7.5, 5.0 and 2.5).
    """

    about = "a quota of the most confident holes, or all holes when their predictions are clear"
    log_prob = certain

    gap_B: jax.Array = per_row(
        Setting(
            "prophet_gap",
            7.5,
            "order=prophet: minimum mean gap between the two largest logits at which all holes are "
            "committed, >= 0; the second third of the steps uses 2/3 of it, and the last third 1/3",
            low=0.0,
            high=1e6,
        )
    )
    confidence: Measure = static(CONFIDENCE)

    @classmethod
    def check(cls, row: Any) -> None:
        super().check(row)
        if row.resample:
            raise SettingError(
                "resample",
                True,
                "does not support the quota of order='prophet'",
                "use order='threshold'",
            )

    def init(self, num_rows: int, num_positions: int) -> Any:
        return jnp.zeros((num_rows, num_positions), jnp.float32)

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        best_NK, _ = vocab.largest(logits_NV.astype(jnp.float32), min(2, logits_NV.shape[1]))
        gap_N = jnp.minimum(best_NK[:, 0] - best_NK[:, -1], _MOST)
        return super().score(state_N, logits_NV, drawn)[0], gap_N

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        is_hole_BL = context.is_hole_BL
        gap_B = jnp.sum(jnp.where(is_hole_BL, state, 0.0), axis=1)
        gap_B /= jnp.maximum(jnp.sum(is_hole_BL, axis=1), 1)
        stage_B = jnp.minimum(3 * context.step_B // context.steps_B, 2)
        is_clear_B = reaches(gap_B, self.gap_B * (3 - stage_B) / 3.0, _MOST)
        surest_BL = most_confident(context, proposal, linear_quota(context))
        return surest_BL | (is_hole_BL & is_clear_B[:, None]), state
