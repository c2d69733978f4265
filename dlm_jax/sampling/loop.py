"""One step of the denoising loop: look at the canvas, write what the rules choose.

``step: re-noise -> forward -> transform logits -> propose -> commit -> edit -> remask``; every
published sampler is a choice of those slots, not a new loop (DESIGN 3). Edits and remasking stand
at the end of a step instead of the beginning of the next: what the forward said need not be kept,
and a row where nothing is remasked is done without another one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dlm_jax.sampling.blocks import choose, next_block
from dlm_jax.sampling.commit import View
from dlm_jax.sampling.editing import edited, is_scored, may_edit
from dlm_jax.sampling.editor import PUT
from dlm_jax.sampling.guidance import Sight
from dlm_jax.sampling.program import Look, Program
from dlm_jax.sampling.propose import Filled, propose_parallel
from dlm_jax.sampling.remasking import may_remask, remasked
from dlm_jax.sampling.state import State, goes_on, work
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.sampling.wavefront import propose_wavefront
from dlm_jax.types import Canvas, Params, Status, live_positions


def step(program: Program, params: Params, state: State) -> State:
    """The state after one step of every running row; other rows come back bit for bit.

    A row whose draft is to be edited is only looked at, the first time: its edits come before its
    first step.
    """
    state = renoised(program, state)
    return write(program, params, state, look(program, params, state))


def renoised(program: Program, state: State) -> State:
    """The state with what re-noise writes before the forward."""
    if state.renoise is None:
        return state
    steps_now_B = _steps_now(state)
    is_free_BL = _is_free(state) & steps_now_B[:, None]
    banned = {*program.banned_ids, program.mask_id, program.pad_id, program.eos_id}
    tokens_BL, is_hit_BL = state.renoise.write(
        state.canvas.tokens_BL,
        is_free_BL,
        state.step_B,
        state.steps_B,
        _step_keys(state, salt=_RENOISE_SALT)[0],
        mask_id=program.mask_id,
        space_id=program.space_id,
        random_ids=tuple(t for t in range(program.network.vocab_size) if t not in banned),
    )
    is_hole_BL = tokens_BL == program.mask_id
    return state._replace(
        canvas=state.canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_hit_BL, 0.0, state.logprob_BL),
        committed_BL=jnp.where(
            is_hit_BL, jnp.where(is_hole_BL, -1, PUT), state.committed_BL
        ),
    )  # fmt: skip


def look(program: Program, params: Params, state: State) -> Look:
    """The forward of a step, and candidates for its open positions; the state stays as it is."""
    canvas, block = state.canvas, state.block
    num_positions = canvas.tokens_BL.shape[1]
    is_live_BL = live_positions(canvas.length_B, num_positions)
    is_visible_BL = is_live_BL & (canvas.tokens_BL != program.mask_id)
    is_stepping_B = _steps_now(state)
    is_free_BL = _is_free(state) & is_stepping_B[:, None]
    draw_key_B, rule_key_B, remask_key_B = _step_keys(state)
    is_closed_BL = is_visible_BL & ~state.resamples_B[:, None]
    view = View(
        is_free_BL & ~is_closed_BL, block.first_holes_B, block.step_B, block.steps_B, rule_key_B
    )
    is_last_BL = block.is_last_step_B[:, None] & ~is_visible_BL
    is_open_BL = view.is_hole_BL & (state.rule.eligible(view) | is_last_BL)
    context = Context(
        tokens_BL=canvas.tokens_BL,
        order_BL=state.committed_BL,
        is_visible_BL=is_visible_BL & (state.committed_BL != PUT),
        length_B=canvas.length_B,
    )
    own_BL = is_read_BL = may_edit_BL = is_scored_BL = None
    if state.remask is not None:
        # A draft's tokens were never proposed; what the remask rule reads of them is their own.
        is_draft_BL = is_free_BL & is_visible_BL & (state.committed_BL < 0) & ~is_open_BL
        is_read_BL = is_draft_BL & state.remask.is_active()[:, None]
        is_read_BL &= ~block.is_last_step_B[:, None]
        own_BL = jnp.where(is_read_BL, canvas.tokens_BL, -1)
    if state.editor is not None:
        may_edit_BL = may_edit(state)
        is_scored_BL = is_scored(may_edit_BL) & is_live_BL
        is_own_BL = is_scored_BL & is_visible_BL & ~is_open_BL
        own_BL = jnp.where(is_own_BL, canvas.tokens_BL, -1 if own_BL is None else own_BL)
    sight = _sight(program, params, state)
    filled = _propose(
        program, params, state, sight, is_open_BL, context, draw_key_B, own_BL, is_visible_BL,
        is_scored_BL,
    )  # fmt: skip
    return Look(
        view, is_open_BL, is_read_BL, sight, context, draw_key_B, remask_key_B, filled,
        is_stepping_B, may_edit_BL,
    )  # fmt: skip


def write(program: Program, params: Params, state: State, seen: Look) -> State:
    """The state with what the commit rule takes of the proposal, one step later."""
    proposal, block = seen.proposal, state.block
    is_running_B = state.status_B == Status.RUNNING
    is_hole_BL = state.canvas.tokens_BL == program.mask_id
    chosen_BL = state.rule.select(seen.view, proposal)
    chosen_BL |= is_hole_BL & block.is_last_step_B[:, None]
    is_committed_BL = seen.is_open_BL & chosen_BL & seen.is_finite_B[:, None]
    state = state._replace(
        canvas=state.canvas._replace(
            tokens_BL=jnp.where(is_committed_BL, proposal.tokens_BL, state.canvas.tokens_BL)
        ),
        logprob_BL=jnp.where(is_committed_BL, proposal.logprob_BL, state.logprob_BL),
        committed_BL=jnp.where(is_committed_BL, state.step_B[:, None], state.committed_BL),
        chain_state=state.chain.update(state.chain_state, is_committed_BL, proposal),
        forwards_B=state.forwards_B + is_running_B * _forwards(program, state, seen),
        waves_B=state.waves_B + seen.filled.waves_B,
        seeds_B=state.seeds_B + seen.filled.seeds_B,
        filled_B=state.filled_B + jnp.sum(seen.is_open_BL, axis=1),
    )
    if state.editor is not None:
        state, seen, is_committed_BL = edited(program, params, state, seen, is_committed_BL)
    if state.remask is not None:
        state = _remasked(program, params, state, seen, is_committed_BL)
    return _ended(program, state, seen)


def _is_free(state: State) -> jax.Array:
    """True at the unfrozen positions of each row's block."""
    canvas = state.canvas
    return state.block.holds(canvas.tokens_BL.shape[1]) & ~canvas.frozen_BL


