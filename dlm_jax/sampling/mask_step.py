"""One step of the denoising loop of models with MASK.

``step: re-noise -> mask -> forward -> transform logits -> propose -> commit -> edit -> remask``.
Every published sampler is a selection of rules for these slots. Edits and remasking run at the end
of a step: the logits need not be stored, and a row without remasked tokens ends without another
forward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import CommitContext, CommitRule, head_of
from dlm_jax.sampling.edits.edit_rule import EditContext, gain_of_edits, read_logprobs
from dlm_jax.sampling.edits.moves import PositionMap, moved, moved_boundary, position_map_of
from dlm_jax.sampling.forward import forward, read_head
from dlm_jax.sampling.positions import TrunkOutput, choose
from dlm_jax.sampling.program import Counters, Program
from dlm_jax.sampling.propose.fill import FillInput, FillOutput
from dlm_jax.sampling.remask import RENOISE_SALT, RemaskContext
from dlm_jax.sampling.state import (
    EDITED,
    State,
    commit_tokens,
    end_step,
    move_state,
    overwrite,
    record_step,
    refines,
    reset_state,
    step_chain,
    step_keys,
    tie_preferences,
    token_positions,
    visible_context,
)
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.transform import Context
from dlm_jax.types import Canvas, Params, left_of, live_positions, returned, right_of


class StepProposal(NamedTuple):
    """The candidates of a step, before the commit. A host sampler can change them."""

    is_open_BL: jax.Array  # positions that receive a candidate
    is_read_BL: jax.Array | None  # tokens to score for the remask rule: drafts, or the whole block
    commit: CommitContext
    context: Context  # the visible tokens, for logit transforms
    output: TrunkOutput
    filled: FillOutput


def step(program: Program, params: Params, state: State) -> State:
    """The state after one step of every running row.

    Rows that are not running remain bitwise unchanged. For a row whose draft is edited, the first
    call does not take a step: it only scores and edits the draft.
    """
    state, proposed = propose_step(program, params, state)
    return commit_step(program, params, state, proposed)[0]


def propose_step(program: Program, params: Params, state: State) -> tuple[State, StepProposal]:
    """The state after re-noise and the forward pass, and candidates for the open positions."""
    if state.rules.renoise is not None:
        state = apply_renoise(program, state)
    rules, rule, block = state.rules, state.rules.commit, state.block
    assert isinstance(rule, CommitRule), "a noise rule has its own step"
    tokens_BL, num_positions = state.canvas.tokens_BL, state.canvas.tokens_BL.shape[1]

    # Mask: the holes of the block, and the open positions, which receive a candidate. At the last
    # step of a block, these include every MASK.
    context, key_B = visible_context(state, mask_id=program.mask_id), step_keys(state)[1]
    preference_BL = tie_preferences(state, key_B)
    is_token_BL = token_positions(state, mask_id=program.mask_id)
    is_free_BL = state.is_stepping_B[:, None] & state.is_free_BL
    is_last_BL = block.is_last_step_B[:, None]
    is_written_BL = is_free_BL & is_token_BL
    is_hole_BL = is_free_BL & ~(is_token_BL & ~state.row.resamples_B[:, None])
    commit = CommitContext(
        is_hole_BL=is_hole_BL,
        first_holes_B=block.first_holes_B,
        step_B=block.step_B,
        steps_B=block.steps_B,
        key_B=key_B,
        is_token_BL=is_token_BL,
        written_BL=None if rule.rewrites is None else jnp.where(is_written_BL, tokens_BL, -1),
        preference_BL=preference_BL,
    )
    is_open_BL = rule.eligible(state.rule_state, commit) | (is_last_BL & ~is_token_BL)
    is_open_BL &= is_hole_BL
    if rule.rewrites is not None:
        is_open_BL |= is_written_BL

    # Tokens to score for the remask rule and for edits, and positions whose logits edits read.
    own_BL = is_read_BL = is_scored_BL = None
    if rules.remask is not None:
        is_read_BL = is_written_BL & ~is_open_BL
        if "logprobs" not in rules.remask.needs:
            is_read_BL &= state.committed_BL < 0
        is_read_BL &= rules.remask.is_active()[:, None] & ~is_last_BL
        own_BL = jnp.where(is_read_BL, tokens_BL, -1)
    if rules.edit is not None:
        is_scored_BL = with_neighbors(editable_positions(state))
        is_scored_BL &= live_positions(state.canvas.length_B, num_positions)
        is_own_BL = is_scored_BL & is_token_BL & ~is_open_BL
        own_BL = jnp.where(is_own_BL, tokens_BL, -1 if own_BL is None else own_BL)

    # Forward.
    output, cache, counters = forward(program, params, state, is_open_BL)
    commit = commit._replace(attention_BLL=output.attention_BLL)

    # Propose.
    filled = draw_candidates(
        program,
        params,
        state,
        output,
        context,
        is_open_BL,
        is_token_BL,
        preference_BL=preference_BL,
        own_BL=own_BL,
        is_scored_BL=is_scored_BL,
    )
    counters = counters.plus(Counters(filled=jnp.sum(is_open_BL, axis=1), **filled.counts))
    state = state._replace(cache=cache, counters=state.counters.plus(counters))
    proposed = StepProposal(
        is_open_BL=is_open_BL,
        is_read_BL=is_read_BL,
        commit=commit,
        context=context,
        output=output,
        filled=filled,
    )
    return state, proposed


def commit_step(
    program: Program, params: Params, state: State, proposed: StepProposal
) -> tuple[State, jax.Array]:
    """The state after the step, and the committed positions before edits."""
    rules, rule = state.rules, state.rules.commit
    assert isinstance(rule, CommitRule), "a noise rule has its own step"
    is_open_BL, is_read_BL = proposed.is_open_BL, proposed.is_read_BL
    context, filled = proposed.commit, proposed.filled
    proposal, is_finite_B, before = filled.proposal, filled.is_finite_B, filled.rule_state
    shape, is_mask_BL = is_open_BL.shape, state.canvas.tokens_BL == program.mask_id
    is_stepping_B, is_last_B = state.is_stepping_B, state.block.is_last_step_B

    # Commit. The last step of a block fills every hole.
    chosen_BL, after = rule.select(before, context, proposal)
    returned(chosen_BL, rule, "select", "B, L", shape, bool)
    chosen_BL |= is_mask_BL & is_last_B[:, None]
    is_committed_BL = is_open_BL & chosen_BL & is_finite_B[:, None]
    choice_B = None
    if state.records is not None:
        chance_B = rule.log_prob(before, context, proposal, is_committed_BL)
        choice_B = jnp.where(is_last_B, 0.0, chance_B)
    is_scored_BL = None if is_read_BL is None else is_committed_BL | is_read_BL
    state = commit_tokens(
        state, filled, is_committed_BL, choose(is_stepping_B, after, before), is_scored_BL
    )

    # Edit.
    candidate_BL = jnp.where(is_open_BL & is_mask_BL, proposal.tokens_BL, -1)
    is_fresh_BL = is_committed_BL
    if rules.edit is not None:
        state, position_map = apply_edits(program, params, state, proposed)
        candidate_BL = moved(position_map, candidate_BL, -1)
        context = context._replace(is_hole_BL=moved(position_map, context.is_hole_BL, False))
        is_fresh_BL = moved(position_map, is_committed_BL, False)

    # Remask. A head reads the canvas with the step's candidates in its holes.
    if rules.remask is not None:
        remask_rule, tokens_BL, wrong_BL = rules.remask, state.canvas.tokens_BL, None
        is_mask_BL = tokens_BL == program.mask_id
        goes_on_B = is_stepping_B & is_finite_B & ~is_last_B
        if head := head_of(remask_rule.needs):
            full_BL = jnp.where((candidate_BL >= 0) & is_mask_BL, candidate_BL, tokens_BL)
            reads_B = goes_on_B & remask_rule.is_active()
            wrong_BL, counters = read_head(program, params, state, head, full_BL, reads_B)
            state = state._replace(counters=state.counters.plus(counters))
        remask = RemaskContext(
            step=context,
            is_open_BL=state.is_free_BL & ~is_mask_BL & goes_on_B[:, None],
            is_fresh_BL=is_fresh_BL,
            num_free_B=jnp.sum(state.is_free_BL, axis=1),
            logprob_BL=state.logprob_BL,
            wrong_BL=wrong_BL,
            key_B=step_keys(state)[2],
        )
        before = state.remask_state
        chosen_BL, after = remask_rule.select(before, remask)
        returned(chosen_BL, remask_rule, "select", "B, L", shape, bool)
        chosen_BL &= remask.is_open_BL
        if choice_B is not None:
            choice_B += remask_rule.log_prob(before, remask, chosen_BL)
        state = overwrite(state, chosen_BL, program.mask_id, mask_id=program.mask_id)
        after = choose(is_stepping_B, after, before)
        state = state._replace(
            rule_state=reset_state(rule, state.rule_state, chosen_BL),
            remask_state=reset_state(remask_rule, after, chosen_BL),
        )

    # Record.
    if choice_B is not None:
        is_drawn_BL = is_open_BL & is_finite_B[:, None]
        state = record_step(
            state,
            canvas=proposed.context.tokens_BL,
            tokens=jnp.where(is_drawn_BL, proposal.tokens_BL, -1),
            is_written=is_committed_BL,
            logprobs=jnp.where(is_drawn_BL, filled.draw_logprob_BL, 0.0),
            entropy=jnp.where(is_drawn_BL, filled.entropy_BL, 0.0),
            level=filled.level_BL,
            choice_logprobs=choice_B,
        )

    # End of the step, the block and the row. A block without holes stays current while a row
    # resamples, edits, re-noises, remasks by a schedule, or rewrites tokens.
    changes_B = refines(rules, state.row)
    stays_B = refines(rules._replace(remask=None), state.row)
    if rules.remask is not None and "steps" in rules.remask.needs:
        stays_B |= rules.remask.is_active()
    if rule.rewrites is not None:
        assert context.written_BL is not None
        had_holes_B = jnp.any(context.is_hole_BL, axis=1)
        changed_B = jnp.any(is_fresh_BL & (context.written_BL >= 0), axis=1)
        settled_B = jnp.where(had_holes_B, 0, state.block.settled_B + is_stepping_B)
        state = state._replace(block=state.block._replace(settled_B=settled_B))
        stays_B |= (had_holes_B | changed_B) & (settled_B < rule.rewrites)
        changes_B = jnp.ones_like(is_stepping_B)
    state = end_step(
        program, state, is_stepping_B, is_finite_B=is_finite_B, stays_B=stays_B, changes_B=changes_B
    )
    return state, is_committed_BL


def fill_input(
    program: Program,
    params: Params,
    state: State,
    output: TrunkOutput,
    context: Context,
    is_open_BL: jax.Array,
    is_seen_BL: jax.Array,
    **arrays: jax.Array | None,
) -> FillInput:
    """The input of a fill, given the output of the trunk, the visible tokens, and further arrays of
    `FillInput`.
    """
    chain, edit = step_chain(state), state.rules.edit
    return FillInput(
        network=program.network,
        params=params,
        output=output,
        # The number of open positions is at most the number of hidden vectors.
        chunk=min(program.chunk, output.hidden_BLD.shape[0] * output.hidden_BLD.shape[1]),
        tokens_BL=context.tokens_BL,
        length_B=context.length_B,
        is_open_BL=is_open_BL,
        is_seen_BL=is_seen_BL,
        chain=chain,
        chain_state=chain.init(context, state.chain_state),
        key_B=step_keys(state)[0],
        rule=state.rules.commit,
        rule_state=state.rule_state,
        is_given_BL=state.canvas.frozen_BL,
        banned_ids=program.banned_ids,
        keeps_best=edit is not None and "likeliest" in edit.needs,
        is_traced=program.num_traced > 0,
        signal_BLD=state.signal_BLD,
        **arrays,
    )


def draw_candidates(
    program: Program,
    params: Params,
    state: State,
    output: TrunkOutput,
    context: Context,
    is_open_BL: jax.Array,
    is_seen_BL: jax.Array,
    **arrays: jax.Array | None,
) -> FillOutput:
    """The candidates of the fill, given the arguments of `fill_input`. If rows are sharded, each
    device fills its own rows.
    """

    def propose(params: Params, rows: tuple[Any, ...]) -> FillOutput:
        state, *inputs, arrays = rows
        return state.rules.fill.propose(fill_input(program, params, state, *inputs, **arrays))

    # The old cache is not used again, so it can be overwritten in place.
    lean = state._replace(cache=None, records=None)
    rows = lean, output, context, is_open_BL, is_seen_BL, arrays
    return program.by_rows(propose)(params, rows)


def apply_renoise(program: Program, state: State) -> State:
    """The state after re-noise, before the forward pass."""
    renoise = state.rules.renoise
    assert renoise is not None
    banned = {*program.banned_ids, program.mask_id, program.pad_id, *program.eos_ids}

    def write(params: Params, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        renoise, chain, tokens_BL, *others = rows
        return renoise.write(
            tokens_BL,
            *others,
            mask_id=program.mask_id,
            space_id=program.space_id,
            is_text=lambda: writable_ids(program, chain, tokens_BL.shape[0], banned),
        )

    is_free_BL = state.is_free_BL & state.is_stepping_B[:, None]
    of_step = state.step_B, state.row.steps_B, step_keys(state, salt=RENOISE_SALT)[0]
    rows = renoise, state.rules.chain, state.canvas.tokens_BL, is_free_BL, *of_step
    new_BL, is_hit_BL = program.by_rows(write)(None, rows)
    return overwrite(state, is_hit_BL, new_BL, mask_id=program.mask_id)


def writable_ids(program: Program, chain: Chain, num_rows: int, banned: set[int]) -> jax.Array:
    """True ``[B, V]`` at ids that neither a row's biases nor `banned` exclude."""
    is_banned_BV = chain.banned(num_rows, program.network.vocab_size)
    return ~is_banned_BV.at[:, jnp.array(sorted(banned))].set(True, mode="drop")


