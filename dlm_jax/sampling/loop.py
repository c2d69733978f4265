"""One step of the denoising loop: look at the canvas, write what the rules choose.

``step: forward -> transform logits -> propose -> commit -> remask``; every published sampler is a
choice of those slots, not a new loop (DESIGN 3). Remasking stands at the end of a step: before the
next forward nothing happens in between, and a row where nothing is remasked is done without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dlm_jax.config.sampling import nearest
from dlm_jax.sampling.blocks import choose, next_block
from dlm_jax.sampling.commit import Proposal, View
from dlm_jax.sampling.draw import METHODS
from dlm_jax.sampling.guidance import Sight
from dlm_jax.sampling.propose import propose_parallel
from dlm_jax.sampling.remask import Tokens
from dlm_jax.sampling.state import Canvas, State, work
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.transforms.protocol import Context
from dlm_jax.types import Network, Params, Status, live_positions


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
      is_guided: whether rows may ask for guidance; otherwise their scale is not looked at.
      eos_id: the id that ends a generation; -1 for none.
    """

    network: Network
    mask_id: int
    chunk: int
    rows: NamedSharding | None = None
    draw: str = "inverse_cdf"
    is_guided: bool = False
    eos_id: int = -1

    def __post_init__(self) -> None:
        if self.draw not in METHODS:
            raise ValueError(
                f"draw={self.draw!r} is not a way to draw; {nearest(self.draw, METHODS)}"
            )


class Look(NamedTuple):
    """A step up to its proposal: what it saw, and what it would write.

    Attributes:
      view: what the commit rule knows.
      is_open_BL: True at the positions that have a candidate.
      is_read_BL: True at a draft's tokens that the proposal scores as they stand; None where no
        remask rule could read it.
      sight: what the trunk returned.
      context: the visible tokens.
      draw_key_B: the step's key of each row, for draws.
      remask_key_B: likewise, for the remask rule.
      proposal: the candidates.
      is_finite_B: False for rows whose logits cannot be drawn from.
    """

    view: View
    is_open_BL: jax.Array
    is_read_BL: jax.Array | None
    sight: Sight
    context: Context
    draw_key_B: jax.Array
    remask_key_B: jax.Array
    proposal: Proposal
    is_finite_B: jax.Array


def step(program: Program, params: Params, state: State) -> State:
    """The state after one step of every running row; other rows come back bit for bit."""
    return write(program, state, look(program, params, state))


def look(program: Program, params: Params, state: State) -> Look:
    """The forward of a step, and candidates for its open positions; the state stays as it is."""
    canvas, block = state.canvas, state.block
    num_positions = canvas.tokens_BL.shape[1]
    is_live_BL = live_positions(canvas.length_B, num_positions)
    is_visible_BL = is_live_BL & (canvas.tokens_BL != program.mask_id)
    is_running_B = state.status_B == Status.RUNNING
    is_free_BL = block.holds(num_positions) & ~canvas.frozen_BL & is_running_B[:, None]
    draw_key_B, rule_key_B, remask_key_B = _step_keys(state)
    view = View(
        is_free_BL & ~is_visible_BL, block.first_holes_B, block.step_B, block.steps_B, rule_key_B
    )
    is_last_B1 = block.is_last_step_B[:, None]
    is_open_BL = view.is_hole_BL & (state.rule.eligible(view) | is_last_B1)
    context = Context(
        tokens_BL=canvas.tokens_BL,
        order_BL=state.committed_BL,
        is_visible_BL=is_visible_BL,
        length_B=canvas.length_B,
    )
    own_BL = is_read_BL = None
    if state.remask is not None:
        # A draft's tokens were never proposed; what the remask rule reads of them is their own.
        is_draft_BL = is_free_BL & is_visible_BL & (state.committed_BL < 0)
        is_read_BL = is_draft_BL & state.remask.is_active()[:, None] & ~is_last_B1
        own_BL = jnp.where(is_read_BL, canvas.tokens_BL, -1)
    sight = _sight(program, params, state)
    proposal, is_finite_B = _propose(
        program, params, state, sight, is_open_BL, context, draw_key_B, own_BL
    )
    return Look(
        view, is_open_BL, is_read_BL, sight, context, draw_key_B, remask_key_B,
        proposal, is_finite_B,
    )  # fmt: skip


