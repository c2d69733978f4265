"""Cache rules: the positions of a row that a step computes, with cached keys and values.

A step computes a window of each row, of a static size, at the block of each row; keys and values of
other positions are cached. The rule decides which may be stale: an exact rule has no stale entries,
an approximate one refreshes them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.blocks import Block
from dlm_jax.settings import Rule, SettingError


class CacheState(NamedTuple):
    """Cached keys and values of the rows, and their age.

    Attributes:
      kept: keys and values of the canvas, in the format of the network.
      bare: those of the canvas with its given tokens masked; None in a program without guidance.
      valid_B: int32, cached positions before it match the current tokens.
      age_B: int32, steps since the whole row was computed, inclusive; 0: never.
      block_B: int32, index of the block of that step.
    """

    kept: Any
    bare: Any
    valid_B: jax.Array
    age_B: jax.Array
    block_B: jax.Array


class CacheContext(NamedTuple):
    """The rows at the start of a step, for a rule.

    Attributes:
      block: the block that each row works on.
      first_B: int32, its first position that the step may write; its begin where there is none.
      valid_B: see `CacheState`.
      age_B: likewise.
      block_B: likewise.
      num_positions: ``L``; static.
    """

    block: Block
    first_B: jax.Array
    valid_B: jax.Array
    age_B: jax.Array
    block_B: jax.Array
    num_positions: int


class CachePlan(NamedTuple):
    """The positions that a step computes of each row.

    Attributes:
      begin_B: int32, first position of the window.
      end_B: int32, one behind its last; at most the widest of `CacheRule.sizes` from `begin_B`, or
        the end of the canvas.
      is_due_B: True where the whole row is computed and cached instead.
      settles_B: True where the positions of the first size before `begin_B` are computed first and
        cached: their tokens are final.
      valid_B: int32, `CacheState.valid_B` after the step.
    """

    begin_B: jax.Array
    end_B: jax.Array
    is_due_B: jax.Array
    settles_B: jax.Array
    valid_B: jax.Array


class CacheRule(Rule):
    """Chooses the positions that a step computes; `plan` and `sizes` are required."""

    required: ClassVar[tuple[str, ...]] = ("plan", "sizes")

    @property
    def keeps(self) -> bool:
        """Whether the keys and values of a step's window are cached; static."""
        return False

    @property
    def settles(self) -> bool:
        """Whether a plan ever finalises positions before a window; static."""
        return False

    @property
    def sees_behind(self) -> bool:
        """Whether a window sees cached positions after it; static."""
        return True

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """True: a cache is activated by its name."""
        return True

    @classmethod
    def check(cls, row: Any) -> None:
        """Raises for edits, which move cached positions."""
        if row.edits:
            raise SettingError(
                "edit",
                True,
                f"moves tokens, and cache={cls.name!r} keeps what they were computed as",
                "use cache='none'",
            )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises for a network without the trunk in pieces."""
        if not facts.has_cache:
            raise SettingError(
                "cache",
                cls.name,
                "needs a network that offers its trunk in pieces "
                "(Network.cached), which this one does not",
                "use cache='none'",
            )

    @classmethod
    def check_trace(cls, row: Any) -> None:
        """Raises for a cache that is not known to be exact."""
        raise SettingError(
            "cache", cls.name, "has no trace: a replay computes what it approximates",
            "use cache='none'",
        )  # fmt: skip

    @classmethod
    def check_canvas(cls, row: Any, facts: Any, is_open: np.ndarray) -> None:
        """Raises ValueError for a canvas that the cache cannot run on; True at open positions."""

    def sizes(self, num_positions: int) -> tuple[int, ...]:
        """Static sizes of the windows, ascending, at most `num_positions`.

        With one size a step runs all rows together; with several each row runs in the smallest that
        holds its window, beside rows of the same size. The first window is the block; the step
        reads its hidden vectors.
        """
        raise NotImplementedError

    def plan(self, context: CacheContext) -> CachePlan:
        """The positions of each row that the next step computes."""
        raise NotImplementedError


def start_cache(num_rows: int) -> CacheState:
    """The state before a first step; `dlm_jax.sampling.forward` allocates keys and values."""
    zeros_B = jnp.zeros(num_rows, jnp.int32)
    return CacheState((), (), zeros_B, zeros_B, zeros_B)