def _steps_now(state: State) -> jax.Array:
    """True ``[B]`` for rows that take a step, instead of being looked at or being done."""
    is_running_B = state.status_B == Status.RUNNING
    return is_running_B if state.edited is None else is_running_B & ~state.edited.warms_B


def _remasked(
    program: Program, params: Params, state: State, seen: Look, is_committed_BL: jax.Array
) -> State:
    """The state with the tokens that the remask rule takes back."""
    assert seen.is_read_BL is not None
    tokens_BL, committed_BL = state.canvas.tokens_BL, state.committed_BL
    logprob_BL = jnp.where(seen.is_read_BL, seen.proposal.logprob_BL, state.logprob_BL)
    is_remasked_BL = remasked(program, params, state, seen, tokens_BL, logprob_BL, is_committed_BL)
    return state._replace(
        canvas=state.canvas._replace(
            tokens_BL=jnp.where(is_remasked_BL, program.mask_id, tokens_BL)
        ),
        logprob_BL=jnp.where(is_remasked_BL, 0.0, logprob_BL),
        committed_BL=jnp.where(is_remasked_BL, -1, committed_BL),
    )


def _ended(program: Program, state: State, seen: Look) -> State:
    """The state one step on: steps are counted, blocks follow each other, rows end."""
    canvas, block = state.canvas, state.block
    steps_now_B, is_finite_B = seen.is_stepping_B, seen.is_finite_B
    is_hole_BL = (canvas.tokens_BL == program.mask_id) & ~canvas.frozen_BL
    left_B = jnp.sum(is_hole_BL & block.holds(is_hole_BL.shape[1]), axis=1)
    goes_on_B = goes_on(state) & ~block.is_last_step_B
    is_over_B = steps_now_B & is_finite_B & (left_B == 0) & ~goes_on_B
    following, has_more_B = next_block(
        block, work(state, mask_id=program.mask_id), is_hole_BL, state.block_length_B, state.steps_B
    )
    is_done_B = is_over_B & (
        ~has_more_B | (state.stops_at_eos_B & _has_eos(program, state, canvas))
    )
    is_full_B = jnp.zeros_like(is_done_B) if state.edited is None else state.edited.lost_B > 0
    step_B = state.step_B + steps_now_B
    is_running_B = state.status_B == Status.RUNNING
    status_B = jnp.select(
        [~is_running_B, ~is_finite_B, is_done_B & is_full_B, is_done_B, step_B >= state.steps_B],
        [state.status_B, *(jnp.full_like(step_B, s) for s in _ENDS)],
        Status.RUNNING,
    )
    again = block._replace(step_B=block.step_B + steps_now_B)
    return state._replace(
        step_B=step_B, block=choose(is_over_B & ~is_done_B, following, again), status_B=status_B
    )


