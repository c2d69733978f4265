"""Cache rules, which select the positions that a step computes and those read from a cache.

A step computes a window of static size at each row's block. The keys and values of all other
positions are cached. An exact rule never uses stale entries; an approximate rule refreshes stale
entries periodically.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.blocks import CurrentBlock
from dlm_jax.settings import Rule, SettingError


class CacheState(NamedTuple):
    """Cached keys and values of the rows, and their age.

    Attributes:
      kept: keys and values of the canvas, in the format of the network.
      bare: keys and values of the canvas with its given tokens masked; None without guidance.
      valid_B: int32 index; cached positions before it match the current tokens.
      age_B: int32, number of steps since the whole row was last computed, including that step; 0 if
        it has not been computed.
      block_B: int32, index of the block in which the whole row was last computed.
    """

    kept: Any
    bare: Any
    valid_B: jax.Array
    age_B: jax.Array
    block_B: jax.Array


class CacheContext(NamedTuple):
    """The rows at the start of a step, as passed to `CacheRule.plan`.

    Attributes:
      block: the current block of each row.
      first_B: int32, first writable position of the block; the start of the block if none is
          writable.
      valid_B: see `CacheState`.
      age_B: see `CacheState`.
      block_B: see `CacheState`.
      num_positions: ``L``; static.
    """

    block: CurrentBlock
    first_B: jax.Array
    valid_B: jax.Array
    age_B: jax.Array
    block_B: jax.Array
    num_positions: int


class CachePlan(NamedTuple):
    """The positions of each row that a step computes.

    Attributes:
      begin_B: int32, first position of the window.
      end_B: int32, exclusive end of the window; at most `begin_B` plus the largest of
        `CacheRule.sizes`, or equal to the end of the canvas.
      is_due_B: True where the whole row is computed and cached instead of a window.
      settles_B: True where the last ``sizes()[0]`` positions before `begin_B`, whose tokens are
        final, are computed first and cached.
      valid_B: int32, `CacheState.valid_B` after the step.
    """

    begin_B: jax.Array
    end_B: jax.Array
    is_due_B: jax.Array
    settles_B: jax.Array
    valid_B: jax.Array


class CacheRule(Rule):
    """Selects the positions that a step computes. `plan` and `sizes` are required."""

    required: ClassVar[tuple[str, ...]] = ("plan", "sizes")

    @property
    def keeps(self) -> bool:
        """True if the keys and values of a step's window are cached; static."""
        return False

    @property
    def settles(self) -> bool:
        """True if a plan can finalise positions before a window; static."""
        return False

    @property
    def sees_behind(self) -> bool:
        """True if a window attends to cached positions after it; static."""
        return True

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """Always True, because the setting ``cache`` selects the rule."""
        return True

    @classmethod
    def check(cls, row: Any) -> None:
        """Raises if edits are enabled, because edits move tokens to other positions."""
        if row.edits:
            raise SettingError(
                "edit",
                True,
                f"moves tokens, which cache={cls.name!r} does not support",
                "use cache='none'",
            )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises for a network without `Network.cached`."""
        if not facts.has_cache:
            raise SettingError(
                "cache",
                cls.name,
                "requires a network that supports a cache (Network.cached)",
                "use cache='none'",
            )

    @classmethod
    def check_trace(cls, row: Any) -> None:
        """Raises unless the cache is exact."""
        raise SettingError(
            "cache",
            cls.name,
            "has no trace, because a replay computes exact values",
            "use cache='none'",
        )

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        """Static window sizes in ascending order, at most `num_positions` each.

        With a single size, a step computes all rows together. With several sizes, each row is
        computed in the smallest size that fits its window, together with the other rows of that
        size. The first size covers the block, and the step reads only the hidden vectors there.
        """
        raise NotImplementedError

    def prefix(self, first: int) -> int:
        """Length of the longest prefix before `first`, the first open position, whose cached values
        depend only on tokens in the prefix; 0 if there is none.

        A row whose prefix is already cached can start with this length as `CacheState.valid_B`.
        """
        return 0

    def plan(self, context: CacheContext) -> CachePlan:
        """The positions of each row that the next step computes."""
        raise NotImplementedError


def start_cache(num_rows: int) -> CacheState:
    """The state before the first step. `dlm_jax.sampling.forward` allocates the keys and values."""
    zeros_B = jnp.zeros(num_rows, jnp.int32)
    return CacheState((), (), zeros_B, zeros_B, zeros_B)
