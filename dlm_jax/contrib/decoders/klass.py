"""KLASS: commits confident holes whose predictions have been stable for several steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most_confident, per_row, rule
from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit import CommitContext, DrawnTokens, Proposal
from dlm_jax.sampling.rule_tools import (
    THRESHOLD,
    THRESHOLD_LEAST,
    Confident,
    exceeds,
    log_odds_of,
    maximum,
    reaches,
)

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
class Klass(Confident):
    """Commits the holes with ``max p > tau`` and ``KL(p_t, p_{t-1}) < epsilon`` for n steps.

    If no hole meets both conditions, the most confident one is committed (Kim et al. 2025, KLASS,
    algorithm 1 and equation 5). The divergence is computed over the 32 most likely ids of the
    previous step and one event for all other ids. The result is exact for vocabularies of at most
    32 ids, and a lower bound for larger ones.
    """

    about = "confident holes with stable predictions"
    confidence = staticmethod(maximum)
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    divergence_B: jax.Array = per_row(
        Setting(
            "klass_divergence",
            0.01,
            "order=klass: upper bound (exclusive) on the change of a stable prediction per step, "
            "in nats, >= 0",
            low=0.0,
            high=1e6,
        )
    )
    steps_B: jax.Array = per_row(
        Setting(
            "klass_steps",
            2,
            "order=klass: number of consecutive steps for which a prediction must be stable",
            low=0,
        )
    )
    least_B: jax.Array = per_row(THRESHOLD_LEAST)

    def init(self, num_rows: int, num_positions: int) -> Any:
        shape = (num_rows, num_positions, LEADING)
        ids, steps = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape[:2], jnp.int32)
        return LastPrediction(ids, jnp.full(shape, -jnp.inf, jnp.float32), steps)

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
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

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        is_ready_BL = context.is_hole_BL & (state.steps >= self.steps_B[:, None])
        is_ready_BL &= exceeds(proposal.confidence_BL, log_odds_of(self.threshold_B)[:, None], 1.0)
        surest_BL = most_confident(context, proposal, self.least_B)
        return jnp.where(jnp.any(is_ready_BL, axis=1, keepdims=True), is_ready_BL, surest_BL), state


def _divergence(now_NK: jax.Array, before_NK: jax.Array) -> jax.Array:
    """KL divergence in nats over the given ids and one event for all other ids."""

    def term(now: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(now > -jnp.inf, jnp.exp(now) * (now - before), 0.0)

    rest_N, rest_before_N = (
        jnp.log(jnp.maximum(1.0 - jnp.exp(x).sum(axis=1), _LEAST)) for x in (now_NK, before_NK)
    )
    return term(now_NK, before_NK).sum(axis=1) + term(rest_N, rest_before_N)
