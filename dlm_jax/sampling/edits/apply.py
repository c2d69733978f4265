"""The edit slot of the loop: after a step's commits, before its remasking, tokens come and go.

Edits at the beginning of an iteration would need what the one before it saw. Here they come at the
end of the step that saw it, so that nothing of the logits need be kept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.blocks import choose
from dlm_jax.sampling.edits.moves import (
    Cells,
    PositionMap,
    moved,
    moved_boundary,
    moved_cells,
    position_map_of,
)
from dlm_jax.sampling.edits.protocol import EditContext
from dlm_jax.sampling.edits.scores import Snapshot
from dlm_jax.sampling.edits.trials import tried
from dlm_jax.sampling.inputs import StepInputs, beside
from dlm_jax.sampling.output import TrunkOutput
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.protocol import gather
from dlm_jax.sampling.row import Counters
from dlm_jax.sampling.state import EDITED, State
from dlm_jax.types import Canvas, Params, live_positions

_CHUNK = 2048


def edited(
    program: Program, params: Params, state: State, inputs: StepInputs, is_committed_BL: jax.Array
) -> tuple[State, StepInputs, jax.Array]:
    """The state after the edits; the inputs and the committed positions where they are now.

    A row's forward has been read where its next edits may happen.
    """
    rule, past, block = state.rules.edit, state.edits, state.block
    may_edit_BL = inputs.masks.may_edit_BL
    assert rule is not None and past is not None and may_edit_BL is not None
    may_edit_BL &= inputs.is_finite_B[:, None]
    before = Cells(state.canvas.tokens_BL, state.canvas.frozen_BL, past.inserted_BL, past.mark_BL,
                   state.canvas.length_B)  # fmt: skip
    context = EditContext(
        before, _snapshot(program, params, state, inputs, beside(may_edit_BL)), may_edit_BL,
        state.step_B + inputs.is_stepping_B, state.row.steps_B, past.capacity_B, past.target_B,
        program.mask_id, program.space_id, inputs.commit.preference_BL,
    )  # fmt: skip
    trial_forwards_B = jnp.zeros_like(state.step_B)
    if rule.num_trials:
        found, trial_forwards_B = tried(program, params, context, rule)
        context = context._replace(tried=found)
    edits = rule.select(context)
    position_map = position_map_of(edits, before, past.capacity_B)
    inserted = edits.token_BL
    if inserted is None:
        inserted = rule.inserted_id(mask_id=program.mask_id, space_id=program.space_id)
    after = moved_cells(position_map, before, inserted, pad_id=program.pad_id)
    is_put_BL = position_map.is_new_BL & (after.tokens_BL != program.mask_id)
    committed_BL = moved(position_map, state.committed_BL, -1)
    moved_block = block._replace(
        begin_B=moved_boundary(position_map, block.begin_B),
        end_B=moved_boundary(position_map, block.end_B),
    )
    now, is_running_B = past.after(after, position_map), state.is_running_B
    state = state._replace(
        canvas=Canvas(after.tokens_BL, after.length_B, after.frozen_BL),
        block=choose(is_running_B, moved_block, block),
        logprob_BL=moved(position_map, state.logprob_BL, 0.0),
        committed_BL=jnp.where(is_put_BL, EDITED, committed_BL),
        # A row that has ended keeps its last marks.
        edits=now._replace(mark_BL=jnp.where(is_running_B[:, None], now.mark_BL, past.mark_BL)),
        counters=state.counters.plus(
            Counters(
                forwards=trial_forwards_B,
                insertions=jnp.sum(position_map.is_new_BL, axis=1, dtype=jnp.int32),
                deletions=jnp.sum(edits.delete_BL, axis=1, dtype=jnp.int32),
                lost=(edits.refused_B + position_map.trimmed_B).astype(jnp.int32),
            )
        ),
    )
    return state, _moved(inputs, position_map), moved(position_map, is_committed_BL, False)


def _snapshot(
    program: Program, params: Params, state: State, inputs: StepInputs, is_wanted_BL: jax.Array
) -> Snapshot:
    """What the step's forward said, see `take_snapshot`, at the wanted tokens."""
    canvas, filled = state.canvas, inputs.filled
    assert filled.total_BL is not None
    is_token_BL = live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    is_token_BL &= canvas.tokens_BL != program.mask_id
    return take_snapshot(
        program, params, inputs.output, filled.total_BL, filled.best_BL, canvas.tokens_BL,
        is_wanted_BL & is_token_BL,
    )  # fmt: skip