def write(program: Program, state: State, seen: Look) -> State:
    """The state with what the commit rule takes of the proposal, one step later."""
    proposal, canvas, block = seen.proposal, state.canvas, state.block
    is_running_B = state.status_B == Status.RUNNING
    is_last_B = block.is_last_step_B
    chosen_BL = state.rule.select(seen.view, proposal) | is_last_B[:, None]
    is_committed_BL = seen.is_open_BL & chosen_BL & seen.is_finite_B[:, None]
    tokens_BL = jnp.where(is_committed_BL, proposal.tokens_BL, canvas.tokens_BL)
    logprob_BL = jnp.where(is_committed_BL, proposal.logprob_BL, state.logprob_BL)
    committed_BL = jnp.where(is_committed_BL, state.step_B[:, None], state.committed_BL)
    goes_on_B = jnp.zeros_like(is_running_B)
    if state.remask is not None:
        assert seen.is_read_BL is not None
        logprob_BL = jnp.where(seen.is_read_BL, proposal.logprob_BL, logprob_BL)
        goes_on_B = state.remask.goes_on() & ~is_last_B
        is_remasked_BL = _remasked(program, state, seen, tokens_BL, logprob_BL, is_committed_BL)
        tokens_BL = jnp.where(is_remasked_BL, program.mask_id, tokens_BL)
        logprob_BL = jnp.where(is_remasked_BL, 0.0, logprob_BL)
        committed_BL = jnp.where(is_remasked_BL, -1, committed_BL)
    canvas = canvas._replace(tokens_BL=tokens_BL)
    is_hole_BL = (tokens_BL == program.mask_id) & ~canvas.frozen_BL
    left_B = jnp.sum(is_hole_BL & block.holds(tokens_BL.shape[1]), axis=1)
    is_over_B = is_running_B & seen.is_finite_B & (left_B == 0) & ~goes_on_B
    is_work_BL = work(canvas, state.remask, mask_id=program.mask_id)
    following, has_more_B = next_block(
        block, is_work_BL, is_hole_BL, state.block_length_B, state.steps_B
    )
    is_done_B = is_over_B & (
        ~has_more_B | (state.stops_at_eos_B & _has_eos(program, state, canvas))
    )
    step_B = state.step_B + is_running_B
    status_B = jnp.select(
        [~is_running_B, ~seen.is_finite_B, is_done_B, step_B >= state.steps_B],
        [state.status_B, *(jnp.full_like(step_B, s) for s in _ENDS)],
        Status.RUNNING,
    )
    again = block._replace(step_B=block.step_B + is_running_B)
    return state._replace(
        canvas=canvas,
        step_B=step_B,
        block=choose(is_over_B & ~is_done_B, following, again),
        forwards_B=state.forwards_B + is_running_B * _forwards(program, state),
        status_B=status_B,
        logprob_BL=logprob_BL,
        committed_BL=committed_BL,
        chain_state=state.chain.update(state.chain_state, is_committed_BL, proposal),
    )


def chain_now(state: State) -> Chain:
    """The chain with the parameters of the step that each row is about to take."""
    share_B = state.step_B.astype(jnp.float32) / jnp.maximum(state.span_B - 1, 1)
    return state.chain.at_progress(jnp.minimum(share_B, 1.0))


_ENDS = (Status.NON_FINITE, Status.DONE, Status.STEP_LIMIT)


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


def _forwards(program: Program, state: State) -> jax.Array:
    """Forwards that a step of each row asks for."""
    return 1 + (state.guidance_B != 0) if program.is_guided else jnp.ones_like(state.forwards_B)


def _has_eos(program: Program, state: State, canvas: Canvas) -> jax.Array:
    """True for rows with a generated EOS in the block or before it, and nothing given behind it."""
    num_positions = canvas.tokens_BL.shape[1]
    place_1L = jnp.arange(num_positions)[None]
    is_given_BL = canvas.frozen_BL & live_positions(canvas.length_B, num_positions)
    last_given_B1 = jnp.max(jnp.where(is_given_BL, place_1L, -1), axis=1, keepdims=True)
    is_before_BL = (place_1L > last_given_B1) & (place_1L < state.block.end_B[:, None])
    return jnp.any(is_before_BL & (canvas.tokens_BL == program.eos_id), axis=1)


def _remasked(
    program: Program,
    state: State,
    seen: Look,
    tokens_BL: jax.Array,
    logprob_BL: jax.Array,
    is_committed_BL: jax.Array,
) -> jax.Array:
    """True where the remask rule takes a token back."""
    assert state.remask is not None
    goes_on_B = (state.status_B == Status.RUNNING) & seen.is_finite_B
    is_free_BL = state.block.holds(tokens_BL.shape[1]) & ~state.canvas.frozen_BL
    goes_on_B &= ~state.block.is_last_step_B
    is_open_BL = is_free_BL & (tokens_BL != program.mask_id) & goes_on_B[:, None]
    tokens = Tokens(
        is_open_BL=is_open_BL,
        is_fresh_BL=is_committed_BL,
        num_free_B=jnp.sum(is_free_BL, axis=1),
        probability_BL=jnp.exp(logprob_BL),
        key_B=seen.remask_key_B,
    )
    return is_open_BL & state.remask.select(seen.view, tokens)


def _propose(
    program: Program, params: Params, state: State, *rows: Any
) -> tuple[Proposal, jax.Array]:
    """`propose_parallel`, on each device for its own rows if they are split.

    Left to the compiler, every device would run all readouts, with a sum over devices in each.
    """

    def of_rows(params, state, sight, is_open_BL, context, key_B, own_BL):
        return propose_parallel(
            program.network,
            params,
            sight,
            is_open_BL,
            chain_now(state),
            state.chain_state,
            context,
            key_B,
            own_BL,
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


def _step_keys(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys of each row for a step's draws and for the two rules: from its own seed and step."""

    def one_row(seed: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        draw_key, rule_key, remask_key = jax.random.split(key, 3)
        return draw_key, rule_key, remask_key

    return jax.vmap(one_row)(state.seed_B, state.step_B)
