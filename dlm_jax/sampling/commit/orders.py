"""Commit rules: by a quota of the holes, by confidence without a quota, and ancestral sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    DrawnTokens,
    Proposal,
    WithState,
    certain,
    exceeds,
    log_each,
    log_odds,
    log_odds_of,
    log_subset,
    most,
    most_confident,
    reaches,
    uniform,
)
from dlm_jax.sampling.vocab import log_prob
from dlm_jax.settings import UNSET, Setting, fact, per_row, require, rule, static

Quota = Callable[[CommitContext], jax.Array]
"""``(context) -> int32 [B]``: the number of holes that each row commits at this step."""


def linear_quota(context: CommitContext) -> jax.Array:
    """``ceil(holes / steps left)``: an even split, with the remainder in the first steps."""
    holes_B = jnp.sum(context.is_hole_BL, axis=1)
    left_B = jnp.maximum(context.steps_B - context.step_B, 1)
    return -(-holes_B // left_B)


def cosine_quota(context: CommitContext) -> jax.Array:
    """A quota that grows over the steps: after step i of S, ``ceil(h cos(pi/2 i/S))`` holes remain.

    See Chang et al. 2022 (MaskGIT), section 3.2; h is the number of holes before the first step. If
    the number of steps is close to the number of holes, the first steps commit nothing.
    """
    done = (context.step_B + 1).astype(jnp.float32) / context.steps_B
    # A product that is an integer in exact arithmetic must not be rounded up.
    share = jnp.cos(0.5 * jnp.pi * jnp.minimum(done, 1.0)) * context.first_holes_B
    remain_B = jnp.ceil(share - 1e-3).astype(jnp.int32)
    return jnp.maximum(jnp.sum(context.is_hole_BL, axis=1) - remain_B, 0)


_LAST_TIME = 1e-3


def timestep_quota(context: CommitContext) -> jax.Array:
    """``floor(holes (1 - s / t))`` for a step from time t to s; all holes at the last step.

    The times decrease evenly from 1 to 1e-3. They are float32 numbers interpolated from both ends,
    as in ``diffusion_generate`` of Dream (Ye et al. 2025).
    """
    steps_B = context.steps_B
    width_B = jnp.float32(_LAST_TIME - 1.0) / steps_B.astype(jnp.float32)

    def time(step_B: jax.Array) -> jax.Array:
        left_B = (steps_B - step_B).astype(jnp.float32)
        is_early_B = step_B < steps_B - steps_B // 2
        from_end_B = jnp.float32(_LAST_TIME) - width_B * left_B
        return jnp.where(is_early_B, 1.0 + width_B * step_B.astype(jnp.float32), from_end_B)

    holes_B = jnp.sum(context.is_hole_BL, axis=1)
    share_B = 1.0 - time(context.step_B + 1) / time(context.step_B)
    count_B = jnp.floor(holes_B.astype(jnp.float32) * share_B).astype(jnp.int32)
    return jnp.where(context.step_B + 1 >= steps_B, holes_B, count_B)


def whole_quota(context: CommitContext) -> jax.Array:
    """Every hole at every step, for use with a remask rule."""
    return jnp.sum(context.is_hole_BL, axis=1)


QUOTAS: dict[str, Quota] = {
    "linear": linear_quota,
    "cosine": cosine_quota,
    "timesteps": timestep_quota,
    "all": whole_quota,
}


Measure = Callable[[jax.Array, jax.Array], jax.Array]
"""``(clean logits [N, V], log-prob. of the candidate [N]) -> float32 [N]``: higher is more
confident. Values that differ by a relative 1e-5, or by 1e-5 if they are below 1, are ties."""


def sampled(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """Log-odds of the probability of the candidate (LLaDA, Nie et al. 2025, algorithm 5)."""
    return log_odds(logprob_N)


def maximum(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """Log-odds of the largest probability (MaskGIT, Chang et al. 2022)."""
    return -jnp.log(vocab.max_and_rest(logits_NV)[1])


def certainty(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """``-ln H`` of the entropy H in nats (Dream, Ye et al. 2025: ``entropy``).

    The logarithm keeps the order of entropies near 0, and `entropy` is its inverse.
    """
    return -jnp.log(vocab.entropy(logits_NV))


def entropy(confidence: jax.Array) -> jax.Array:
    """Entropy in nats, given its `certainty`."""
    return jnp.exp(-confidence)


def margin(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
    """``-ln(1 - m)``, where m is the probability of the most likely token minus that of the second
    most likely token (Kim et al. 2025, ``topk_margin``).

    The logarithm keeps the order of margins near 1.
    """
    best_NK, _ = vocab.largest(logits_NV, min(2, logits_NV.shape[1]))
    _, rest_N = vocab.max_and_rest(logits_NV)
    second_N = jnp.exp(best_NK[:, 1] - best_NK[:, 0]) if best_NK.shape[1] > 1 else 0.0
    return jnp.log1p(rest_N) - jnp.log(rest_N + second_N)


CONFIDENCE = Setting(
    "confidence",
    "sampled",
    "confidence of a hole: probability of the drawn or of the likeliest token",
    choices={"sampled": sampled, "max": maximum},
)
SCHEDULE = Setting("schedule", "linear", "distribution of a quota over the steps", choices=QUOTAS)


CONFIDENCE_OF = Setting(
    "confidence_of",
    "clean",
    "logits that confidence reads: clean, or filtered by all transforms",
    choices={"clean": "clean", "filtered": "filtered"},
    is_preset=True,
)


class Confident(CommitRule):
    """A rule that compares holes by a confidence measure.

    Attributes:
      confidence: the measure, which a setting selects.
      source: ``clean`` or ``filtered`` logits (the latter as in Dream, Ye et al. 2025).
    """

    confidence: Measure
    source: str = "clean"

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> WithState:
        logprob_N = drawn.logprob_N
        if self.source == "filtered":
            logits_NV = drawn.filter_logits()
            logprob_N = log_prob(logits_NV, drawn.ids_N)
        return self.confidence(logits_NV, logprob_N), state_N


class QuotaRule(CommitRule):
    """A commit rule that commits a quota of holes: by default, the most confident ones."""

    quota: Quota

    @classmethod
    def check(cls, row: Any) -> None:
        why = f"does not support a quota of order={row.order!r}"
        remedy = "use schedule='all', order='threshold', or --preset variable_length"
        require(not row.resample or row.schedule == "all", "resample", UNSET, why, remedy)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        return most_confident(context, proposal, self.quota(context)), state


@rule
class MostConfident(Confident, QuotaRule):
    """Commits a quota of the most confident candidates in each row."""

    log_prob = certain

    quota: Quota = static(SCHEDULE)
    source: str = static(CONFIDENCE_OF)


@rule
class LowConfidence(MostConfident):
    """Commits a quota of the most confident candidates in each row.

    If confidence is the clean probability of the drawn token, this is LLaDA's ``low_confidence``
    remasking (Nie et al. 2025, algorithm 5).
    """

    about = (
        "a quota of the most confident holes, as in LLaDA; on an empty canvas, small models "
        "collapse to spaces and line ends"
    )
    confidence: Measure = static(CONFIDENCE)


@rule
class LowEntropy(MostConfident):
    """Commits a quota of the holes with the lowest entropy."""

    about = "a quota of the holes with the lowest entropy"
    name = "entropy"
    confidence = staticmethod(certainty)


@rule
class LargeMargin(MostConfident):
    """Commits a quota of the holes with the largest margin between their two most likely tokens."""

    about = "a quota of the holes with the largest margin between their two most likely tokens"
    name = "margin"
    confidence = staticmethod(margin)


@rule
class RandomOrder(QuotaRule):
    """Commits a uniformly random quota of the holes, selected before the logits are computed."""

    about = "a random quota of the holes"
    name = "random"
    quota: Quota = static(SCHEDULE)

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """A random quota of the holes. Other holes need no logits."""
        score_BL = uniform(context.key_B, context.is_hole_BL.shape[1])
        return most(score_BL, context.is_hole_BL, self.quota(context))

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        return context.is_hole_BL, state

    def log_prob(
        self, state: Any, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        return log_subset(context.is_hole_BL, is_chosen_BL)


@rule
class RandomFilled(RandomOrder):
    """Fills every hole, and commits the quota that `RandomOrder` would select.

    The selection does not depend on the tokens. If the fill draws from the joint distribution of
    all holes, the committed tokens therefore follow their exact joint distribution. A fill of only
    the quota would ignore the holes between its positions and follow another distribution. With the
    parallel fill, the candidates are the same in both cases. Candidates outside the quota are
    discarded.
    """

    about = "a random quota of the holes, with candidates for all holes"

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        return context.is_hole_BL

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        return super().eligible(state, context), state


@rule
class LeftToRight(QuotaRule):
    """Commits a quota of the leftmost holes. Other holes need no logits."""

    about = "a quota of the leftmost holes"
    log_prob = certain

    quota: Quota = static(SCHEDULE)

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """The leftmost holes."""
        rank_BL = jnp.cumsum(context.is_hole_BL, axis=1)
        return context.is_hole_BL & (rank_BL <= self.quota(context)[:, None])

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        return context.is_hole_BL, state


THRESHOLD = Setting(
    "threshold", 0.9, "order=threshold: minimum confidence of a committed hole", low=0.0, high=1.0
)
THRESHOLD_ABOVE = Setting(
    "threshold_above", False, "commit only holes strictly above the threshold", is_preset=True
)
THRESHOLD_LEAST = Setting(
    "threshold_least", 1, "minimum number of tokens committed per step", low=1, is_preset=True
)

ENTROPY_BOUND = Setting("entropy_bound", 0.1, "order=entropy_bound: nats per step", 0.0, 1e6)


@rule
class Threshold(Confident):
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
        Setting("threshold_alone", 0, "commit every nth hole alone and first", 0, is_preset=True)
    )
    confidence: Measure = static(CONFIDENCE)
    source: str = static(CONFIDENCE_OF)

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """The first hole that must be committed alone, or all holes if there is none."""
        place_1L = jnp.arange(context.is_hole_BL.shape[1])[None]
        unit_B1 = self.alone_B[:, None]
        is_alone_BL = context.is_hole_BL & (unit_B1 > 0)
        is_alone_BL &= place_1L % jnp.maximum(unit_B1, 1) == 0
        is_first_BL = is_alone_BL & (jnp.cumsum(is_alone_BL, axis=1) == 1)
        is_any_B1 = jnp.any(is_first_BL, axis=1, keepdims=True)
        return jnp.where(is_any_B1, is_first_BL, context.is_hole_BL)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        is_hole_BL = self.eligible(state, context)
        cut_B1 = log_odds_of(self.threshold_B)[:, None]
        is_over_BL, is_at_BL = (
            by(proposal.confidence_BL, cut_B1, 1.0) for by in (exceeds, reaches)
        )
        is_sure_BL = jnp.where(self.is_above_B[:, None], is_over_BL, is_at_BL)
        least_BL = most(
            proposal.confidence_BL, is_hole_BL, self.least_B, context.preference_BL, 1.0
        )
        return (is_hole_BL & is_sure_BL) | least_BL, state


@rule
class EntropyBound(Confident):
    """Commits holes in ascending order of entropy while the sum of the preceding entropies is at
    most the bound.

    This sum bounds the loss of joint entropy when tokens are drawn in parallel (Ben-Hamu et al.
    2025, EB-Sampler, equation 6).
    """

    about = "holes with a small total entropy"
    confidence = staticmethod(certainty)
    log_prob = certain

    bound_B: jax.Array = per_row(ENTROPY_BOUND)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        is_chosen_BL = within_entropy(
            proposal.confidence_BL, context.is_hole_BL, self.bound_B, context.preference_BL
        )
        return is_chosen_BL, state


@rule
class JointThreshold(Threshold):
    """Commits confident holes, and replaces written tokens of the block with confident new ones.

    A block without holes continues until a step rewrites nothing, or for a limited number of steps
    (LLaDA2.1, Bie et al. 2026, "token-to-token editing"). Given tokens and tokens in earlier blocks
    are never rewritten.
    """

    about = "like threshold, but also rewrites written tokens"

    rewrite_B: jax.Array = per_row(
        Setting(
            "rewrite_threshold",
            0.9,
            "order=joint_threshold: confidence of a new token",
            low=0.0,
            high=1.0,
            activates=False,
            is_preset=True,
        )
    )
    rewrites: jax.Array = per_row(
        Setting(
            "rewrite_steps",
            16,
            "order=joint_threshold: maximum steps without holes",
            low=0,
            activates=False,
            is_preset=True,
        )
    )

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        is_chosen_BL, state = super().select(state, context, proposal)
        written_BL, cut_B1 = context.written_BL, log_odds_of(self.rewrite_B)[:, None]
        assert written_BL is not None, "the rule rewrites"
        is_better_BL = exceeds(proposal.confidence_BL, cut_B1, 1.0)
        is_better_BL &= (written_BL >= 0) & (proposal.tokens_BL != written_BL)
        return is_chosen_BL | is_better_BL, state


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


# Ancestral sampling of MDLM and ReMDM, which reverses the noise process used in training. Step i of
# S goes from time ``t = 1 - i/S`` to ``s = 1 - (i + 1)/S`` of the noise schedule. ``alpha`` is the
# fraction of visible tokens.


class NoiseSchedule(Protocol):
    """The noise schedule used in training; hashable."""

    def masked_ratio(self, t: jax.Array, /) -> jax.Array:
        """``1 - alpha(t)`` for t in [0, 1]."""
        ...


def visible_shares(schedule: NoiseSchedule, context: CommitContext) -> tuple[jax.Array, jax.Array]:
    """Fractions of visible tokens at the start and at the end of the step, ``[B]`` each."""
    steps_B = context.steps_B.astype(jnp.float32)
    t_B = 1.0 - context.step_B / steps_B
    s_B = jnp.maximum(1.0 - (context.step_B + 1) / steps_B, 0.0)
    return 1.0 - schedule.masked_ratio(t_B), 1.0 - schedule.masked_ratio(s_B)


@rule
class Ancestral(CommitRule):
    """Commits each hole with its probability in the reverse process, ``(alpha_s - alpha_t) / (1 -
    alpha_t)`` (Sahoo et al. 2024, MDLM, equation 7).
    """

    about = "each hole with its probability in the reverse noise process"

    schedule: NoiseSchedule = fact("noise")

    def chance(self, context: CommitContext) -> jax.Array:
        """The probability ``[B]`` that this step commits a hole."""
        alpha_t_B, alpha_s_B = visible_shares(self.schedule, context)
        return (alpha_s_B - alpha_t_B) / jnp.maximum(1.0 - alpha_t_B, 1e-9)

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """The holes that the process unmasks in this step. All other holes need no logits."""
        drawn_BL = uniform(context.key_B, context.is_hole_BL.shape[1])
        return context.is_hole_BL & (drawn_BL < self.chance(context)[:, None])

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        return context.is_hole_BL, state

    def log_prob(
        self, state: Any, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        chance_B1 = jnp.clip(self.chance(context), 0.0, 1.0)[:, None]
        return log_each(context.is_hole_BL, is_chosen_BL, chance_B1)
