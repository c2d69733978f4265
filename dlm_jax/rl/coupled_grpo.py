"""Pairs of complementary masks: coupled-GRPO (DiffuCoder, Gong et al. 2025, section 5).

There are ``rl.masks`` pairs of canvases. The first canvas of a pair masks a fraction ``t`` of the
answer, uniform on [0.2, 0.8]. The second canvas masks the other tokens of the answer, so that every
token is masked once per pair. An additional canvas masks the whole answer. The log-probability of
the k-th token is (equation 7)::

    1 / (pairs + 1) ( log p(o_k | MASK ... MASK) + sum_pairs log p(o_k | o_t) / t_k ),

where ``o_t`` is the canvas of the pair in which the token is masked, and ``t_k`` is the fraction of
tokens that are masked on this canvas.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dlm_jax.config import RLConfig
from dlm_jax.rl.policy import Estimator, Rollout, token_log_probs
from dlm_jax.types import Network, Params

Halves = tuple[jax.Array, jax.Array]
"""True at the positions that the first canvas of a pair masks, ``[B, pairs, L]``, and the masked
fraction, ``[B, pairs]``.
"""


def draw(rollout: Rollout, key: jax.Array, *, pairs: int) -> Halves:
    num_rows, num_positions = rollout.tokens_BL.shape
    share_key, place_key = jax.random.split(key)
    share_BP = jax.random.uniform(share_key, (num_rows, pairs), minval=0.2, maxval=0.8)
    place_BPL = jax.random.uniform(place_key, (num_rows, pairs, num_positions))
    return place_BPL < share_BP[:, :, None], share_BP


def coupled_grpo(settings: RLConfig, *, mask_id: int) -> Estimator:
    def log_probs(network: Network, params: Params, rollout: Rollout, halves: Halves) -> jax.Array:
        is_first_BPL, share_BP = halves
        is_answer_BL = rollout.is_answer_BL()

        def seen_with(is_hidden_BL: jax.Array) -> jax.Array:
            shown_BL = jnp.where(is_hidden_BL & is_answer_BL, mask_id, rollout.tokens_BL)
            return token_log_probs(network, params, rollout, shown_BL, mask_id=mask_id)

        total_BL = seen_with(is_answer_BL)
        for pair in range(settings.masks):
            is_first_BL, share_B1 = is_first_BPL[:, pair], share_BP[:, pair, None]
            total_BL += jnp.where(
                is_first_BL,
                seen_with(is_first_BL) / share_B1,
                seen_with(~is_first_BL) / (1.0 - share_B1),
            )
        return total_BL / (settings.masks + 1)

    return Estimator(functools.partial(draw, pairs=settings.masks), log_probs)
