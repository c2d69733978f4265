"""Commit rules that commit a quota of the most confident, random, or leftmost holes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    DrawnTokens,
    Proposal,
    certain,
    log_odds,
    log_subset,
    most,
    most_confident,
    uniform,
)
from dlm_jax.sampling.draw import log_prob
from dlm_jax.settings import UNSET, Setting, SettingError, check_ids, rule, static

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
    "confidence of a hole: probability of the drawn token (sampled), or of the most likely token "
    "(max)",
    choices={"sampled": sampled, "max": maximum},
)
SCHEDULE = Setting(
    "schedule",
    "linear",
    "distribution of a quota over the steps: linear, cosine, timesteps (as for a noise process "
    "with evenly decreasing times), or all (every hole at every step)",
    choices=QUOTAS,
)


CONFIDENCE_OF = Setting(
    "confidence_of",
    "clean",
    "logits for confidence, entropy and margin: clean, or filtered (after all transforms)",
    choices={"clean": "clean", "filtered": "filtered"},
    is_preset=True,
)


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SettingError(
            "confidence_without", value, "is not a list of ids", "for example, use ()"
        )
    if not all(hasattr(id_, "__index__") and not isinstance(id_, bool) for id_ in value):
        raise SettingError("confidence_without", value, "contains a non-id", "use integers")
    return tuple(int(id_) for id_ in value)


CONFIDENCE_WITHOUT = Setting(
    "confidence_without",
    (),
    "ids excluded from confidence: probabilities are renormalised over the other ids, and a hole "
    "with an excluded candidate has confidence 0",
    parse=_ids,
    hint=tuple[int, ...],
)


class Confident(CommitRule):
    """A rule with a confidence measure selected by a setting."""

    confidence: Measure

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        return self.confidence(logits_NV, drawn.logprob_N), state_N

    def show_score(self, score: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(score)


class ByEntropy(CommitRule):
    """A rule whose confidence is the `certainty` of a hole."""

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        return certainty(logits_NV, drawn.logprob_N), state_N

    def show_score(self, score: jax.Array) -> jax.Array:
        return -entropy(score)


class ByMargin(CommitRule):
    """A rule whose confidence is the `margin` of a hole."""

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        return margin(logits_NV, drawn.logprob_N), state_N

    def show_score(self, score: jax.Array) -> jax.Array:
        return -jnp.expm1(-score)


class Weighed(CommitRule):
    """A rule with two settings that select the logits for its confidence. The next base class
    computes the confidence from them.

    Attributes:
      source: ``clean`` or ``filtered`` logits (the latter as in Dream, Ye et al. 2025).
      without: excluded ids (LLaDA, Nie et al. 2025, appendix B.4).
    """

    source: str
    without: tuple[int, ...]

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        if self.source == "filtered" or self.without:
            is_filtered = self.source == "filtered"
            logits_NV = drawn.filter_logits() if is_filtered else logits_NV.astype(jnp.float32)
            if self.without:
                logits_NV = logits_NV.at[:, jnp.array(self.without)].set(-jnp.inf)
            drawn = drawn._replace(logprob_N=log_prob(logits_NV, drawn.ids_N))
        return super().score(state_N, logits_NV, drawn)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        check_ids("confidence_without", row.confidence_without, facts.vocab_size)


class QuotaRule(CommitRule):
    """A commit rule that commits a quota of holes."""

    quota: Quota

    @classmethod
    def check(cls, row: Any) -> None:
        super().check(row)
        if row.resample and row.schedule != "all":
            loop = ", or --preset variable_length" if row.edit else ""
            raise SettingError(
                "resample",
                UNSET,
                f"does not support a quota of order={row.order!r}",
                f"use schedule='all', or order='threshold'{loop}",
            )


class _MostConfidentFirst(Weighed, QuotaRule):
    log_prob = certain

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        return most_confident(context, proposal, self.quota(context)), state


@rule
class LowConfidence(_MostConfidentFirst, Confident):
    """Commits a quota of the most confident candidates in each row.

    If confidence is the clean probability of the drawn token, this is LLaDA's ``low_confidence``
    remasking (Nie et al. 2025, algorithm 5).
    """

    about = (
        "a quota of the most confident holes, as in LLaDA; on an empty canvas, small models "
        "collapse to spaces and line ends"
    )

    quota: Quota = static(SCHEDULE)
    source: str = static(CONFIDENCE_OF)
    without: tuple[int, ...] = static(CONFIDENCE_WITHOUT)
    confidence: Measure = static(CONFIDENCE)


@rule
class LowEntropy(_MostConfidentFirst, ByEntropy):
    """Commits a quota of the holes with the lowest entropy."""

    about = "a quota of the holes with the lowest entropy"
    name = "entropy"
    quota: Quota = static(SCHEDULE)
    source: str = static(CONFIDENCE_OF)
    without: tuple[int, ...] = static(CONFIDENCE_WITHOUT)


@rule
class LargeMargin(_MostConfidentFirst, ByMargin):
    """Commits a quota of the holes with the largest margin between their two most likely tokens."""

    about = "a quota of the holes with the largest margin between their two most likely tokens"
    name = "margin"
    quota: Quota = static(SCHEDULE)
    source: str = static(CONFIDENCE_OF)
    without: tuple[int, ...] = static(CONFIDENCE_WITHOUT)


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

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        return context.is_hole_BL, state

    def log_prob(
        self, state: Any, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        return log_subset(context.is_hole_BL, is_chosen_BL)


@rule
class RandomFilled(QuotaRule):
    """Fills every hole, and commits the quota that `RandomOrder` would select.

    The selection does not depend on the tokens. If the fill draws from the joint distribution of
    all holes, the committed tokens therefore follow their exact joint distribution. A fill of only
    the quota would ignore the holes between its positions and follow another distribution. With the
    parallel fill, the candidates are the same in both cases. Candidates outside the quota are
    discarded.
    """

    about = "a random quota of the holes, with candidates for all holes"

    quota: Quota = static(SCHEDULE)

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        score_BL = uniform(context.key_B, context.is_hole_BL.shape[1])
        return most(score_BL, context.is_hole_BL, self.quota(context)), state

    def log_prob(
        self, state: Any, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        return log_subset(context.is_hole_BL, is_chosen_BL)


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

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        return context.is_hole_BL, state
