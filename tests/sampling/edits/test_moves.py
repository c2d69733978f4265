"""The map of a step's edits against lists that edit one at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import edits as oracle

from dlm_jax.sampling.edits.moves import Edits, moved, moved_boundary, position_map_of

ROWS, LENGTH, NEW, PAD = 32, 9, -1, -2
PLACE = np.arange(LENGTH)


@jax.jit
def _mapped(edits, tokens_BL, frozen_BL, length_B, capacity_B, boundary_B):
    """The map, the canvas, a score moved through it, and a boundary."""
    position_map = position_map_of(edits, frozen_BL, length_B, capacity_B)
    age_BL = jnp.broadcast_to(jnp.arange(LENGTH), tokens_BL.shape) * 0.5
    own_BL = jnp.broadcast_to(10.0 + jnp.arange(ROWS)[:, None], tokens_BL.shape)
    return (
        position_map,
        moved(position_map, tokens_BL, edits.token, PAD),
        moved(position_map, frozen_BL, False, True),
        moved(position_map, age_BL, own_BL),
        moved_boundary(position_map, boundary_B),
    )


BYTES = st.binary(min_size=12 * ROWS, max_size=12 * ROWS)
"""Of each row six numbers: length, which are frozen, which get a token in front, which go, free
capacity, a boundary. Drawn as bytes, which is quick, and shrinks towards rows without anything."""


@settings(max_examples=100, deadline=None)
@given(drawn=BYTES)
def test_the_map_is_what_one_edit_at_a_time_makes(drawn):
    number_BC = np.frombuffer(drawn, np.uint16).reshape(ROWS, 6).astype(np.int32)
    length_B, room_B, boundary_B = (number_BC[:, i] % (LENGTH + 1) for i in (0, 4, 5))
    is_live_BL = length_B[:, None] > PLACE
    frozen_BL, put_BL, gone_BL = (
        (((x_B1 >> PLACE) % 2 == 1) | (x_B1 >> 14 == 3)) & is_live_BL
        for x_B1 in (number_BC[:, i, None] for i in (1, 2, 3))
    )
    put_BL[:, 0] = False
    gone_BL &= ~frozen_BL
    capacity_B = np.minimum(length_B + room_B, LENGTH)
    boundary_B = np.minimum(boundary_B, length_B)
    tokens_BL = np.where(is_live_BL, PLACE, PAD)
    canvas = tokens_BL, frozen_BL | ~is_live_BL, length_B
    found = _mapped(Edits(put_BL, gone_BL, NEW), *canvas, capacity_B, boundary_B)
    position_map, after_BL, is_frozen_BL, age_BL, moved_B = jax.tree.map(np.asarray, found)
    for i in range(ROWS):
        n, boundary = position_map.length_B[i], boundary_B[i]
        row = oracle.row_from(PLACE, frozen_BL[i], length=length_B[i])
        puts, gone = np.flatnonzero(put_BL[i]), np.flatnonzero(gone_BL[i])
        want, trimmed = oracle.apply(row, puts, gone, token=NEW, capacity=capacity_B[i])
        tokens = [cell.token for cell in want]
        assert after_BL[i].tolist() == tokens + [PAD] * (LENGTH - n)
        assert n == len(tokens)
        is_kept_frozen = [cell.frozen for cell in want]
        assert is_frozen_BL[i].tolist() == is_kept_frozen + [True] * (LENGTH - n)
        ages = [10.0 + i if token == NEW else token * 0.5 for token in tokens]
        assert age_BL[i].tolist() == ages + [10.0 + i] * (LENGTH - n)
        assert position_map.is_new_BL[i, :n].tolist() == [token == NEW for token in tokens]
        assert position_map.mark_BL[i].tolist() == [cell.mark for cell in want] + [False] * (
            LENGTH - n
        )
        assert position_map.trimmed_B[i] == trimmed
        if not trimmed:
            assert moved_B[i] == boundary + sum(puts < boundary) - sum(gone < boundary)
        assert (np.diff(position_map.source_BL[i, :n]) >= 0).all()
