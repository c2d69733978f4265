"""ReMDM: ancestral sampling that turns tokens into holes again (Wang et al. 2025)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax import RemaskRule, Setting, fact, per_row, rule
from dlm_jax.sampling import NoiseSchedule, log_each, visible_shares
from dlm_jax.sampling.commit import Ancestral, CommitContext, uniform
from dlm_jax.sampling.remask import RemaskContext
from dlm_jax.settings import reads, require

__all__ = ["AncestralRemdm", "RemdmCap", "RemdmConf"]

ETA = Setting("remask_eta", 0.1, "remdm: strength; remdm_conf: 0 is off", 0.0, 1.0)


def sigma_max(alpha_t_B: jax.Array, alpha_s_B: jax.Array) -> jax.Array:
    """``min(1, (1 - alpha_s) / alpha_t)``, the bound on the remask probability (section 4)."""
    return jnp.minimum(1.0, (1.0 - alpha_s_B) / jnp.maximum(alpha_t_B, 1e-9))


@rule
class AncestralRemdm(Ancestral):
    """`Ancestral` for a remask rule of this module: each position is visible with probability
    ``alpha_s`` after the step.

    A hole is unmasked with probability ``(alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)``, where
    sigma is the remask probability; for ``remdm_conf``, which has weight 0 at holes, it is 0
    (equation 6).
    """

    about = "ancestral, for the remask rules of ReMDM"

    eta_B: jax.Array = per_row(ETA)
    remask: str = reads("remask", "none")

    def chance(self, context: CommitContext) -> jax.Array:
        alpha_t_B, alpha_s_B = visible_shares(self.schedule, context)
        sigma_B: Any = 0.0
        if self.remask == "remdm_cap":
            sigma_B = jnp.minimum(self.eta_B, sigma_max(alpha_t_B, alpha_s_B))
        hidden_B = jnp.maximum(1.0 - alpha_t_B, 1e-9)
        return (alpha_s_B - (1.0 - sigma_B) * alpha_t_B) / hidden_B


@rule
class RemdmCap(RemaskRule):
    """Remasks every token that was visible at the start of the step with probability ``min(eta,
    sigma_max)`` (section 4.1).
    """

    about = "remasks each token with the probability of the noise process"
    needs = ("steps",)

    eta_B: jax.Array = per_row(ETA)
    schedule: NoiseSchedule = fact("noise")

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return row.remask_eta > 0

    @classmethod
    def check(cls, row: Any) -> None:
        why, remedy = f"does not know remask={cls.name!r}", "use order='ancestral_remdm'"
        require(row.order != "ancestral", "order", row.order, why, remedy)

    def is_active(self) -> jax.Array:
        return self.eta_B > 0

    def chance(
        self, most_B: jax.Array, is_old_BL: jax.Array, probability_BL: jax.Array
    ) -> jax.Array:
        """The probability that each token is remasked; `most_B` is sigma_max."""
        return jnp.broadcast_to(jnp.minimum(self.eta_B, most_B)[:, None], is_old_BL.shape)

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
class RemdmConf(RemdmCap):
    """`RemdmCap` with probability ``sigma_max`` times a softmax of the negative token
    probabilities over the unfrozen tokens of the block. ``eta`` only enables the rule.
    """

    about = "like remdm_cap, with higher probability for unlikely tokens"

    # The probabilities depend on the parameters through earlier steps, so there is no trace.
    log_prob = RemaskRule.log_prob

    def chance(
        self, most_B: jax.Array, is_old_BL: jax.Array, probability_BL: jax.Array
    ) -> jax.Array:
        sigma_B1 = jnp.where(self.eta_B > 0, most_B, 0.0)[:, None]
        weight_BL = jnp.where(is_old_BL, jnp.exp(-probability_BL), 0.0)
        return sigma_B1 * weight_BL / jnp.maximum(weight_BL.sum(1, keepdims=True), 1e-9)
