"""DAWN: commits confident holes that do not conflict according to the attention maps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import Setting, certain, most, most_confident, per_row, rule, static
from dlm_jax.sampling.commit import CommitContext, DrawnTokens, Proposal
from dlm_jax.sampling.rule_tools import (
    CONFIDENCE,
    THRESHOLD,
    THRESHOLD_LEAST,
    Confident,
    Measure,
    exceeds,
    reached,
    reaches,
)


@rule
class Dawn(Confident):
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
    log_prob = certain

    high_B: jax.Array = per_row(THRESHOLD)
    induced_B: jax.Array = per_row(
        Setting(
            "induced_threshold",
            0.7,
            "order=dawn: minimum confidence of a committed hole that depends on an "
            "anchor, in [0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    low_B: jax.Array = per_row(
        Setting(
            "apart_threshold",
            0.7,
            "order=dawn: minimum confidence of a committed hole that conflicts with no other, in "
            "[0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    edge_B: jax.Array = per_row(
        Setting(
            "dependence",
            0.07,
            "order=dawn: minimum attention from a position to another position on which it depends",
            low=0.0,
            high=1.0,
        )
    )
    sink_B: jax.Array = per_row(
        Setting(
            "sink",
            0.02,
            "order=dawn: positions that receive more than this mean attention are sinks",
            low=0.0,
            high=1.0,
        )
    )
    least_B: jax.Array = per_row(THRESHOLD_LEAST)
    confidence: Measure = static(CONFIDENCE)

    def init(self, num_rows: int, num_positions: int) -> Any:
        return jnp.full((num_rows, num_positions), jnp.inf, jnp.float32)

    def score(
        self, state_N: Any, logits_NV: jax.Array, drawn: DrawnTokens
    ) -> tuple[jax.Array, Any]:
        sure_N, _ = super().score(state_N, logits_NV, drawn)
        return sure_N, sure_N

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
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
                sure_BL, is_left_BL, jnp.ones_like(self.least_B), context.preference_BL, 1.0
            )
            is_left_BL &= ~is_next_BL & ~_any_of(conflicts_BLL, is_next_BL)
            return is_taken_BL | is_next_BL, is_left_BL

        is_taken_BL, _ = jax.lax.while_loop(
            lambda sets: jnp.any(sets[1]), with_next, (is_taken_BL, is_left_BL)
        )
        return is_taken_BL | most_confident(context, proposal, self.least_B), state

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
