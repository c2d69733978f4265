"""ReMDM: remasks tokens according to the noise process used in training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.ancestral import (
    REMASK_ETA,
    SIGMAS,
    NoiseSchedule,
    sigma_max,
    visible_shares,
)
from dlm_jax.sampling.commit.commit_rule import log_each, uniform
from dlm_jax.sampling.remask.remask_rule import RemaskContext, RemaskRule
from dlm_jax.settings import SettingError, fact, per_row, rule


@rule
class RemdmCap(RemaskRule):
    """Remasks every token that was visible at the start of the step with probability ``min(eta,
    sigma_max)``.

    See Wang et al. 2025, section 4.1. If the commit rule is `Ancestral` with the same settings,
    each position is visible with probability ``alpha_s`` after the step.
    """

    about = "remasks each token with the probability of the noise process"
    needs = ("steps",)

    eta_B: jax.Array = per_row(REMASK_ETA)
    schedule: NoiseSchedule = fact("noise")

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return row.remask_eta > 0

    def is_active(self) -> jax.Array:
        return self.eta_B > 0

    def chance(
        self, most_B: jax.Array, is_old_BL: jax.Array, probability_BL: jax.Array
    ) -> jax.Array:
        """The probability that each token is remasked; `most_B` is sigma_max."""
        return jnp.broadcast_to(SIGMAS[self.name](self.eta_B, most_B)[:, None], is_old_BL.shape)

    def select(self, state: Any, context: RemaskContext) -> tuple[jax.Array, Any]:
        is_old_BL, chance_BL = self._chances(context)
        return is_old_BL & (uniform(context.key_B, is_old_BL.shape[1]) < chance_BL), state

    def log_prob(self, state: Any, context: RemaskContext, is_chosen_BL: jax.Array) -> jax.Array:
        is_old_BL, chance_BL = self._chances(context)
        return log_each(is_old_BL, is_chosen_BL, jnp.clip(chance_BL, 0.0, 1.0))

    def _chances(self, context: RemaskContext) -> tuple[jax.Array, jax.Array]:
        """The tokens that can be remasked, and the probability of each."""
        most_B = sigma_max(*visible_shares(self.schedule, context.step))
        is_old_BL = context.is_open_BL & ~context.is_fresh_BL
        return is_old_BL, self.chance(most_B, is_old_BL, context.probability_BL)


@rule
class RemdmRescale(RemdmCap):
    """`RemdmCap` with probability ``eta sigma_max``."""

    about = "like remdm_cap, but with remask_eta times the maximum probability"


@rule
class RemdmConf(RemdmCap):
    """`RemdmCap` with probability ``sigma_max`` times a softmax of the negative token
    probabilities.

    The softmax is taken over the unfrozen tokens of the block. ``eta`` only enables the rule.
    """

    about = "like remdm_cap, with higher probability for unlikely tokens"

    @classmethod
    def check_trace(cls, row: Any) -> None:
        raise SettingError(
            "remask",
            cls.name,
            "has no trace: its probabilities depend on the parameters through tokens of earlier "
            "steps",
            "use remask='remdm_cap'",
        )

    def chance(
        self, most_B: jax.Array, is_old_BL: jax.Array, probability_BL: jax.Array
    ) -> jax.Array:
        """The probabilities sum to `most_B` per row and are lower for more likely tokens."""
        sigma_B1 = jnp.where(self.eta_B > 0, most_B, 0.0)[:, None]
        weight_BL = jnp.where(is_old_BL, jnp.exp(-probability_BL), 0.0)
        return sigma_B1 * weight_BL / jnp.maximum(weight_BL.sum(1, keepdims=True), 1e-9)
