"""Where the loop asks a remask rule, and what the rule is told: probabilities, or the critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.sampling.program import Look, Program
from dlm_jax.sampling.remask import Tokens
from dlm_jax.sampling.state import State
from dlm_jax.types import Params


def may_remask(state: State, seen: Look) -> jax.Array:
    """True for rows whose remask rule is asked at this step."""
    assert state.remask is not None
    goes_on_B = seen.is_stepping_B & seen.is_finite_B & ~state.block.is_last_step_B
    return goes_on_B & state.remask.is_active()


def _wrongness(
    program: Program, params: Params, state: State, seen: Look, tokens_BL: jax.Array
) -> jax.Array | None:
    """What the critic says of the canvas with the step's candidates in its holes."""
    if state.remask is None or not state.remask.asks_critic:
        return None
    critic = program.network.critic
    assert critic is not None
    is_hole_BL = seen.is_open_BL & (tokens_BL == program.mask_id)
    filled_BL = jnp.where(is_hole_BL, seen.proposal.tokens_BL, tokens_BL)

    def ask() -> jax.Array:
        hidden_BLD, _ = program.network.trunk(params, filled_BL, state.canvas.length_B, None)
        logit_P = critic(params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1]))
        return jax.nn.sigmoid(logit_P).reshape(filled_BL.shape)

    return jax.lax.cond(
        jnp.any(may_remask(state, seen)), ask, lambda: jnp.zeros(filled_BL.shape, jnp.float32)
    )


def remasked(
    program: Program,
    params: Params,
    state: State,
    seen: Look,
    tokens_BL: jax.Array,
    logprob_BL: jax.Array,
    is_committed_BL: jax.Array,
) -> jax.Array:
    """True where the remask rule takes a token back."""
    assert state.remask is not None
    goes_on_B = seen.is_stepping_B & seen.is_finite_B
    is_free_BL = state.block.holds(tokens_BL.shape[1]) & ~state.canvas.frozen_BL
    goes_on_B &= ~state.block.is_last_step_B
    wrong_BL = _wrongness(program, params, state, seen, tokens_BL)
    is_open_BL = is_free_BL & (tokens_BL != program.mask_id) & goes_on_B[:, None]
    tokens = Tokens(
        is_open_BL=is_open_BL,
        is_fresh_BL=is_committed_BL,
        num_free_B=jnp.sum(is_free_BL, axis=1),
        probability_BL=jnp.exp(logprob_BL),
        wrong_BL=wrong_BL,
        key_B=seen.remask_key_B,
    )
    return is_open_BL & state.remask.select(seen.view, tokens)
