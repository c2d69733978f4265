"""Blocks: windows of a row that are decoded in order (semi-autoregressive decoding).

A row's steps are divided among the blocks that have work, with the remainder in the first blocks.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.positions import place_of_largest
from dlm_jax.types import left_of

T = TypeVar("T")


class CurrentBlock(NamedTuple):
    """The current block of each row; all fields are int32 ``[B]``."""

    begin_B: jax.Array
    end_B: jax.Array  # exclusive; can exceed the length of the row
    step_B: jax.Array  # number of steps taken in the block
    steps_B: jax.Array  # step budget of the block, at least 1
    first_holes_B: jax.Array  # number of holes at the start of the block
    index_B: jax.Array  # number of earlier blocks with work
    count_B: jax.Array  # number of blocks of the row that had work at the start
    settled_B: jax.Array  # number of consecutive steps that started without a hole in the block

    def holds(self, num_positions: int) -> jax.Array:
        """True at the positions of the block, ``[B, L]``."""
        place_1L = jnp.arange(num_positions)[None]
        return (place_1L >= self.begin_B[:, None]) & (place_1L < self.end_B[:, None])

    @property
    def is_last_step_B(self) -> jax.Array:
        """True where the next step of the block is its last."""
        return self.step_B + 1 >= self.steps_B


def first_block(
    is_work_BL: jax.Array,
    is_hole_BL: jax.Array,
    first_B: jax.Array,
    length_B: jax.Array,
    steps_B: jax.Array,
) -> tuple[CurrentBlock, jax.Array]:
    """Returns the first block with work, and True ``[B]`` for rows that have such a block.

    Each block has `length_B` positions. The first block starts at `first_B`, the first unfrozen
    position. A length of 0 gives a single block.
    """
    zeros_B, size_B = jnp.zeros_like(steps_B), _size(length_B, is_work_BL)
    first_B = first_B.astype(jnp.int32)
    # Each block with work is counted at its first position with work.
    number_BL = (jnp.arange(is_work_BL.shape[1])[None] - first_B[:, None]) // size_B[:, None]
    upto_BL = jax.lax.cummax(jnp.where(is_work_BL, number_BL, -1), axis=1)
    is_first_BL = is_work_BL & (number_BL > left_of(upto_BL, -1))
    before = CurrentBlock(
        begin_B=first_B,
        end_B=first_B,
        step_B=zeros_B,
        steps_B=jnp.ones_like(steps_B),
        first_holes_B=zeros_B,
        index_B=zeros_B - 1,
        count_B=jnp.sum(is_first_BL, axis=1).astype(jnp.int32),
        settled_B=zeros_B,
    )
    return next_block(before, is_work_BL, is_hole_BL, length_B, steps_B)


def next_block(
    block: CurrentBlock,
    is_work_BL: jax.Array,
    is_hole_BL: jax.Array,
    length_B: jax.Array,
    steps_B: jax.Array,
) -> tuple[CurrentBlock, jax.Array]:
    """Returns the next block with work, or `block` if there is none, and True ``[B]`` for rows that
    have such a block.
    """
    size_B, num_positions = _size(length_B, is_work_BL), is_work_BL.shape[1]
    is_later_BL = is_work_BL & (jnp.arange(num_positions)[None] >= block.end_B[:, None])
    is_any_B, place_B = jnp.any(is_later_BL, axis=1), place_of_largest(is_later_BL)
    begin_B = block.end_B + (place_B - block.end_B) // size_B * size_B
    index_B, count_B = block.index_B + 1, jnp.maximum(block.count_B, 1)
    following = block._replace(
        begin_B=begin_B,
        end_B=begin_B + size_B,
        step_B=jnp.zeros_like(block.step_B),
        steps_B=jnp.maximum(steps_B // count_B + (index_B < steps_B % count_B), 1),
        index_B=index_B,
        settled_B=jnp.zeros_like(block.settled_B),
    )
    holes_B = jnp.sum(is_hole_BL & following.holds(num_positions), axis=1)
    following = following._replace(first_holes_B=holes_B)
    return choose(is_any_B, following, block), is_any_B


def steps_needed(holes: np.ndarray, block_length: int, begin: int) -> int:
    """The smallest number of steps that gives every block at least one step per hole, given the
    positions of the holes.
    """
    if not block_length:
        return holes.size
    _, counts = np.unique((holes - begin) // block_length, return_counts=True)
    return int(counts.max()) * counts.size


def choose(is_first_B: jax.Array, first: T, other: T) -> T:
    """Selects one of two pytrees of arrays ``[B, ...]``, such as blocks, for each row."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return x if x is y else jnp.where(is_first_B.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(one, first, other)


def _size(length_B: jax.Array, is_work_BL: jax.Array) -> jax.Array:
    num_positions = is_work_BL.shape[1]
    return jnp.where(length_B > 0, jnp.minimum(length_B, num_positions), num_positions)
