"""The per-row state of the denoising loop, its records, and the state before the first step.

The state of a commit, remask or noise rule is any pytree that the rule's ``init(num_rows,
num_positions)`` returns. A leaf ``[B, L, ...]`` belongs to the positions: `score` reads and updates
it where logits are read, edits move it, and remasking resets it. Every other leaf belongs to the
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.randomness import key_of
from dlm_jax.sampling.commit.commit_rule import preferences
from dlm_jax.sampling.edits.edit_rule import EditState, start_edits
from dlm_jax.sampling.edits.moves import PositionMap, moved
from dlm_jax.sampling.kv_cache import CacheState
from dlm_jax.sampling.noise import NoiseRule
from dlm_jax.sampling.positions import (
    CurrentBlock,
    belongs_to_positions,
    choose,
    first_block,
    next_block,
    place_of_largest,
)
from dlm_jax.sampling.program import TIES, Counters, Program, RowParams
from dlm_jax.sampling.propose.fill import FillOutput
from dlm_jax.sampling.rules import Rules
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.transform import Context
from dlm_jax.types import Canvas, Status, first_eos, live_positions

EDITED = -2
"""Value used instead of a step number for tokens written by an edit or re-noise."""


class State(NamedTuple):
    """The state of the rows in the denoising loop."""

    canvas: Canvas
    # float32 log-probability in nats of each committed token under the clean logits it was drawn
    # from; 0 elsewhere. If the remask rule reads it, also that of draft tokens in the last forward.
    logprob_BL: jax.Array
    # int32, the step that committed each token, counted from 0; -1 at given tokens, holes and draft
    # tokens; `EDITED` at tokens written by an edit or re-noise.
    committed_BL: jax.Array
    row: RowParams
    rules: Rules
    chain_state: Any  # of the logit transforms that have a memory
    block: CurrentBlock
    edits: EditState | None  # None without an edit rule
    cache: CacheState | None  # None without a KV cache
    counters: Counters
    step_B: jax.Array  # int32, number of steps taken
    status_B: jax.Array  # int32, a `Status`
    rule_state: Any = ()  # of the commit or noise rule
    remask_state: Any = ()
    records: dict[str, jax.Array] | None = None  # the arrays of `dlm_jax.Trace` by step, if traced
    # Self-conditioning signal at the positions whose logits the previous step of the same block
    # read, outdated elsewhere; None for a network without a signal.
    signal_BLD: jax.Array | None = None

    @property
    def is_running_B(self) -> jax.Array:
        """True for rows that have not ended."""
        return self.status_B == Status.RUNNING

    @property
    def is_stepping_B(self) -> jax.Array:
        """True for rows that take a step; False for rows that are only scored or have ended."""
        if self.edits is None:
            return self.is_running_B
        return self.is_running_B & ~self.edits.warms_B

    @property
    def is_free_BL(self) -> jax.Array:
        """True at the unfrozen positions of the current block."""
        return self.block.holds(self.canvas.tokens_BL.shape[1]) & ~self.canvas.frozen_BL


def start(
    tokens_BL: jax.Array,
    length_B: jax.Array,
    row: RowParams,
    rules: Rules,
    *,
    mask_id: int,
    frozen_BL: jax.Array | None = None,
    num_traced: int = 0,
) -> State:
    """State before the first step: live MASK tokens are holes, and other live tokens are frozen.

    With `frozen_BL`, only the tokens at these positions are frozen; all others are a draft. A
    length of 0 marks an idle slot. At most `num_traced` steps per row are recorded.
    """
    num_rows = tokens_BL.shape[0]
    zeros_B, is_mask_BL = jnp.zeros(num_rows, jnp.int32), tokens_BL == mask_id
    is_free_BL = is_mask_BL if frozen_BL is None else is_mask_BL | ~frozen_BL
    is_free_BL &= live_positions(length_B, tokens_BL.shape[1])
    canvas = Canvas(tokens_BL, length_B, ~is_free_BL)
    is_hole_BL = is_free_BL & is_mask_BL
    is_work_BL = is_free_BL & (is_hole_BL | refines(rules, row)[:, None])
    first_B = place_of_largest(is_free_BL)
    if row.block_unit:
        first_B = first_B // row.block_unit * row.block_unit
    block, is_any_B = first_block(is_work_BL, is_hole_BL, first_B, row.block_length_B, row.steps_B)
    edit = rules.edit
    state = State(
        canvas=canvas,
        logprob_BL=jnp.zeros(tokens_BL.shape, jnp.float32),
        committed_BL=jnp.full(tokens_BL.shape, -1, jnp.int32),
        row=row,
        rules=rules,
        chain_state=(),
        block=block,
        edits=None if edit is None else start_edits(edit, canvas, row, mask_id=mask_id),
        cache=None if rules.cache is None else CacheState((), (), jnp.zeros(num_rows, jnp.int32)),
        counters=Counters(*[zeros_B for _ in Counters._fields]),
        step_B=zeros_B,
        status_B=jnp.where(is_any_B, Status.RUNNING, Status.DONE).astype(jnp.int32),
        rule_state=rules.commit.init(*tokens_BL.shape),
        remask_state=() if rules.remask is None else rules.remask.init(*tokens_BL.shape),
        records=start_records(tokens_BL, num_traced) if num_traced else None,
    )
    chain_state = rules.chain.start(visible_context(state, mask_id=mask_id))
    # `advance` donates the state, so all buffers must be distinct and not shared with other arrays.
    return jax.tree.map(jnp.copy, state._replace(chain_state=chain_state))


def commit_tokens(
    state: State,
    filled: FillOutput,
    is_committed_BL: jax.Array,
    rule_state: Any,
    is_scored_BL: jax.Array | None = None,
) -> State:
    """The state with candidates written at some positions, and with their log-probabilities, or
    those of candidates and of tokens that were scored.
    """
    proposal, canvas = filled.proposal, state.canvas
    tokens_BL = jnp.where(is_committed_BL, proposal.tokens_BL, canvas.tokens_BL)
    is_scored_BL = is_committed_BL if is_scored_BL is None else is_scored_BL
    memory = state.rules.chain.update(state.chain_state, is_committed_BL, proposal)
    return state._replace(
        canvas=canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_scored_BL, proposal.logprob_BL, state.logprob_BL),
        committed_BL=jnp.where(is_committed_BL, state.step_B[:, None], state.committed_BL),
        chain_state=choose(state.is_stepping_B, memory, state.chain_state),
        rule_state=rule_state,
        signal_BLD=filled.signal_BLD,
    )


def start_records(tokens_BL: jax.Array, num_steps: int) -> dict[str, jax.Array]:
    """Empty records for `num_steps` steps, by the names of the fields of `dlm_jax.Trace`."""
    num_rows, num_positions = tokens_BL.shape
    zeros = jnp.zeros((num_rows, num_steps, num_positions), jnp.float32)
    none = jnp.full(zeros.shape, -1, jnp.int32)
    return {
        "canvas": jnp.broadcast_to(tokens_BL[:, None], zeros.shape),
        "tokens": none,
        "is_written": zeros > 0,
        "logprobs": zeros,
        "choice_logprobs": zeros[:, :, 0],
        "entropy": zeros,
        "level": none + 1,
    }


def record_step(state: State, **values: jax.Array) -> State:
    """The state with the values of this step, by the names of its records."""
    assert state.records is not None
    row_B, num_steps = jnp.arange(state.step_B.size), state.records["tokens"].shape[1]
    at = row_B, jnp.where(state.is_stepping_B, state.step_B, num_steps)
    records = {name: x.at[at].set(values[name], mode="drop") for name, x in state.records.items()}
    return state._replace(records=records)


def refines(rules: Rules, row: RowParams) -> jax.Array:
    """bool ``[B]``, True for rows that change existing tokens in addition to filling holes."""
    if isinstance(rules.commit, NoiseRule):
        return jnp.ones_like(row.resamples_B)
    refines_B = row.resamples_B
    for slot in (rules.remask, rules.edit, rules.renoise):
        if slot is not None:
            refines_B = refines_B | slot.is_active()
    return refines_B


def token_positions(state: State, *, mask_id: int) -> jax.Array:
    """True at live tokens that are not MASK."""
    tokens_BL = state.canvas.tokens_BL
    return live_positions(state.canvas.length_B, tokens_BL.shape[1]) & (tokens_BL != mask_id)


def visible_context(state: State, *, mask_id: int) -> Context:
    """The visible canvas, as read by logit transforms."""
    is_token_BL = token_positions(state, mask_id=mask_id)
    return Context(
        tokens_BL=state.canvas.tokens_BL,
        order_BL=state.committed_BL,
        is_visible_BL=is_token_BL & (state.committed_BL != EDITED),
        length_B=state.canvas.length_B,
    )


def step_keys(state: State, *, salt: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row's keys for drawing tokens, for the commit rule and for the remask rule, derived from
    the row's seed and step, and from a salt.
    """

    def one_row(seed: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        key = jax.random.fold_in(key_of(seed), step)
        key = key if salt is None else jax.random.fold_in(key, salt)
        return tuple(jax.random.split(key, 3))

    draw_key_B, rule_key_B, remask_key_B = jax.vmap(one_row)(state.row.seed_B, state.step_B)
    return draw_key_B, rule_key_B, remask_key_B


def tie_preferences(state: State, key_B: jax.Array) -> jax.Array:
    """The `preferences` of the rows among tied positions."""
    is_lower_B = state.row.ties_B == TIES.code("lower")
    return preferences(key_B, is_lower_B, state.canvas.tokens_BL.shape[1])


def step_chain(state: State) -> Chain:
    """The chain with the parameters of the next step of each row.

    A schedule covers the allowed number of steps, or the number of unfrozen positions if that is
    lower and written tokens do not change. With a noise rule it covers the block.
    """
    if isinstance(state.rules.commit, NoiseRule):
        step_B, steps_B = state.block.step_B, state.block.steps_B
    else:
        free_B = jnp.sum(~state.canvas.frozen_BL, axis=1)
        few_B = jnp.minimum(state.row.steps_B, jnp.maximum(free_B, 1))
        steps_B = jnp.where(refines(state.rules, state.row), state.row.steps_B, few_B)
        step_B = state.step_B
    share_B = step_B.astype(jnp.float32) / jnp.maximum(steps_B - 1, 1)
    return state.rules.chain.at_progress(jnp.minimum(share_B, 1.0))


def overwrite(state: State, is_at_BL: jax.Array, new_BL: jax.Array | int, *, mask_id: int) -> State:
    """The state with tokens that are not candidates, such as MASK, at some positions."""
    put_BL = jnp.where(new_BL == mask_id, -1, EDITED)
    tokens_BL = jnp.where(is_at_BL, new_BL, state.canvas.tokens_BL)
    return state._replace(
        canvas=state.canvas._replace(tokens_BL=tokens_BL),
        logprob_BL=jnp.where(is_at_BL, 0.0, state.logprob_BL),
        committed_BL=jnp.where(is_at_BL, put_BL, state.committed_BL),
    )


def end_step(
    program: Program,
    state: State,
    steps_B: jax.Array,
    *,
    is_finite_B: jax.Array,
    stays_B: jax.Array,
    changes_B: jax.Array,
) -> State:
    """Finishes a step of the rows where `steps_B`: counts it, advances blocks, and ends rows.

    A row whose logits are not finite ends. Where `stays_B`, a block without holes remains current
    until its last step. Where `changes_B`, tokens become final only when their block ends.
    """
    canvas, block = state.canvas, state.block
    is_hole_BL = (canvas.tokens_BL == program.mask_id) & ~canvas.frozen_BL
    left_B = jnp.sum(is_hole_BL & block.holds(is_hole_BL.shape[1]), axis=1)
    is_over_B = steps_B & is_finite_B & (left_B == 0) & ~(stays_B & ~block.is_last_step_B)

    # The next block of the row, or the next step of this one.
    is_work_BL = ~canvas.frozen_BL & (is_hole_BL | refines(state.rules, state.row)[:, None])
    following, has_more_B = next_block(
        block, is_work_BL, is_hole_BL, state.row.block_length_B, state.row.steps_B
    )
    again = block._replace(step_B=block.step_B + steps_B)

    # A generated EOS ends the row if no given token follows it. The final tokens end at the first
    # hole, or at the end of the last block that is over.
    behind_B = jnp.where(is_over_B, block.end_B, again.begin_B)
    first_hole_B = jnp.where(
        jnp.any(is_hole_BL, axis=1), place_of_largest(is_hole_BL), canvas.length_B
    )
    final_B = jnp.where(changes_B, behind_B, first_hole_B)
    stops_B = True if state.row.stops_at_eos_B is None else state.row.stops_at_eos_B
    is_whole_B = steps_B & is_finite_B & stops_B
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, is_hole_BL.shape[1])
    is_whole_B &= first_eos(canvas.tokens_BL, is_given_BL, program.eos_ids) < final_B

    is_done_B = (is_over_B & ~has_more_B) | is_whole_B
    step_B = state.step_B + steps_B
    status_B = jnp.full_like(step_B, Status.RUNNING)
    for ends_B, status in (
        (step_B >= state.row.steps_B, Status.STEP_LIMIT),
        (is_done_B, Status.DONE),
        (is_done_B & (state.counters.lost > 0), Status.CANVAS_FULL),
        (~is_finite_B, Status.NON_FINITE),
    ):
        status_B = jnp.where(ends_B, status, status_B)
    status_B = jnp.where(state.is_running_B, status_B, state.status_B)
    block = choose(is_over_B & ~is_done_B, following, choose(steps_B, again, block))
    return state._replace(step_B=step_B, block=block, status_B=status_B)


