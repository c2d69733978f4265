"""Approximate, periodically refreshed caches for bidirectional models, as in Fast-dLLM.

In a bidirectional model, every position attends to all others. Cached values outside the window are
those of the last refresh of the whole row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dlm_jax.sampling.cache.cache_policy import CacheContext, CachePlan, CacheRule
from dlm_jax.settings import Setting, SettingError, per_row, reads, rule

# Window sizes in sixteenths of the canvas. A longer list fits suffixes better, but a trunk is
# compiled for each entry.
_SUFFIXES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


@rule
class Dual(CacheRule):
    """Computes only the block. Keys and values before and after the block are cached.

    The whole row is computed when a block starts and every ``refresh_B`` steps (Fast-dLLM, Wu et
    al. 2025, section 3.2).
    """

    about = "everything outside the block; approximate, for bidirectional models"
    reaches_end: ClassVar[bool] = False

    refresh_B: jax.Array = per_row(
        Setting(
            "cache_refresh",
            0,
            "prefix, dual: number of steps between refreshes of the whole row; 0 refreshes only "
            "when a block starts",
            low=0,
            activates=False,
        )
    )
    block_length: int = reads("block_length", 0)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        if facts.is_causal or facts.block_length or facts.canvas_length:
            raise SettingError(
                "cache",
                cls.name,
                "supports only bidirectional models",
                "use cache='exact', which is exact for this model",
            )
        if row.block_length == 0:
            raise SettingError(
                "cache",
                cls.name,
                "computes one block per step, but block_length=0 makes the row a single block",
                "for example, use block_length=32",
            )

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        return (min(self.block_length, num_positions),)

    def plan(self, context: CacheContext) -> CachePlan:
        """A window of the block, or of the block and all later positions."""
        end_B = jnp.minimum(context.block.end_B, context.num_positions)
        is_old_B = (self.refresh_B > 0) & (context.age_B >= self.refresh_B)
        is_new_B = (context.age_B == 0) | (context.block_B != context.block.index_B)
        return CachePlan(
            begin_B=context.block.begin_B,
            end_B=jnp.full_like(end_B, context.num_positions) if self.reaches_end else end_B,
            is_due_B=is_new_B | is_old_B,
            settles_B=jnp.zeros_like(is_old_B),
            valid_B=context.valid_B,
        )


@rule
class Prefix(Dual):
    """Computes the block and all later positions. Keys and values before the block are cached.

    The whole row is computed at the same steps as with `Dual`.
    """

    about = "everything before the block; approximate, for bidirectional models"
    reaches_end = True

    @property
    def sees_behind(self) -> bool:
        return False

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        (width,) = super().sizes(num_positions)
        suffixes = {-(-num_positions * share // 16) for share in _SUFFIXES}
        return (width, *sorted(size for size in suffixes if size > width))
