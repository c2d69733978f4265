"""DUS: commits distant positions first, then the positions between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import CommitRule, Setting, certain, per_row, rule
from dlm_jax.sampling.commit import CommitContext, Proposal

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

    base_B: jax.Array = per_row(
        Setting(
            "dilated_base",
            2,
            "order=dilated: factor by which each round divides the distance between positions",
            low=2,
            high=2**15,
        )
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

    def select(
        self, state: Any, context: CommitContext, proposal: Proposal
    ) -> tuple[jax.Array, Any]:
        return context.is_hole_BL, state
