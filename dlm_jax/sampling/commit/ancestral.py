"""Ancestral sampling of MDLM and ReMDM, which reverses the noise process used in training.

Step i of S goes from time ``t = 1 - i/S`` to ``s = 1 - (i + 1)/S`` of the noise schedule, in which
``alpha`` is the fraction of visible tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    Proposal,
    WithState,
    log_each,
    uniform,
)
from dlm_jax.settings import Setting, fact, per_row, reads, rule

REMASK_ETA = Setting(
    "remask_eta",
    0.1,
    "remdm: strength, in [0, 1]; for remdm_conf all values above 0 are equivalent",
    low=0.0,
    high=1.0,
)


class NoiseSchedule(Protocol):
    """The noise schedule used in training; hashable."""

    def masked_ratio(self, t: jax.Array, /) -> jax.Array:
        """``1 - alpha(t)`` for t in [0, 1]."""
        ...


def visible_shares(schedule: NoiseSchedule, context: CommitContext) -> tuple[jax.Array, jax.Array]:
    """Fractions of visible tokens at the start and at the end of the step, ``[B]`` each."""
    steps_B = context.steps_B.astype(jnp.float32)
    t_B = 1.0 - context.step_B / steps_B
    s_B = jnp.maximum(1.0 - (context.step_B + 1) / steps_B, 0.0)
    return 1.0 - schedule.masked_ratio(t_B), 1.0 - schedule.masked_ratio(s_B)


SIGMAS = {
    "remdm_cap": lambda eta_B, most_B: jnp.minimum(eta_B, most_B),
    "remdm_rescale": lambda eta_B, most_B: eta_B * most_B,
}
"""Remask probabilities of the rules that use the same probability for all tokens, keyed by rule."""


def sigma_max(alpha_t_B: jax.Array, alpha_s_B: jax.Array) -> jax.Array:
    """``min(1, (1 - alpha_s) / alpha_t)``, the upper bound on the remask probability (ReMDM,
    section 4).
    """
    return jnp.minimum(1.0, (1.0 - alpha_s_B) / jnp.maximum(alpha_t_B, 1e-9))


@rule
class Ancestral(CommitRule):
    """Commits each hole with the probability of the reverse process.

    The probability is ``(alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)``, where sigma is the
    remask probability of ReMDM. Sigma is 0 without ReMDM and for ``remdm_conf``, which has weight 0
    at holes (Sahoo et al. 2024, MDLM, equation 7; Wang et al. 2025, ReMDM, equation 6).
    """

    about = "each hole with its probability in the reverse noise process"

    eta_B: jax.Array = per_row(REMASK_ETA)
    schedule: NoiseSchedule = fact("noise")
    remask: str = reads("remask", "none")

    def eligible(self, state: Any, context: CommitContext) -> jax.Array:
        """The holes that the process unmasks in this step. All other holes need no logits."""
        chance_B = self._chance(context)
        drawn_BL = uniform(context.key_B, context.is_hole_BL.shape[1])
        return context.is_hole_BL & (drawn_BL < chance_B[:, None])

    def _chance(self, context: CommitContext) -> jax.Array:
        alpha_t_B, alpha_s_B = visible_shares(self.schedule, context)
        sigma = SIGMAS.get(self.remask)
        sigma_B = 0.0 if sigma is None else sigma(self.eta_B, sigma_max(alpha_t_B, alpha_s_B))
        hidden_B = jnp.maximum(1.0 - alpha_t_B, 1e-9)
        return (alpha_s_B - (1.0 - sigma_B) * alpha_t_B) / hidden_B

    def select(self, state: Any, context: CommitContext, proposal: Proposal) -> WithState:
        return context.is_hole_BL, state

    def log_prob(
        self, state: Any, context: CommitContext, proposal: Proposal, is_chosen_BL: jax.Array
    ) -> jax.Array:
        chance_B1 = jnp.clip(self._chance(context), 0.0, 1.0)[:, None]
        return log_each(context.is_hole_BL, is_chosen_BL, chance_B1)
