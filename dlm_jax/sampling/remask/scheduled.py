"""Refinement: remasks the tokens that are most likely wrong, fewer at each step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import certain, exceeds, most, uniform
from dlm_jax.sampling.remask.remask_rule import RemaskContext, RemaskRule
from dlm_jax.settings import Setting, SettingError, per_row, require_head, rule, static


@rule
class Scheduled(RemaskRule):
    """Remasks the tokens that are most likely wrong, fewer at each step.

    Before step i of N (i >= 1), the fraction ``r = start - (start - end) i / (N - 1)`` of the
    block's unfrozen positions is remasked. Tokens are ranked by their score ``(1 - m) w + m u``,
    called wrongness, with randomness m and a uniform random number u. Here w is the output of the
    critic, or 1 minus the probability that the token had when it was drawn.
    """

    about = "remasks the share of tokens with the highest wrongness"
    log_prob = certain

    start_B: jax.Array = per_row(
        Setting(
            "remask_start",
            0.95,
            "scheduled: initial share of remasked tokens, in [0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    end_B: jax.Array = per_row(
        Setting(
            "remask_end",
            0.05,
            "scheduled: share of tokens remasked before the last step, in [0, 1]",
            low=0.0,
            high=1.0,
        )
    )
    randomness_B: jax.Array = per_row(
        Setting(
            "remask_randomness",
            0.0,
            "scheduled: weight of randomness relative to wrongness, in [0, 1]; 1 selects tokens at "
            "random",
            low=0.0,
            high=1.0,
        )
    )
    needs: tuple[str, ...] = static(
        Setting(
            "remask_by",
            "confidence",
            "scheduled: measure of wrongness: the probability of the token when it was drawn "
            "(confidence), or the critic head on the filled text (critic), which "
            "costs a forward pass",
            choices={"confidence": (), "critic": ("head:critic",)},
        )
    )

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return max(row.remask_start, row.remask_end) > 0

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if row.remask_by == "critic":
            require_head("critic", facts, "remask_by", "critic", "use remask_by='confidence'")

    @classmethod
    def check_trace(cls, row: Any) -> None:
        super().check_trace(row)
        if row.remask_randomness > 0:
            raise SettingError(
                "remask_randomness",
                row.remask_randomness,
                "has no trace: the probability of its choice has no closed form",
                "use remask_randomness=0",
            )

    def is_active(self) -> jax.Array:
        return (self.start_B > 0) | (self.end_B > 0)

    def select(self, state: Any, context: RemaskContext) -> tuple[jax.Array, Any]:
        step = context.step
        share_B = (step.step_B + 1).astype(jnp.float32) / jnp.maximum(step.steps_B - 1, 1)
        ratio_B = self.start_B - (self.start_B - self.end_B) * jnp.minimum(share_B, 1.0)
        mix_B1 = self.randomness_B[:, None]
        chance_BL = uniform(context.key_B, context.is_open_BL.shape[1])
        if context.wrong_BL is None:
            wrong_BL, right_BL = -jnp.expm1(context.logprob_BL), context.probability_BL
            right_BL = (1.0 - mix_B1) * right_BL + mix_B1 * (1.0 - chance_BL)
        else:
            # The difference of 1 and the output of the critic is not accurate near 0.
            wrong_BL, right_BL = context.wrong_BL, jnp.ones_like(chance_BL)
        wrong_BL = (1.0 - mix_B1) * wrong_BL + mix_B1 * chance_BL
        is_worst_BL = self.worst(wrong_BL, right_BL, ratio_B, context)
        return is_worst_BL & self.is_active()[:, None], state

    def worst(
        self, wrong_BL: jax.Array, right_BL: jax.Array, ratio_B: jax.Array, context: RemaskContext
    ) -> jax.Array:
        """True at the open tokens with the highest wrongness, compared by ``ln(wrong / right)``;
        `ratio_B` determines their number.
        """
        count_B = jnp.floor(ratio_B * context.num_free_B + 1e-3).astype(jnp.int32)
        score_BL = jnp.log(wrong_BL) - jnp.log(right_BL)
        return most(score_BL, context.is_open_BL, count_B, context.step.preference_BL, 1.0)


@rule
class ScheduledThreshold(Scheduled):
    """Remasks the tokens with wrongness above ``1 - r``; r and wrongness are as in `Scheduled`.

    A block without such tokens is finished.
    """

    about = "remasks all tokens whose wrongness is above a threshold"

    def worst(
        self, wrong_BL: jax.Array, right_BL: jax.Array, ratio_B: jax.Array, context: RemaskContext
    ) -> jax.Array:
        """True where wrongness is above the threshold."""
        return exceeds(wrong_BL, 1.0 - ratio_B[:, None], 1.0)
