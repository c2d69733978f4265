"""One step of the denoising loop: look at the canvas, write what the rules choose.

``step: re-noise -> forward -> transform logits -> propose -> commit -> edit -> remask``; every
published sampler is a choice of those slots, not a new loop. Edits and remasking come at the end
of a step instead of the beginning of the next: what the forward said need not be kept, and a row
where nothing is remasked is done without another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.blocks import choose, joined, next_block
from dlm_jax.sampling.edits.apply import edited
from dlm_jax.sampling.forward import forward
from dlm_jax.sampling.inputs import (
    RENOISE_SALT,
    StepInputs,
    StepMasks,
    is_free,
    is_stepping,
    step_keys,
    step_masks,
    visible_context,
)
from dlm_jax.sampling.output import TrunkOutput
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.protocol import CandidateWriter, Filled, Reader, Wanted
from dlm_jax.sampling.remask.apply import may_remask, remasked
from dlm_jax.sampling.row import Counters
from dlm_jax.sampling.state import EDITED, State, work
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.types import Canvas, Params, Status, live_positions

_ENDS = (Status.NON_FINITE, Status.CANVAS_FULL, Status.DONE, Status.STEP_LIMIT)


class StepInfo(NamedTuple):
    """What a step did, at the positions that the canvas had before its edits.

    Attributes:
      is_committed_BL: True where it committed a candidate.
    """

    is_committed_BL: jax.Array


def step(program: Program, params: Params, state: State) -> tuple[State, StepInfo]:
    """The state after one step of every running row; other rows come back bit for bit.

    A row whose draft is to be edited is only looked at, the first time: its edits come before its
    first step.
    """
    state = renoised(program, state)
    return write(program, params, state, look(program, params, state))


def renoised(program: Program, state: State) -> State:
    """The state with what re-noise writes before the forward."""
    renoise = state.rules.renoise
    if renoise is None:
        return state
    banned = {*program.banned_ids, program.mask_id, program.pad_id, *program.eos_ids}

    def of_rows(params: Params, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        renoise, chain, tokens_BL, *others = rows
        num_rows, vocab_size = tokens_BL.shape[0], program.network.vocab_size

        def is_text() -> jax.Array:
            is_banned_BV = chain.banned(num_rows, vocab_size)
            return ~is_banned_BV.at[:, jnp.array(sorted(banned))].set(True, mode="drop")

        return renoise.write(
            tokens_BL, *others, mask_id=program.mask_id, space_id=program.space_id, is_text=is_text
        )

    rows = (
        renoise, state.rules.chain, state.canvas.tokens_BL,
        is_free(state) & is_stepping(state)[:, None],
        renoise.ratio(state.step_B, state.row.steps_B), step_keys(state, salt=RENOISE_SALT)[0],
    )  # fmt: skip
    tokens_BL, is_hit_BL = program.by_rows(of_rows)(None, rows)
    put_BL = jnp.where(tokens_BL == program.mask_id, -1, EDITED)
    return state._replace(
        canvas=state.canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_hit_BL, 0.0, state.logprob_BL),
        committed_BL=jnp.where(is_hit_BL, put_BL, state.committed_BL),
    )


def look(program: Program, params: Params, state: State) -> StepInputs:
    """The forward of a step, and candidates for its open positions; the state stays as it is."""
    draw_key_B, rule_key_B, remask_key_B = step_keys(state)
    masks, commit = step_masks(program, state, rule_key_B)
    context = visible_context(state, masks.is_visible_BL)
    found = forward(program, params, state, masks.is_open_BL)
    # What was kept is not looked at again: it may be overwritten where it lies.
    state = state._replace(cache=None)
    filled = _propose(
        program, params, state, found.output, masks, context, commit.preference_BL, draw_key_B
    )
    return StepInputs(
        masks, commit, context, found, draw_key_B, remask_key_B, filled, is_stepping(state)
    )


def write(
    program: Program, params: Params, state: State, inputs: StepInputs
) -> tuple[State, StepInfo]:
    """The state with what the commit rule takes of the proposal, one step later."""
    proposal, rules = inputs.proposal, state.rules
    state = state._replace(cache=inputs.forward.cache)
    forwards_B, positions_B = _cost(state, inputs)
    is_hole_BL = state.canvas.tokens_BL == program.mask_id
    chosen_BL = rules.commit.select(inputs.commit, proposal)
    chosen_BL |= is_hole_BL & state.block.is_last_step_B[:, None]
    is_committed_BL = inputs.masks.is_open_BL & chosen_BL & inputs.is_finite_B[:, None]
    info = StepInfo(is_committed_BL)
    tokens_BL = jnp.where(is_committed_BL, proposal.tokens_BL, state.canvas.tokens_BL)
    state = state._replace(
        canvas=state.canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_committed_BL, proposal.logprob_BL, state.logprob_BL),
        committed_BL=jnp.where(is_committed_BL, state.step_B[:, None], state.committed_BL),
        chain_state=rules.chain.update(state.chain_state, is_committed_BL, proposal),
        counters=state.counters.plus(
            Counters(
                forwards=state.is_running_B * forwards_B,
                positions=state.is_running_B * positions_B,
                waves=inputs.filled.waves_B,
                bootstrapped=inputs.filled.bootstrapped_B,
                filled=jnp.sum(inputs.masks.is_open_BL, axis=1),
            )
        ),
    )
    if rules.edit is not None:
        state, inputs, is_committed_BL = edited(program, params, state, inputs, is_committed_BL)
    if rules.remask is not None:
        state = remasked(program, params, state, inputs, is_committed_BL)
    if rules.commit.rewrites:
        state, still_B = _settled(state, inputs, is_committed_BL)
    else:
        still_B = jnp.zeros_like(state.is_running_B)
    return _ended(program, state, inputs, still_B), info


def _settled(
    state: State, inputs: StepInputs, is_committed_BL: jax.Array
) -> tuple[State, jax.Array]:
    """The state with its steps without holes counted, and where a block is still rewritten."""
    commit, rule = inputs.commit, state.rules.commit
    assert commit.written_BL is not None, "the rule rewrites"
    had_holes_B = jnp.any(commit.is_hole_BL, axis=1)
    changed_B = jnp.any(is_committed_BL & (commit.written_BL >= 0), axis=1)
    settled_B = jnp.where(had_holes_B, 0, state.block.settled_B + inputs.is_stepping_B)
    state = state._replace(block=state.block._replace(settled_B=settled_B))
    return state, (had_holes_B | changed_B) & (settled_B < rule.patience())


def _ended(program: Program, state: State, inputs: StepInputs, still_B: jax.Array) -> State:
    """The state one step on: steps are counted, blocks follow each other, rows end.

    A block without holes waits where `still_B`, unless that was its last step.
    """
    canvas, block = state.canvas, state.block
    steps_now_B, is_finite_B = inputs.is_stepping_B, inputs.is_finite_B
    is_hole_BL = (canvas.tokens_BL == program.mask_id) & ~canvas.frozen_BL
    left_B = jnp.sum(is_hole_BL & block.holds(is_hole_BL.shape[1]), axis=1)
    goes_on_B = state.rules.goes_on(state.row.resamples_B) | still_B
    goes_on_B &= ~block.is_last_step_B
    is_over_B = steps_now_B & is_finite_B & (left_B == 0) & ~goes_on_B
    following, has_more_B = next_block(
        block, work(state, mask_id=program.mask_id), is_hole_BL, state.row.block_length_B,
        state.row.steps_B,
    )  # fmt: skip
    again = block._replace(step_B=block.step_B + steps_now_B)
    again = joined(again, is_hole_BL, ~canvas.frozen_BL, state.row)
    behind_B = jnp.where(is_over_B, block.end_B, again.begin_B)
    is_whole_B = steps_now_B & is_finite_B & state.row.stops_at_eos_B
    is_whole_B &= _has_eos(program, canvas, _stays(state, is_hole_BL, behind_B))
    is_done_B = (is_over_B & ~has_more_B) | is_whole_B
    is_full_B = state.counters.lost > 0
    step_B = state.step_B + steps_now_B
    status_B = jnp.select(
        [
            ~state.is_running_B, ~is_finite_B, is_done_B & is_full_B, is_done_B,
            step_B >= state.row.steps_B,
        ],
        [state.status_B, *(jnp.full_like(step_B, s) for s in _ENDS)],
        Status.RUNNING,
    )  # fmt: skip
    is_next_B = is_over_B & ~is_done_B
    block = choose(is_next_B, following, choose(steps_now_B, again, block))
    return state._replace(step_B=step_B, block=block, status_B=status_B)


def chain_now(state: State) -> Chain:
    """The chain with the parameters of the step that each row is about to take."""
    share_B = state.step_B.astype(jnp.float32) / jnp.maximum(state.span_B - 1, 1)
    return state.rules.chain.at_progress(jnp.minimum(share_B, 1.0))


def _cost(state: State, inputs: StepInputs) -> tuple[jax.Array, jax.Array]:
    """Forwards that a step of each row asks for, and the positions that they compute."""
    forwards_B, positions_B = inputs.forward.forwards_B, inputs.forward.positions_B
    forwards_B += state.rules.fill.forwards
    if state.rules.remask is not None and state.rules.remask.reads_critic:
        asks_B = may_remask(state, inputs)
        forwards_B += asks_B
        if state.rules.cache is not None:
            positions_B += asks_B * state.canvas.length_B
    return forwards_B, positions_B


def _stays(state: State, is_hole_BL: jax.Array, behind_B: jax.Array) -> jax.Array:
    """How far the tokens of each row stay as they are, from its begin: up to its first hole.

    Where tokens may be rewritten, they stay once their block is behind the row.
    """
    place_B = jnp.argmax(is_hole_BL, axis=1)
    first_hole_B = jnp.where(jnp.any(is_hole_BL, axis=1), place_B, state.canvas.length_B)
    changes_B = state.rules.refines(state.row.resamples_B) | state.rules.commit.rewrites
    return jnp.where(changes_B, behind_B, first_hole_B)


def _has_eos(program: Program, canvas: Canvas, end_B: jax.Array) -> jax.Array:
    """True for rows with a generated EOS before that position, and nothing given behind it."""
    num_positions = canvas.tokens_BL.shape[1]
    place_1L = jnp.arange(num_positions)[None]
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, num_positions)
    last_given_B1 = jnp.max(jnp.where(is_given_BL, place_1L, -1), axis=1, keepdims=True)
    is_before_BL = (place_1L > last_given_B1) & (place_1L < end_B[:, None])
    is_eos_BL = jnp.isin(canvas.tokens_BL, jnp.array(program.eos_ids, jnp.int32))
    return jnp.any(is_before_BL & is_eos_BL, axis=1)


def _propose(
    program: Program,
    params: Params,
    state: State,
    output: TrunkOutput,
    masks: StepMasks,
    context: Context,
    preference_BL: jax.Array | None,
    key_B: jax.Array,
) -> Filled:
    """The candidates, on each device for its own rows if they are split."""
    edit = state.rules.edit
    keeps_best = edit is not None and edit.reads_likeliest

    def of_rows(params: Params, rows: tuple[Any, ...]) -> Filled:
        state, output, masks, context, preference_BL, key_B = rows
        chain, commit = chain_now(state), state.rules.commit
        writer = CandidateWriter(
            chain, chain.prepare(state.chain_state, context), key_B, masks.own_BL,
            masks.is_open_BL.shape[1], commit.measure, program.draw, program.banned_ids,
            commit.weighed,
        )  # fmt: skip
        wanted = Wanted(
            masks.is_open_BL, masks.is_visible_BL, context.tokens_BL, context.length_B,
            masks.is_scored_BL, keeps_best, preference_BL,
        )  # fmt: skip
        # No more positions can be open than the trunk returned vectors for.
        chunk = min(program.chunk, output.num_vectors)
        reader = Reader(program.network, params, output, chunk)
        return state.rules.fill.propose(reader, writer, wanted)

    rows = state, output, masks, context, preference_BL, key_B
    return program.by_rows(of_rows)(params, rows)
