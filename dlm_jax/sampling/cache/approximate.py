"""Approximate caches of bidirectional models, after Fast-dLLM: the row is refreshed now and then.

Every position of such a model sees all others, so that what is kept of those outside the window is
that of the canvas as it was when the whole row was computed last.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.cache.protocol import CacheContext, CachePlan, CacheRule
from dlm_jax.settings import Setting, per_row, reads, rule, static

CACHE_REFRESH = Setting(
    "cache_refresh", 0,
    "prefix, dual: steps after which the whole row is computed again; 0: when a block begins alone",
    low=0, activates=False,
)  # fmt: skip
CACHE_MARGIN = Setting(
    "cache_margin", 0,
    "prefix, dual: positions on each side of the block that are computed at every step too",
    low=0, high=2**20, activates=False,
)  # fmt: skip

# Sixteenths of the canvas: a longer list fits suffixes better, and each compiles a trunk.
_SUFFIXES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


class _Approximate(CacheRule):
    refresh_B: jax.Array
    margin: int
    block_length: int
    open_blocks: int

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Refuses models that have an exact cache, and rows without blocks."""
        super().check_model(row, facts)
        if facts.is_causal or facts.block_length:
            raise ValueError(
                f"cache={cls.name!r} is for models whose positions all see one another; use "
                "cache='exact', which is exact for this one"
            )
        if row.block_length == 0:
            raise ValueError(
                f"cache={cls.name!r} computes a block at a step, and block_length=0 is all in one; "
                "use block_length=32, say"
            )

    def width(self, num_positions: int) -> int:
        """Positions of the open blocks with their margins."""
        return min(self.block_length * self.open_blocks + 2 * self.margin, num_positions)

    def _plan(self, context: CacheContext, *, reaches_end: bool) -> CachePlan:
        begin_B = jnp.maximum(context.block.begin_B - self.margin, 0)
        end_B = jnp.minimum(context.block.end_B + self.margin, context.num_positions)
        is_old_B = (self.refresh_B > 0) & (context.age_B >= self.refresh_B)
        is_new_B = (context.age_B == 0) | (context.block_B != context.block.index_B)
        return CachePlan(
            begin_B=begin_B,
            end_B=jnp.full_like(end_B, context.num_positions) if reaches_end else end_B,
            is_due_B=is_new_B | is_old_B,
            settles_B=jnp.zeros_like(is_old_B),
            valid_B=context.valid_B,
        )


@rule
class Dual(_Approximate):
    """Computes the block alone, beside what is kept of all that stands before and behind it.

    The whole row is computed when a block begins, and every ``refresh_B`` steps (Fast-dLLM, Wu et
    al. 2025, section 3.2); with a margin, the positions near the block are computed with it
    (dInfer, Ma et al. 2025, "vicinity refresh").

    Attributes:
      refresh_B: int32 steps between two refreshes; 0: none but when a block begins.
      margin: positions on each side of the block that a step computes with it.
      block_length: positions of a block.
      open_blocks: blocks that may be worked on at once.
    """

    refresh_B: jax.Array = per_row(CACHE_REFRESH)
    margin: int = static(CACHE_MARGIN)
    block_length: int = reads("block_length", 0)
    open_blocks: int = reads("open_blocks", 1)

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        """The block with its margins."""
        return (self.width(num_positions),)

    def plan(self, context: CacheContext) -> CachePlan:
        """The block with its margins."""
        return self._plan(context, reaches_end=False)


@rule
class Prefix(_Approximate):
    """Computes the block and all that stands behind it, beside what is kept of what stands before.

    The whole row is computed when a block begins, and every ``refresh_B`` steps (Fast-dLLM, Wu et
    al. 2025, section 3.2).

    Attributes:
      refresh_B: int32 steps between two refreshes; 0: none but when a block begins.
      margin: positions before the block that a step computes with it.
      block_length: positions of a block.
      open_blocks: blocks that may be worked on at once.
    """

    refresh_B: jax.Array = per_row(CACHE_REFRESH)
    margin: int = static(CACHE_MARGIN)
    block_length: int = reads("block_length", 0)
    open_blocks: int = reads("open_blocks", 1)

    @property
    def sees_behind(self) -> bool:
        """False: what stands behind is computed with the block."""
        return False

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        """The block, and shares of the canvas."""
        width = self.width(num_positions)
        suffixes = {-(-num_positions * share // 16) for share in _SUFFIXES}
        return (width, *sorted(size for size in suffixes if size > width))

    def plan(self, context: CacheContext) -> CachePlan:
        """From the block, or its margin, on."""
        return self._plan(context, reaches_end=True)
