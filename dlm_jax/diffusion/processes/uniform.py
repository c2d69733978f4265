"""Uniform diffusion: noise is any token, so every token may change until the end of sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.processes.forward_process import Process, Shares
from dlm_jax.settings import rule


@rule
class Uniform(Process):
    """Each position shows a uniform noise id with a probability equal to the level.

    Schiff et al. 2024, UDLM, section 4; the network is not conditioned on the level, as in GIDD.
    """

    about = "a uniformly random token"

    def shares(self, level: jax.Array, /) -> Shares:
        return Shares(1.0 - level, jnp.zeros_like(level), level)
