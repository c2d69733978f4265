"""ELBO estimates of the log-likelihood of whole answers: ESPO (Ou et al. 2025). The answer is a
single action.

The log-probability of an answer with N positions is estimated with ``rl.masks`` masks. Each mask
hides a uniformly random set of ``l`` positions, where ``l`` is uniform on 1..N. The ratio is
normalised per token::

    L(o | q) = E_l E_set [ N / l sum_{k in set} log p(o_k | o without the set, q) ]
    r = exp( (L(o | q) - L_old(o | q)) / N ).

The values of ``l`` are stratified over the masks of a row. The EOS tokens after an answer are part
of it, as in training with ``data.tail = "eos"``. The ELBO is below the log-likelihood, so the
gradient is biased unless the bound is tight. Ou et al. use k2 for the KL (``rl.kl_estimator``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dlm_jax.config import RLConfig
from dlm_jax.diffusion.corruption import mask_exactly
from dlm_jax.diffusion.likelihood import bound_at
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.rl.policy import Estimator, Rollout
from dlm_jax.types import Network, Params


def draw(rollout: Rollout, key: jax.Array, *, masks: int) -> jax.Array:
    """True where a mask hides a position, ``[B, masks, L]``."""
    is_answer_BL = rollout.is_answer_BL()
    size_B = jnp.sum(is_answer_BL, axis=1)
    count_key, set_key = jax.random.split(key)
    offset_B = jax.random.uniform(count_key, size_B.shape)

    def one(number: jax.Array) -> jax.Array:
        share_B = (offset_B + number / masks) % 1.0
        count_B = jnp.minimum(1 + jnp.floor(share_B * size_B).astype(jnp.int32), size_B)
        return mask_exactly(jax.random.fold_in(set_key, number), count_B, is_answer_BL)

    return jnp.moveaxis(jax.vmap(one)(jnp.arange(masks)), 0, 1)


def sequence_elbo(settings: RLConfig, *, mask_id: int) -> Estimator:
    def log_probs(
        network: Network, params: Params, rollout: Rollout, is_masked_BML: jax.Array
    ) -> jax.Array:
        batch = Batch(rollout.tokens_BL, rollout.length_B, rollout.given_B)
        nats_B = jnp.zeros(rollout.length_B.shape)
        for number in range(settings.masks):
            nats_BN = bound_at(network, params, batch, is_masked_BML[:, number], mask_id=mask_id)
            nats_B += jnp.sum(nats_BN, axis=1)
        size_B = jnp.maximum(jnp.sum(rollout.is_answer_BL(), axis=1), 1)
        return (-nats_B / (settings.masks * size_B))[:, None]

    return Estimator(functools.partial(draw, masks=settings.masks), log_probs, weights)


def weights(rollout: Rollout) -> jax.Array:
    """1 for each row with actions, float32 ``[B, 1]``."""
    return jnp.any(rollout.is_action_BL(), axis=1, keepdims=True).astype(jnp.float32)
