"""A single position map for all insertions and deletions of a step.

For each new position, the map gives the old position, and every per-position array is gathered
through the map. The map is the array of indices after the shifts `delete_at` and `insert_at`, one
edit at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dlm_jax.types import left_of, live_positions


def insert_at(
    x: jax.Array, gap: ArrayLike, fill: ArrayLike, *, end: ArrayLike | None = None
) -> jax.Array:
    """The array with `fill` inserted into one gap of each row and the suffix moved right by one.

    The result has the shape and dtype of `x`, so the value at ``end - 1`` is dropped. A row whose
    gap is negative, or at or beyond its end, is unchanged. The array operations are a ``roll`` and
    two ``where``, without indices, so the function can be jitted, vmapped and run in loops.

    Args:
      x: ``[..., L]``, any dtype; the leading axes are rows.
      gap: int ``[...]``, the position that `fill` gets: the gap between positions g and g + 1 is
        ``g + 1``, and 0 is the gap before the row.
      fill: the inserted value, ``[...]``.
      end: int ``[...]``, the first position that does not move; None means ``L``. Use the row's
        length + 1 to let the row grow.

    Source: variable-length refinement, ``right_shift_``, which writes `fill` at its ``start``.
    """
    return _shift(x, gap, fill, end, 1)


def delete_at(
    x: jax.Array, position: ArrayLike, fill: ArrayLike, *, end: ArrayLike | None = None
) -> jax.Array:
    """The array with one position of each row deleted and the suffix moved left by one.

    The result has the shape and dtype of `x`; the value at ``end - 1`` is `fill`. A row whose
    position is negative, or at or beyond its end, is unchanged. The array operations are those of
    `insert_at`.

    Args:
      x: ``[..., L]``, any dtype; the leading axes are rows.
      position: int ``[...]``, the deleted position.
      fill: the value at ``end - 1``, ``[...]``.
      end: int ``[...]``, the first position that does not move, usually the row's length; None
        means ``L``.

    Source: variable-length refinement, ``left_shift_``.
    """
    return _shift(x, position, fill, end, -1)


def _shift(
    x: jax.Array, at: ArrayLike, fill: ArrayLike, end: ArrayLike | None, by: int
) -> jax.Array:
    """The array with the values from `at` to `end` shifted by 1 or -1."""
    index = jnp.arange(x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,))
    at, end, fill = (
        value.reshape((1,) * (x.ndim - 1 - value.ndim) + (*value.shape, 1))
        for value in map(jnp.asarray, (at, x.shape[-1] if end is None else end, fill))
    )
    edge = at if by > 0 else end - 1
    shifted = jnp.where(index == edge, fill.astype(x.dtype), jnp.roll(x, by, axis=-1))
    return jnp.where((at >= 0) & (index >= at) & (index < end), shifted, x)


class Edits(NamedTuple):
    """The edits of a step, in terms of the old positions.

    Attributes:
      insert_gap_BL: True at g + 1 to insert a token between g and g + 1, and at 0 to insert one
        before the row; live positions only.
      delete_BL: True at tokens to delete; live and unfrozen positions only.
      token: int32 ids of the inserted tokens: one for all, or ``[B, L]`` by gap.
      refused_B: int32, number of insertions rejected for lack of capacity.
      forwards_B: int32, number of forward passes that the choice took.
    """

    insert_gap_BL: jax.Array
    delete_BL: jax.Array
    token: Any
    refused_B: Any = 0
    forwards_B: Any = 0


class PositionMap(NamedTuple):
    """The map between old and new positions.

    Attributes:
      source_BL: int32, old position for each new position; for an insertion, the old position of
        the token after it. Values are non-decreasing over live positions and undefined beyond the
        new length.
      is_new_BL: True at the insertions of this step.
      mark_BL: True at insertions, and at tokens that moved to a deleted position.
      length_B: int32, new lengths.
      trimmed_B: int32, number of tokens dropped for lack of capacity.
    """

    source_BL: jax.Array
    is_new_BL: jax.Array
    mark_BL: jax.Array
    length_B: jax.Array
    trimmed_B: jax.Array


def position_map_of(
    edits: Edits, frozen_BL: jax.Array, length_B: jax.Array, capacity_B: jax.Array
) -> PositionMap:
    """The map for the edits of a step. The result equals that of applying all insertions by
    `insert_at` and then all deletions by `delete_at`, one by one.

    An insertion and a deletion at the same position replace its token. If the result exceeds the
    capacity, the rightmost unfrozen tokens, including new ones, are dropped. Frozen tokens are
    never dropped. A deletion marks the token that then occupies the deleted position (the inserted
    token, if any). Dropped tokens are not marked.

    `capacity_B` is at least the row's length and at most ``L``.
    """
    num_positions = frozen_BL.shape[1]
    is_put_BL = edits.insert_gap_BL
    is_kept_BL = live_positions(length_B, num_positions) & ~edits.delete_BL
    is_moved_in_BL = is_kept_BL & ~is_put_BL & left_of(edits.delete_BL)
    num_left_B = jnp.sum(is_kept_BL, axis=1) + jnp.sum(is_put_BL, axis=1)
    excess_B1 = jnp.maximum(num_left_B - capacity_B, 0)[:, None]
    is_loose_BL = is_kept_BL & ~frozen_BL
    loose_BL = is_loose_BL.astype(jnp.int32)
    behind_BL = jax.lax.cumsum(loose_BL + is_put_BL, axis=1, reverse=True) - loose_BL - is_put_BL
    is_kept_BL &= ~is_loose_BL | (behind_BL >= excess_B1)
    is_put_BL &= behind_BL + loose_BL >= excess_B1

    # One scatter per row makes any number of edits. The shifts of `insert_at` and `delete_at` would
    # run as often as the row with the most edits requires, and on several devices with a reduction.
    until_BL = jnp.cumsum(is_put_BL.astype(jnp.int32) + is_kept_BL, axis=1)
    kept_BL = jnp.where(is_kept_BL, until_BL - 1, num_positions)
    put_BL = jnp.where(is_put_BL, until_BL - 1 - is_kept_BL, num_positions)

    def invert(kept_L: jax.Array, put_L: jax.Array) -> tuple[jax.Array, jax.Array]:
        place_L = jnp.arange(num_positions)
        source_L = place_L.at[kept_L].set(place_L, mode="drop")
        is_new_L = jnp.zeros(num_positions, bool).at[put_L].set(True, mode="drop")
        return source_L.at[put_L].set(place_L, mode="drop"), is_new_L

    source_BL, is_new_BL = jax.vmap(invert)(kept_BL, put_BL)
    length_B = jnp.sum(is_kept_BL, axis=1) + jnp.sum(is_put_BL, axis=1)
    is_moved_in_BL = jnp.take_along_axis(is_moved_in_BL, source_BL, axis=1)
    return PositionMap(
        source_BL=source_BL,
        is_new_BL=is_new_BL,
        mark_BL=is_new_BL | (is_moved_in_BL & live_positions(length_B, num_positions)),
        length_B=length_B,
        trimmed_B=num_left_B - length_B,
    )


def moved(position_map: PositionMap, x_BL: jax.Array, fill: Any, beyond: Any = None) -> jax.Array:
    """Moves the values of `x_BL` to their new positions.

    Insertions get the value `fill`: a scalar, or ``[B, L]``, read at the old position of the token
    after the insertion. Positions beyond the new length get the scalar `beyond`; None means `fill`.
    """
    new = jnp.asarray(fill, x_BL.dtype)
    if new.ndim:
        new = jnp.take_along_axis(new, position_map.source_BL, axis=1)
    beyond = new if beyond is None else jnp.asarray(beyond, x_BL.dtype)
    old_BL = jnp.take_along_axis(x_BL, position_map.source_BL, axis=1)
    is_live_BL = live_positions(position_map.length_B, x_BL.shape[1])
    return jnp.where(is_live_BL, jnp.where(position_map.is_new_BL, new, old_BL), beyond)


def moved_boundary(position_map: PositionMap, boundary_B: jax.Array) -> jax.Array:
    """int32 ``[B]``, the new index of a boundary before an old position.

    A token inserted at the boundary is placed after the boundary. A boundary at a row's length
    moves to the new length.
    """
    is_live_BL = live_positions(position_map.length_B, position_map.source_BL.shape[1])
    return jnp.sum(is_live_BL & (position_map.source_BL < boundary_B[:, None]), axis=1)
