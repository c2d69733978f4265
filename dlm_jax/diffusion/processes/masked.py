"""Masked diffusion, whose only noise is MASK."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.processes.forward_process import Process, Shares
from dlm_jax.settings import rule


@rule
class Masked(Process):
    """Replaces each free token with MASK; the probability equals the level (Sahoo et al. 2024,
    MDLM).

    The bound is the weighted cross-entropy of `dlm_jax.diffusion.objectives.elbo`.
    """

    about = "MASK"
    is_masked = True

    def shares(self, level: jax.Array, /) -> Shares:
        return Shares(1.0 - level, level, jnp.zeros_like(level))
