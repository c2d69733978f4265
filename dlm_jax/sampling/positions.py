"""The loop over chunks of gathered positions, the clean logits at these positions, and blocks.

A *place* is the flat index ``row * L + index`` of a position in a ``[B, L]`` canvas. *Blocks* are
windows of a row that are decoded in order (semi-autoregressive decoding). A row's steps are divided
among the blocks that have work, with the remainder in the first blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.devices import platform
from dlm_jax.types import Network, Params, left_of, returned

T = TypeVar("T")
_Pair = tuple[jax.Array, jax.Array]
NEVER = 2**30
"""A distance that is larger than any canvas."""


def chunk_size(vocab_size: int) -> int:
    """Number of positions per readout, whose logits fit into the cache of a CPU or saturate an
    accelerator.
    """
    if platform() == "cpu":
        return max(64, 2**18 // vocab_size)
    return max(256, 2**24 // vocab_size)


def wave_chunk(vocab_size: int) -> int:
    """Number of positions per call to the sampler head; small on CPU, where the unused places of a
    short wave are expensive.
    """
    return max(16, min(128, 2**20 // vocab_size)) if platform() == "cpu" else 1024


def group_size(num_rows: int, num_positions: int) -> int:
    """Number of rows per group for forward passes over this many positions per row."""
    many = 256 if platform() == "cpu" else 8192
    return max(1, min(many // num_positions, num_rows))


def fold(
    is_wanted_BL: jax.Array,
    chunk: int,
    body: Callable[[T, jax.Array, jax.Array], T],
    carry: T,
    *,
    level_BL: jax.Array | None = None,
) -> T:
    """The final carry of ``carry = body(carry, places_N, is_real_N)`` over the requested positions.

    Positions are processed in order, `chunk` at a time, so the cost is proportional to their
    number. The padding of a chunk is not real. With levels, positions are processed level by level:
    positions of higher levels in a chunk are not real, and are processed in a later chunk.
    """
    size = is_wanted_BL.size
    chunk, count = min(chunk, size), jnp.sum(is_wanted_BL)
    if level_BL is None:
        (flat_P,) = jnp.nonzero(is_wanted_BL.reshape(-1), size=size, fill_value=0)
        flat_P = jnp.pad(flat_P, (0, -size % chunk)).astype(jnp.int32)
    else:
        level_P = jnp.where(is_wanted_BL, level_BL, jnp.iinfo(level_BL.dtype).max).reshape(-1)
        flat_P = jnp.pad(jnp.argsort(level_P, stable=True).astype(jnp.int32), (0, chunk))

    def one_chunk(state: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        first, carry = state
        places_N = jax.lax.dynamic_slice(flat_P, (first,), (chunk,))
        is_real_N, taken = first + jnp.arange(chunk) < count, chunk
        if level_BL is not None:
            level_N = level_BL.reshape(-1)[places_N]
            is_real_N &= level_N == level_N[0]
            taken = jnp.sum(is_real_N)
        return first + taken, body(carry, places_N, is_real_N)

    start = (jnp.zeros((), count.dtype), carry)
    with jax.named_scope("chunks"):
        return jax.lax.while_loop(lambda state: state[0] < count, one_chunk, start)[1]


def put(old: Any, places_N: jax.Array, is_real_N: jax.Array, new: Any) -> Any:
    """Writes values ``[N, ...]`` into arrays ``[B, L, ...]`` at the real places."""

    def into(old_BL: jax.Array, new_N: jax.Array) -> jax.Array:
        size = old_BL.shape[0] * old_BL.shape[1]
        flat_P = old_BL.reshape(size, *old_BL.shape[2:])
        target_N = jnp.where(is_real_N, places_N, size)
        return flat_P.at[target_N].set(new_N, mode="drop").reshape(old_BL.shape)

    return jax.tree.map(into, old, new)


def belongs_to_positions(leaf: jax.Array, num_positions: int) -> bool:
    """Whether a leaf of a rule's state has an axis of positions; see `dlm_jax.sampling.state`."""
    return leaf.ndim > 1 and leaf.shape[1] == num_positions


def at_places(x_BL: jax.Array, places_N: jax.Array) -> jax.Array:
    """The values at the places, ``[N, ...]``."""
    return x_BL.reshape(x_BL.shape[0] * x_BL.shape[1], *x_BL.shape[2:])[places_N]


