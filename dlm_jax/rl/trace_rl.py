"""Exact log-probabilities of the sampled trajectory: TraceRL (Wang et al. 2025, equation 3).

The log-probability of each token is computed under the distribution from which it was drawn, given
the canvas of its step::

    log pi(o_k | q) = log p( o_k | the canvas before the step that wrote it ),

after bans, temperature and the whole chain of the sampler (`dlm_jax.replay`). Random choices of
positions do not depend on the parameters. The actions of a row are all written tokens. Tokens after
EOS are included, because later tokens depend on them. In orders that select among candidates, all
candidates are actions. The sum over the actions is the exact log-probability of the policy. Without
clipping, the gradient equals that of the expected reward up to the factor ``1 / |actions|``, which
all losses in this package have (TraceRL divides by the number of tokens in each step instead).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.config import RLConfig, SamplingParams
from dlm_jax.inference.pure import replay
from dlm_jax.rl.policy import Estimator, Rollout
from dlm_jax.types import Network, Params

_WRITINGS_SUFFICE = ("random", "random_filled", "ancestral", "left_to_right")


def trace_rl(settings: RLConfig, sample: SamplingParams) -> Estimator:
    every_draw = sample.order not in _WRITINGS_SUFFICE or sample.fill != "parallel"

    def log_probs(network: Network, params: Params, rollout: Rollout, noise: None) -> jax.Array:
        found_BSL = replay(network, params, rollout.trace, every_draw=every_draw)
        return found_BSL.reshape(found_BSL.shape[0], -1)

    def weights(rollout: Rollout) -> jax.Array:
        trace = rollout.trace
        is_action_BSL = trace.tokens >= 0 if every_draw else trace.is_written
        is_used_B = jnp.any(rollout.is_action_BL(), axis=1)
        is_action_BN = is_action_BSL.reshape(is_used_B.size, -1) & is_used_B[:, None]
        count_B1 = jnp.maximum(jnp.sum(is_action_BN, axis=1, keepdims=True), 1)
        return is_action_BN / count_B1.astype(jnp.float32)

    return Estimator(lambda rollout, key: None, log_probs, weights)
