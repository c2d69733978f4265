"""ReMDM: tokens are remasked along the noise process that trained the model."""

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
from dlm_jax.sampling.commit.commit_rule import uniform
from dlm_jax.sampling.remask.remask_rule import RemaskContext, RemaskRule
from dlm_jax.settings import fact, per_row, rule


@rule
class RemdmCap(RemaskRule):
    """Remasks every token that was visible when the step began with ``min(eta, sigma_max)``.

    Wang et al. 2025, section 4.1. With `Ancestral` of the same settings each position is visible
    with probability ``alpha_s`` after the step.
    """

    about = "a chance for each token, as the noise process allows"

    eta_B: jax.Array = per_row(REMASK_ETA)
    schedule: NoiseSchedule = fact("noise")

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return row.remask_eta > 0

    def goes_on(self) -> jax.Array:
        return self.is_active()

    def is_active(self) -> jax.Array:
        return self.eta_B > 0

    def chance(
        self, most_B: jax.Array, is_old_BL: jax.Array, probability_BL: jax.Array
    ) -> jax.Array:
        """How likely each token is remasked, where `most_B` is sigma_max."""
        return jnp.broadcast_to(SIGMAS[self.name](self.eta_B, most_B)[:, None], is_old_BL.shape)

    def select(self, context: RemaskContext) -> jax.Array:
        most_B = sigma_max(*visible_shares(self.schedule, context.step))
        is_old_BL = context.is_open_BL & ~context.is_fresh_BL
        chance_BL = self.chance(most_B, is_old_BL, context.probability_BL)
        return is_old_BL & (uniform(context.key_B, is_old_BL.shape[1]) < chance_BL)


@rule
class RemdmRescale(RemdmCap):
    """`RemdmCap` with ``eta sigma_max``."""

    about = "that chance times remask_eta"


@rule
class RemdmConf(RemdmCap):
    """`RemdmCap` with ``sigma_max`` times a softmax of minus the tokens' probabilities.

    The softmax runs over the block's unfrozen tokens; eta is on or off alone.
    """

    about = "that chance, more for tokens of low probability"

    def chance(
        self, most_B: jax.Array, is_old_BL: jax.Array, probability_BL: jax.Array
    ) -> jax.Array:
        """In all as much as `most_B`, less for the likelier tokens."""
        sigma_B1 = jnp.where(self.eta_B > 0, most_B, 0.0)[:, None]
        weight_BL = jnp.where(is_old_BL, jnp.exp(-probability_BL), 0.0)
        return sigma_B1 * weight_BL / jnp.maximum(weight_BL.sum(1, keepdims=True), 1e-9)
