"""One step of the denoising loop.

``step: re-noise -> forward -> transform logits -> propose -> commit -> edit -> remask``. Every
published sampler is a selection of rules for these slots. Edits and remasking run at the end of a
step, not at the start of the next step. The logits therefore need not be stored, and a row without
remasked tokens ends without another forward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.randomness import key_of, salted
from dlm_jax.sampling.blocks import choose, joined, next_block
from dlm_jax.sampling.cache.cache_policy import CacheState
from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    Proposal,
    RuleMemory,
    Standing,
    preferences,
    uniform,
)
from dlm_jax.sampling.edits.edit_rule import EditContext
from dlm_jax.sampling.edits.moves import (
    Cells,
    PositionMap,
    moved,
    moved_boundary,
    moved_cells,
    position_map_of,
)
from dlm_jax.sampling.edits.scores import take_snapshot
from dlm_jax.sampling.edits.trial import tried
from dlm_jax.sampling.forward import forward
from dlm_jax.sampling.positions import TrunkOutput, hidden, place_of_largest, returned
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.fill import CandidateWriter, Filled, FillRule, Reader, Wanted
from dlm_jax.sampling.remask.remask_rule import RemaskContext
from dlm_jax.sampling.remask.renoise import random_ids
from dlm_jax.sampling.row import TIES, Counters
from dlm_jax.sampling.state import EDITED, Records, State, start_remask_memory, work
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.transform import Context
from dlm_jax.types import Canvas, Params, Status, live_positions

_LOWER = TIES.code("lower")
RENOISE_SALT = 0x6E6F6973


class StepInputs(NamedTuple):
    """Inputs and candidates of a step, before the commit.

    Attributes:
      is_open_BL: True at positions that receive a candidate.
      is_read_BL: True at tokens to score for the remask rule: draft tokens, and the whole block if
        the rule `rereads`; None without a remask rule.
      commit: the context of the commit rule.
      context: the visible tokens, for logit transforms.
      output: the output of the trunk.
      cache: the cache after the forward pass; None without a cache.
      forwards_B: int32, number of forward passes for each row so far in this step.
      positions_B: int32, number of live positions computed by these passes; 0 without a cache.
      draw_key_B: key of each row for drawing the tokens of the step.
      remask_key_B: key of each row for the remask rule.
      filled: candidates and statistics of the fill.
    """

    is_open_BL: jax.Array
    is_read_BL: jax.Array | None
    commit: CommitContext
    context: Context
    output: TrunkOutput
    cache: CacheState | None
    forwards_B: jax.Array
    positions_B: jax.Array
    draw_key_B: jax.Array
    remask_key_B: jax.Array
    filled: Filled


def step(program: Program, params: Params, state: State) -> tuple[State, jax.Array]:
    """The state after one step of every running row, and the committed positions before edits.

    Rows that are not running remain bitwise unchanged. For a row whose draft is edited, the first
    call does not take a step: it only scores and edits the draft.
    """
    state = renoised(program, begun(program, state))
    return write(program, params, state, look(program, params, state))


def look(program: Program, params: Params, state: State) -> StepInputs:
    """The forward pass of a step, and candidates for the open positions. The state is unchanged."""
    draw_key_B, rule_key_B, remask_key_B = step_keys(state)
    commit = commit_context(program, state, rule_key_B)
    is_open_BL = open_positions(program, state, commit)
    is_read_BL, is_scored_BL, own_BL = scored_positions(program, state, is_open_BL)
    context = visible_context(program, state)
    output, cache, forwards_B, positions_B = forward(program, params, state, is_open_BL)
    commit = commit._replace(attention_BLL=output.attention_BLL)
    # The old cache is not used again, so it can be overwritten in place.
    rows = (
        state._replace(cache=None, records=None),
        output,
        is_open_BL,
        is_scored_BL,
        own_BL,
        context,
        draw_key_B,
    )
    filled = _propose(program, params, (*rows, commit.preference_BL))
    if state.rules.commit.reads_head:
        wrong_BL, extra_B = _wrong_by_head(
            program, params, state, output, filled.proposal.tokens_BL, is_open_BL
        )
        is_known_B = jnp.all(jnp.isfinite(wrong_BL) | ~is_open_BL, axis=1)
        filled = filled._replace(is_finite_B=filled.is_finite_B & is_known_B)
        commit, forwards_B = commit._replace(wrong_BL=wrong_BL), forwards_B + extra_B
    return StepInputs(
        is_open_BL=is_open_BL, is_read_BL=is_read_BL, commit=commit, context=context,
        output=output, cache=cache, forwards_B=forwards_B, positions_B=positions_B,
        draw_key_B=draw_key_B, remask_key_B=remask_key_B, filled=filled,
    )  # fmt: skip


def write(
    program: Program, params: Params, state: State, inputs: StepInputs
) -> tuple[State, jax.Array]:
    """The state after one step, and the committed positions before edits."""
    rules, is_finite_B, steps_B = state.rules, inputs.filled.is_finite_B, is_stepping(state)
    goes_on_B = steps_B & is_finite_B & ~state.block.is_last_step_B
    is_candidate_BL = inputs.is_open_BL & (state.canvas.tokens_BL == program.mask_id)
    candidate_BL = jnp.where(is_candidate_BL, inputs.filled.proposal.tokens_BL, -1)
    is_hole_BL = inputs.commit.is_hole_BL

    # Commit.
    step_B, seen = state.step_B, with_memory(state, inputs)
    state, is_committed_BL = committed(program, state, inputs, goes_on_B)
    state = _renewed(program, state, inputs, is_committed_BL)
    is_fresh_BL = is_committed_BL
    choice_B = None
    if state.records is not None:
        # The last step of a block fills every hole.
        chance_B = rules.commit.log_chance(seen, inputs.filled.proposal, is_committed_BL)
        choice_B = jnp.where(state.block.is_last_step_B, 0.0, chance_B)

    # Edit.
    if rules.edit is not None:
        state, position_map = edited(program, params, state, inputs)
        candidate_BL = moved(position_map, candidate_BL, -1)
        is_hole_BL = moved(position_map, is_hole_BL, False)
        is_fresh_BL = moved(position_map, is_committed_BL, False)
    commit = inputs.commit._replace(is_hole_BL=is_hole_BL)

    # Remask.
    if rules.remask is not None:
        is_free_BL = is_free(state)
        tokens_BL = state.canvas.tokens_BL
        context = RemaskContext(
            step=commit,
            is_open_BL=is_free_BL & (tokens_BL != program.mask_id) & goes_on_B[:, None],
            is_fresh_BL=is_fresh_BL,
            num_free_B=jnp.sum(is_free_BL, axis=1),
            logprob_BL=state.logprob_BL,
            wrong_BL=_wrongness(program, params, state, candidate_BL, goes_on_B),
            key_B=inputs.remask_key_B,
            memory=state.remask_memory,
        )
        chosen_BL = returned(
            rules.remask.select(context), rules.remask, "select", "B, L", tokens_BL.shape, bool
        )
        chosen_BL &= context.is_open_BL
        if choice_B is not None:
            choice_B += rules.remask.log_chance(context, chosen_BL)
        state = _with_remask_memory(state, rules.remask.remember(context, chosen_BL), steps_B)
        state = remasked(program, state, chosen_BL)

    if state.records is not None and choice_B is not None:
        new = _seen(rules.commit, inputs, is_committed_BL, choice_B)
        state = state._replace(records=state.records.with_step(step_B, steps_B, new))

    # End of the step, the block and the row.
    still_B = jnp.zeros_like(steps_B)
    if rules.commit.rewrites:
        state, still_B = _settled(state, commit, is_fresh_BL, steps_B)
    return _ended(program, state, steps_B, is_finite_B, still_B), is_committed_BL


def _seen(
    commit: CommitRule, inputs: StepInputs, is_committed_BL: jax.Array, choice_B: jax.Array
) -> Records:
    """The records of one step, ``[B, L]`` and ``[B]``."""
    filled, is_open_BL = inputs.filled, inputs.is_open_BL & inputs.filled.is_finite_B[:, None]
    drawn, proposal = filled.drawn, filled.proposal
    shown_BL = commit.shown(proposal.confidence_BL)
    assert drawn is not None, "the program is traced"

    def at_open(x_BL: jax.Array) -> jax.Array:
        return jnp.where(is_open_BL, x_BL, jnp.zeros((), x_BL.dtype))

    return Records(
        inputs.context.tokens_BL, jnp.where(is_open_BL, proposal.tokens_BL, -1), is_committed_BL,
        at_open(drawn.logprob_BL), at_open(drawn.entropy_BL), at_open(shown_BL),
        drawn.level_BL, choice_B,
    )  # fmt: skip


def is_stepping(state: State) -> jax.Array:
    """True ``[B]`` for rows that take a step; False for rows that are only scored or have ended."""
    if state.edits is None:
        return state.is_running_B
    return state.is_running_B & ~state.edits.warms_B


def is_free(state: State) -> jax.Array:
    """True at the unfrozen positions of the current block."""
    canvas = state.canvas
    return state.block.holds(canvas.tokens_BL.shape[1]) & ~canvas.frozen_BL


def is_token(program: Program, state: State) -> jax.Array:
    """True at live tokens that are not holes."""
    tokens_BL = state.canvas.tokens_BL
    is_live_BL = live_positions(state.canvas.length_B, tokens_BL.shape[1])
    return is_live_BL & (tokens_BL != program.mask_id)


def commit_context(program: Program, state: State, key_B: jax.Array) -> CommitContext:
    """The context of the commit rule at the start of a step."""
    tokens_BL, block, rules = state.canvas.tokens_BL, state.block, state.rules
    is_visible_BL = is_token(program, state)
    is_free_BL = is_free(state) & is_stepping(state)[:, None]
    is_closed_BL = is_visible_BL & ~state.row.resamples_B[:, None]
    if rules.commit.renews:
        is_closed_BL = jnp.zeros_like(is_visible_BL)
    written_BL = None
    if rules.commit.rewrites:
        written_BL = jnp.where(is_free_BL & is_visible_BL, tokens_BL, -1)
    return CommitContext(
        is_hole_BL=is_free_BL & ~is_closed_BL,
        first_holes_B=block.first_holes_B,
        step_B=block.step_B,
        steps_B=block.steps_B,
        key_B=key_B,
        is_token_BL=is_visible_BL,
        written_BL=written_BL,
        preference_BL=preferences(key_B, state.row.ties_B == _LOWER, tokens_BL.shape[1]),
        memory=state.memory,
        standing=standing(program, state, key_B) if rules.commit.renews else None,
    )


def standing(program: Program, state: State, key_B: jax.Array) -> Standing:
    """The current canvas, and uniform noise over the ids that can be written in each row."""
    eos_ids = set(program.eos_ids)
    banned = ({*program.banned_ids, program.pad_id} - eos_ids) | {program.mask_id}

    def of_rows(params: Params, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        chain, tokens_BL, key_B = rows
        num_rows, num_positions = tokens_BL.shape
        is_text_BV = ~chain.banned(num_rows, program.network.vocab_size)
        is_text_BV = is_text_BV.at[:, jnp.array(sorted(banned))].set(False, mode="drop")
        random_BL = random_ids(is_text_BV, uniform(key_B, num_positions), program.mask_id)
        is_noise_BL = jnp.take_along_axis(is_text_BV, tokens_BL, axis=1)
        return is_noise_BL, random_BL, jnp.sum(is_text_BV, axis=1, dtype=jnp.int32)

    tokens_BL = state.canvas.tokens_BL
    is_noise_BL, random_BL, num_ids_B = program.by_rows(of_rows)(
        None, (state.rules.chain, tokens_BL, salted(key_B, RENOISE_SALT))
    )
    is_mask_BL = tokens_BL == program.mask_id
    return Standing(tokens_BL, is_mask_BL, is_noise_BL, random_BL, num_ids_B, program.mask_id)


def begun(program: Program, state: State) -> State:
    """Fills the holes of starting rows with the initial tokens of the commit rule, if it renews."""
    rule = state.rules.commit
    if not rule.renews:
        return state
    key_B = step_keys(state, salt=RENOISE_SALT)[1]
    is_new_BL = ((state.step_B == 0) & state.is_running_B)[:, None] & ~state.canvas.frozen_BL
    is_new_BL &= state.canvas.tokens_BL == program.mask_id

    def first() -> jax.Array:
        tokens_BL = rule.begin(standing(program, state, key_B), key_B)
        return returned(tokens_BL, rule, "begin", "B, L", is_new_BL.shape, jnp.int32)

    new_BL = jax.lax.cond(jnp.any(is_new_BL), first, lambda: state.canvas.tokens_BL)
    return overwritten(program, state, is_new_BL & (new_BL != state.canvas.tokens_BL), new_BL)


def _renewed(
    program: Program, state: State, inputs: StepInputs, is_committed_BL: jax.Array
) -> State:
    """Writes the tokens of a rule that renews at the open positions that it did not select."""
    rule, filled = state.rules.commit, inputs.filled
    if not rule.renews:
        return state
    others_BL = inputs.is_open_BL & ~is_committed_BL & filled.is_finite_B[:, None]
    new_BL = rule.renewed(with_memory(state, inputs), filled.proposal)
    new_BL = returned(new_BL, rule, "renewed", "B, L", others_BL.shape, jnp.int32)
    return overwritten(program, state, others_BL & (new_BL != state.canvas.tokens_BL), new_BL)


def overwritten(
    program: Program, state: State, is_at_BL: jax.Array, new_BL: jax.Array | int
) -> State:
    """The state with tokens that are not candidates, such as MASK, at some positions."""
    put_BL = jnp.where(new_BL == program.mask_id, -1, EDITED)
    tokens_BL = jnp.where(is_at_BL, new_BL, state.canvas.tokens_BL)
    return state._replace(
        canvas=state.canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_at_BL, 0.0, state.logprob_BL),
        committed_BL=jnp.where(is_at_BL, put_BL, state.committed_BL),
    )


def open_positions(program: Program, state: State, commit: CommitContext) -> jax.Array:
    """True at positions that receive a candidate. At the last step of a block, these include all
    holes.
    """
    is_last_BL = state.block.is_last_step_B[:, None] & ~is_token(program, state)
    rule, shape = state.rules.commit, is_last_BL.shape
    may_BL = returned(rule.eligible(commit), rule, "eligible", "B, L", shape, bool)
    is_open_BL = commit.is_hole_BL & (may_BL | is_last_BL)
    return is_open_BL if commit.written_BL is None else is_open_BL | (commit.written_BL >= 0)


def scored_positions(
    program: Program, state: State, is_open_BL: jax.Array
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Positions whose logits are read for remasking and edits, in addition to the open positions.

    Returns three arrays: True at tokens that a remask rule scores (draft tokens, and the whole
    block if the rule `rereads`); True where edits read logits; and the int32 tokens to score for
    both purposes, -1 elsewhere. An array that is not needed is None.
    """
    rules, tokens_BL, is_visible_BL = state.rules, state.canvas.tokens_BL, is_token(program, state)
    own_BL = is_read_BL = is_scored_BL = None
    if rules.remask is not None:
        is_free_BL = is_free(state) & is_stepping(state)[:, None]
        is_wanted_BL = is_free_BL & is_visible_BL
        if not rules.remask.rereads:
            is_wanted_BL = is_wanted_BL & (state.committed_BL < 0)
        is_wanted_BL = is_wanted_BL & ~is_open_BL
        is_read_BL = is_wanted_BL & rules.remask.is_active()[:, None]
        is_read_BL &= ~state.block.is_last_step_B[:, None]
        own_BL = jnp.where(is_read_BL, tokens_BL, -1)
    if rules.edit is not None:
        is_live_BL = live_positions(state.canvas.length_B, tokens_BL.shape[1])
        is_scored_BL = beside(may_edit(state)) & is_live_BL
        is_own_BL = is_scored_BL & is_visible_BL & ~is_open_BL
        own_BL = jnp.where(is_own_BL, tokens_BL, -1 if own_BL is None else own_BL)
    return is_read_BL, is_scored_BL, own_BL


