"""The per-row state of the denoising loop, and the state before the first step.

Everything in it is ``[B]`` or ``[B, L]``. No step reads one row to decide about another, so that a
row comes out as if it had run alone, and drivers may put rows of any age side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.blocks import Block, first_block
from dlm_jax.sampling.commit import CommitRule
from dlm_jax.sampling.editor import Edited, Editor, start_edited
from dlm_jax.sampling.remask import RemaskRule
from dlm_jax.sampling.renoise import Renoise
from dlm_jax.sampling.transforms.chain import Chain
from dlm_jax.sampling.wavefront import Wavefront
from dlm_jax.types import Canvas, Status, live_positions


class State(NamedTuple):
    """What `advance` carries.

    Attributes:
      canvas: tokens, lengths, frozen positions.
      seed_B: uint32, what the row's keys are made of; never changes.
      step_B: int32, steps taken.
      steps_B: int32, steps allowed, at least 1.
      span_B: int32, the steps over which a temperature moves: those allowed, or as many as there
        were holes if that is fewer and none comes back.
      block: the block that each row works on.
      block_length_B: int32, positions of a block; 0 is all in one.
      guidance_B: float32 scale of classifier-free guidance; 0 is none.
      stops_at_eos_B: True for rows that are done when a finished block holds EOS.
      forwards_B: int32, forwards of the trunk the row has asked for.
      status_B: int32, a `Status`.
      logprob_BL: float32, log-probability of each committed token under the clean logits it was
        drawn from, in nats; 0 at given tokens, holes, and what an edit or re-noise put there. Of a
        draft's tokens, where the remask rule reads it: that under the last forward.
      committed_BL: int32, the step that committed each token, from 0; -1 at given tokens, holes,
        and tokens of a draft; -2 where an edit or re-noise put a token.
      chain: the logit transforms with their per-row parameters.
      chain_state: what those transforms carry.
      rule: the commit rule with its per-row parameters.
      remask: the remask rule with its own; None: committed tokens stay.
      fill: how the sampler head fills each row; None: all candidates are drawn in parallel.
      waves_B: int32, waves of the fills so far.
      seeds_B: int32, positions that the LM head seeded in them.
      filled_B: int32, candidates drawn in them.
      resamples_B: True for rows whose unfrozen tokens are all open, as if they were holes.
      editor: how each row is edited; None: lengths stay.
      edited: what that has come to; None likewise.
      renoise: what is written over before each forward; None: nothing.
    """

    canvas: Canvas
    seed_B: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    span_B: jax.Array
    block: Block
    block_length_B: jax.Array
    guidance_B: jax.Array
    stops_at_eos_B: jax.Array
    forwards_B: jax.Array
    status_B: jax.Array
    logprob_BL: jax.Array
    committed_BL: jax.Array
    chain: Chain
    chain_state: Any
    rule: CommitRule
    remask: RemaskRule | None
    fill: Wavefront | None
    waves_B: jax.Array
    seeds_B: jax.Array
    filled_B: jax.Array
    resamples_B: jax.Array
    editor: Editor | None
    edited: Edited | None
    renoise: Renoise | None


def start(
    tokens_BL: jax.Array,
    length_B: jax.Array,
    *,
    seeds_B: jax.Array,
    steps_B: jax.Array,
    chain: Chain,
    rule: CommitRule,
    mask_id: int,
    remask: RemaskRule | None = None,
    fill: Wavefront | None = None,
    frozen_BL: jax.Array | None = None,
    block_length_B: jax.Array | None = None,
    guidance_B: jax.Array | None = None,
    stops_at_eos_B: jax.Array | None = None,
    resamples_B: jax.Array | None = None,
    editor: Editor | None = None,
    renoise: Renoise | None = None,
    capacity_B: jax.Array | None = None,
    max_new_B: jax.Array | None = None,
) -> State:
    """State before the first step: live MASK tokens are holes, other live tokens are frozen.

    Args:
      tokens_BL: int32; PAD from `length_B` on.
      length_B: int32; 0 makes an idle slot.
      seeds_B: uint32 seed of each row.
      steps_B: int32, at least 1, and at least the number of the row's blocks that hold holes.
      chain: logit transforms whose parameters have ``B`` rows.
      rule: commit rule, likewise.
      mask_id: the id of MASK.
      remask: remask rule, likewise; None for none.
      fill: how the sampler head fills; None draws all candidates in parallel.
      frozen_BL: True at given tokens, where a draft leaves some free; MASK is never frozen.
      block_length_B: int32 positions of a block, at least 0; 0, or None for all rows, is one block.
      guidance_B: float32 scale of classifier-free guidance; None is 0.
      stops_at_eos_B: True for rows that end with the block that holds EOS; None is False.
      resamples_B: True for rows that rewrite all their unfrozen tokens; None is False.
      editor: how rows are edited; None: not at all.
      renoise: what is written over before each forward; None: nothing.
      capacity_B: int32, live positions that edits may grow a row to, at most ``L``; None, or less
        than the row has, is as many as it has.
      max_new_B: int32, unfrozen tokens that a row is nudged towards; 0, or None for all rows, is
        as many as it has.
    """
    num_rows = tokens_BL.shape[0]
    zeros_B = jnp.zeros(num_rows, jnp.int32)
    canvas = _canvas(tokens_BL, length_B, frozen_BL, mask_id=mask_id)
    is_hole_BL = ~canvas.frozen_BL & (tokens_BL == mask_id)
    block_length_B = zeros_B if block_length_B is None else block_length_B
    never_B = zeros_B.astype(bool)
    resamples_B = never_B if resamples_B is None else resamples_B
    refines_B = _refines(remask, resamples_B, editor, renoise)
    is_work_BL = _work(canvas, refines_B, mask_id=mask_id)
    block, is_any_B = first_block(
        is_work_BL, is_hole_BL, jnp.argmin(canvas.frozen_BL, axis=1), block_length_B, steps_B
    )
    state = State(
        canvas=canvas,
        seed_B=seeds_B,
        steps_B=steps_B,
        span_B=_span(is_hole_BL, refines_B, steps_B),
        block=block,
        block_length_B=block_length_B,
        guidance_B=jnp.zeros(num_rows) if guidance_B is None else guidance_B,
        stops_at_eos_B=never_B if stops_at_eos_B is None else stops_at_eos_B,
        status_B=jnp.where(is_any_B, Status.RUNNING, Status.DONE).astype(jnp.int32),
        chain=chain,
        chain_state=chain.init(num_rows),
        rule=rule,
        remask=remask,
        fill=fill,
        logprob_BL=jnp.zeros(tokens_BL.shape, jnp.float32),
        committed_BL=jnp.full(tokens_BL.shape, -1, jnp.int32),
        **dict.fromkeys(("step_B", "forwards_B", "waves_B", "seeds_B", "filled_B"), zeros_B),
        resamples_B=resamples_B,
        editor=editor,
        edited=editor and start_edited(editor, canvas, mask_id, capacity_B, max_new_B),
        renoise=renoise,
    )  # fmt: skip
    # `advance` donates the state: its buffers must be its own, and each be there once.
    return jax.tree.map(jnp.copy, state)


def _canvas(
    tokens_BL: jax.Array, length_B: jax.Array, frozen_BL: jax.Array | None, *, mask_id: int
) -> Canvas:
    is_live_BL = live_positions(length_B, tokens_BL.shape[1])
    is_free_BL = is_live_BL & (tokens_BL == mask_id)
    if frozen_BL is not None:
        is_free_BL |= is_live_BL & ~frozen_BL
    return Canvas(tokens_BL, length_B, ~is_free_BL)


def _span(is_hole_BL: jax.Array, refines_B: jax.Array, steps_B: jax.Array) -> jax.Array:
    few_B = jnp.minimum(steps_B, jnp.maximum(jnp.sum(is_hole_BL, axis=1), 1))
    return jnp.where(refines_B, steps_B, few_B)


def _refines(
    remask: RemaskRule | None,
    resamples_B: jax.Array,
    editor: Editor | None,
    renoise: Renoise | None,
) -> jax.Array:
    """True ``[B]`` for rows that change tokens which are there, not holes alone."""
    for slot in (remask, editor, renoise):
        if slot is not None:
            resamples_B = resamples_B | slot.is_active()
    return resamples_B


def goes_on(state: State) -> jax.Array:
    """True ``[B]`` where a block without holes waits for its last step."""
    on_B = _refines(None, state.resamples_B, state.editor, state.renoise)
    return on_B if state.remask is None else on_B | state.remask.goes_on()


def work(state: State, *, mask_id: int) -> jax.Array:
    """True ``[B, L]`` at holes, and at unfrozen tokens of rows that refine them."""
    refines_B = _refines(state.remask, state.resamples_B, state.editor, state.renoise)
    return _work(state.canvas, refines_B, mask_id=mask_id)


def _work(canvas: Canvas, refines_B: jax.Array, *, mask_id: int) -> jax.Array:
    is_free_BL = ~canvas.frozen_BL
    is_hole_BL = is_free_BL & (canvas.tokens_BL == mask_id)
    return is_hole_BL | (is_free_BL & refines_B[:, None])
