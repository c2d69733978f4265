"""Sampling along the noise process that trained the model: MDLM's ancestral steps, and ReMDM's.

Step i of S goes from time ``t = 1 - i/S`` to ``s = 1 - (i + 1)/S`` of the noise schedule, whose
``alpha`` is the share of tokens visible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit import View
from dlm_jax.sampling.orders import ChosenBefore, uniform
from dlm_jax.sampling.remask import Tokens

Kind = Literal["none", "cap", "rescale", "conf"]


class NoiseSchedule(Protocol):
    """The noise schedule of the model's training; hashable."""

    def masked_ratio(self, t: jax.Array) -> jax.Array:
        """``1 - alpha(t)`` for t in [0, 1]."""
        ...


def _alphas(schedule: NoiseSchedule, view: View) -> tuple[jax.Array, jax.Array]:
    """Shares visible at the beginning and the end of the step, ``[B]`` each."""
    steps_B = view.steps_B.astype(jnp.float32)
    t_B = 1.0 - view.step_B / steps_B
    s_B = jnp.maximum(1.0 - (view.step_B + 1) / steps_B, 0.0)
    return 1.0 - schedule.masked_ratio(t_B), 1.0 - schedule.masked_ratio(s_B)


def _sigma(kind: Kind, eta_B: jax.Array, alpha_t_B: jax.Array, alpha_s_B: jax.Array) -> jax.Array:
    """Probability that a visible token is remasked, without ``conf``'s weights.

    Wang et al. 2025 (ReMDM), section 4: ``sigma_max = min(1, (1 - alpha_s) / alpha_t)``.
    """
    most_B = jnp.minimum(1.0, (1.0 - alpha_s_B) / jnp.maximum(alpha_t_B, 1e-9))
    if kind == "cap":
        return jnp.minimum(eta_B, most_B)
    return eta_B * most_B if kind == "rescale" else jnp.where(eta_B > 0, most_B, 0.0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["eta_B"], meta_fields=["schedule", "kind"]
)
@dataclass(frozen=True)
class Ancestral(ChosenBefore):
    """Commits each hole with the probability of the reverse process.

    ``(alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t)``, where sigma is what ReMDM remasks with, and
    0 without it and for ``conf``, whose weights are 0 at holes (Sahoo et al. 2024, MDLM, equation
    7; Wang et al. 2025, ReMDM, equation 6).

    Attributes:
      eta_B: float32, strength of the remasking, in [0, 1].
      schedule: the model's noise schedule.
      kind: how it remasks.
    """

    eta_B: jax.Array
    schedule: NoiseSchedule
    kind: Kind = "none"

    def eligible(self, view: View) -> jax.Array:
        """The holes that the process unmasks now; only their logits are needed."""
        alpha_t_B, alpha_s_B = _alphas(self.schedule, view)
        has_sigma = self.kind in ("cap", "rescale")
        sigma_B = _sigma(self.kind, self.eta_B, alpha_t_B, alpha_s_B) if has_sigma else 0.0
        hidden_B = jnp.maximum(1.0 - alpha_t_B, 1e-9)
        chance_B = (alpha_s_B - (1.0 - sigma_B) * alpha_t_B) / hidden_B
        drawn_BL = uniform(view.key_B, view.is_hole_BL.shape[1])
        return view.is_hole_BL & (drawn_BL < chance_B[:, None])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["eta_B"], meta_fields=["schedule", "kind"]
)
@dataclass(frozen=True)
class ReMDM:
    """Remasks every token that was visible when the step began with probability sigma.

    ``cap``: ``min(eta, sigma_max)``; ``rescale``: ``eta sigma_max``; ``conf``: ``sigma_max`` times
    a softmax of minus the tokens' probabilities (Wang et al. 2025, section 4.1; the softmax runs
    over the block's unfrozen tokens). With `Ancestral` of the same settings each position is
    visible with probability ``alpha_s`` after the step.

    Attributes:
      eta_B: float32 in [0, 1]; 0 turns the row's remasking off. ``conf`` knows on and off alone.
      schedule: the model's noise schedule.
      kind: cap, rescale or conf.
    """

    eta_B: jax.Array
    schedule: NoiseSchedule
    kind: Kind
    asks_critic = False

    def is_active(self) -> jax.Array:
        """True where eta is not 0."""
        return self.eta_B > 0

    def goes_on(self) -> jax.Array:
        """True where active: a later step may remask although this one did not."""
        return self.is_active()

    def select(self, view: View, tokens: Tokens) -> jax.Array:
        """Each token on its own."""
        sigma_B = _sigma(self.kind, self.eta_B, *_alphas(self.schedule, view))
        is_old_BL = tokens.is_open_BL & ~tokens.is_fresh_BL
        chance_BL = jnp.broadcast_to(sigma_B[:, None], is_old_BL.shape)
        if self.kind == "conf":
            weight_BL = jnp.where(is_old_BL, jnp.exp(-tokens.probability_BL), 0.0)
            total_B1 = jnp.maximum(weight_BL.sum(1, keepdims=True), 1e-9)
            chance_BL = chance_BL * weight_BL / total_B1
        return is_old_BL & (uniform(tokens.key_B, is_old_BL.shape[1]) < chance_BL)
