"""The denoising loop: its per-row state, and one step of it.

Everything in the state is ``[B]`` or ``[B, L]``. No step reads one row to decide about another, so
that a row comes out as if it had run alone, and drivers may put rows of any age side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.config.sampling import nearest
from dlm_jax.sampling.commit import CommitRule, Proposal, View
from dlm_jax.sampling.draw import METHODS
from dlm_jax.sampling.propose import propose_parallel
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.types import Network, Params, Status, live_positions


class Canvas(NamedTuple):
    """The arrays being denoised.

    Attributes:
      tokens_BL: int32; MASK at holes, PAD from the row's length on.
      length_B: int32, live positions of each row; 0 for an idle slot.
      frozen_BL: True at given tokens, which are never written.
    """

    tokens_BL: jax.Array
    length_B: jax.Array
    frozen_BL: jax.Array


class State(NamedTuple):
    """What `advance` carries.

    Attributes:
      canvas: tokens, lengths, frozen positions.
      key_B: typed key of each row, made of its own seed; never changes.
      step_B: int32, steps taken.
      steps_B: int32, steps allowed, at least 1.
      first_holes_B: int32, holes before the first step.
      forwards_B: int32, forwards of the trunk the row has asked for.
      status_B: int32, a `Status`.
      logprob_BL: float32, log-probability of each committed token under the clean logits it was
        drawn from, in nats; 0 at given tokens and holes.
      committed_BL: int32, the step that committed each token, from 0; -1 at given tokens and holes.
      chain: the logit transforms with their per-row parameters.
      chain_state: what those transforms carry.
      rule: the commit rule with its per-row parameters.
    """

    canvas: Canvas
    key_B: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    first_holes_B: jax.Array
    forwards_B: jax.Array
    status_B: jax.Array
    logprob_BL: jax.Array
    committed_BL: jax.Array
    chain: Chain
    chain_state: Any
    rule: CommitRule


@dataclass(frozen=True)
class Program:
    """What is compiled in.

    Attributes:
      network: the model as pure functions.
      mask_id: the id of MASK.
      chunk: positions of one readout; trades memory (``chunk * V`` float32 logits at a time)
        against launches.
      rows: how the rows of the state are split over devices, which then read out and draw for
        their own rows alone; None: not at all. The number of slots must divide evenly.
      draw: how a token is drawn, of `dlm_jax.sampling.draw.METHODS`.
    """

    network: Network
    mask_id: int
    chunk: int
    rows: NamedSharding | None = None
    draw: str = "inverse_cdf"

    def __post_init__(self) -> None:
        if self.draw not in METHODS:
            raise ValueError(
                f"draw={self.draw!r} is not a way to draw; {nearest(self.draw, METHODS)}"
            )


def start(
    tokens_BL: jax.Array,
    length_B: jax.Array,
    *,
    seeds_B: jax.Array,
    steps_B: jax.Array,
    chain: Chain,
    rule: CommitRule,
    mask_id: int,
) -> State:
    """State before the first step: live MASK tokens are holes, other live tokens are frozen.

    Args:
      tokens_BL: int32; PAD from `length_B` on.
      length_B: int32; 0 makes an idle slot.
      seeds_B: uint32 seed of each row.
      steps_B: int32, at least 1.
      chain: logit transforms whose parameters have ``B`` rows.
      rule: commit rule, likewise.
      mask_id: the id of MASK.
    """
    num_rows, num_positions = tokens_BL.shape
    is_hole_BL = (tokens_BL == mask_id) & live_positions(length_B, num_positions)
    holes_B = jnp.sum(is_hole_BL, axis=1)
    zeros_B = jnp.zeros(num_rows, jnp.int32)
    state = State(
        canvas=Canvas(tokens_BL, length_B, ~is_hole_BL),
        key_B=jax.vmap(jax.random.key)(seeds_B),
        step_B=zeros_B,
        steps_B=steps_B,
        first_holes_B=holes_B,
        forwards_B=zeros_B,
        status_B=jnp.where(holes_B > 0, Status.RUNNING, Status.DONE).astype(jnp.int32),
        logprob_BL=jnp.zeros((num_rows, num_positions), jnp.float32),
        committed_BL=jnp.full((num_rows, num_positions), -1, jnp.int32),
        chain=chain,
        chain_state=chain.init(num_rows),
        rule=rule,
    )
    # `advance` donates the state: its buffers must be its own, and each be there once.
    return jax.tree.map(jnp.copy, state)


class Look(NamedTuple):
    """A step up to its proposal: what it saw, and what it would write.

    Attributes:
      view: what the commit rule knows.
      is_open_BL: True at the positions that have a candidate.
      hidden_BLD: what the trunk returned.
      context: the visible tokens.
      draw_key_B: the step's key of each row, for draws.
      proposal: the candidates.
      is_finite_B: False for rows whose logits cannot be drawn from.
    """

    view: View
    is_open_BL: jax.Array
    hidden_BLD: jax.Array
    context: Context
    draw_key_B: jax.Array
    proposal: Proposal
    is_finite_B: jax.Array


def step(program: Program, params: Params, state: State) -> State:
    """The state after one step of every running row; other rows come back bit for bit."""
    return write(state, look(program, params, state))


def look(program: Program, params: Params, state: State) -> Look:
    """The forward of a step, and candidates for its open positions; the state stays as it is."""
    canvas = state.canvas
    is_live_BL = live_positions(canvas.length_B, canvas.tokens_BL.shape[1])
    is_hole_BL = (
        (canvas.tokens_BL == program.mask_id)
        & is_live_BL
        & ~canvas.frozen_BL
        & (state.status_B == Status.RUNNING)[:, None]
    )
    draw_key_B, rule_key_B = _step_keys(state)
    view = View(is_hole_BL, state.first_holes_B, state.step_B, state.steps_B, rule_key_B)
    is_open_BL = is_hole_BL & (state.rule.eligible(view) | _is_last(state)[:, None])

    hidden_BLD, _ = program.network.trunk(params, canvas.tokens_BL, canvas.length_B, None)
    context = Context(
        tokens_BL=canvas.tokens_BL,
        order_BL=state.committed_BL,
        is_visible_BL=is_live_BL & (canvas.tokens_BL != program.mask_id),
        length_B=canvas.length_B,
    )
    proposal, is_finite_B = _propose(
        program, params, state, hidden_BLD, is_open_BL, context, draw_key_B
    )
    return Look(view, is_open_BL, hidden_BLD, context, draw_key_B, proposal, is_finite_B)


def write(state: State, seen: Look) -> State:
    """The state with what the commit rule takes of the proposal, one step later."""
    proposal = seen.proposal
    is_running_B = state.status_B == Status.RUNNING
    chosen_BL = state.rule.select(seen.view, proposal) | _is_last(state)[:, None]
    is_committed_BL = seen.is_open_BL & chosen_BL & seen.is_finite_B[:, None]
    left_B = jnp.sum(seen.view.is_hole_BL & ~is_committed_BL, axis=1)
    step_B = state.step_B + is_running_B
    status_B = jnp.select(
        [~is_running_B, ~seen.is_finite_B, left_B == 0, step_B >= state.steps_B],
        [state.status_B, *(jnp.full_like(step_B, s) for s in _ENDS)],
        Status.RUNNING,
    )
    canvas = state.canvas
    return state._replace(
        canvas=canvas._replace(
            tokens_BL=jnp.where(is_committed_BL, proposal.tokens_BL, canvas.tokens_BL)
        ),
        step_B=step_B,
        forwards_B=state.forwards_B + is_running_B,
        status_B=status_B,
        logprob_BL=jnp.where(is_committed_BL, proposal.logprob_BL, state.logprob_BL),
        committed_BL=jnp.where(is_committed_BL, state.step_B[:, None], state.committed_BL),
        chain_state=state.chain.update(state.chain_state, is_committed_BL, proposal),
    )


def _is_last(state: State) -> jax.Array:
    return state.step_B + 1 >= state.steps_B


_ENDS = (Status.NON_FINITE, Status.DONE, Status.STEP_LIMIT)


def _propose(
    program: Program, params: Params, state: State, *rows: Any
) -> tuple[Proposal, jax.Array]:
    """`propose_parallel`, on each device for its own rows if they are split.

    Left to the compiler, every device would run all readouts, with a sum over devices in each.
    """

    def of_rows(params, state, hidden_BLD, is_open_BL, context, key_B):
        return propose_parallel(
            program.network,
            params,
            hidden_BLD,
            is_open_BL,
            state.chain,
            state.chain_state,
            context,
            key_B,
            measure=state.rule.measure,
            chunk=program.chunk,
            method=program.draw,
        )

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


def _step_keys(state: State) -> tuple[jax.Array, jax.Array]:
    """Keys of each row for a step's draws and for the rule: from its own key and step."""

    def one_row(key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        draw_key, rule_key = jax.random.split(jax.random.fold_in(key, step))
        return draw_key, rule_key

    return jax.vmap(one_row)(state.key_B, state.step_B)