def editable_positions(state: State) -> jax.Array:
    """True at positions that can be edited after this step."""
    edit, edits, canvas = state.rules.edit, state.edits, state.canvas
    assert edit is not None and edits is not None
    is_row_B = edit.is_active() & state.is_running_B
    is_row_B &= ~state.block.is_last_step_B | edits.warms_B
    num_positions = canvas.tokens_BL.shape[1]
    is_live_BL = live_positions(canvas.length_B, num_positions)
    return state.block.holds(num_positions) & is_row_B[:, None] & is_live_BL


def with_neighbors(is_true_BL: jax.Array) -> jax.Array:
    """True at each True position and at its direct neighbours."""
    return is_true_BL | left_of(is_true_BL, False) | right_of(is_true_BL, False)


def apply_edits(
    program: Program, params: Params, state: State, proposed: StepProposal
) -> tuple[State, PositionMap]:
    """The state after the edits, and the map of positions.

    Logits must have been read at all positions where edits are possible.
    """
    rule, past, block, filled = state.rules.edit, state.edits, state.block, proposed.filled
    assert rule is not None and past is not None and filled.total_BL is not None
    canvas, is_running_B = state.canvas, state.is_running_B
    is_open_BL = editable_positions(state) & filled.is_finite_B[:, None]
    own_BL, right_BL, *best_BL = read_logprobs(
        program,
        params,
        proposed.output,
        filled.total_BL,
        filled.best_BL,
        canvas.tokens_BL,
        with_neighbors(is_open_BL) & token_positions(state, mask_id=program.mask_id),
    )
    context = EditContext(
        tokens_BL=canvas.tokens_BL,
        frozen_BL=canvas.frozen_BL,
        inserted_BL=past.inserted_BL,
        mark_BL=past.mark_BL,
        length_B=canvas.length_B,
        own_BL=own_BL,
        right_BL=right_BL,
        is_open_BL=is_open_BL,
        step_B=state.step_B + state.is_stepping_B,
        steps_B=state.row.steps_B,
        capacity_B=past.capacity_B,
        target_B=past.target_B,
        mask_id=program.mask_id,
        space_id=program.space_id,
        preference_BL=proposed.commit.preference_BL,
        best_id_BL=filled.best_BL,
        best_BL=best_BL[0] if best_BL else None,
    )
    context = context._replace(gain=functools.partial(gain_of_edits, program, params, context))
    edits = rule.select(context, rule.score(context))
    position_map = position_map_of(edits, canvas.frozen_BL, canvas.length_B, past.capacity_B)
    tokens_BL = moved(position_map, canvas.tokens_BL, edits.token, program.pad_id)
    is_put_BL = position_map.is_new_BL & (tokens_BL != program.mask_id)
    committed_BL = moved(position_map, state.committed_BL, -1)
    moved_block = block._replace(
        begin_B=moved_boundary(position_map, block.begin_B),
        end_B=moved_boundary(position_map, block.end_B),
    )
    counters = Counters(
        forwards=edits.forwards_B,
        insertions=jnp.sum(position_map.is_new_BL, axis=1, dtype=jnp.int32),
        deletions=jnp.sum(edits.delete_BL, axis=1, dtype=jnp.int32),
        lost=(edits.refused_B + position_map.trimmed_B).astype(jnp.int32),
    )
    state = state._replace(
        canvas=Canvas(
            tokens_BL, position_map.length_B, moved(position_map, canvas.frozen_BL, False, True)
        ),
        block=choose(is_running_B, moved_block, block),
        logprob_BL=moved(position_map, state.logprob_BL, 0.0),
        committed_BL=jnp.where(is_put_BL, EDITED, committed_BL),
        rule_state=move_state(state.rules.commit, state.rule_state, position_map),
        remask_state=move_state(state.rules.remask, state.remask_state, position_map),
        edits=past._replace(
            inserted_BL=moved(position_map, past.inserted_BL, True, False),
            # A row that has ended retains the marks of its last edits.
            mark_BL=jnp.where(is_running_B[:, None], position_map.mark_BL, past.mark_BL),
            origin_BL=moved(position_map, past.origin_BL, -1),
            warms_B=jnp.zeros_like(past.warms_B),
        ),
        counters=state.counters.plus(counters),
    )
    return state, position_map
