"""Frechet profile: commits the largest number of holes that the joint probability bound allows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most_confident, per_row, rule, static
from dlm_jax.sampling.commit import CommitContext, Proposal
from dlm_jax.sampling.rule_tools import CONFIDENCE, Confident, Measure, exceeds, falling


@rule
class Frechet(Confident):
    """Commits the most confident holes with ``L_n - U_n > delta``, and at least one hole.

    ``L_n = max(0, sum of c_j up to n, minus (n - 1))`` is a lower bound on the joint probability of
    the n candidates (Frechet), and ``U_n = 1 - c_n`` is an upper bound on the probability of any
    other choice. The confidences ``c_n`` are in descending order (Kasa et al. 2026, Fast-dLLM++,
    section 3). If all confidences are equal, the rule is equivalent to `Factor` with a factor of
    ``1 - delta``.
    """

    about = "holes with a high lower bound on their joint probability"
    log_prob = certain

    margin_B: jax.Array = per_row(
        Setting(
            "frechet_margin",
            0.25,
            "order=frechet: minimum difference between the lower bound on the joint probability "
            "and the upper bound on that of any other choice; values down to -1 commit more than "
            "the bounds allow",
            low=-1e6,
            high=1.0,
        )
    )
    confidence: Measure = static(CONFIDENCE)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        sure_BL, place_1L = (
            falling(context, proposal),
            jnp.arange(context.is_hole_BL.shape[1])[None],
        )
        is_hole_BL = place_1L < jnp.sum(context.is_hole_BL, axis=1, keepdims=True)
        doubt_BL = jnp.where(is_hole_BL, jax.nn.sigmoid(-sure_BL), jnp.inf)
        lead_BL = jnp.maximum(1.0 - jnp.cumsum(doubt_BL, axis=1), 0.0) - doubt_BL
        count_B = jnp.sum(exceeds(lead_BL, self.margin_B[:, None], 1.0), axis=1)
        return most_confident(context, proposal, jnp.maximum(count_B, 1)), state