def move_state(rule: Any, state: Any, position_map: PositionMap) -> Any:
    """A rule's state after edits: moved with the positions, and as in `init` where inserted."""

    def move(leaf: jax.Array, fresh: jax.Array) -> jax.Array:
        shape = (*leaf.shape[:2], -1)
        one = jax.vmap(moved, in_axes=(None, 2, 2), out_axes=2)
        return one(position_map, leaf.reshape(shape), fresh.reshape(shape)).reshape(leaf.shape)

    return _map_positions(rule, state, move, position_map.is_new_BL.shape)


def reset_state(rule: Any, state: Any, is_at_BL: jax.Array) -> Any:
    """A rule's state as in `init` at some positions."""

    def reset(leaf: jax.Array, fresh: jax.Array) -> jax.Array:
        is_fresh = is_at_BL.reshape(*is_at_BL.shape, *[1] * (leaf.ndim - 2))
        return jnp.where(is_fresh, fresh, leaf)

    return _map_positions(rule, state, reset, is_at_BL.shape)


def _map_positions(
    rule: Any, state: Any, change: Callable[..., jax.Array], shape: tuple[int, ...]
) -> Any:
    def one(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return change(old, fresh) if belongs_to_positions(old, shape[1]) else old

    return jax.tree.map(one, state, rule.init(*shape)) if jax.tree.leaves(state) else state
