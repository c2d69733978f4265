"""Clean logits of gathered positions, with classifier-free guidance where a row asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.types import Network, Params


class TrunkOutput(NamedTuple):
    """What the trunk returned in a step.

    Attributes:
      hidden_BLD: for the canvas, or for a window of each row, ``[B, W, D]``.
      bare_BLD: for the canvas with its given tokens masked; None in a program without guidance.
      scale_B: float32 guidance of each row; None likewise.
      at_BL: int32, where the hidden vector of each position of the canvas stands in its row's
        window; it means nothing outside of it. None: the windows are the whole rows.
    """

    hidden_BLD: jax.Array
    bare_BLD: jax.Array | None = None
    scale_B: jax.Array | None = None
    at_BL: jax.Array | None = None

    @property
    def num_vectors(self) -> int:
        """Positions that have a hidden vector: those of all windows."""
        return self.hidden_BLD.shape[0] * self.hidden_BLD.shape[1]

    def logits(self, network: Network, params: Params, places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of the LM head at places ``row * L + index``."""
        return self.read(lambda hidden_ND: network.readout(params, hidden_ND), places_N)

    def read(self, head: Callable[[jax.Array], jax.Array], places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of a head, which maps hidden vectors ``[N, D]`` to logits.

        ``u + (s + 1) (c - u)`` where the row's scale s is not 0, with c from the canvas and u from
        the one without what was given (Nie et al. 2025, LLaDA, appendix; after Ho and Salimans
        2022); ids that either calls impossible stay so. Where s is 0 the plain logits, bit for bit.
        """
        num_positions, width = self.hidden_BLD.shape[1:]
        row_N = places_N // num_positions
        if self.at_BL is not None:
            row_N = places_N // self.at_BL.shape[1]
            places_N = row_N * num_positions + self.at_BL.reshape(-1)[places_N]
        plain_NV = head(self.hidden_BLD.reshape(-1, width)[places_N])
        if self.bare_BLD is None or self.scale_B is None:
            return plain_NV
        bare_BLD, scale_N = self.bare_BLD, self.scale_B[row_N]

        def guided(plain_NV: jax.Array) -> jax.Array:
            bare_NV = head(bare_BLD.reshape(-1, width)[places_N])
            led_NV = bare_NV + (scale_N + 1.0)[:, None] * (plain_NV - bare_NV)
            is_possible_NV = jnp.isfinite(plain_NV) & jnp.isfinite(bare_NV)
            led_NV = jnp.where(is_possible_NV, led_NV, plain_NV + bare_NV)
            return jnp.where(scale_N[:, None] == 0, plain_NV, led_NV)

        return jax.lax.cond(jnp.any(scale_N != 0), guided, lambda x: x, plain_NV)
