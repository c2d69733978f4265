"""Published decoders: ten commit rules, and the remask rule of WINO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax import (
    CommitRule,
    RemaskRule,
    Setting,
    certain,
    fact,
    most,
    most_confident,
    per_row,
    rule,
    static,
)
from dlm_jax.sampling import (
    CONFIDENCE,
    SCHEDULE,
    THRESHOLD,
    Confident,
    Measure,
    Quota,
    QuotaRule,
    exceeds,
    linear_quota,
    log_odds,
    log_odds_of,
    maximum,
    place_of_largest,
    reaches,
    vocab,
)
from dlm_jax.sampling.commit import CommitContext, DrawnTokens, Proposal
from dlm_jax.sampling.remask import RemaskContext
from dlm_jax.settings import SettingError, check_ids, require

__all__ = [
    "Credit",
    "Dawn",
    "Dilated",
    "Frechet",
    "Hierarchical",
    "Klass",
    "LocalLeap",
    "PositionAware",
    "Prophet",
    "SlowFast",
    "Wino",
]


Returned = tuple[jax.Array, Any]


class _Decoder(Confident):
    """A rule that compares holes by their confidence, without random choices."""

    log_prob = certain


def _number(name: str, default: float, about: str, **limits: Any) -> Any:
    """A field with one value per row."""
    return per_row(Setting(name, default, about, **limits))


def _share(name: str, default: float, about: str) -> Any:
    """A field with one value in [0, 1] per row."""
    return _number(name, default, about, low=0.0, high=1.0)


def _surest(context: CommitContext, proposal: Proposal) -> jax.Array:
    """True at the most confident hole of each row."""
    return most_confident(context, proposal, jnp.ones_like(context.step_B))


def reached(confidence_BL: jax.Array, threshold_B: jax.Array) -> jax.Array:
    """True where the confidence, in log-odds, is at or above that of the threshold."""
    return reaches(confidence_BL, log_odds_of(threshold_B)[:, None], 1.0)


@rule
class Frechet(_Decoder):
    """Commits the most confident holes with ``L_n - U_n > delta``, and at least one hole.

    ``L_n = max(0, sum of c_j up to n, minus (n - 1))`` is a lower bound on the joint probability of
    the n candidates (Frechet), and ``U_n = 1 - c_n`` is an upper bound on the probability of any
    other choice. The confidences ``c_n`` are in descending order (Kasa et al. 2026, Fast-dLLM++,
    section 3). If all confidences are equal, the rule is Fast-dLLM's factor rule with a factor of
    ``1 - delta``.
    """

    about = "holes with a high lower bound on their joint probability"

    margin_B: jax.Array = _number(
        "frechet_margin",
        0.25,
        "order=frechet: minimum difference between the lower bound on the joint probability "
        "and the upper bound on that of any other choice; values down to -1 commit more than "
        "the bounds allow",
        low=-1e6,
        high=1.0,
    )
    confidence: Measure = static(CONFIDENCE)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        sure_BL = jnp.where(context.is_hole_BL, proposal.confidence_BL, -jnp.inf)
        sure_BL = jnp.sort(sure_BL, axis=1, descending=True)
        place_1L = jnp.arange(sure_BL.shape[1])[None]
        is_hole_BL = place_1L < jnp.sum(context.is_hole_BL, axis=1, keepdims=True)
        doubt_BL = jnp.where(is_hole_BL, jax.nn.sigmoid(-sure_BL), jnp.inf)
        lead_BL = jnp.maximum(1.0 - jnp.cumsum(doubt_BL, axis=1), 0.0) - doubt_BL
        count_B = jnp.sum(exceeds(lead_BL, self.margin_B[:, None], 1.0), axis=1)
        return most_confident(context, proposal, jnp.maximum(count_B, 1)), state


@rule
class LocalLeap(_Decoder):
    """Commits anchors, which are holes with confidence >= tau, and holes with confidence >= tau'
    within W positions of an anchor.

    If there is no anchor, the most confident hole is committed. Predictions next to an anchor are
    nearly deterministic (Kong et al. 2025, LocalLeap, algorithm 1).
    """

    about = "confident holes, and less confident ones near them"

    threshold_B: jax.Array = per_row(THRESHOLD)
    relaxed_B: jax.Array = _share(
        "leap_threshold",
        0.75,
        "order=local_leap: minimum confidence of a committed hole near a hole that reaches "
        "threshold, in [0, 1]",
    )
    radius_B: jax.Array = _number(
        "leap_radius",
        4,
        "order=local_leap: maximum distance from a hole that reaches threshold",
        low=0,
    )
    confidence: Measure = static(CONFIDENCE)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
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
        return is_anchor_BL | is_near_BL | _surest(context, proposal), state


@rule
class Hierarchical(_Decoder):
    """Commits holes with confidence >= threshold, and the most confident hole of each run.

    Each step thus splits every run in two, so a run of n holes can take only about ``log2(n)``
    steps (Ma et al. 2025, dInfer, section 4.2). If all holes are below the floor and the threshold,
    only the most confident one is committed.
    """

    about = "the most confident hole of each run of holes, and all holes above the threshold"

    threshold_B: jax.Array = per_row(THRESHOLD)
    floor_B: jax.Array = _share(
        "hierarchy_floor",
        0.0,
        "order=hierarchical: minimum confidence for the most confident hole of a run; 0 is off",
    )
    confidence: Measure = static(CONFIDENCE)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        sure_BL, is_hole_BL = proposal.confidence_BL, context.is_hole_BL
        is_best_BL = is_hole_BL & reaches(sure_BL, _most_of_run(sure_BL, is_hole_BL, -jnp.inf), 1.0)
        assert context.preference_BL is not None, "the loop gives it"
        preference_BL = jnp.where(is_best_BL, context.preference_BL, jnp.uint32(0))
        is_best_BL &= preference_BL == _most_of_run(preference_BL, is_hole_BL, 0)
        is_best_BL &= reached(sure_BL, self.floor_B)
        is_sure_BL = is_hole_BL & reached(sure_BL, self.threshold_B)
        return is_best_BL | is_sure_BL | _surest(context, proposal), state


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


_ROUNDS = 24
"""Maximum number of rounds. float32 represents all integers up to 2**24 exactly."""


@rule
class Dilated(CommitRule):
    """Commits the holes at multiples of ``s_t = a^(R - t)`` in round t.

    A block of G holes takes ``R = ceil(log_a G)`` rounds, and t starts at 1 (Luxembourg et al.
    2025, DUS, section 3). A step needs logits only at the positions of its round. Positions are
    counted from the start of the canvas.
    """

    about = "a grid that is refined at each step, regardless of confidence"
    log_prob = certain

    base_B: jax.Array = _number(
        "dilated_base",
        2,
        "order=dilated: factor by which each round divides the distance between positions",
        low=2,
        high=2**15,
    )

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """The holes on the grid of this round; all holes after the last round."""
        step_B, holes_B1 = context.step_B, context.first_holes_B[:, None]
        base_B1 = self.base_B.astype(jnp.float32)[:, None]
        power_BR = base_B1 ** jnp.arange(_ROUNDS)[None]
        rounds_B = jnp.sum(power_BR < holes_B1, axis=1)
        left_B1 = jnp.maximum(rounds_B - 1 - step_B, 0)[:, None]
        spacing_B1 = jnp.round(jnp.take_along_axis(power_BR, left_B1, axis=1)).astype(jnp.int32)
        place_1L = jnp.arange(context.is_hole_BL.shape[1])[None]
        return context.is_hole_BL & (place_1L % jnp.maximum(spacing_B1, 1) == 0)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        return context.is_hole_BL, state


_RAREST = 1e-10


def _shares(value: Any) -> tuple[tuple[int, float], ...]:
    """The pairs in a mapping, or those that are its result."""
    try:
        found = tuple((int(id_), float(share)) for id_, share in dict(value).items())
    except (TypeError, ValueError, OverflowError):
        raise SettingError("common_ids", value, "is not a mapping", "use {12: 0.05}") from None
    is_law = all(share >= 0 for _, share in found) and sum(share for _, share in found) <= 1
    why = "has a negative frequency, or frequencies with a sum above 1"
    require(is_law, "common_ids", value, why, "use {}")
    return found


@rule
class PositionAware(_Decoder):
    """Commits a quota of holes with the highest ``exp(-lambda i) min(-p ln f, alpha)``.

    Here i is the index of the position, p is the probability of its candidate, and f is the
    relative frequency of that token in a corpus (Huang et al. 2025, PC-Sampler, equations 5 to 7).
    """

    about = "a quota of the holes, ranked by position, probability and token rarity"

    decay_B: jax.Array = _number(
        "position_decay",
        0.25,
        "order=position_aware: decay rate of the weight exp(-decay i) of position i, >= 0",
        low=0.0,
        high=1e3,
    )
    limit_B: jax.Array = _number(
        "information_limit",
        10.0,
        "order=position_aware: upper bound on -p ln f of a token, > 0",
        low=1e-6,
        high=1e6,
    )
    common: tuple[tuple[int, float], ...] = static(
        Setting(
            "common_ids",
            (),
            "order=position_aware: frequencies of ids in the corpus, such as 12:0.05,30:0.2; all "
            "other ids share the rest evenly",
            parse=_shares,
            hint=Mapping[int, float] | tuple[tuple[int, float], ...],
        )
    )
    quota: Quota = static(SCHEDULE)
    confidence: Measure = static(CONFIDENCE)
    vocab_size: int = fact("vocab_size", 0)

    @classmethod
    def check(cls, row: Any) -> None:
        QuotaRule.check(row)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises ValueError if a frequency is given for an id outside the vocabulary."""
        check_ids("common_ids", (id_ for id_, _ in row.common_ids), facts.vocab_size)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        is_hole_BL = context.is_hole_BL
        rest = 1.0 - sum(share for _, share in self.common)
        share_BL = rest / max(self.vocab_size - len(self.common), 1)
        for id_, share in self.common:
            share_BL = jnp.where(proposal.tokens_BL == id_, share, share_BL)
        rare_BL = -jnp.log(jnp.maximum(share_BL, _RAREST))
        share_BL = jax.nn.sigmoid(proposal.confidence_BL)
        counts_BL = jnp.minimum(share_BL * rare_BL, self.limit_B[:, None])
        first_B1 = place_of_largest(is_hole_BL)[:, None]
        place_BL = jnp.arange(is_hole_BL.shape[1])[None] - first_B1
        score_BL = jnp.log(counts_BL) - self.decay_B[:, None] * place_BL
        return most(score_BL, is_hole_BL, self.quota(context), context.preference_BL, 1.0), state


