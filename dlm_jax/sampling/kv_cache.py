"""KV caches: a step computes a window of static size at each row's block; attention reads the keys
and values of all other positions from the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.positions import CurrentBlock
from dlm_jax.settings import Rule, Setting, fact, per_row, reads, require, require_values, rule


class CacheState(NamedTuple):
    """The cached keys and values of the rows, in the format of the network.

    Attributes:
      kv_cache: keys and values of the canvas.
      uncond_kv_cache: keys and values of the canvas with its given tokens masked; None without
        guidance.
      valid_B: int32 index; cached positions before it match the current tokens. Only an exact cache
        reads it.
    """

    kv_cache: Any
    uncond_kv_cache: Any
    valid_B: jax.Array


class KVCache(Rule, ABC):
    """Selects the positions that a step computes. Both methods are required.

    A causal network caches its window, whose input is final. Other networks cache only whole rows
    and finished blocks.
    """

    @abstractmethod
    def read(
        self, block: CurrentBlock, first_B: jax.Array, num_positions: int
    ) -> tuple[jax.Array, jax.Array, int]:
        """The first position and the exclusive end of the window of each row, int32 ``[B]``, and
        the static size of the windows. All other positions are read from the cache.

        `first_B` is the first writable position of the block, int32 ``[B]``; its start if none is.
        """

    @abstractmethod
    def refresh(
        self, block: CurrentBlock, begin_B: jax.Array, valid_B: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """True ``[B]`` where the whole row is computed and cached first, and where only the last
        positions before the window are, as many as it has, whose tokens are final; None for never.

        The window of each row begins at `begin_B`, and `valid_B` is that of `CacheState`.
        """


@rule
class Exact(KVCache):
    """Caches keys and values of all positions before the block, and computes only the block.

    In a block-causal model, no earlier position attends to the block, so results equal those
    without a cache, up to rounding in the logits. Each finished block is computed once more with
    its final tokens (SDAR, Cheng et al. 2025, section 3), and a finished canvas once more as text
    (DiffusionGemma, 2026). The whole row is computed once, at the first step, unless the given
    tokens fit in one block. A causal model has blocks of one position and computes nothing twice.
    """

    about = "finished blocks; exact, for causal and block-causal models and models with canvases"

    block_length: int = fact("block_length", 0)
    canvas_length: int = fact("canvas_length", 0)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        is_exact = facts.is_causal or facts.block_length > 1 or facts.canvas_length
        why = "requires model.attention_type='causal', or 'block_causal' with blocks of 2 or more"
        require(bool(is_exact), "cache", "exact", why, "use cache='dual'")
        if facts.is_causal:
            settings: dict[str, tuple[Any, ...]] = {
                "order": ("left_to_right",),
                "schedule": ("linear",),
                "block_length": (0, 1),
                "resample": (False,),
                "remask": ("none",),
            }
            why = "is not supported by cache='exact' with a causal model, which writes the next one"
            require_values(row, settings, why)

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        least = is_open.sum() if facts.is_causal else 0
        why = f"is less than the {least} tokens that cache='exact' writes one by one"
        require(row.steps >= least, "steps", row.steps, why, f"use steps={least} or more")

    def read(
        self, block: CurrentBlock, first_B: jax.Array, num_positions: int
    ) -> tuple[jax.Array, jax.Array, int]:
        """The row's block or, in a causal model, its next token."""
        size = min(self.block_length or self.canvas_length or 1, num_positions)
        if self.canvas_length:
            return block.begin_B, block.end_B, size
        begin_B = first_B
        if self.block_length:  # the block of a row can be part of a block of the model
            begin_B = block.begin_B // self.block_length * self.block_length
        return begin_B, begin_B + size, size

    def refresh(
        self, block: CurrentBlock, begin_B: jax.Array, valid_B: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Whole rows if the cache does not end at the window or at the block before it."""
        size = self.block_length or self.canvas_length
        if not size:
            return valid_B != begin_B, None
        is_finished_B = (valid_B < begin_B) & (valid_B >= begin_B - size)
        return (valid_B != begin_B) & ~is_finished_B, is_finished_B


@rule
class Dual(KVCache):
    """Computes only the block. Keys and values before and after the block are cached.

    The whole row is computed when a block starts and every ``refresh_B`` steps (Fast-dLLM, Wu et
    al. 2025, section 3.2).
    """

    about = "everything outside the block; approximate, for bidirectional models"

    refresh_B: jax.Array = per_row(
        Setting(
            "cache_refresh",
            0,
            "dual: steps between refreshes of the whole row; 0: when a block starts",
            low=0,
            activates=False,
        )
    )
    block_length: int = reads("block_length", 0)

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        is_other = facts.is_causal or facts.block_length or facts.canvas_length
        why = "supports only bidirectional models"
        require(not is_other, "cache", cls.name, why, "use cache='exact', which is exact")
        why = "computes one block per step, but block_length=0 makes the row a single block"
        require(row.block_length > 0, "cache", cls.name, why, "for example, use block_length=32")

    def read(
        self, block: CurrentBlock, first_B: jax.Array, num_positions: int
    ) -> tuple[jax.Array, jax.Array, int]:
        end_B = jnp.minimum(block.end_B, num_positions)
        return block.begin_B, end_B, min(self.block_length, num_positions)

    def refresh(
        self, block: CurrentBlock, begin_B: jax.Array, valid_B: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Whole rows at the first step of a block, and every ``refresh_B`` steps."""
        is_old_B = (self.refresh_B > 0) & (block.step_B % jnp.maximum(self.refresh_B, 1) == 0)
        return (block.step_B == 0) | is_old_B, None


KV_CACHES: Mapping[str, type[KVCache]] = {rule.name: rule for rule in (Exact, Dual)}
"""KV caches, keyed by the value of ``cache``. The value ``none`` selects no cache."""
