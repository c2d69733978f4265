"""Hierarchical decoding: commits the most confident hole in each run of holes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most_confident, per_row, rule, static
from dlm_jax.sampling.commit import CommitContext, Proposal
from dlm_jax.sampling.rule_tools import CONFIDENCE, THRESHOLD, Confident, Measure, reached, reaches


@rule
class Hierarchical(Confident):
    """Commits holes with confidence >= threshold, and the most confident hole of each run.

    Each step thus splits every run in two, so a run of n holes can take only about ``log2(n)``
    steps (Ma et al. 2025, dInfer, section 4.2). If all holes are below the floor and the threshold,
    only the most confident one is committed.
    """

    about = "the most confident hole of each run of holes, and all holes above the threshold"
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    floor_B: jax.Array = per_row(
        Setting(
            "hierarchy_floor",
            0.0,
            "order=hierarchical: minimum confidence for the most confident hole of a run, in [0, "
            "1]; 0 is off",
            low=0.0,
            high=1.0,
        )
    )
    confidence: Measure = static(CONFIDENCE)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        sure_BL, is_hole_BL = proposal.confidence_BL, context.is_hole_BL
        is_best_BL = is_hole_BL & reaches(sure_BL, _most_of_run(sure_BL, is_hole_BL, -jnp.inf), 1.0)
        assert context.preference_BL is not None, "the loop gives it"
        preference_BL = jnp.where(is_best_BL, context.preference_BL, jnp.uint32(0))
        is_best_BL &= preference_BL == _most_of_run(preference_BL, is_hole_BL, 0)
        is_best_BL &= reached(sure_BL, self.floor_B)
        is_sure_BL = is_hole_BL & reached(sure_BL, self.threshold_B)
        surest_BL = most_confident(context, proposal, jnp.ones_like(context.step_B))
        return is_best_BL | is_sure_BL | surest_BL, state


def _most_of_run(x_BL: jax.Array, is_in_BL: jax.Array, least: float) -> jax.Array:
    """The largest value within the run of True positions around each position, or `least`."""

    def later(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]):
        return jnp.where(two[1], two[0], jnp.maximum(one[0], two[0])), one[1] | two[1]

    left_BL, right_BL = (
        jax.lax.associative_scan(
            later,
            (jnp.where(is_in_BL, x_BL, jnp.array(least, x_BL.dtype)), ~is_in_BL),
            reverse=reverse,
            axis=1,
        )[0]
        for reverse in (False, True)
    )
    return jnp.maximum(left_BL, right_BL)
