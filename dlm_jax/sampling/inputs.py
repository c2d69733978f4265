"""What a step works on: where its positions stand, and what it has seen before it writes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.randomness import key_of
from dlm_jax.sampling.commit.protocol import CommitContext, Proposal, preferences
from dlm_jax.sampling.forward import Pass
from dlm_jax.sampling.output import TrunkOutput
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.propose.protocol import Filled
from dlm_jax.sampling.row import TIES
from dlm_jax.sampling.state import EDITED, State
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.types import live_positions

_LOWER = TIES.code("lower")
RENOISE_SALT = 0x6E6F6973


class StepMasks(NamedTuple):
    """Where the positions of the canvas stand in a step, ``[B, L]`` each.

    Attributes:
      is_visible_BL: True at live tokens.
      is_open_BL: True at the positions that get a candidate.
      is_read_BL: True at a draft's tokens that are scored as they stand, because they were never
        proposed; None where no remask rule could read it.
      may_edit_BL: True where the step's edits may happen; None without an edit rule.
      is_scored_BL: True where the logits tell of such edits; likewise.
      own_BL: int32 tokens to be scored as they stand, -1 elsewhere; None: nowhere.
    """

    is_visible_BL: jax.Array
    is_open_BL: jax.Array
    is_read_BL: jax.Array | None
    may_edit_BL: jax.Array | None
    is_scored_BL: jax.Array | None
    own_BL: jax.Array | None


class StepInputs(NamedTuple):
    """A step up to its proposal: what it saw, and what it would write.

    Attributes:
      masks: where the positions stand.
      commit: what the commit rule knows.
      context: the visible tokens, for logit transforms.
      forward: what the trunk returned, and what that cost.
      draw_key_B: the step's key of each row, for draws.
      remask_key_B: likewise, for the remask rule.
      filled: the candidates, and how the fill went.
      is_stepping_B: True for rows that take the step: others have ended, or are only looked at.
    """

    masks: StepMasks
    commit: CommitContext
    context: Context
    forward: Pass
    draw_key_B: jax.Array
    remask_key_B: jax.Array
    filled: Filled
    is_stepping_B: jax.Array

    @property
    def output(self) -> TrunkOutput:
        """What the trunk returned."""
        return self.forward.output

    @property
    def proposal(self) -> Proposal:
        """The candidates."""
        return self.filled.proposal

    @property
    def is_finite_B(self) -> jax.Array:
        """False for rows whose logits cannot be drawn from."""
        return self.filled.is_finite_B


def is_stepping(state: State) -> jax.Array:
    """True ``[B]`` for rows that take a step, instead of being looked at or being done."""
    if state.edits is None:
        return state.is_running_B
    return state.is_running_B & ~state.edits.warms_B


def is_free(state: State) -> jax.Array:
    """True at the unfrozen positions of each row's block."""
    canvas = state.canvas
    return state.block.holds(canvas.tokens_BL.shape[1]) & ~canvas.frozen_BL


def step_masks(
    program: Program, state: State, rule_key_B: jax.Array
) -> tuple[StepMasks, CommitContext]:
    """Where the positions stand when a step begins, and what the commit rule knows."""
    canvas, block, rules = state.canvas, state.block, state.rules
    is_live_BL = live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    is_visible_BL = is_live_BL & (canvas.tokens_BL != program.mask_id)
    is_free_BL = is_free(state) & is_stepping(state)[:, None]
    is_closed_BL = is_visible_BL & ~state.row.resamples_B[:, None]
    is_last_B1 = block.is_last_step_B[:, None]
    written_BL = None
    if rules.commit.rewrites:
        written_BL = jnp.where(is_free_BL & is_visible_BL, canvas.tokens_BL, -1)
    commit = CommitContext(
        is_free_BL & ~is_closed_BL, block.first_holes_B, block.step_B, block.steps_B, rule_key_B,
        written_BL,
        preferences(rule_key_B, state.row.ties_B == _LOWER, canvas.tokens_BL.shape[1]),
    )  # fmt: skip
    is_last_BL = is_last_B1 & ~is_visible_BL
    is_open_BL = commit.is_hole_BL & (rules.commit.eligible(commit) | is_last_BL)
    if written_BL is not None:
        is_open_BL |= written_BL >= 0
    own_BL = is_read_BL = may_edit_BL = is_scored_BL = None
    if rules.remask is not None:
        # A draft's tokens were never proposed; what the remask rule reads of them is their own.
        is_draft_BL = is_free_BL & is_visible_BL & (state.committed_BL < 0) & ~is_open_BL
        is_read_BL = is_draft_BL & rules.remask.is_active()[:, None] & ~is_last_B1
        own_BL = jnp.where(is_read_BL, canvas.tokens_BL, -1)
    if rules.edit is not None:
        may_edit_BL = _may_edit(state) & is_live_BL
        is_scored_BL = beside(may_edit_BL) & is_live_BL
        is_own_BL = is_scored_BL & is_visible_BL & ~is_open_BL
        own_BL = jnp.where(is_own_BL, canvas.tokens_BL, -1 if own_BL is None else own_BL)
    masks = StepMasks(is_visible_BL, is_open_BL, is_read_BL, may_edit_BL, is_scored_BL, own_BL)
    return masks, commit


def _may_edit(state: State) -> jax.Array:
    """True where the edits after this step may happen."""
    edit, edits = state.rules.edit, state.edits
    assert edit is not None and edits is not None
    is_row_B = edit.is_active() & state.is_running_B
    is_row_B &= ~state.block.is_last_step_B | edits.warms_B
    return state.block.holds(state.canvas.tokens_BL.shape[1]) & is_row_B[:, None]


def beside(is_true_BL: jax.Array) -> jax.Array:
    """True at and on either side of a True."""
    padded = jnp.pad(is_true_BL, ((0, 0), (1, 1)))
    return is_true_BL | padded[:, :-2] | padded[:, 2:]


def visible_context(state: State, is_visible_BL: jax.Array) -> Context:
    """What logit transforms may know of the canvas."""
    return Context(
        tokens_BL=state.canvas.tokens_BL,
        order_BL=state.committed_BL,
        is_visible_BL=is_visible_BL & (state.committed_BL != EDITED),
        length_B=state.canvas.length_B,
    )


def step_keys(state: State, *, salt: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys of each row for a step's draws and for the two rules: from its own seed and step.

    With a salt, others.
    """

    def one_row(seed: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        key = jax.random.fold_in(key_of(seed), step)
        key = key if salt is None else jax.random.fold_in(key, salt)
        draw_key, rule_key, remask_key = jax.random.split(key, 3)
        return draw_key, rule_key, remask_key

    return jax.vmap(one_row)(state.row.seed_B, state.step_B)