def may_edit(state: State) -> jax.Array:
    """True at positions that can be edited after this step."""
    edit, edits, canvas = state.rules.edit, state.edits, state.canvas
    assert edit is not None and edits is not None
    is_row_B = edit.is_active() & state.is_running_B
    is_row_B &= ~state.block.is_last_step_B | edits.warms_B
    num_positions = canvas.tokens_BL.shape[1]
    is_live_BL = live_positions(canvas.length_B, num_positions)
    return state.block.holds(num_positions) & is_row_B[:, None] & is_live_BL


def beside(is_true_BL: jax.Array) -> jax.Array:
    """True at each True position and at its direct neighbours."""
    padded = jnp.pad(is_true_BL, ((0, 0), (1, 1)))
    return is_true_BL | padded[:, :-2] | padded[:, 2:]


def visible_context(program: Program, state: State) -> Context:
    """The visible canvas, as read by logit transforms."""
    return Context(
        tokens_BL=state.canvas.tokens_BL,
        order_BL=state.committed_BL,
        is_visible_BL=is_token(program, state) & (state.committed_BL != EDITED),
        length_B=state.canvas.length_B,
    )


def step_keys(state: State, *, salt: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row's keys for drawing tokens, for the commit rule and for the remask rule.

    The keys are derived from the row's seed and step. A different salt gives different keys.
    """

    def one_row(seed: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        key = jax.random.fold_in(key_of(seed), step)
        key = key if salt is None else jax.random.fold_in(key, salt)
        draw_key, rule_key, remask_key = jax.random.split(key, 3)
        return draw_key, rule_key, remask_key

    return jax.vmap(one_row)(state.row.seed_B, state.step_B)


def chain_now(state: State) -> Chain:
    """The chain with the parameters of the next step of each row."""
    step_B, span_B = state.step_B, state.span_B
    if state.rules.commit.renews:  # each block starts from noise, so its own steps count
        step_B, span_B = state.block.step_B, state.block.steps_B
    share_B = step_B.astype(jnp.float32) / jnp.maximum(span_B - 1, 1)
    return state.rules.chain.at_progress(jnp.minimum(share_B, 1.0))


def renoised(program: Program, state: State) -> State:
    """The state after re-noise, before the forward pass."""
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
    new_BL, is_hit_BL = program.by_rows(of_rows)(None, rows)
    return overwritten(program, state, is_hit_BL, new_BL)


def _propose(program: Program, params: Params, rows: tuple[Any, ...]) -> Filled:
    """Proposes candidates. If rows are sharded, each device fills its own rows."""

    def of_rows(params: Params, rows: tuple[Any, ...]) -> Filled:
        state, output, is_open_BL, is_scored_BL, own_BL, context, key_B, preference_BL = rows
        chain, commit, edit = chain_now(state), state.rules.commit, state.rules.edit
        kept, signal = state.memory.places, program.network.signal

        def measure(logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
            sure_N = commit.measure(logits_NV, logprob_N)
            return returned(sure_N, commit, "measure", "N", logprob_N.shape, jnp.float32)

        writer = CandidateWriter(
            chain=chain,
            prepared=chain.prepare(state.chain_state, context),
            key_B=key_B,
            own_BL=own_BL,
            num_positions=is_open_BL.shape[1],
            measure=measure,
            method=program.draw,
            banned_ids=program.banned_ids,
            weighed=commit.weighed,
            observe=None if kept is None else commit.observe,
            kept=kept,
            standing_BL=state.canvas.tokens_BL if commit.renews else None,
            signal=None if signal is None else functools.partial(signal, params),
        )
        is_seen_BL = is_token(program, state)
        if commit.renews:  # the blocks behind the current one are noise
            place_1L = jnp.arange(is_open_BL.shape[1])[None]
            is_seen_BL &= state.canvas.frozen_BL | (place_1L < state.block.begin_B[:, None])
        wanted = Wanted(
            is_open_BL=is_open_BL,
            is_seen_BL=is_seen_BL,
            tokens_BL=context.tokens_BL,
            length_B=context.length_B,
            is_scored_BL=is_scored_BL,
            keeps_best=edit is not None and edit.reads_likeliest,
            preference_BL=preference_BL,
            kept=kept,
            is_given_BL=state.canvas.frozen_BL,
            is_traced=program.num_traced > 0,
            signal_BLD=state.signal_BLD,
        )
        # The number of open positions is at most the number of hidden vectors.
        chunk = min(program.chunk, output.num_vectors)
        reader = Reader(program.network, params, output, chunk)
        filled = state.rules.fill.propose(reader, writer, wanted)
        return _checked(state.rules.fill, filled, is_open_BL.shape)

    return program.by_rows(of_rows)(params, rows)


def _checked(fill: FillRule, filled: Filled, shape: tuple[int, ...]) -> Filled:
    """Returns the output of a fill after checking shapes and dtypes. Errors name the fill."""
    kinds = Proposal(jnp.int32, *[jnp.float32] * 3)
    for name, value, kind in zip(Proposal._fields, filled.proposal, kinds, strict=True):
        returned(value, fill, f"propose(...).proposal.{name}", "B, L", shape, kind)
    returned(filled.is_finite_B, fill, "propose(...).is_finite_B", "B", shape[:1], bool)
    return filled


def with_memory(state: State, inputs: StepInputs) -> CommitContext:
    """The context of the commit rule with the observations of this step."""
    return inputs.commit._replace(memory=state.memory._replace(places=inputs.filled.kept))


def committed(
    program: Program, state: State, inputs: StepInputs, goes_on_B: jax.Array
) -> tuple[State, jax.Array]:
    """The state after the commits, and the committed positions. This function ends no row."""
    rules, filled, tokens_BL = state.rules, inputs.filled, state.canvas.tokens_BL
    context = with_memory(state, inputs)
    memory = context.memory
    chosen_BL = returned(
        rules.commit.select(context, filled.proposal), rules.commit, "select", "B, L",
        tokens_BL.shape, bool,
    )  # fmt: skip
    chosen_BL |= (tokens_BL == program.mask_id) & state.block.is_last_step_B[:, None]
    is_committed_BL = inputs.is_open_BL & chosen_BL & filled.is_finite_B[:, None]
    if memory.rows is not None:
        rows = rules.commit.remember(context, filled.proposal, is_committed_BL)
        _require_memory(rows, memory.rows, rules.commit)
        memory = memory._replace(rows=choose(is_stepping(state), rows, memory.rows))
    is_scored_BL = is_committed_BL
    if inputs.is_read_BL is not None:
        is_scored_BL |= inputs.is_read_BL
    forwards_B, positions_B = inputs.forwards_B + rules.fill.forwards, inputs.positions_B
    if rules.remask is not None and rules.remask.reads_head:
        asks_B = goes_on_B & rules.remask.is_active()
        forwards_B += asks_B
        if rules.cache is not None:
            positions_B += asks_B * state.canvas.length_B
    counters = Counters(
        forwards=state.is_running_B * forwards_B,
        positions=state.is_running_B * positions_B,
        filled=jnp.sum(inputs.is_open_BL, axis=1),
        **filled.counts,
    )
    tokens_BL = jnp.where(is_committed_BL, filled.proposal.tokens_BL, tokens_BL)
    return state._replace(
        canvas=state.canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_scored_BL, filled.proposal.logprob_BL, state.logprob_BL),
        committed_BL=jnp.where(is_committed_BL, state.step_B[:, None], state.committed_BL),
        chain_state=rules.chain.update(state.chain_state, is_committed_BL, filled.proposal),
        cache=inputs.cache,
        counters=state.counters.plus(counters),
        memory=memory,
        signal_BLD=filled.signal_BLD,
    ), is_committed_BL


def _require_memory(new: Any, before: Any, rule: Any, what: str = "the per-row arrays") -> None:
    """Raises ValueError if `remember` returns another structure than `start_memory`."""
    found, kept = jax.tree.structure(new), jax.tree.structure(before)
    if found != kept:
        raise ValueError(
            f"{type(rule).__name__}.remember returned {found}; return {what} of "
            f"start_memory, {kept}"
        )


def _with_remask_memory(state: State, new: RuleMemory, steps_B: jax.Array) -> State:
    """The state with the memory that the remask rule returned, in the rows that take a step."""
    old = state.remask_memory
    _require_memory(new, old, state.rules.remask, "the arrays")
    return state._replace(remask_memory=choose(steps_B, new, old))


def _moved_memory(memory: RuleMemory, start: RuleMemory, position_map: PositionMap) -> RuleMemory:
    """The memory of a rule, moved to the new positions; as at the `start` at inserted ones."""

    def one(x: jax.Array, fresh: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], -1)
        move = jax.vmap(moved, in_axes=(None, 2, 2), out_axes=2)
        return move(position_map, x.reshape(shape), fresh.reshape(shape)).reshape(x.shape)

    return memory._replace(places=jax.tree.map(one, memory.places, start.places))


def edited(
    program: Program, params: Params, state: State, inputs: StepInputs
) -> tuple[State, PositionMap]:
    """The state after the edits, and the map of positions.

    Logits must have been read at all positions where edits are possible.
    """
    rule, past, block, filled = state.rules.edit, state.edits, state.block, inputs.filled
    assert rule is not None and past is not None and filled.total_BL is not None
    may_edit_BL = may_edit(state) & filled.is_finite_B[:, None]
    before = Cells(state.canvas.tokens_BL, state.canvas.frozen_BL, past.inserted_BL, past.mark_BL,
                   state.canvas.length_B)  # fmt: skip
    snapshot = take_snapshot(
        program, params, inputs.output, filled.total_BL, filled.best_BL, before.tokens_BL,
        beside(may_edit_BL) & is_token(program, state),
    )  # fmt: skip
    context = EditContext(
        cells=before,
        snapshot=snapshot,
        is_open_BL=may_edit_BL,
        step_B=state.step_B + is_stepping(state),
        steps_B=state.row.steps_B,
        capacity_B=past.capacity_B,
        target_B=past.target_B,
        mask_id=program.mask_id,
        space_id=program.space_id,
        preference_BL=inputs.commit.preference_BL,
    )
    trial_forwards_B = jnp.zeros_like(state.step_B)
    if rule.num_trials:
        found, trial_forwards_B = tried(program, params, context, rule)
        context = context._replace(tried=found)
    edits = rule.select(context)
    for name in ("insert_gap_BL", "delete_BL"):
        value = getattr(edits, name)
        returned(value, rule, f"select(...).{name}", "B, L", may_edit_BL.shape, bool)
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
    is_running_B = state.is_running_B
    state = state._replace(
        canvas=Canvas(after.tokens_BL, after.length_B, after.frozen_BL),
        block=choose(is_running_B, moved_block, block),
        logprob_BL=moved(position_map, state.logprob_BL, 0.0),
        committed_BL=jnp.where(is_put_BL, EDITED, committed_BL),
        memory=_moved_memory(
            state.memory, state.rules.commit.start_memory(*before.tokens_BL.shape), position_map
        ),
        remask_memory=_moved_memory(
            state.remask_memory, start_remask_memory(state.rules, before.tokens_BL), position_map
        ),
        edits=past._replace(
            inserted_BL=after.inserted_BL,
            # A row that has ended retains the marks of its last edits.
            mark_BL=jnp.where(is_running_B[:, None], after.mark_BL, past.mark_BL),
            origin_BL=moved(position_map, past.origin_BL, -1),
            warms_B=jnp.zeros_like(past.warms_B),
        ),
        counters=state.counters.plus(
            Counters(
                forwards=trial_forwards_B,
                insertions=jnp.sum(position_map.is_new_BL, axis=1, dtype=jnp.int32),
                deletions=jnp.sum(edits.delete_BL, axis=1, dtype=jnp.int32),
                lost=(edits.refused_B + position_map.trimmed_B).astype(jnp.int32),
            )
        ),
    )
    return state, position_map


def remasked(program: Program, state: State, is_remasked_BL: jax.Array) -> State:
    """Remasks the selected tokens."""
    state = overwritten(program, state, is_remasked_BL, program.mask_id)

    def forgotten(kept: jax.Array, fresh: jax.Array) -> jax.Array:
        is_fresh = is_remasked_BL.reshape(*is_remasked_BL.shape, *[1] * (kept.ndim - 2))
        return jnp.where(is_fresh, fresh, kept)

    def without(memory: RuleMemory, start: RuleMemory) -> RuleMemory:
        return memory._replace(places=jax.tree.map(forgotten, memory.places, start.places))

    start = state.rules.commit.start_memory(*is_remasked_BL.shape)
    start_remask = start_remask_memory(state.rules, is_remasked_BL)
    return state._replace(
        memory=without(state.memory, start),
        remask_memory=without(state.remask_memory, start_remask),
    )


def _wrongness(
    program: Program, params: Params, state: State, candidate_BL: jax.Array, goes_on_B: jax.Array
) -> jax.Array | None:
    """The sigmoid of the head that the remask rule reads, for the canvas with the step's candidates
    in its holes; None if the rule reads no head.
    """
    remask = state.rules.remask
    if remask is None or not remask.reads_head:
        return None
    tokens_BL = state.canvas.tokens_BL
    is_filled_BL = (candidate_BL >= 0) & (tokens_BL == program.mask_id)
    filled_BL = jnp.where(is_filled_BL, candidate_BL, tokens_BL)

    def ask() -> jax.Array:
        hidden_BLD = hidden(program.network, params, filled_BL, state.canvas.length_B)
        return _head_sigmoid(program, params, remask.reads_head, hidden_BLD)

    nothing_BL = jnp.zeros(filled_BL.shape, jnp.float32)
    return jax.lax.cond(jnp.any(goes_on_B & remask.is_active()), ask, lambda: nothing_BL)


def _wrong_by_head(
    program: Program,
    params: Params,
    state: State,
    output: TrunkOutput,
    candidate_BL: jax.Array,
    is_open_BL: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The sigmoid of the head that the commit rule reads, and True ``[B]`` for rows that require
    another forward pass, which reads the candidates at MASK.
    """
    tokens_BL, length_B = state.canvas.tokens_BL, state.canvas.length_B
    is_filled_BL = is_open_BL & (tokens_BL == program.mask_id)
    extra_B = jnp.any(is_filled_BL, axis=1) & is_stepping(state)
    filled_BL = jnp.where(is_filled_BL, candidate_BL, tokens_BL)
    hidden_BLD = jax.lax.cond(
        jnp.any(extra_B),
        lambda: hidden(program.network, params, filled_BL, length_B),
        lambda: output.hidden_BLD,
    )
    hidden_BLD = jnp.where(extra_B[:, None, None], hidden_BLD, output.hidden_BLD)
    return _head_sigmoid(program, params, state.rules.commit.reads_head, hidden_BLD), extra_B


def _head_sigmoid(program: Program, params: Params, name: str, hidden_BLD: jax.Array) -> jax.Array:
    """The sigmoid of a head at every position, ``[B, L]``."""
    logit_P = returned(
        program.network.heads[name](params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1])),
        program.network, name, "N", (hidden_BLD.shape[0] * hidden_BLD.shape[1],), jnp.float32,
    )  # fmt: skip
    return jax.nn.sigmoid(logit_P).reshape(hidden_BLD.shape[:2])


