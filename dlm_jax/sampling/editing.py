"""The edit slot of the loop: after a step's commits, before its remasking, tokens come and go.

`seeds/variable_length_edits.md` edits at the beginning of an iteration what the one before it saw.
Here that is the end of the step that saw it, so that nothing of the logits need be kept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dlm_jax.sampling.blocks import choose
from dlm_jax.sampling.editor import PUT
from dlm_jax.sampling.edits import Snapshot, edit
from dlm_jax.sampling.guidance import Sight
from dlm_jax.sampling.program import Look, Program
from dlm_jax.sampling.propose import gather
from dlm_jax.sampling.shifting import Cells, Plan, apply_plan, moved_boundary
from dlm_jax.sampling.state import State
from dlm_jax.types import Canvas, Params, Status, live_positions

_CHUNK = 2048


def may_edit(state: State) -> jax.Array:
    """True where the edits after this step may happen."""
    assert state.editor is not None and state.edited is not None
    num_positions = state.canvas.tokens_BL.shape[1]
    is_row_B = state.editor.is_active() & (state.status_B == Status.RUNNING)
    is_row_B &= ~state.block.is_last_step_B | state.edited.warms_B
    is_live_BL = live_positions(state.canvas.length_B, num_positions)
    return is_live_BL & state.block.holds(num_positions) & is_row_B[:, None]


def edited(
    program: Program, params: Params, state: State, seen: Look, is_committed_BL: jax.Array
) -> tuple[State, Look, jax.Array]:
    """The state after the edits; the look and the committed positions where they are now.

    A row's forward has been read where its next edits may happen (`may_edit`).
    """
    assert state.editor is not None and state.edited is not None
    filled = seen.filled
    assert seen.may_edit_BL is not None
    assert filled.total_BL is not None
    canvas, block = state.canvas, state.block
    may_edit_BL = seen.may_edit_BL & seen.is_finite_B[:, None]
    is_token_BL = live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    is_token_BL &= canvas.tokens_BL != program.mask_id
    snapshot = take_snapshot(
        program, params, seen.sight, filled.total_BL, filled.best_BL, canvas.tokens_BL,
        is_scored(may_edit_BL) & is_token_BL,
    )  # fmt: skip
    past, next_B = state.edited, state.step_B + seen.is_stepping_B
    after, plan = edit(
        Cells(canvas.tokens_BL, canvas.frozen_BL, past.inserted_BL, past.mark_BL, canvas.length_B),
        snapshot,
        state.editor.at(next_B, state.steps_B, past),
        mask_id=program.mask_id,
        space_id=program.space_id,
        pad_id=program.pad_id,
        edit_id=jnp.where(state.editor.puts_mask_B, program.mask_id, program.space_id),
        is_open_BL=may_edit_BL,
    )
    is_put_BL = plan.is_new_BL & (after.tokens_BL != program.mask_id)
    committed_BL = apply_plan(plan, state.committed_BL, -1)
    moved = block._replace(
        begin_B=moved_boundary(plan, block.begin_B), end_B=moved_boundary(plan, block.end_B)
    )
    is_running_B = state.status_B == Status.RUNNING
    now = past.after(after, plan)
    state = state._replace(
        canvas=Canvas(after.tokens_BL, after.length_B, after.frozen_BL),
        block=choose(is_running_B, moved, block),
        logprob_BL=apply_plan(plan, state.logprob_BL, 0.0),
        committed_BL=jnp.where(is_put_BL, PUT, committed_BL),
        # A row that has ended keeps its last marks.
        edited=now._replace(mark_BL=jnp.where(is_running_B[:, None], now.mark_BL, past.mark_BL)),
    )
    return state, _moved(seen, plan), apply_plan(plan, is_committed_BL, False)


def _moved(seen: Look, plan: Plan) -> Look:
    """What a remask rule reads of the look, where it is after the edits."""
    proposal = seen.proposal
    tokens_BL = apply_plan(plan, proposal.tokens_BL, 0)
    is_read_BL = seen.is_read_BL
    return seen._replace(
        view=seen.view._replace(is_hole_BL=apply_plan(plan, seen.view.is_hole_BL, False)),
        is_open_BL=apply_plan(plan, seen.is_open_BL, False),
        is_read_BL=None if is_read_BL is None else apply_plan(plan, is_read_BL, False),
        filled=seen.filled._replace(
            proposal=proposal._replace(
                tokens_BL=tokens_BL, logprob_BL=apply_plan(plan, proposal.logprob_BL, 0.0)
            )
        ),
    )


def is_scored(is_open_BL: jax.Array) -> jax.Array:
    """True where the logits tell of edits at open positions: there, and on either side."""
    padded = jnp.pad(is_open_BL, ((0, 0), (1, 1)))
    return is_open_BL | padded[:, :-2] | padded[:, 2:]


def take_snapshot(
    program: Program,
    params: Params,
    sight: Sight,
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
      sight: what the trunk returned.
      total_BL: float32 log-normaliser of each wanted position.
      best_BL: int32, the likeliest id there, -1 where it may not be written; None where edits do
        not ask.
      tokens_BL: int32 canvas.
      is_wanted_BL: True where it is asked.
    """

    def of_rows(params: Params, *rows: Any) -> Snapshot:
        return _read(program, params, *rows)

    if program.rows is not None:
        of_rows = jax.shard_map(
            of_rows,
            mesh=program.rows.mesh,
            in_specs=(PartitionSpec(), *[program.rows.spec] * 5),
            out_specs=program.rows.spec,
            check_vma=False,
        )
    return of_rows(params, sight, total_BL, best_BL, tokens_BL, is_wanted_BL)


def _read(
    program: Program,
    params: Params,
    sight: Sight,
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
            logits_NV = sight.logits(network, params, places_N)
            logits_NK = jnp.take_along_axis(logits_NV, ids_NK, axis=1)
        else:
            logits_of = network.logits_of
            logits_NK = sight.read(lambda hidden_ND: logits_of(params, hidden_ND, ids_NK), places_N)
        logprob_NK = jnp.minimum(logits_NK - total_P[places_N][:, None], 0.0)
        target_N = jnp.where(is_real_N, places_N, total_P.size)
        return first + chunk, found_PK.at[target_N].set(logprob_NK, mode="drop")

    start = (jnp.zeros((), jnp.int32), jnp.zeros(ids_PK.shape, jnp.float32))
    _, found_PK = jax.lax.while_loop(lambda carry: carry[0] < num_wanted, one_chunk, start)
    found_KBL = jnp.moveaxis(found_PK.reshape(-1, num_positions, len(asked)), 2, 0)
    return Snapshot(*found_KBL, is_due_BL=None if best_BL is None else best_BL == right_BL)
