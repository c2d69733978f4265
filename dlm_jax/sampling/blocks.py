"""Blocks: windows of a row that are finished one after the other (semi-autoregressive decoding).

Blocks start at the first unfrozen position; a row's steps are split over the blocks that
have work, the remainder on the first ones, and steps that a block does not use are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Block(NamedTuple):
    """The block that each row works on, ``[B]`` int32 each.

    Attributes:
      begin_B: its first position.
      end_B: one behind its last; may lie beyond the row's length.
      step_B: steps taken in it.
      steps_B: steps it may take, at least 1.
      first_holes_B: holes it had when it began.
      index_B: blocks with work before it.
      count_B: blocks of the row that had work at the start.
    """

    begin_B: jax.Array
    end_B: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    first_holes_B: jax.Array
    index_B: jax.Array
    count_B: jax.Array

    def holds(self, num_positions: int) -> jax.Array:
        """True at its positions, ``[B, L]``."""
        place_1L = jnp.arange(num_positions)[None]
        return (place_1L >= self.begin_B[:, None]) & (place_1L < self.end_B[:, None])

    @property
    def is_last_step_B(self) -> jax.Array:
        """True where its next step is its last."""
        return self.step_B + 1 >= self.steps_B


def first_block(
    is_work_BL: jax.Array,
    is_hole_BL: jax.Array,
    first_B: jax.Array,
    length_B: jax.Array,
    steps_B: jax.Array,
) -> tuple[Block, jax.Array]:
    """The first block that has work, and ``[B]``, True where there is one.

    Args:
      is_work_BL: True where a block has something to do.
      is_hole_BL: True at holes.
      first_B: int32, the first unfrozen position, where blocks begin.
      length_B: int32, positions of a block; 0 is all in one.
      steps_B: int32, steps of the row.
    """
    zeros_B = jnp.zeros_like(steps_B)
    count_B = _num_busy(is_work_BL, first_B, _size(length_B, is_work_BL))
    before = Block(
        begin_B=first_B.astype(jnp.int32),
        end_B=first_B.astype(jnp.int32),
        step_B=zeros_B,
        steps_B=jnp.ones_like(steps_B),
        first_holes_B=zeros_B,
        index_B=zeros_B - 1,
        count_B=count_B,
    )
    return next_block(before, is_work_BL, is_hole_BL, length_B, steps_B)


def next_block(
    block: Block,
    is_work_BL: jax.Array,
    is_hole_BL: jax.Array,
    length_B: jax.Array,
    steps_B: jax.Array,
) -> tuple[Block, jax.Array]:
    """The next block that has work, and where there is one; the same block where there is none."""
    size_B = _size(length_B, is_work_BL)
    num_positions = is_work_BL.shape[1]
    is_later_BL = is_work_BL & (jnp.arange(num_positions)[None] >= block.end_B[:, None])
    is_any_B = jnp.any(is_later_BL, axis=1)
    place_B = jnp.argmax(is_later_BL, axis=1)
    begin_B = block.end_B + (place_B - block.end_B) // size_B * size_B
    index_B = block.index_B + 1
    count_B = jnp.maximum(block.count_B, 1)
    following = block._replace(
        begin_B=begin_B,
        end_B=begin_B + size_B,
        step_B=jnp.zeros_like(block.step_B),
        steps_B=jnp.maximum(steps_B // count_B + (index_B < steps_B % count_B), 1),
        index_B=index_B,
    )
    holes_B = jnp.sum(is_hole_BL & following.holds(num_positions), axis=1)
    following = following._replace(first_holes_B=holes_B)
    return choose(is_any_B, following, block), is_any_B


def choose(is_first_B: jax.Array, first: Block, other: Block) -> Block:
    """Each row's block out of the two."""
    return Block(*(jnp.where(is_first_B, a, b) for a, b in zip(first, other, strict=True)))


def _size(length_B: jax.Array, is_work_BL: jax.Array) -> jax.Array:
    num_positions = is_work_BL.shape[1]
    return jnp.where(length_B > 0, jnp.minimum(length_B, num_positions), num_positions)


def _num_busy(is_work_BL: jax.Array, first_B: jax.Array, size_B: jax.Array) -> jax.Array:
    """Blocks that have work: each is counted at its first position with work."""
    place_1L = jnp.arange(is_work_BL.shape[1])[None]
    number_BL = (place_1L - first_B[:, None]) // size_B[:, None]
    at_work_BL = jnp.where(is_work_BL, number_BL, -1)
    upto_BL = jax.lax.cummax(at_work_BL, axis=1)
    before_BL = jnp.pad(upto_BL[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jnp.sum(is_work_BL & (number_BL > before_BL), axis=1).astype(jnp.int32)
