"""A lower bound for good answers and an upper bound for bad ones: SPG (Wang et al. 2025).

The log-likelihood of an answer with a positive advantage is estimated by its ELBO, as in
`dlm_jax.rl.sequence_elbo`. For a negative advantage, a mixture with an upper bound is used
(equations 6 to 9)::

    U = 1 / N sum_k 1 / b log E_l E_set [ N / l 1(k in set) p(o_k | o without the set, q)^b ],
    log pi = w U + (1 - w) ELBO / N,

where ``b`` is ``rl.spg_power`` and ``w`` is ``rl.spg_share``. The expectation is estimated with the
same ``rl.masks`` masks. Tokens that no mask hides are excluded from the mean over k. Because of the
logarithm, the estimate of U is biased for few masks. The masks are uniform sets of the whole
answer, not blocks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dlm_jax.config import RLConfig
from dlm_jax.diffusion.likelihood import hidden_nll, in_blocks
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.rl.policy import Estimator, Rollout
from dlm_jax.rl.sequence_elbo import draw, weights
from dlm_jax.types import Network, Params


def spg(settings: RLConfig, *, mask_id: int) -> Estimator:
    power, share = settings.spg_power, settings.spg_share

    def log_probs(
        network: Network, params: Params, rollout: Rollout, is_masked_BML: jax.Array
    ) -> jax.Array:
        batch = Batch(rollout.tokens_BL, rollout.length_B, rollout.given_B)
        is_answer_BL = rollout.is_answer_BL()
        lower_B = jnp.zeros(rollout.length_B.shape)
        is_seen_BL = jnp.any(is_masked_BML, axis=1)
        terms = []
        for number in range(settings.masks):
            is_masked_BL = is_masked_BML[:, number]
            nll_BL = hidden_nll(network, params, batch, is_masked_BL, mask_id=mask_id)
            weight_BL = _inverse_share(is_masked_BL, is_answer_BL, network.block_length)
            lower_B -= jnp.sum(weight_BL * nll_BL, axis=1) / settings.masks
            term_BL = jnp.log(jnp.maximum(weight_BL, 1.0) / settings.masks) - power * nll_BL
            terms.append(jnp.where(is_masked_BL | ~is_seen_BL, term_BL, -jnp.inf))
        lower_B /= jnp.maximum(jnp.sum(is_answer_BL, axis=1), 1)
        upper_BL = jnp.where(is_seen_BL, _logsumexp(jnp.stack(terms)), 0.0) / power
        upper_B = jnp.sum(upper_BL, axis=1) / jnp.maximum(jnp.sum(is_seen_BL, axis=1), 1)
        mixed_B = share * upper_B + (1.0 - share) * lower_B
        return jnp.where(rollout.advantage_B >= 0, lower_B, mixed_B)[:, None]

    return Estimator(functools.partial(draw, masks=settings.masks), log_probs, weights)


def _logsumexp(terms_MBL: jax.Array) -> jax.Array:
    """``logsumexp`` over the first axis, with a gradient of 0 where all terms are -inf."""
    is_possible_BL = jnp.any(jnp.isfinite(terms_MBL), axis=0)
    sums_BL = jax.nn.logsumexp(jnp.where(is_possible_BL, terms_MBL, 0.0), axis=0)
    return jnp.where(is_possible_BL, sums_BL, -jnp.inf)


def _inverse_share(
    is_masked_BL: jax.Array, is_answer_BL: jax.Array, block_length: int
) -> jax.Array:
    """The ratio of answer positions to masked positions in each position's block, ``[B, L]``."""
    count_BN, size_BN = (
        jnp.sum(in_blocks(x_BL, block_length), axis=2) for x_BL in (is_masked_BL, is_answer_BL)
    )
    num_positions = is_masked_BL.shape[1]
    each_BL = jnp.repeat(size_BN / jnp.maximum(count_BN, 1), block_length or num_positions, axis=1)
    return each_BL[:, :num_positions]