_WIDEST_GAP = 30.0
"""Upper bound on the gap of a hole, which is infinite if the second token has probability 0."""


@rule
class Prophet(_Decoder):
    """Commits a quota of the most confident holes, or all holes if the mean gap reaches
    ``tau(progress)``.

    The gap of a hole is the difference between its two largest logits, and the mean is taken over
    the holes of the block. The bound tau decreases in three stages (Li et al. 2025, Prophet,
    equations 4 and 5: 7.5, 5.0 and 2.5).
    """

    about = "a quota of the most confident holes, or all holes when their predictions are clear"

    gap_B: jax.Array = _number(
        "prophet_gap",
        7.5,
        "order=prophet: minimum mean gap between the two largest logits at which all holes are "
        "committed, >= 0; the second third of the steps uses 2/3 of it, and the last third 1/3",
        low=0.0,
        high=1e6,
    )
    confidence: Measure = static(CONFIDENCE)

    @classmethod
    def check(cls, row: Any) -> None:
        why = "does not support the quota of order='prophet'"
        require(not row.resample, "resample", True, why, "use order='threshold'")

    def init(self, num_rows: int, num_positions: int) -> Any:
        return jnp.zeros((num_rows, num_positions), jnp.float32)

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> Returned:
        best_NK, _ = vocab.largest(logits_NV.astype(jnp.float32), min(2, logits_NV.shape[1]))
        gap_N = jnp.minimum(best_NK[:, 0] - best_NK[:, -1], _WIDEST_GAP)
        return super().score(state_N, logits_NV, drawn)[0], gap_N

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        is_hole_BL = context.is_hole_BL
        gap_B = jnp.sum(jnp.where(is_hole_BL, state, 0.0), axis=1)
        gap_B /= jnp.maximum(jnp.sum(is_hole_BL, axis=1), 1)
        stage_B = jnp.minimum(3 * context.step_B // context.steps_B, 2)
        is_clear_B = reaches(gap_B, self.gap_B * (3 - stage_B) / 3.0, _WIDEST_GAP)
        surest_BL = most_confident(context, proposal, linear_quota(context))
        return surest_BL | (is_hole_BL & is_clear_B[:, None]), state


LEADING = 32
"""Number of ids per position whose log-probabilities are stored."""
_LEAST = 1e-6


class LastPrediction(NamedTuple):
    """The last prediction of each position.

    Attributes:
      ids: int32 ``[..., K]``, the most likely ids; -1 in empty entries.
      logprobs: float32 ``[..., K]``, log-probabilities of these ids.
      steps: int32 ``[...]``, number of consecutive predictions that changed by less than the bound.
    """

    ids: jax.Array
    logprobs: jax.Array
    steps: jax.Array


@rule
class Klass(_Decoder):
    """Commits the holes with ``max p > tau`` and ``KL(p_t, p_{t-1}) < epsilon`` for n steps.

    If no hole meets both conditions, the most confident one is committed (Kim et al. 2025, KLASS,
    algorithm 1 and equation 5). The divergence is computed over the 32 most likely ids of the
    previous step and one event for all other ids. The result is exact for vocabularies of at most
    32 ids, and a lower bound for larger ones.
    """

    about = "confident holes with stable predictions"
    confidence = staticmethod(maximum)

    threshold_B: jax.Array = per_row(THRESHOLD)
    divergence_B: jax.Array = _number(
        "klass_divergence",
        0.01,
        "order=klass: upper bound (exclusive) on the change of a stable prediction per step, "
        "in nats, >= 0",
        low=0.0,
        high=1e6,
    )
    steps_B: jax.Array = _number(
        "klass_steps",
        2,
        "order=klass: number of consecutive steps for which a prediction must be stable",
        low=0,
    )

    def init(self, num_rows: int, num_positions: int) -> Any:
        shape = (num_rows, num_positions, LEADING)
        ids, steps = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape[:2], jnp.int32)
        return LastPrediction(ids, jnp.full(shape, -jnp.inf, jnp.float32), steps)

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> Returned:
        last = state_N
        logprob_NV = jax.nn.log_softmax(logits_NV.astype(jnp.float32))
        now_NK = jnp.take_along_axis(logprob_NV, jnp.maximum(last.ids, 0), axis=1)
        moved_N = _divergence(jnp.where(last.ids >= 0, now_NK, -jnp.inf), last.logprobs)
        bound_N = self.divergence_B[drawn.row_N]
        is_stable_N = (last.ids[:, 0] >= 0) & ~reaches(moved_N, bound_N, 1.0)
        best_NK, best_ids_NK = vocab.largest(logprob_NV, min(LEADING, logits_NV.shape[1]))
        padding = (0, 0), (0, LEADING - best_NK.shape[1])
        seen = LastPrediction(
            jnp.pad(best_ids_NK, padding, constant_values=-1),
            jnp.pad(best_NK, padding, constant_values=-jnp.inf),
            jnp.where(is_stable_N, last.steps + 1, 0),
        )
        return maximum(logits_NV.astype(jnp.float32), drawn.logprob_N), seen

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        is_ready_BL = context.is_hole_BL & (state.steps >= self.steps_B[:, None])
        is_ready_BL &= exceeds(proposal.confidence_BL, log_odds_of(self.threshold_B)[:, None], 1.0)
        surest_BL = _surest(context, proposal)
        return jnp.where(jnp.any(is_ready_BL, axis=1, keepdims=True), is_ready_BL, surest_BL), state