def _moved(inputs: StepInputs, position_map: PositionMap) -> StepInputs:
    """What a remask rule reads of the inputs, where it is after the edits."""
    proposal, masks = inputs.proposal, inputs.masks
    is_hole_BL = moved(position_map, inputs.commit.is_hole_BL, False)
    is_read_BL = masks.is_read_BL
    is_read_BL = None if is_read_BL is None else moved(position_map, is_read_BL, False)
    is_open_BL = moved(position_map, masks.is_open_BL, False)
    proposal = proposal._replace(
        tokens_BL=moved(position_map, proposal.tokens_BL, 0),
        logprob_BL=moved(position_map, proposal.logprob_BL, 0.0),
    )
    return inputs._replace(
        masks=masks._replace(is_open_BL=is_open_BL, is_read_BL=is_read_BL),
        commit=inputs.commit._replace(is_hole_BL=is_hole_BL),
        filled=inputs.filled._replace(proposal=proposal),
    )


def take_snapshot(
    program: Program,
    params: Params,
    output: TrunkOutput,
    total_BL: jax.Array,
    best_BL: jax.Array | None,
    tokens_BL: jax.Array,
    is_wanted_BL: jax.Array,
) -> Snapshot:
    """What the step's forward says of the tokens that now stand on the canvas, at temperature 1.

    No logits are computed again: the log-normaliser of each position is known, and of its logits
    two or three are read off the output matrix, if the network can (`Network.logits_of`). Each
    device reads its own rows.

    Args:
      program: the network.
      params: its parameters.
      output: what the trunk returned.
      total_BL: float32 log-normaliser of each wanted position.
      best_BL: int32, the likeliest id there, -1 where it may not be written; None where edits do
        not ask.
      tokens_BL: int32 canvas.
      is_wanted_BL: True where it is asked.
    """

    def of_rows(params: Params, rows: tuple[Any, ...]) -> Snapshot:
        return _read(program, params, *rows)

    return program.by_rows(of_rows)(params, (output, total_BL, best_BL, tokens_BL, is_wanted_BL))


def _read(
    program: Program,
    params: Params,
    output: TrunkOutput,
    total_BL: jax.Array,
    best_BL: jax.Array | None,
    tokens_BL: jax.Array,
    is_wanted_BL: jax.Array,
) -> Snapshot:
    network, num_positions = program.network, tokens_BL.shape[1]
    chunk = program.chunk if network.logits_of is None else _CHUNK
    chunk = min(chunk, tokens_BL.size)
    flat, num_wanted = gather(is_wanted_BL, chunk)
    # Right of a row's last position stands nothing; what is said of that is never read.
    right_BL = jnp.pad(tokens_BL[:, 1:], ((0, 0), (0, 1)))
    asked = [tokens_BL, right_BL]
    if best_BL is not None:
        asked.append(jnp.where(best_BL < 0, tokens_BL, best_BL))
    ids_PK = jnp.stack([x.reshape(-1) for x in asked], axis=1)
    total_P = total_BL.reshape(-1)

    def one_chunk(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, found_PK = carry
        places_N = jax.lax.dynamic_slice(flat, (first,), (chunk,))
        is_real_N = first + jnp.arange(chunk) < num_wanted
        ids_NK = ids_PK[places_N]
        if network.logits_of is None:
            logits_NV = output.logits(network, params, places_N)
            logits_NK = jnp.take_along_axis(logits_NV, ids_NK, axis=1)
        else:
            logits_of = network.logits_of
            logits_NK = output.read(
                lambda hidden_ND: logits_of(params, hidden_ND, ids_NK), places_N
            )
        logprob_NK = jnp.minimum(logits_NK - total_P[places_N][:, None], 0.0)
        target_N = jnp.where(is_real_N, places_N, total_P.size)
        return first + chunk, found_PK.at[target_N].set(logprob_NK, mode="drop")

    start = (jnp.zeros((), jnp.int32), jnp.zeros(ids_PK.shape, jnp.float32))
    _, found_PK = jax.lax.while_loop(lambda carry: carry[0] < num_wanted, one_chunk, start)
    found_KBL = jnp.moveaxis(found_PK.reshape(-1, num_positions, len(asked)), 2, 0)
    if best_BL is None:
        return Snapshot(*found_KBL)
    return Snapshot(*found_KBL, is_due_BL=best_BL == right_BL, best_id_BL=best_BL)
