"""WINO: later forward passes verify drafts, and rejected drafts become holes again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import RemaskRule, Setting, certain, most, per_row, rule
from dlm_jax.sampling.remask import RemaskContext
from dlm_jax.sampling.rule_tools import log_odds, reached


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

    threshold_B: jax.Array = per_row(
        Setting(
            "verify_threshold",
            0.9,
            "remask=wino: minimum probability of a token in later forward passes, in [0, 1]; 0 "
            "disables it",
            low=0.0,
            high=1.0,
        )
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
