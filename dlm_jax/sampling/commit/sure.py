"""Commit rules without a quota, which commit all confident holes, and at least one hole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    Proposal,
    certain,
    exceeds,
    log_odds_of,
    most,
    most_confident,
    reaches,
)
from dlm_jax.sampling.commit.quotas import (
    CONFIDENCE,
    CONFIDENCE_OF,
    CONFIDENCE_WITHOUT,
    ByEntropy,
    Confident,
    Measure,
    Weighed,
    entropy,
)
from dlm_jax.settings import Setting, per_row, rule, static

THRESHOLD = Setting(
    "threshold",
    0.9,
    "order=threshold: minimum confidence of a committed hole, in [0, 1]",
    low=0.0,
    high=1.0,
)
THRESHOLD_ABOVE = Setting(
    "threshold_above",
    False,
    "order=threshold: commit only holes strictly above the threshold",
    is_preset=True,
)
THRESHOLD_LEAST = Setting(
    "threshold_least",
    1,
    "order=threshold: minimum number of tokens committed per step",
    low=1,
    is_preset=True,
)

ENTROPY_BOUND = Setting(
    "entropy_bound",
    0.1,
    "order=entropy_bound: bound in nats on the total entropy of the holes committed in a step, "
    ">= 0",
    low=0.0,
    high=1e6,
)


@rule
class Threshold(Weighed, Confident):
    """Commits every hole with confidence >= threshold (Wu et al. 2025, Fast-dLLM, section 3.3).

    SDAR and LLaDA2 commit only above the threshold. Holes at multiples of a given number can be
    committed alone, as in Fast-dLLM v2, where the previous block predicts the first token of a
    block.
    """

    about = "holes above the threshold"
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    is_above_B: jax.Array = per_row(THRESHOLD_ABOVE)
    least_B: jax.Array = per_row(THRESHOLD_LEAST)
    alone_B: jax.Array = per_row(
        Setting(
            "threshold_alone",
            0,
            "order=threshold: commit each hole at a multiple of this number alone, before all "
            "other holes of its block; 0 disables it",
            low=0,
            is_preset=True,
        )
    )
    confidence: Measure = static(CONFIDENCE)
    source: str = static(CONFIDENCE_OF)
    without: tuple[int, ...] = static(CONFIDENCE_WITHOUT)

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """The first hole that must be committed alone, or all holes if there is none."""
        place_1L = jnp.arange(context.is_hole_BL.shape[1])[None]
        unit_B1 = self.alone_B[:, None]
        is_alone_BL = context.is_hole_BL & (unit_B1 > 0)
        is_alone_BL &= place_1L % jnp.maximum(unit_B1, 1) == 0
        is_first_BL = is_alone_BL & (jnp.cumsum(is_alone_BL, axis=1) == 1)
        is_any_B1 = jnp.any(is_first_BL, axis=1, keepdims=True)
        return jnp.where(is_any_B1, is_first_BL, context.is_hole_BL)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        is_hole_BL = self.eligible(state, context)
        is_sure_BL = passes(proposal.confidence_BL, self.threshold_B, self.is_above_B)
        least_BL = most(
            proposal.confidence_BL, is_hole_BL, self.least_B, context.preference_BL, 1.0
        )
        return (is_hole_BL & is_sure_BL) | least_BL, state


@rule
class Factor(Confident):
    """Commits the most confident holes while ``c_n >= 1 - f / (n + 1)``.

    The confidences ``c_n`` are in descending order, and n starts at 1. A step that commits more
    holes requires a higher confidence (Fast-dLLM, section 3.3, theorem 1).
    """

    about = "confident holes, with a threshold that depends on their number"
    log_prob = certain

    factor_B: jax.Array = per_row(
        Setting(
            "factor",
            1.0,
            "order=factor: n holes are committed together if the confidence of each is at least 1 "
            "- factor / (n + 1)",
            low=0.0,
            high=1e6,
        )
    )
    confidence: Measure = static(CONFIDENCE)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        score_BL = falling(context, proposal)
        number_1L = 1.0 + jnp.arange(score_BL.shape[1])[None]
        doubt_BL = jnp.minimum(self.factor_B[:, None] / (number_1L + 1.0), 1.0)
        run_BL = jnp.cumprod(reaches(score_BL, -log_odds_of(doubt_BL), 1.0), axis=1)
        return most_confident(context, proposal, jnp.maximum(jnp.sum(run_BL, axis=1), 1)), state


@rule
class EntropyBound(ByEntropy):
    """Commits holes in ascending order of entropy while the sum of the preceding entropies is at
    most the bound.

    This sum bounds the loss of joint entropy when tokens are drawn in parallel (Ben-Hamu et al.
    2025, EB-Sampler, equation 6).
    """

    about = "holes with a small total entropy"
    log_prob = certain

    bound_B: jax.Array = per_row(ENTROPY_BOUND)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        is_chosen_BL = within_entropy(
            proposal.confidence_BL, context.is_hole_BL, self.bound_B, context.preference_BL
        )
        return is_chosen_BL, state


@rule
class JointThreshold(Confident):
    """Commits confident holes, and replaces written tokens of the block with confident new ones.

    A block without holes continues until a step rewrites nothing, or for a limited number of steps
    (LLaDA2.1, Bie et al. 2026, "token-to-token editing"). Given tokens and tokens in earlier blocks
    are never rewritten.
    """

    about = "like threshold, but also rewrites written tokens"
    rewrites = True
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    is_above_B: jax.Array = per_row(THRESHOLD_ABOVE)
    least_B: jax.Array = per_row(THRESHOLD_LEAST)
    rewrite_B: jax.Array = per_row(
        Setting(
            "rewrite_threshold",
            0.9,
            "order=joint_threshold: confidence above which another token replaces a written one, "
            "in [0, 1]",
            low=0.0,
            high=1.0,
            activates=False,
            is_preset=True,
        )
    )
    rewrite_steps_B: jax.Array = per_row(
        Setting(
            "rewrite_steps",
            16,
            "order=joint_threshold: maximum number of rewriting steps in a block without holes",
            low=0,
            activates=False,
            is_preset=True,
        )
    )
    confidence: Measure = static(CONFIDENCE)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        surest_BL, written_BL = proposal.confidence_BL, context.written_BL
        assert written_BL is not None, "the rule rewrites"
        is_sure_BL = passes(surest_BL, self.threshold_B, self.is_above_B)
        least_BL = most_confident(context, proposal, self.least_B)
        is_better_BL = exceeds(surest_BL, log_odds_of(self.rewrite_B)[:, None], 1.0)
        is_better_BL &= proposal.tokens_BL != written_BL
        return (context.is_hole_BL & is_sure_BL) | least_BL | (
            (written_BL >= 0) & is_better_BL
        ), state


def passes(confidence_BL: jax.Array, threshold_B: jax.Array, is_above_B: jax.Array) -> jax.Array:
    """True where the confidence, in log-odds, is at or above that of the threshold, or strictly
    above it in rows with `is_above_B`.
    """
    cut_B1 = log_odds_of(threshold_B)[:, None]
    is_over_BL, is_at_BL = (by(confidence_BL, cut_B1, 1.0) for by in (exceeds, reaches))
    return jnp.where(is_above_B[:, None], is_over_BL, is_at_BL)


def reached(confidence_BL: jax.Array, threshold_B: jax.Array) -> jax.Array:
    """True where the confidence, in log-odds, is at or above that of the threshold."""
    return reaches(confidence_BL, log_odds_of(threshold_B)[:, None], 1.0)


def within_entropy(
    score_BL: jax.Array, is_open_BL: jax.Array, bound_B: jax.Array, preference_BL: jax.Array | None
) -> jax.Array:
    """True at the open positions of lowest entropy while the sum of the preceding entropies is at
    most the bound, and at one position at least. The scores are `certainty`.
    """
    falling_BL = jnp.sort(jnp.where(is_open_BL, score_BL, -jnp.inf), axis=1, descending=True)
    is_real_BL = falling_BL > -jnp.inf
    entropy_BL = jnp.where(is_real_BL, entropy(falling_BL), 0.0)
    before_BL = jnp.cumsum(entropy_BL, axis=1) - entropy_BL
    is_in_BL = is_real_BL & ~exceeds(before_BL, bound_B[:, None], 1.0)
    count_B = jnp.maximum(jnp.sum(is_in_BL, axis=1), 1)
    return most(score_BL, is_open_BL, count_B, preference_BL, 1.0)


def falling(context: CommitContext, proposal: Proposal) -> jax.Array:
    """Confidences of the holes in descending order, followed by -inf."""
    score_BL = jnp.where(context.is_hole_BL, proposal.confidence_BL, -jnp.inf)
    return jnp.sort(score_BL, axis=1, descending=True)
