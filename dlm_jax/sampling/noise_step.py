"""One step of the denoising loop of models whose forward process writes other noise than MASK.

``step: begin -> forward -> transform logits -> propose -> update``. A block starts from noise, and
each step writes all of its open positions: a candidate, new noise or the current token, as the
`NoiseRule` selects. There are no edits, no remasking and no traces.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.randomness import salted
from dlm_jax.sampling.commit.commit_rule import uniform
from dlm_jax.sampling.forward import forward
from dlm_jax.sampling.mask_step import draw_candidates, writable_ids
from dlm_jax.sampling.noise import NoiseContext, NoiseRule
from dlm_jax.sampling.positions import choose
from dlm_jax.sampling.program import Counters, Program
from dlm_jax.sampling.remask import RENOISE_SALT, random_ids
from dlm_jax.sampling.state import (
    State,
    commit_tokens,
    end_step,
    overwrite,
    step_keys,
    tie_preferences,
    token_positions,
    visible_context,
)
from dlm_jax.types import Params


def step(program: Program, params: Params, state: State) -> State:
    """The state after one step of every running row. Other rows remain bitwise unchanged."""
    rule, mask_id = state.rules.commit, program.mask_id
    assert isinstance(rule, NoiseRule), "a commit rule has its own step"
    is_running_B = state.is_running_B

    # Begin: write the first tokens at the holes of starting rows.
    begin_key_B = step_keys(state, salt=RENOISE_SALT)[1]
    is_new_BL = ((state.step_B == 0) & is_running_B)[:, None] & ~state.canvas.frozen_BL
    is_new_BL &= state.canvas.tokens_BL == mask_id
    new_BL = jax.lax.cond(
        jnp.any(is_new_BL),
        lambda: rule.begin(make_context(program, state, begin_key_B)),
        lambda: state.canvas.tokens_BL,
    )
    is_new_BL &= new_BL != state.canvas.tokens_BL
    state = overwrite(state, is_new_BL, new_BL, mask_id=mask_id)

    # Open positions: the unfrozen positions of the block. The blocks behind it are noise.
    rule_key_B = step_keys(state)[1]
    tokens_BL, block = state.canvas.tokens_BL, state.block
    place_1L = jnp.arange(tokens_BL.shape[1])[None]
    is_seen_BL = state.canvas.frozen_BL | (place_1L < block.begin_B[:, None])
    is_seen_BL &= token_positions(state, mask_id=mask_id)
    noise_context = make_context(program, state, rule_key_B)
    is_open_BL = noise_context.is_open_BL

    # Forward.
    output, cache, counters = forward(program, params, state, is_open_BL)

    # Propose. The rule scores the current tokens.
    filled = draw_candidates(
        program,
        params,
        state,
        output,
        visible_context(state, mask_id=mask_id),
        is_open_BL,
        is_seen_BL,
        preference_BL=noise_context.preference_BL,
    )
    proposal, is_finite_B = filled.proposal, filled.is_finite_B

    # Update: candidates, new noise and current tokens. The last step of a block leaves no MASK.
    before = filled.rule_state
    update, after = rule.update(before, noise_context, proposal)
    is_written_BL = is_open_BL & is_finite_B[:, None]
    is_last_mask_BL = (tokens_BL == mask_id) & block.is_last_step_B[:, None]
    is_taken_BL = is_written_BL & (update.is_candidate_BL | is_last_mask_BL)
    counters = counters.plus(Counters(filled=jnp.sum(is_open_BL, axis=1), **filled.counts))
    state = state._replace(cache=cache, counters=state.counters.plus(counters))
    state = commit_tokens(state, filled, is_taken_BL, choose(is_running_B, after, before))
    is_new_BL = is_written_BL & ~is_taken_BL & (update.tokens_BL != state.canvas.tokens_BL)
    state = overwrite(state, is_new_BL, update.tokens_BL, mask_id=mask_id)

    # End of the step, the block and the row. A block takes all its steps unless the rule ends it.
    always_B = jnp.ones_like(is_running_B)
    stays_B = always_B if update.is_final_B is None else ~update.is_final_B
    return end_step(
        program, state, is_running_B, is_finite_B=is_finite_B, stays_B=stays_B, changes_B=always_B
    )


def make_context(program: Program, state: State, key_B: jax.Array) -> NoiseContext:
    """The current block, and uniform noise over the ids that can be written in each row."""
    eos_ids = set(program.eos_ids)
    banned = ({*program.banned_ids, program.pad_id} - eos_ids) | {program.mask_id}

    def draw(params: Params, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        chain, tokens_BL, key_B = rows
        num_rows, num_positions = tokens_BL.shape
        is_text_BV = writable_ids(program, chain, num_rows, banned)
        random_BL = random_ids(is_text_BV, uniform(key_B, num_positions), program.mask_id)
        is_noise_BL = jnp.take_along_axis(is_text_BV, tokens_BL, axis=1)
        return is_noise_BL, random_BL, jnp.sum(is_text_BV, axis=1, dtype=jnp.int32)

    tokens_BL = state.canvas.tokens_BL
    rows = state.rules.chain, tokens_BL, salted(key_B, RENOISE_SALT)
    is_noise_BL, random_BL, num_ids_B = program.by_rows(draw)(None, rows)
    return NoiseContext(
        tokens_BL=tokens_BL,
        is_open_BL=state.is_free_BL & state.is_running_B[:, None],
        step_B=state.block.step_B,
        steps_B=state.block.steps_B,
        key_B=key_B,
        is_noise_BL=is_noise_BL,
        random_BL=random_BL,
        num_ids_B=num_ids_B,
        mask_id=program.mask_id,
        preference_BL=tie_preferences(state, key_B),
    )
