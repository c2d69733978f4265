"""The per-row state of the denoising loop, its records, and the state before the first step.

Every leaf is ``[B]`` or ``[B, L]``. Rows are independent: the result for a row does not depend on
the rest of the batch, and rows at different steps can be batched together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.blocks import CurrentBlock, first_block
from dlm_jax.sampling.cache.cache_policy import CacheState, start_cache
from dlm_jax.sampling.commit.commit_rule import RuleMemory
from dlm_jax.sampling.edits.edit_rule import EditState, start_edits
from dlm_jax.sampling.positions import place_of_largest
from dlm_jax.sampling.row import Counters, RowParams
from dlm_jax.sampling.rules import Rules
from dlm_jax.types import Canvas, Status, live_positions

EDITED = -2
"""Value used instead of a step number for tokens written by an edit or re-noise."""


class Records(NamedTuple):
    """Records of up to ``S`` steps per row. Records of steps that were not taken are empty.

    Attributes:
      canvas_BSL: int32, input of the forward pass.
      tokens_BSL: int32 candidates; -1 where no candidate was drawn.
      is_written_BSL: True where the candidate was committed.
      logprob_BSL: `logprob_BL` of `propose.fill.Drawn`; 0 where no candidate was drawn, as in the
        next two fields.
      entropy_BSL: `Drawn.entropy_BL`.
      confidence_BSL: float32 confidence of the commit rule, as `CommitRule.shown` reports it.
      level_BSL: `Drawn.level_BL`.
      choice_BS: float32 log-probability of choosing the committed and remasked positions; 0 if the
        choice is deterministic.
    """

    canvas_BSL: jax.Array
    tokens_BSL: jax.Array
    is_written_BSL: jax.Array
    logprob_BSL: jax.Array
    entropy_BSL: jax.Array
    confidence_BSL: jax.Array
    level_BSL: jax.Array
    choice_BS: jax.Array

    def with_step(self, step_B: jax.Array, steps_B: jax.Array, new: Records) -> Records:
        """Adds the values of one step, ``[B, L]`` and ``[B]``, where ``steps_B`` is True."""
        row_B, num_steps = jnp.arange(step_B.shape[0]), self.choice_BS.shape[1]
        place_B = jnp.where(steps_B, step_B, num_steps)
        put = (
            old.at[row_B, place_B].set(one, mode="drop") for old, one in zip(self, new, strict=True)
        )
        return Records(*put)


class State(NamedTuple):
    """The state of the rows in the denoising loop.

    Attributes:
      canvas: tokens, lengths and frozen positions.
      logprob_BL: float32, log-probability of each committed token under the clean logits it was
        drawn from, in nats; 0 at given tokens, at holes, and at tokens written by an edit or
        re-noise. If the remask rule reads it, draft tokens have the log-probability from the last
        forward pass.
      committed_BL: int32, the step that committed each token, counted from 0; -1 at given tokens,
        holes and draft tokens; `EDITED` at tokens written by an edit or re-noise.
      row: per-row parameters of the loop.
      rules: the rules of the step, with per-row parameters.
      chain_state: state of the logit transforms.
      block: the current block of each row.
      edits: state of the edits; None without an edit rule.
      cache: cached keys and values; None without a cache rule.
      counters: counters of each row.
      step_B: int32, number of steps taken.
      status_B: int32, a `Status`.
      memory: state of the commit rule.
      remask_memory: state of the remask rule.
      records: records of every step; None in a loop without traces.
      signal_BLD: self-conditioning signal at the positions whose logits the previous step read, if
        that step was in the same block; values at other positions are outdated. None for a network
        without a signal.
    """

    canvas: Canvas
    logprob_BL: jax.Array
    committed_BL: jax.Array
    row: RowParams
    rules: Rules
    chain_state: Any
    block: CurrentBlock
    edits: EditState | None
    cache: CacheState | None
    counters: Counters
    step_B: jax.Array
    status_B: jax.Array
    memory: RuleMemory = RuleMemory()
    remask_memory: RuleMemory = RuleMemory()
    records: Records | None = None
    signal_BLD: jax.Array | None = None

    @property
    def is_running_B(self) -> jax.Array:
        """True for rows that have not ended."""
        return self.status_B == Status.RUNNING

    @property
    def span_B(self) -> jax.Array:
        """int32 ``[B]``, the number of steps that a temperature schedule covers.

        The span is the allowed number of steps, or the number of unfrozen positions if that is
        lower and written tokens do not change.
        """
        refines_B = self.rules.refines(self.row.resamples_B)
        free_B = jnp.sum(~self.canvas.frozen_BL, axis=1)
        few_B = jnp.minimum(self.row.steps_B, jnp.maximum(free_B, 1))
        return jnp.where(refines_B, self.row.steps_B, few_B)


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
    zeros_B = jnp.zeros(num_rows, jnp.int32)
    is_free_BL = live_positions(length_B, tokens_BL.shape[1])
    if frozen_BL is None:
        is_free_BL &= tokens_BL == mask_id
    else:
        is_free_BL &= (tokens_BL == mask_id) | ~frozen_BL
    canvas = Canvas(tokens_BL, length_B, ~is_free_BL)
    is_hole_BL = ~canvas.frozen_BL & (tokens_BL == mask_id)
    refines_B = rules.refines(row.resamples_B)
    is_work_BL = work(canvas, refines_B, mask_id=mask_id)
    first_B = place_of_largest(~canvas.frozen_BL)
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
        chain_state=rules.chain.init(num_rows),
        block=block,
        edits=None if edit is None else start_edits(edit, canvas, row, mask_id=mask_id),
        cache=None if rules.cache is None else start_cache(num_rows),
        counters=Counters(*[zeros_B for _ in Counters._fields]),
        step_B=zeros_B,
        status_B=jnp.where(is_any_B, Status.RUNNING, Status.DONE).astype(jnp.int32),
        memory=rules.commit.start_memory(*tokens_BL.shape),
        remask_memory=start_remask_memory(rules, tokens_BL),
        records=start_records(tokens_BL, num_traced) if num_traced else None,
    )
    # `advance` donates the state, so all buffers must be distinct and not shared with other arrays.
    return jax.tree.map(jnp.copy, state)


def start_remask_memory(rules: Rules, tokens_BL: jax.Array) -> RuleMemory:
    """The memory of the remask rule before the first step; empty without such a rule."""
    return RuleMemory() if rules.remask is None else rules.remask.start_memory(*tokens_BL.shape)


def start_records(tokens_BL: jax.Array, num_steps: int) -> Records:
    """Empty records for `num_steps` steps."""
    num_rows, num_positions = tokens_BL.shape
    shape = num_rows, num_steps, num_positions
    none, zeros = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    canvas = jnp.broadcast_to(tokens_BL[:, None], shape)
    return Records(
        canvas, none, zeros > 0, zeros, zeros, zeros, none + 1,
        jnp.zeros((num_rows, num_steps), jnp.float32),
    )  # fmt: skip


def work(canvas: Canvas, refines_B: jax.Array, *, mask_id: int) -> jax.Array:
    """True ``[B, L]`` at holes and, in rows that refine tokens, at unfrozen tokens."""
    return ~canvas.frozen_BL & ((canvas.tokens_BL == mask_id) | refines_B[:, None])
