"""Mixed noise, with both MASK and uniform tokens at intermediate levels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.processes.forward_process import Process, Shares
from dlm_jax.settings import ABOVE_ZERO, BELOW_ONE, Setting, rule, static


@rule
class Mixed(Process):
    """A mixture of MASK and uniform noise. The probability of uniform noise is 0 at levels 0 and 1,
    and ``uniform_share`` at level 1/2.

    At level ``v``, the probabilities are ``alpha = (1 - v) / C``, ``mask = v / C`` and ``text = B
    sqrt(v (1 - v)) / C``, where ``C = 1 + B sqrt(v (1 - v))``, ``B = 2 p / (1 - p)`` and ``p`` is
    ``uniform_share`` (von Rutte et al. 2025, GIDD, section 4.1 with gamma = 1).
    """

    about = "MASK at the end and uniformly random tokens in between"

    uniform_share: float = static(Setting(
        "uniform_share", 0.1, "mixed: share of uniform noise at level 1/2, in (0, 1)",
        low=ABOVE_ZERO, high=BELOW_ONE,
    ))  # fmt: skip

    def shares(self, level: jax.Array, /) -> Shares:
        most = 2.0 * self.uniform_share / (1.0 - self.uniform_share)
        product = level * (1.0 - level)
        # The slope of a square root is infinite at the ends.
        is_inside = product > 0
        root = jnp.where(is_inside, jnp.sqrt(jnp.where(is_inside, product, 1.0)), 0.0)
        total = 1.0 + most * root
        return Shares((1.0 - level) / total, level / total, most * root / total)