def gather_state(state: Any, places_N: jax.Array, num_positions: int) -> Any:
    """A rule's state of N positions or of their rows, ``[N, ...]``, at ``row * L + index``."""

    def gather(leaf: jax.Array) -> jax.Array:
        if belongs_to_positions(leaf, num_positions):
            return at_places(leaf, places_N)
        return leaf[places_N // num_positions]

    return jax.tree.map(gather, state)


def distance(
    is_walked_BL: jax.Array, is_source_BL: jax.Array, is_one_sided_B: jax.Array | bool = False
) -> jax.Array:
    """Distance of each position to the nearest source, through positions in `is_walked_BL` only;
    `NEVER` if no source is reachable.

    In one-sided rows, the source on the left is used if there is one.
    """

    def from_left(is_walked_BL: jax.Array, is_source_BL: jax.Array) -> jax.Array:
        place_BL = jnp.broadcast_to(jnp.arange(is_walked_BL.shape[1]), is_walked_BL.shape)
        wall_BL = jax.lax.cummax(jnp.where(is_walked_BL, -1, place_BL), axis=1)
        is_source_BL = jnp.take_along_axis(is_source_BL, jnp.maximum(wall_BL, 0), axis=1)
        return jnp.where(is_source_BL & (wall_BL >= 0), place_BL - wall_BL, NEVER)

    left_BL = from_left(is_walked_BL, is_source_BL)
    right_BL = from_left(is_walked_BL[:, ::-1], is_source_BL[:, ::-1])[:, ::-1]
    is_from_left_BL = jnp.reshape(is_one_sided_B, (-1, 1)) & (left_BL < NEVER)
    return jnp.where(is_from_left_BL, left_BL, jnp.minimum(left_BL, right_BL))


def place_of_largest(x: jax.Array, axis: int = -1) -> jax.Array:
    """`jnp.argmax` of floats or booleans along an axis, as int32, without a new function on each
    use, whose traces JAX caches (jax 0.10.1), so that memory grows with every compiled program.
    """
    axis %= x.ndim
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    lowest = np.array(False if x.dtype == bool else -np.inf, x.dtype)
    return jax.lax.reduce((x, place), (lowest, np.int32(0)), _larger, (axis,))[1]


def _larger(one: _Pair, other: _Pair) -> _Pair:
    """The pair with the larger value, or with the lower index on ties. NaN is the largest."""
    (x, place), (other_x, other_place) = one, other
    is_larger = (x > other_x) | (x != x)
    is_first = is_larger | ((x == other_x) & (place < other_place))
    return jax.lax.select(is_larger, x, other_x), jax.lax.select(is_first, place, other_place)


class TrunkOutput(NamedTuple):
    """The output of the trunk in a step."""

    hidden_BLD: jax.Array  # of the canvas, or [B, W, D] of one window per row
    uncond_BLD: jax.Array | None = None  # with guidance: of the canvas with its given tokens masked
    scale_B: jax.Array | None = None  # with guidance: float32 scale of each row
    at_BL: jax.Array | None = None  # int32 index of each position in its window; None: whole rows
    attention_BLL: jax.Array | None = None  # see `CommitContext`

    def logits(self, network: Network, params: Params, places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of the LM head at places ``row * L + index``."""
        return self.read(lambda hidden_ND: logits(network, params, hidden_ND), places_N)

    def read(self, head: Callable[[jax.Array], jax.Array], places_N: jax.Array) -> jax.Array:
        """Clean logits ``[N, V]`` of a head, which maps hidden vectors ``[N, D]`` to logits.

        The logits of guided rows (scale s other than 0) are ``u + (s + 1) (c - u)``, where c is
        computed from the canvas and u from the canvas with its given tokens masked (Nie et al.
        2025, LLaDA, appendix; after Ho and Salimans 2022). Ids that are impossible under c or u
        remain impossible.
        """
        num_positions = self.hidden_BLD.shape[1]
        row_N = places_N // num_positions
        if self.at_BL is not None:
            row_N = places_N // self.at_BL.shape[1]
            places_N = row_N * num_positions + self.at_BL.reshape(-1)[places_N]
        plain_NV = head(at_places(self.hidden_BLD, places_N))
        if self.uncond_BLD is None or self.scale_B is None:
            return plain_NV
        uncond_BLD, scale_N = self.uncond_BLD, self.scale_B[row_N]

        def guided(plain_NV: jax.Array) -> jax.Array:
            uncond_NV = head(at_places(uncond_BLD, places_N))
            led_NV = uncond_NV + (scale_N + 1.0)[:, None] * (plain_NV - uncond_NV)
            is_possible_NV = jnp.isfinite(plain_NV) & jnp.isfinite(uncond_NV)
            led_NV = jnp.where(is_possible_NV, led_NV, plain_NV + uncond_NV)
            return jnp.where(scale_N[:, None] == 0, plain_NV, led_NV)

        return jax.lax.cond(jnp.any(scale_N != 0), guided, lambda x: x, plain_NV)


def hidden(
    network: Network, params: Params, tokens_BL: jax.Array, length_B: jax.Array
) -> jax.Array:
    """Hidden vectors ``[B, L, D]`` of a canvas."""
    hidden_BLD = network.trunk(params, tokens_BL, length_B, None)[0]
    return returned(hidden_BLD, network, "trunk", "B, L, D", (*tokens_BL.shape, None), float)


def logits(network: Network, params: Params, hidden_ND: jax.Array) -> jax.Array:
    """Logits ``[N, V]`` of the LM head, float32."""
    shape = (hidden_ND.shape[0], network.vocab_size)
    logits_NV = network.readout(params, hidden_ND)
    return returned(logits_NV, network, "readout", "N, V", shape, jnp.float32)


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
