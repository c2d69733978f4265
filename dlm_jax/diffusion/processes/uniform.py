"""Uniform diffusion, whose noise is any token, so every token can change during sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.processes.forward_process import Process, Shares
from dlm_jax.settings import rule


@rule
class Uniform(Process):
    """Replaces each free token with a uniform noise id; the probability equals the level.

    See Schiff et al. 2024 (UDLM), section 4. As in GIDD, the network is not conditioned on the
    level.
    """

    about = "a uniformly random token"

    def shares(self, level: jax.Array, /) -> Shares:
        return Shares(1.0 - level, jnp.zeros_like(level), level)
