"""The exact cache for causal and block-causal models.

A finished block is computed once more, and is then read from the cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.cache.cache_policy import CacheContext, CachePlan, CacheRule
from dlm_jax.settings import SettingError, fact, require_values, rule

_NEEDS = {
    "order": ("left_to_right",),
    "schedule": ("linear",),
    "block_length": (0, 1),
    "resample": (False,),
    "remask": ("none",),
}
"""Settings for a causal model."""


@rule
class Exact(CacheRule):
    """Caches keys and values of all positions before the block, and computes only the block.

    In a block-causal model, no earlier position attends to the block, so the cached values equal
    those of a full forward pass. Results equal those without a cache, up to rounding in the logits.
    Each finished block is computed once more with its final tokens (SDAR, Cheng et al. 2025,
    section 3). The whole row is computed once, at the first step, unless the given tokens fit in
    one block.

    A causal model has blocks of one position. The model predicts each token from the token before
    it, so the forward pass that predicts a token also computes the cached values of its input, and
    nothing is computed twice.

    A canvas attends to the tokens before it, which are read causally and cached. A finished canvas
    is computed once more as text (DiffusionGemma, 2026).
    """

    about = "finished blocks; exact, for causal and block-causal models and models with canvases"

    block_length: int = fact("block_length", 0)
    canvas_length: int = fact("canvas_length", 0)

    @classmethod
    def check_trace(cls, row: Any) -> None:
        """Accepts traces, because a replay without a cache computes the same values."""

    @property
    def keeps(self) -> bool:
        return not self.settles

    @property
    def settles(self) -> bool:
        return self.block_length > 0 or self.canvas_length > 0

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        if not (facts.is_causal or facts.block_length or facts.canvas_length):
            raise SettingError(
                "cache",
                "exact",
                "requires model.attention_type='causal' or 'block_causal', where no position "
                "attends to later ones",
                "use cache='prefix' or 'dual'",
            )
        if facts.is_causal:
            require_values(
                row,
                _NEEDS,
                "can write positions other than the next one, but cache='exact' with a causal "
                "model writes only the next one",
            )

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        if facts.is_causal and row.steps < is_open.sum():
            raise SettingError(
                "steps",
                row.steps,
                f"is less than the {is_open.sum()} tokens to write; cache='exact' with a causal "
                f"model writes one per step",
                f"use steps={is_open.sum()} or more",
            )

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        unit = self.block_length or self.canvas_length or 1
        return (min(unit, num_positions),)

    def prefix(self, first: int) -> int:
        """Number of positions in whole blocks of the model; `first` for a causal model."""
        return first // max(1, self.block_length) * max(1, self.block_length)

    def plan(self, context: CacheContext) -> CachePlan:
        """A window of the row's block or, for a causal model, of its next token."""
        (size,) = self.sizes(context.num_positions)
        begin_B, end_B = context.first_B, None
        if self.canvas_length:
            begin_B, end_B = context.block.begin_B, context.block.end_B
        elif self.block_length:  # the block of a row can be part of a block of the model
            begin_B = context.block.begin_B // self.block_length * self.block_length
        settles_B = jnp.zeros_like(begin_B, bool)
        if self.settles:
            settles_B = (context.valid_B < begin_B) & (context.valid_B >= begin_B - size)
        return CachePlan(
            begin_B=begin_B,
            end_B=begin_B + size if end_B is None else end_B,
            is_due_B=(context.valid_B != begin_B) & ~settles_B,
            settles_B=settles_B,
            valid_B=begin_B if self.settles else begin_B + 1,
        )
