"""ReMDM: tokens are remasked along the noise process that trained the model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.ancestral import (
    REMASK_ETA,
    NoiseSchedule,
    remask_probability,
    visible_shares,
)
from dlm_jax.sampling.commit.protocol import uniform
from dlm_jax.sampling.remask.protocol import RemaskContext, RemaskRule
from dlm_jax.settings import fact, per_row, rule


class ReMDM(RemaskRule):
    """Remasks every token that was visible when the step began with probability sigma.

    `RemdmCap`: ``min(eta, sigma_max)``; `RemdmRescale`: ``eta sigma_max``; `RemdmConf`:
    ``sigma_max`` times a softmax of minus the tokens' probabilities (Wang et al. 2025, section 4.1;
    the softmax runs over the block's unfrozen tokens). With `Ancestral` of the same settings each
    position is visible with probability ``alpha_s`` after the step.

    Attributes:
      eta_B: float32 in [0, 1]; 0 turns the row's remasking off. `RemdmConf` knows on and off alone.
      schedule: the model's noise schedule.
    """

    eta_B: jax.Array
    schedule: NoiseSchedule

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """Whether eta is not 0."""
        return row.remask_eta > 0

    def is_active(self) -> jax.Array:
        """True where eta is not 0."""
        return self.eta_B > 0

    def goes_on(self) -> jax.Array:
        """True where active: a later step may remask although this one did not."""
        return self.is_active()

    def select(self, context: RemaskContext) -> jax.Array:
        """Each token on its own."""
        shares = visible_shares(self.schedule, context.step)
        sigma_B = remask_probability(self.name, self.eta_B, *shares)
        is_old_BL = context.is_open_BL & ~context.is_fresh_BL
        chance_BL = jnp.broadcast_to(sigma_B[:, None], is_old_BL.shape)
        if self.name == "remdm_conf":
            weight_BL = jnp.where(is_old_BL, jnp.exp(-context.probability_BL), 0.0)
            total_B1 = jnp.maximum(weight_BL.sum(1, keepdims=True), 1e-9)
            chance_BL = chance_BL * weight_BL / total_B1
        return is_old_BL & (uniform(context.key_B, is_old_BL.shape[1]) < chance_BL)


@rule
class RemdmCap(ReMDM):
    """`ReMDM` with ``min(eta, sigma_max)``."""

    eta_B: jax.Array = per_row(REMASK_ETA)
    schedule: NoiseSchedule = fact("noise")


@rule
class RemdmRescale(ReMDM):
    """`ReMDM` with ``eta sigma_max``."""

    eta_B: jax.Array = per_row(REMASK_ETA)
    schedule: NoiseSchedule = fact("noise")


@rule
class RemdmConf(ReMDM):
    """`ReMDM` that prefers tokens of low probability."""

    eta_B: jax.Array = per_row(REMASK_ETA)
    schedule: NoiseSchedule = fact("noise")
