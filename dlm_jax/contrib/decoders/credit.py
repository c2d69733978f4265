"""CreditDecoding: raises the confidence of predictions that persist over several steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, per_row, rule
from dlm_jax.sampling import vocab
from dlm_jax.sampling.commit import (
    CommitContext,
    DrawnTokens,
    Proposal,
    certain,
    most_confident,
)
from dlm_jax.sampling.rule_tools import (
    THRESHOLD,
    THRESHOLD_LEAST,
    Confident,
    maximum,
    place_of_largest,
    reached,
)

KEPT = 4
"""Number K of ids per position whose credit is stored. A new id replaces the one with the least
credit. The memory consists of the ids and their credits, ``[..., K]`` each; an id of -1 marks an
empty entry."""


@rule
class Credit(Confident):
    """Commits holes with confidence >= threshold under ``softmax(x + alpha ln(1 + C))``.

    If no hole reaches the threshold, the most confident one is committed. The confidence of a hole
    is its largest probability in this softmax. In each step, the most likely id v gains credit: ``C
    <- beta C + [v] p(v)^gamma`` (Wang et al. 2025, CreditDecoding, section 4). Credit is stored for
    4 ids per position. Candidates are drawn without credit.
    """

    about = "holes above the threshold, with a bonus for persistent predictions"
    confidence = staticmethod(maximum)
    log_prob = certain

    threshold_B: jax.Array = per_row(THRESHOLD)
    weight_B: jax.Array = per_row(
        Setting(
            "credit_weight",
            0.7,
            "order=credit: weight of the credit added to the logits, >= 0; 0 disables it",
            low=0.0,
            high=1e3,
        )
    )
    decay_B: jax.Array = per_row(
        Setting(
            "credit_decay",
            0.8,
            "order=credit: share of the credit that is kept at each step, in [0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    power_B: jax.Array = per_row(
        Setting(
            "credit_power",
            0.2,
            "order=credit: exponent of the credited probability, >= 0",
            low=0.0,
            high=1e3,
        )
    )
    least_B: jax.Array = per_row(THRESHOLD_LEAST)

    def init(self, num_rows: int, num_positions: int) -> Any:
        shape = (num_rows, num_positions, KEPT)
        return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        ids_NK, credit_NK = state_N
        logits_NV = logits_NV.astype(jnp.float32)
        logprob_NV = jax.nn.log_softmax(logits_NV)
        best_id_N1 = vocab.argmax(logprob_NV, vocab.TOLERANCE)[:, None]
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

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        is_sure_BL = reached(proposal.confidence_BL, self.threshold_B)
        is_sure_BL &= context.is_hole_BL
        return is_sure_BL | most_confident(context, proposal, self.least_B), state