def _settled(
    state: State, commit: CommitContext, is_committed_BL: jax.Array, steps_B: jax.Array
) -> tuple[State, jax.Array]:
    """The state with updated counts of steps without holes, and True ``[B]`` for rows that still
    rewrite their block.
    """
    assert commit.written_BL is not None, "the rule rewrites"
    had_holes_B = jnp.any(commit.is_hole_BL, axis=1)
    changed_B = jnp.any(is_committed_BL & (commit.written_BL >= 0), axis=1)
    settled_B = jnp.where(had_holes_B, 0, state.block.settled_B + steps_B)
    state = state._replace(block=state.block._replace(settled_B=settled_B))
    return state, (had_holes_B | changed_B) & (settled_B < state.rules.commit.patience())


def _ended(
    program: Program, state: State, steps_B: jax.Array, is_finite_B: jax.Array, still_B: jax.Array
) -> State:
    """Finishes a step: counts it, advances blocks, and ends rows.

    A block without holes remains current where `still_B` is True, except after its last step.
    """
    canvas, block = state.canvas, state.block
    is_hole_BL = (canvas.tokens_BL == program.mask_id) & ~canvas.frozen_BL
    left_B = jnp.sum(is_hole_BL & block.holds(is_hole_BL.shape[1]), axis=1)
    goes_on_B = state.rules.goes_on(state.row.resamples_B) | still_B
    goes_on_B &= ~block.is_last_step_B
    finished_B = state.rules.commit.finished(state.memory)
    if finished_B is not None:
        goes_on_B &= ~finished_B
    is_over_B = steps_B & is_finite_B & (left_B == 0) & ~goes_on_B
    refines_B = state.rules.refines(state.row.resamples_B)
    is_work_BL = work(canvas, refines_B, mask_id=program.mask_id)
    following, has_more_B = next_block(
        block, is_work_BL, is_hole_BL, state.row.block_length_B, state.row.steps_B
    )
    again = block._replace(step_B=block.step_B + steps_B)
    again = joined(again, is_hole_BL, ~canvas.frozen_BL, state.row)
    behind_B = jnp.where(is_over_B, block.end_B, again.begin_B)
    is_whole_B = steps_B & is_finite_B & state.row.stops_at_eos_B
    is_whole_B &= _has_eos(program, canvas, _stays(state, is_hole_BL, behind_B))
    is_done_B = (is_over_B & ~has_more_B) | is_whole_B
    is_full_B = state.counters.lost > 0
    step_B = state.step_B + steps_B
    status_B = jnp.full_like(step_B, Status.RUNNING)
    for ends_B, status in (
        (step_B >= state.row.steps_B, Status.STEP_LIMIT),
        (is_done_B, Status.DONE),
        (is_done_B & is_full_B, Status.CANVAS_FULL),
        (~is_finite_B, Status.NON_FINITE),
    ):
        status_B = jnp.where(ends_B, status, status_B)
    status_B = jnp.where(state.is_running_B, status_B, state.status_B)
    is_next_B = is_over_B & ~is_done_B
    block = choose(is_next_B, following, choose(steps_B, again, block))
    return state._replace(step_B=step_B, block=block, status_B=status_B)


