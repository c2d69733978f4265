"""Where the loop asks a remask rule, and what the rule is told: probabilities, or the critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.sampling.inputs import StepInputs, is_free
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.remask.protocol import RemaskContext
from dlm_jax.sampling.state import State
from dlm_jax.types import Params


def may_remask(state: State, inputs: StepInputs) -> jax.Array:
    """True for rows whose remask rule is asked at this step."""
    assert state.rules.remask is not None
    goes_on_B = inputs.is_stepping_B & inputs.is_finite_B & ~state.block.is_last_step_B
    return goes_on_B & state.rules.remask.is_active()


def _wrongness(
    program: Program, params: Params, state: State, inputs: StepInputs
) -> jax.Array | None:
    """What the critic says of the canvas with the step's candidates in its holes."""
    if state.rules.remask is None or not state.rules.remask.reads_critic:
        return None
    critic = program.network.critic
    assert critic is not None
    tokens_BL = state.canvas.tokens_BL
    is_hole_BL = inputs.masks.is_open_BL & (tokens_BL == program.mask_id)
    filled_BL = jnp.where(is_hole_BL, inputs.proposal.tokens_BL, tokens_BL)

    def ask() -> jax.Array:
        hidden_BLD, _ = program.network.trunk(params, filled_BL, state.canvas.length_B, None)
        logit_P = critic(params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1]))
        return jax.nn.sigmoid(logit_P).reshape(filled_BL.shape)

    return jax.lax.cond(
        jnp.any(may_remask(state, inputs)), ask, lambda: jnp.zeros(filled_BL.shape, jnp.float32)
    )


def remasked(
    program: Program, params: Params, state: State, inputs: StepInputs, is_committed_BL: jax.Array
) -> State:
    """The state with the tokens that the remask rule chooses turned back into holes."""
    rule, masks = state.rules.remask, inputs.masks
    assert rule is not None and masks.is_read_BL is not None
    tokens_BL = state.canvas.tokens_BL
    logprob_BL = jnp.where(masks.is_read_BL, inputs.proposal.logprob_BL, state.logprob_BL)
    goes_on_B = inputs.is_stepping_B & inputs.is_finite_B & ~state.block.is_last_step_B
    is_free_BL = is_free(state)
    context = RemaskContext(
        step=inputs.commit,
        is_open_BL=is_free_BL & (tokens_BL != program.mask_id) & goes_on_B[:, None],
        is_fresh_BL=is_committed_BL,
        num_free_B=jnp.sum(is_free_BL, axis=1),
        probability_BL=jnp.exp(logprob_BL),
        wrong_BL=_wrongness(program, params, state, inputs),
        key_B=inputs.remask_key_B,
    )
    is_remasked_BL = context.is_open_BL & rule.select(context)
    return state._replace(
        canvas=state.canvas._replace(
            tokens_BL=jnp.where(is_remasked_BL, program.mask_id, tokens_BL)
        ),
        logprob_BL=jnp.where(is_remasked_BL, 0.0, logprob_BL),
        committed_BL=jnp.where(is_remasked_BL, -1, state.committed_BL),
    )
