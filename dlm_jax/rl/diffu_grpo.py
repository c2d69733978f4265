"""One-step estimate with masked prompts: diffu-GRPO (d1, Zhao et al. 2025, section 3).

The log-probabilities of all tokens of an answer ``o`` to a prompt ``q`` are computed in one forward
pass. On the canvas of this pass, all tokens of the answer are masked, and each prompt token is
masked with probability ``rl.prompt_mask`` (equation 3 and algorithm 1). For the k-th token::

    log pi(o_k | q) ~ log p(o_k | q', MASK ... MASK),

The masks of the prompt are redrawn for every update. Each token has the weight ``1 / |o|``
(equation 4). The estimate treats tokens as independent given the prompt, so the gradient is biased.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.config import RLConfig
from dlm_jax.rl.policy import Estimator, Rollout, token_log_probs
from dlm_jax.types import Network, Params


def draw(rollout: Rollout, key: jax.Array, *, share: float, mask_id: int) -> jax.Array:
    """The canvas ``[B, L]`` with the answer and part of the prompt masked."""
    is_chosen_BL = jax.random.uniform(key, rollout.tokens_BL.shape) < share
    is_prompt_BL = jnp.arange(is_chosen_BL.shape[1])[None] < rollout.given_B[:, None]
    is_hidden_BL = rollout.is_answer_BL() | (is_chosen_BL & is_prompt_BL)
    return jnp.where(is_hidden_BL, mask_id, rollout.tokens_BL)


def diffu_grpo(settings: RLConfig, *, mask_id: int) -> Estimator:
    def log_probs(network: Network, params: Params, rollout: Rollout, shown_BL: Any) -> jax.Array:
        return token_log_probs(network, params, rollout, shown_BL, mask_id=mask_id)

    return Estimator(
        functools.partial(draw, share=settings.prompt_mask, mask_id=mask_id), log_probs
    )