def chain_now(state: State) -> Chain:
    """The chain with the parameters of the step that each row is about to take."""
    share_B = state.step_B.astype(jnp.float32) / jnp.maximum(state.span_B - 1, 1)
    return state.chain.at_progress(jnp.minimum(share_B, 1.0))


_ENDS = (Status.NON_FINITE, Status.CANVAS_FULL, Status.DONE, Status.STEP_LIMIT)
_RENOISE_SALT = 0x6E6F6973


def _sight(program: Program, params: Params, state: State) -> Sight:
    """The forward, and the one without what was given if a running row is guided."""
    canvas = state.canvas
    hidden_BLD, _ = program.network.trunk(params, canvas.tokens_BL, canvas.length_B, None)
    if not program.is_guided:
        return Sight(hidden_BLD)
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    bare_BL = jnp.where(is_given_BL, program.mask_id, canvas.tokens_BL)
    bare_BLD = jax.lax.cond(
        jnp.any((state.guidance_B != 0) & (state.status_B == Status.RUNNING)),
        lambda: program.network.trunk(params, bare_BL, canvas.length_B, None)[0],
        lambda: jnp.zeros_like(hidden_BLD),
    )
    return Sight(hidden_BLD, bare_BLD, state.guidance_B)


def _forwards(program: Program, state: State, seen: Look) -> jax.Array:
    """Forwards that a step of each row asks for."""
    forwards_B = jnp.ones_like(state.forwards_B)
    if program.is_guided:
        forwards_B += state.guidance_B != 0
    if state.remask is not None and state.remask.asks_critic:
        forwards_B += may_remask(state, seen)
    return forwards_B


def _has_eos(program: Program, state: State, canvas: Canvas) -> jax.Array:
    """True for rows with a generated EOS in the block or before it, and nothing given behind it."""
    num_positions = canvas.tokens_BL.shape[1]
    place_1L = jnp.arange(num_positions)[None]
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, num_positions)
    last_given_B1 = jnp.max(jnp.where(is_given_BL, place_1L, -1), axis=1, keepdims=True)
    is_before_BL = (place_1L > last_given_B1) & (place_1L < state.block.end_B[:, None])
    return jnp.any(is_before_BL & (canvas.tokens_BL == program.eos_id), axis=1)


def _propose(program: Program, params: Params, state: State, *rows: Any) -> Filled:
    """The candidates, on each device for its own rows if they are split.

    Left to the compiler, every device would run all readouts, with a sum over devices in each.
    """

    def of_rows(
        params, state, sight, is_open_BL, context, key_B, own_BL, is_visible_BL, is_scored_BL
    ):  # fmt: skip
        given = (
            program.network, params, sight, is_open_BL, chain_now(state), state.chain_state,
            context, key_B, own_BL,
        )  # fmt: skip
        how: dict[str, Any] = {
            "measure": state.rule.measure, "chunk": program.chunk, "method": program.draw
        }  # fmt: skip
        keeps_best = state.editor is not None and state.editor.scoring == "lead"
        if state.fill is not None:
            return propose_wavefront(
                *given, **how, fill=state.fill, banned_ids=program.banned_ids,
                is_seen_BL=is_visible_BL, is_scored_BL=is_scored_BL, keeps_best=keeps_best,
            )  # fmt: skip
        return propose_parallel(
            *given, **how, banned_ids=program.banned_ids, keeps_total=is_scored_BL is not None,
            keeps_best=keeps_best,
        )  # fmt: skip

    if program.rows is not None:
        split = program.rows.spec
        of_rows = jax.shard_map(
            of_rows,
            mesh=program.rows.mesh,
            in_specs=(PartitionSpec(), *[split] * (1 + len(rows))),
            out_specs=split,
            check_vma=False,
        )
    return of_rows(params, state, *rows)


def _step_keys(state: State, *, salt: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys of each row for a step's draws and for the two rules: from its own seed and step.

    With a salt, others.
    """

    def one_row(seed: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        key = key if salt is None else jax.random.fold_in(key, salt)
        draw_key, rule_key, remask_key = jax.random.split(key, 3)
        return draw_key, rule_key, remask_key

    return jax.vmap(one_row)(state.seed_B, state.step_B)
