"""What the edits of a row have come to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits.moves import Cells, PositionMap, moved
from dlm_jax.sampling.edits.protocol import EditRule
from dlm_jax.sampling.row import RowParams
from dlm_jax.types import Canvas, live_positions


class EditState(NamedTuple):
    """What the edits of a row have come to.

    Attributes:
      inserted_BL: True at positions that an edit made, whatever has been written there since.
      mark_BL: True at the marks of the last step's edits.
      origin_BL: int32, where each position stood when `Advance` was called last; -1: it was not
        there.
      capacity_B: int32, most live positions.
      target_B: int32, the length that rows are nudged towards.
      warms_B: True for rows whose draft is looked at, and edited, before their first step.
    """

    inserted_BL: jax.Array
    mark_BL: jax.Array
    origin_BL: jax.Array
    capacity_B: jax.Array
    target_B: jax.Array
    warms_B: jax.Array

    def after(self, cells: Cells, position_map: PositionMap) -> EditState:
        """With the edits of a map, which left `cells`."""
        return self._replace(
            inserted_BL=cells.inserted_BL,
            mark_BL=cells.mark_BL,
            origin_BL=moved(position_map, self.origin_BL, -1),
            warms_B=jnp.zeros_like(self.warms_B),
        )


def start_edits(rule: EditRule, canvas: Canvas, row: RowParams, *, mask_id: int) -> EditState:
    """Before the first step of rows with these parameters."""
    tokens_BL, length_B, frozen_BL = canvas
    num_positions = tokens_BL.shape[1]
    is_free_BL = live_positions(length_B, num_positions) & ~frozen_BL
    free_B = jnp.sum(is_free_BL, axis=1)
    new_B = jnp.where(row.max_new_B > 0, row.max_new_B, free_B)
    capacity_B = jnp.maximum(row.capacity_B, length_B)
    has_draft_B = jnp.any(is_free_BL & (tokens_BL != mask_id), axis=1)
    none_BL = jnp.zeros(tokens_BL.shape, bool)
    return EditState(
        inserted_BL=none_BL,
        mark_BL=none_BL,
        origin_BL=places(tokens_BL),
        capacity_B=jnp.minimum(capacity_B, num_positions).astype(jnp.int32),
        target_B=(length_B - free_B + new_B).astype(jnp.int32),
        warms_B=rule.is_active() & has_draft_B,
    )


def places(x_BL: jax.Array) -> jax.Array:
    """int32 ``[B, L]``: the number of each position."""
    return jnp.broadcast_to(jnp.arange(x_BL.shape[1], dtype=jnp.int32), x_BL.shape)
