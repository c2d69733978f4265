"""Common parts of the policy losses: samples, advantages, clipped ratios, and the reference KL.

Each loss in `dlm_jax.rl` is an `Estimator` of the log-probabilities of the actions in a sample. All
losses use the surrogate of PPO and GRPO::

    loss = -mean_rows sum_n w_n ( min(r_n A, clip(r_n, 1 - c, 1 + c) A) - beta KL_n ),
    r_n = exp(log p_n - log p_old_n),

where ``w`` are the weights of the estimator, which add up to 1 over the actions in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import RLConfig
from dlm_jax.diffusion.losses import Loss, cross_entropy, hidden_of
from dlm_jax.diffusion.objectives import NetworkObjective
from dlm_jax.types import Network, Params, live_positions


class Rollout(NamedTuple):
    """The samples of a training step, as rows of a batch.

    Attributes:
      tokens_BL: int32, the whole canvas: prompt, answer, EOS after the answer, and PAD beyond
        ``length_B``.
      length_B: int32, number of positions on each canvas.
      given_B: int32, number of leading positions that are the prompt.
      step_BL: int32, index of the sampling step that wrote each token of the answer, starting at 0;
        -1 elsewhere and in excluded rows.
      advantage_B: float32, reward of the row relative to its group.
      trace: all draws of the rows (`dlm_jax.Trace`) if ``rl.loss`` is ``trace``, else None.
    """

    tokens_BL: jax.Array
    length_B: jax.Array
    given_B: jax.Array
    step_BL: jax.Array
    advantage_B: jax.Array
    trace: Any = None

    def is_action_BL(self) -> jax.Array:
        """True at sampled tokens up to and including the first EOS."""
        return self.step_BL >= 0

    def is_answer_BL(self) -> jax.Array:
        """True at all sampled positions, including those after the first EOS."""
        place_1L = jnp.arange(self.tokens_BL.shape[1])[None]
        is_live_BL = live_positions(self.length_B, self.tokens_BL.shape[1])
        return is_live_BL & (place_1L >= self.given_B[:, None])

    def token_weights_BL(self) -> jax.Array:
        """``1 / |actions|`` at each action of a row, as float32."""
        is_action_BL = self.is_action_BL()
        count_B1 = jnp.maximum(jnp.sum(is_action_BL, axis=1, keepdims=True), 1)
        return is_action_BL / count_B1.astype(jnp.float32)


@dataclass(frozen=True)
class Estimator:
    """Estimator of the log-probabilities of the N actions in each row.

    Attributes:
      draw: ``(rollout, key) -> noise``, a pytree with all masks. Each leaf is ``[B, ...]`` or a
        scalar. The same masks are used for the trained, the sampling and the reference parameters.
      log_probs: ``(network, params, rollout, noise) -> log_probs_BN`` in nats.
      weights: ``(rollout) -> weights_BN``. The weights sum to 1 in each row, or to 0 in rows
        without actions.
    """

    draw: Callable[[Rollout, jax.Array], Any]
    log_probs: Callable[[Network, Params, Rollout, Any], jax.Array]
    weights: Callable[[Rollout], jax.Array] = Rollout.token_weights_BL


def token_log_probs(
    network: Network, params: Params, rollout: Rollout, shown_BL: jax.Array, *, mask_id: int
) -> jax.Array:
    """Log-probability in nats ``[B, L]`` of each token given the canvas `shown_BL`.

    The result is 0 at positions that are not actions. MASK is never predicted, but PAD and other
    ids that samplers ban keep their probability.
    """
    hidden_BLD = hidden_of(network, params, shown_BL, rollout.tokens_BL, rollout.length_B)
    is_action_BL = rollout.is_action_BL()
    nll_BL = cross_entropy(
        network, params, hidden_BLD, rollout.tokens_BL, mask_id=mask_id, is_read_BL=is_action_BL
    )
    return jnp.where(is_action_BL, -nll_BL, 0.0)


def policy_objective(estimator: Estimator, settings: RLConfig) -> NetworkObjective:
    """The policy objective: the clipped surrogate of the log-probabilities of an estimator.

    The metrics are ``clip_share``, the total weight of the actions whose ratio is clipped, and, if
    ``rl.kl`` is not 0, ``kl``, the divergence from the reference in nats per action. Actions with
    probability 0 under any of the parameters have weight 0.
    """

    def draw(rollout: Any, key: jax.Array) -> dict[str, Any]:
        is_used_B = jnp.any(rollout.is_action_BL(), axis=1)
        rows = jnp.sum(is_used_B).astype(jnp.float32)
        return {"rollout": rollout, "views": estimator.draw(rollout, key), "rows": rows}

    def log_probs(network: Network, params: Params, noise: Any) -> jax.Array:
        return estimator.log_probs(network, params, noise["rollout"], noise["views"])

    def anchor(network: Network, params: Params, reference: Params, noise: Any) -> Any:
        found = {}
        if settings.updates > 1 or settings.asynchronous:
            found["old"] = log_probs(network, params, noise)
        if settings.kl > 0:
            found["reference"] = log_probs(network, reference, noise)
        return noise | jax.lax.stop_gradient(found)

    def loss(network: Network, params: Params, noise: Any) -> Loss:
        rollout = noise["rollout"]
        now_BN, weight_BN = log_probs(network, params, noise), estimator.weights(rollout)
        old_BN = noise.get("old", jax.lax.stop_gradient(now_BN))
        reference_BN = noise.get("reference", old_BN)
        # With changed parameters, or after rounding, a truncation in the chain may exclude an
        # action that was sampled.
        is_cut_BN = jnp.isneginf(now_BN) | jnp.isneginf(old_BN) | jnp.isneginf(reference_BN)
        weight_BN = jnp.where(is_cut_BN, 0.0, weight_BN)
        now_BN, old_BN, reference_BN = (
            jnp.where(is_cut_BN, 0.0, x_BN) for x_BN in (now_BN, old_BN, reference_BN)
        )
        gain_BN, is_clipped_BN = clipped_gain(
            now_BN - old_BN, rollout.advantage_B[:, None], clip=settings.clip
        )
        figures = {"clip_share": _sum(weight_BN, is_clipped_BN.astype(jnp.float32))}
        total = -_sum(weight_BN, gain_BN)
        if settings.kl > 0:
            distance_BN = KL[settings.kl_estimator](reference_BN - now_BN)
            figures["kl"] = _sum(weight_BN, distance_BN)
            total = total + settings.kl * figures["kl"]
        rows = noise["rows"]
        return Loss(total, rows, {name: (found, rows) for name, found in figures.items()})

    return NetworkObjective(draw, loss, anchor)


def _sum(weight_BN: jax.Array, values_BN: jax.Array) -> jax.Array:
    # Positions without weight may contain MASK, whose cost is infinite.
    return jnp.sum(jnp.where(weight_BN > 0, weight_BN * values_BN, 0.0))


def clipped_gain(
    log_ratio: jax.Array, advantage: jax.Array, *, clip: float
) -> tuple[jax.Array, jax.Array]:
    """``min(r A, clip(r, 1 - c, 1 + c) A)``, and True where the ratio is clipped.

    The formula is equation 7 of PPO (Schulman et al. 2017). The arguments are broadcast.
    """
    ratio = jnp.exp(log_ratio)
    free = ratio * advantage
    held = jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantage
    return jnp.minimum(free, held), held < free


def squared(log_ratio: jax.Array) -> jax.Array:
    """The estimator k2 of Schulman (2020, Approximating KL divergence): half the squared
    log-ratio.
    """
    return 0.5 * jnp.square(log_ratio)


def unbiased(log_ratio: jax.Array) -> jax.Array:
    """The estimator k3 of Schulman (2020): ``r - 1 - log r``, where ``log r = log p_reference - log
    p``.
    """
    return jnp.expm1(log_ratio) - log_ratio


KL = {"k2": squared, "k3": unbiased}
"""Estimators of the divergence from the reference, by ``rl.kl_estimator``."""


def group_relative(rewards_PG: np.ndarray) -> np.ndarray:
    """``(r - mean) / (std + 1e-4)`` in each group, where the standard deviation divides by G - 1:
    GRPO (Shao et al. 2024).
    """
    return centred(rewards_PG) / (np.std(rewards_PG, axis=1, ddof=1, keepdims=True) + 1e-4)


def centred(rewards_PG: np.ndarray) -> np.ndarray:
    """``r - mean`` in each group: GRPO without the standard deviation (Liu et al. 2025; d1)."""
    return rewards_PG - np.mean(rewards_PG, axis=1, keepdims=True)


def leave_one_out(rewards_PG: np.ndarray) -> np.ndarray:
    """``r`` minus the mean of the other samples in its group: RLOO (Ahmadian et al. 2024)."""
    size = rewards_PG.shape[1]
    return centred(rewards_PG) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": group_relative,
    "grpo_mean": centred,
    "rloo": leave_one_out,
}
"""Functions that compute advantages from rewards ``[P, G]`` (P groups of size G), keyed
by ``rl.advantage``."""


def advantages(rewards_PG: np.ndarray, kind: str) -> np.ndarray:
    """Advantages, float32 ``[P, G]``. Samples whose reward is NaN are excluded from their groups
    and have an advantage of 0.

    In a group with fewer than two rewards, all advantages are 0.
    """
    found_PG = np.zeros(rewards_PG.shape, np.float32)
    for rewards_G, found_G in zip(rewards_PG, found_PG, strict=True):
        is_there_G = np.isfinite(rewards_G)
        if is_there_G.sum() > 1:
            found_G[is_there_G] = ADVANTAGES[kind](rewards_G[None, is_there_G])[0]
    return found_PG