def _divergence(now_NK: jax.Array, before_NK: jax.Array) -> jax.Array:
    """KL divergence in nats over the given ids and one event for all other ids."""

    def term(now: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(now > -jnp.inf, jnp.exp(now) * (now - before), 0.0)

    rest_N, rest_before_N = (
        jnp.log(jnp.maximum(1.0 - jnp.exp(x).sum(axis=1), _LEAST)) for x in (now_NK, before_NK)
    )
    return term(now_NK, before_NK).sum(axis=1) + term(rest_N, rest_before_N)


KEPT = 4
"""Number of ids per position whose credit is stored; an id of -1 marks an empty entry."""


@rule
class Credit(_Decoder):
    """Commits holes with confidence >= threshold under ``softmax(x + alpha ln(1 + C))``.

    If no hole reaches the threshold, the most confident one is committed. The confidence of a hole
    is its largest probability in this softmax. In each step, the most likely id v gains credit: ``C
    <- beta C + [v] p(v)^gamma`` (Wang et al. 2025, CreditDecoding, section 4). Credit is stored for
    4 ids per position. Candidates are drawn without credit.
    """

    about = "holes above the threshold, with a bonus for persistent predictions"
    confidence = staticmethod(maximum)

    threshold_B: jax.Array = per_row(THRESHOLD)
    weight_B: jax.Array = _number(
        "credit_weight",
        0.7,
        "order=credit: weight of the credit added to the logits, >= 0; 0 disables it",
        low=0.0,
        high=1e3,
    )
    decay_B: jax.Array = _share(
        "credit_decay", 0.8, "order=credit: share of the credit that is kept at each step"
    )
    power_B: jax.Array = _number(
        "credit_power",
        0.2,
        "order=credit: exponent of the credited probability, >= 0",
        low=0.0,
        high=1e3,
    )

    def init(self, num_rows: int, num_positions: int) -> Any:
        shape = (num_rows, num_positions, KEPT)
        return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> Returned:
        ids_NK, credit_NK = state_N
        logits_NV = logits_NV.astype(jnp.float32)
        logprob_NV = jax.nn.log_softmax(logits_NV)
        best_id_N1 = vocab.argmax(logprob_NV)[:, None]
        best_N1 = jnp.take_along_axis(logprob_NV, best_id_N1, axis=1)
        credit_NK = self.decay_B[drawn.row_N][:, None] * credit_NK
        # The credit is written to the slot of the id, or else to the slot with the least credit.
        is_own_NK = ids_NK == best_id_N1
        rank_NK = jnp.where(is_own_NK, -jnp.inf, credit_NK)
        is_slot_NK = jnp.arange(KEPT)[None] == place_of_largest(-rank_NK)[:, None]
        gain_N1 = jnp.exp(self.power_B[drawn.row_N][:, None] * best_N1)
        own_NK = jnp.where(is_own_NK, credit_NK, 0.0) + gain_N1
        ids_NK = jnp.where(is_slot_NK, best_id_N1, ids_NK)
        credit_NK = jnp.where(is_slot_NK, own_NK, credit_NK)
        # Each probability is multiplied by exp(alpha ln(1 + C)) and divided by the sum of these
        # products. All factors are divided by the largest, because they can overflow float32.
        gain_NK = self.weight_B[drawn.row_N][:, None] * jnp.log1p(credit_NK)
        gain_NK = jnp.where(ids_NK >= 0, gain_NK, 0.0)
        peak_N1 = gain_NK.max(axis=1, keepdims=True)
        factor_NK, one_N1 = jnp.exp(gain_NK - peak_N1), jnp.exp(-peak_N1)
        share_NK = jnp.exp(jnp.take_along_axis(logprob_NV, jnp.maximum(ids_NK, 0), axis=1))
        share_NK = jnp.where(ids_NK >= 0, share_NK, 0.0)
        # The most likely id is one of those with credit. Its rivals are these and all other ids.
        _, rest_N = vocab.max_and_rest(logits_NV)
        rival_NK = jnp.where(ids_NK == best_id_N1, 0.0, share_NK)
        others_N = jnp.maximum(rest_N / (1.0 + rest_N) - rival_NK.sum(axis=1), 0.0)
        product_NK = share_NK * factor_NK
        is_most_NK = jnp.arange(KEPT)[None] == place_of_largest(product_NK)[:, None]
        less_N = others_N * one_N1[:, 0] + jnp.where(is_most_NK, 0.0, product_NK).sum(axis=1)
        return jnp.log(product_NK.max(axis=1)) - jnp.log(less_N), (ids_NK, credit_NK)

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        is_sure_BL = reached(proposal.confidence_BL, self.threshold_B)
        is_sure_BL &= context.is_hole_BL
        return is_sure_BL | _surest(context, proposal), state


@rule
class Dawn(_Decoder):
    """Commits confident holes, holes that depend on an anchor, and holes that do not conflict.

    The minimum confidences of these holes are ``tau_high``, ``tau_induced`` and ``tau_low``. A
    position depends on the positions that it attends to with a weight of at least ``tau_edge``,
    except for sinks. Anchors are given tokens and tokens with confidence >= ``tau_high``. Two
    positions conflict if one depends on the other; of conflicting holes, only the most confident is
    committed (Luo et al. 2026, DAWN, section 4 and algorithm 1). If no hole qualifies, the most
    confident one is committed. The attention is averaged over the heads of the last 4 blocks.
    """

    about = "confident holes, and holes selected by their attention to other positions"
    needs = ("attention:4", "candidates")

    high_B: jax.Array = per_row(THRESHOLD)
    induced_B: jax.Array = _share(
        "induced_threshold",
        0.7,
        "order=dawn: minimum confidence of a committed hole that depends on an anchor, in [0, 1]",
    )
    low_B: jax.Array = _share(
        "apart_threshold",
        0.7,
        "order=dawn: minimum confidence of a committed hole that conflicts with no other, in "
        "[0, 1]",
    )
    edge_B: jax.Array = _share(
        "dependence",
        0.07,
        "order=dawn: minimum attention from a position to another position on which it depends",
    )
    sink_B: jax.Array = _share(
        "sink",
        0.02,
        "order=dawn: positions that receive more than this mean attention are sinks",
    )
    confidence: Measure = static(CONFIDENCE)

    def init(self, num_rows: int, num_positions: int) -> Any:
        return jnp.full((num_rows, num_positions), jnp.inf, jnp.float32)

    def score(self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens) -> Returned:
        sure_N, _ = super().score(state_N, logits_NV, drawn)
        return sure_N, sure_N

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        sure_BL, is_hole_BL = proposal.confidence_BL, context.is_hole_BL
        assert context.attention_BLL is not None
        needs_BLL = self._dependences(context.attention_BLL)
        is_anchor_BL = context.is_token_BL & reached(state, self.high_B)
        is_taken_BL = reached(sure_BL, self.induced_B) & _any_of(needs_BLL, is_anchor_BL)
        is_taken_BL = is_hole_BL & (is_taken_BL | reached(sure_BL, self.high_B))
        conflicts_BLL = needs_BLL | jnp.swapaxes(needs_BLL, 1, 2)
        is_left_BL = is_hole_BL & ~is_taken_BL & reached(sure_BL, self.low_B)
        is_left_BL &= ~_any_of(conflicts_BLL, is_taken_BL)

        def with_next(sets: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            is_taken_BL, is_left_BL = sets
            is_next_BL = most(
                sure_BL, is_left_BL, jnp.ones_like(context.step_B), context.preference_BL, 1.0
            )
            is_left_BL &= ~is_next_BL & ~_any_of(conflicts_BLL, is_next_BL)
            return is_taken_BL | is_next_BL, is_left_BL

        is_taken_BL, _ = jax.lax.while_loop(
            lambda sets: jnp.any(sets[1]), with_next, (is_taken_BL, is_left_BL)
        )
        return is_taken_BL | _surest(context, proposal), state

    def _dependences(self, attention_BLL: jax.Array) -> jax.Array:
        """True where a position (axis 1) depends on another (axis 2)."""
        num_live_B1 = jnp.sum(jnp.any(attention_BLL > 0, axis=2), axis=1)[:, None]
        incoming_BL = jnp.sum(attention_BLL, axis=1) / jnp.maximum(num_live_B1, 1)
        is_sink_BL = exceeds(incoming_BL, self.sink_B[:, None])
        return (
            reaches(attention_BLL, self.edge_B[:, None, None])
            & ~is_sink_BL[:, None]
            & ~jnp.eye(attention_BLL.shape[1], dtype=bool)[None]
        )


def _any_of(pairs_BLL: jax.Array, is_in_BL: jax.Array) -> jax.Array:
    """True at positions (axis 1) that are paired with a position in the set (axis 2)."""
    return jnp.any(pairs_BLL & is_in_BL[:, None], axis=2)


@rule
class SlowFast(_Decoder):
    """Commits holes with confidence >= threshold within a span determined by slow steps.

    A slow step considers all holes after the previous span. The step commits those with confidence
    >= threshold, or else the most confident one, and proposes the last hole with confidence >= tau'
    as the end of the span. Once two consecutive proposals differ by less than sigma, or after K
    slow steps, fast steps commit holes within the span by the same criterion (Wei et al. 2025,
    SlowFast, algorithm 1).
    """

    about = "confident holes within a span that slow steps determine"

    threshold_B: jax.Array = per_row(THRESHOLD)
    reach_B: jax.Array = _share(
        "slow_threshold",
        0.3,
        "order=slow_fast: minimum confidence of the hole at the end of a span, in [0, 1]",
    )
    steps_B: jax.Array = _number(
        "slow_steps",
        6,
        "order=slow_fast: maximum number of slow steps before a span",
        low=1,
    )
    spread_B: jax.Array = _number(
        "slow_spread",
        1.0,
        "order=slow_fast: difference in positions, >= 0, below which two consecutive proposals "
        "fix the end of a span",
        low=0.0,
        high=1e6,
    )
    confidence: Measure = static(CONFIDENCE)

    @classmethod
    def check(cls, row: Any) -> None:
        why = "changes the span of order='slow_fast'"
        require(not row.edits, "edit", True, why, "use order='threshold'")

    def init(self, num_rows: int, num_positions: int) -> Any:
        """int32 ``[B]`` each: the start and the end of the span, the end that the last slow step
        proposed, and the number of slow steps. The end is 0 until slow steps have determined it.
        """
        return tuple(jnp.zeros(num_rows, jnp.int32) for _ in range(4))

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> Returned:
        sure_BL, is_hole_BL = proposal.confidence_BL, context.is_hole_BL
        place_1L = jnp.arange(is_hole_BL.shape[1])[None]
        # A block starts with a slow step at its first hole.
        is_first_B = context.step_B == 0
        begin_B, end_B, seen_B, slow_B = (jnp.where(is_first_B, 0, x_B) for x_B in state)
        begin_B = jnp.where(is_first_B, place_of_largest(is_hole_BL), begin_B)

        # Commit in the span or, while its end is unknown, behind its start.
        begin_B1, end_B1 = begin_B[:, None], end_B[:, None]
        scope_BL = is_hole_BL & (place_1L >= begin_B1) & ((place_1L < end_B1) | (end_B1 == 0))
        scope_BL = jnp.where(jnp.any(scope_BL, axis=1, keepdims=True), scope_BL, is_hole_BL)
        is_chosen_BL = scope_BL & reached(sure_BL, self.threshold_B)
        is_chosen_BL |= most(
            sure_BL, scope_BL, jnp.ones_like(context.step_B), context.preference_BL, 1.0
        )

        # Slow steps propose an end. The deviation of two numbers from their mean is half of their
        # distance.
        is_far_BL = scope_BL & reached(sure_BL, self.reach_B)
        new_B = jnp.max(jnp.where(is_far_BL, place_1L, begin_B1), axis=1) + 1
        is_slow_B = end_B == 0
        slow_B = jnp.where(is_slow_B, slow_B + 1, slow_B)
        is_stable_B = (slow_B > 1) & (jnp.abs(new_B - seen_B) < 2.0 * self.spread_B)
        mean_B = jnp.where(slow_B > 1, (new_B + seen_B) // 2, new_B)
        found_B = jnp.where(is_stable_B, new_B, jnp.where(slow_B >= self.steps_B, mean_B, 0))
        end_B = jnp.where(is_slow_B, found_B, end_B)
        seen_B = jnp.where(is_slow_B, new_B, seen_B)

        # The next span starts behind a span without holes.
        is_left_BL = is_hole_BL & ~is_chosen_BL & (place_1L >= begin_B1)
        is_over_B = (end_B > 0) & ~jnp.any(is_left_BL & (place_1L < end_B[:, None]), axis=1)
        begin_B, end_B = jnp.where(is_over_B, end_B, begin_B), jnp.where(is_over_B, 0, end_B)
        return is_chosen_BL, (begin_B, end_B, seen_B, jnp.where(is_over_B, 0, slow_B))


@rule
class Wino(RemaskRule):
    """Remasks tokens with a probability below ``tau_2`` in the forward pass of this step.

    The rule remasks fewer tokens than the step committed, the least likely first, so the number of
    holes decreases with every step (Hong et al. 2025, WINO, algorithm 1). ``order="threshold"``
    with a lower ``tau_1`` writes the drafts. The paper computes the probability in a second copy of
    the block, in which a position does not attend to itself. This rule instead uses the forward
    pass of the step, in which the network can attend to the token itself.
    """

    about = "remasks tokens that become unlikely in later passes, fewer than the step commits"
    needs = ("logprobs",)
    log_prob = certain

    threshold_B: jax.Array = _share(
        "verify_threshold",
        0.9,
        "remask=wino: minimum probability of a token in later forward passes, in [0, 1]; 0 "
        "disables it",
    )

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return row.verify_threshold > 0

    def is_active(self) -> jax.Array:
        return self.threshold_B > 0

    def select(self, state: Any, context: RemaskContext) -> tuple[jax.Array, Any]:
        is_doubted_BL = context.is_open_BL & ~context.is_fresh_BL
        sure_BL = log_odds(context.logprob_BL)
        is_doubted_BL &= ~reached(sure_BL, self.threshold_B)
        room_B = jnp.maximum(jnp.sum(context.is_fresh_BL, axis=1) - 1, 0)
        preference_BL = context.step.preference_BL
        return most(-sure_BL, is_doubted_BL, room_B, preference_BL, 1.0), state
