"""LocalLeap: lowers the threshold near confident holes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most_confident, per_row, rule, static
from dlm_jax.sampling.commit import CommitContext, Proposal
from dlm_jax.sampling.rule_tools import (
    CONFIDENCE,
    THRESHOLD,
    THRESHOLD_LEAST,
    Confident,
    Measure,
    reached,
)


@rule
class LocalLeap(Confident):
    """Commits anchors, which are holes with confidence >= tau, and holes with confidence >= tau'
    within W positions of an anchor.

    If there is no anchor, the most confident hole is committed. Predictions next to an anchor are
    nearly deterministic (Kong et al. 2025, LocalLeap, algorithm 1).
    """

    about = "confident holes, and less confident ones near them"
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    relaxed_B: jax.Array = per_row(
        Setting(
            "leap_threshold",
            0.75,
            "order=local_leap: minimum confidence of a committed hole near a hole that reaches "
            "threshold, in [0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    radius_B: jax.Array = per_row(
        Setting(
            "leap_radius",
            4,
            "order=local_leap: maximum distance from a hole that reaches threshold",
            low=0,
        )
    )
    least_B: jax.Array = per_row(THRESHOLD_LEAST)
    confidence: Measure = static(CONFIDENCE)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        sure_BL, is_hole_BL = proposal.confidence_BL, context.is_hole_BL
        is_anchor_BL = is_hole_BL & reached(sure_BL, self.threshold_B)
        num_positions = is_hole_BL.shape[1]
        upto_BL = jnp.pad(jnp.cumsum(is_anchor_BL, axis=1), ((0, 0), (1, 0)))
        place_1L = jnp.arange(num_positions)[None]
        radius_B1 = jnp.minimum(self.radius_B, num_positions)[:, None]
        first_BL = jnp.maximum(place_1L - radius_B1, 0)
        end_BL = jnp.minimum(place_1L + radius_B1 + 1, num_positions)
        anchors_BL = jnp.take_along_axis(upto_BL, end_BL, axis=1)
        anchors_BL -= jnp.take_along_axis(upto_BL, first_BL, axis=1)
        is_near_BL = is_hole_BL & (anchors_BL > 0) & reached(sure_BL, self.relaxed_B)
        return is_anchor_BL | is_near_BL | most_confident(context, proposal, self.least_B), state