def _stays(state: State, is_hole_BL: jax.Array, behind_B: jax.Array) -> jax.Array:
    """The length of each row's prefix of final tokens.

    The prefix ends at the first hole. In rows whose tokens can be rewritten, tokens become final
    when their block ends.
    """
    place_B = place_of_largest(is_hole_BL)
    first_hole_B = jnp.where(jnp.any(is_hole_BL, axis=1), place_B, state.canvas.length_B)
    changes_B = state.rules.refines(state.row.resamples_B) | state.rules.commit.rewrites
    return jnp.where(changes_B, behind_B, first_hole_B)


def _has_eos(program: Program, canvas: Canvas, end_B: jax.Array) -> jax.Array:
    """True for rows with a generated EOS before `end_B` and no given token after this EOS."""
    num_positions = canvas.tokens_BL.shape[1]
    place_1L = jnp.arange(num_positions)[None]
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, num_positions)
    last_given_B1 = jnp.max(jnp.where(is_given_BL, place_1L, -1), axis=1, keepdims=True)
    is_before_BL = (place_1L > last_given_B1) & (place_1L < end_B[:, None])
    is_eos_BL = jnp.isin(canvas.tokens_BL, jnp.array(program.eos_ids, jnp.int32))
    return jnp.any(is_before_BL & is_eos_BL, axis=1)
