"""The policy loss: samples, advantages, clipped ratios, the reference KL, and two estimators.

An `Estimator` gives the log-probabilities of the actions in a sample. The loss is the surrogate of
PPO and GRPO::

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

from dlm_jax import Network, replay
from dlm_jax.objectives.losses import Loss, cross_entropy, hidden_of
from dlm_jax.settings import require

Params = dict[str, Any]


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
      trace: all draws of the rows (`dlm_jax.Trace`) if the estimator reads them, else None.
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
        return (place_1L < self.length_B[:, None]) & (place_1L >= self.given_B[:, None])

    def token_weights_BL(self) -> jax.Array:
        """``1 / |actions|`` at each action of a row, as float32."""
        return _shares(self.is_action_BL())


def _shares(is_action_BN: jax.Array) -> jax.Array:
    count_B1 = jnp.maximum(jnp.sum(is_action_BN, axis=1, keepdims=True), 1)
    return is_action_BN / count_B1.astype(jnp.float32)


@dataclass(frozen=True)
class Estimator:
    """Estimator of the log-probabilities of the N actions in each row.

    Attributes:
      draw: ``(rollout, key) -> noise``, a pytree with all masks. The same masks are used for the
        trained, the sampling and the reference parameters.
      log_probs: ``(network, params, rollout, noise) -> log_probs_BN`` in nats.
      weights: ``(rollout) -> weights_BN``. The weights sum to 1 in each row, or to 0 in rows
        without actions.
      reads_trace: whether `Rollout.trace` is needed.
    """

    draw: Callable[[Rollout, jax.Array], Any]
    log_probs: Callable[[Network, Params, Rollout, Any], jax.Array]
    weights: Callable[[Rollout], jax.Array] = Rollout.token_weights_BL
    reads_trace: bool = False


@dataclass(frozen=True)
class PolicySettings:
    """Settings of policy optimisation.

    Attributes:
      loss: name of the estimator: ``trace`` or ``diffu_grpo``.
      group: number of samples per prompt, at least 2.
      advantage: ``grpo``, ``grpo_mean`` or ``rloo`` (`ADVANTAGES`).
      clip: distance from 1 at which probability ratios are clipped, in (0, 1].
      updates: number of updates per batch of samples, at least 1.
      kl: weight of the divergence from the initial model, at least 0.
      kl_estimator: ``k2`` or ``k3`` (`KL`).
      prompt_mask: diffu_grpo: probability that a prompt token is masked.
    """

    loss: str = "trace"
    group: int = 8
    advantage: str = "grpo"
    clip: float = 0.2
    updates: int = 1
    kl: float = 0.0
    kl_estimator: str = "k3"
    prompt_mask: float = 0.15

    def __post_init__(self) -> None:
        choices = {"loss": ("trace", "diffu_grpo"), "advantage": ADVANTAGES, "kl_estimator": KL}
        for name, known in choices.items():
            value = getattr(self, name)
            require(value in known, name, value, f"is not one of {', '.join(known)}", "use one")
        require(self.group >= 2, "group", self.group, "has no baseline", "use 8")
        require(0 < self.clip <= 1, "clip", self.clip, "is outside (0, 1]", "use 0.2")
        require(self.updates >= 1, "updates", self.updates, "is below 1", "use 1")
        require(self.kl >= 0, "kl", self.kl, "is negative", "use 0")
        is_share = 0 <= self.prompt_mask <= 1
        require(is_share, "prompt_mask", self.prompt_mask, "is outside [0, 1]", "use 0.15")


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


def diffu_grpo(*, prompt_mask: float, mask_id: int) -> Estimator:
    """One-step estimate with masked prompts: diffu-GRPO (d1, Zhao et al. 2025, section 3).

    The log-probabilities of all tokens of an answer ``o`` to a prompt ``q`` are computed in one
    forward pass with the whole answer masked, and each prompt token with probability `prompt_mask`
    (equation 3 and algorithm 1): ``log pi(o_k | q) ~ log p(o_k | q', MASK ... MASK)``. The masks of
    the prompt are redrawn for every update. The estimate treats tokens as independent given the
    prompt, so the gradient is biased.
    """

    def draw(rollout: Rollout, key: jax.Array) -> jax.Array:
        is_chosen_BL = jax.random.uniform(key, rollout.tokens_BL.shape) < prompt_mask
        is_prompt_BL = jnp.arange(is_chosen_BL.shape[1])[None] < rollout.given_B[:, None]
        is_hidden_BL = rollout.is_answer_BL() | (is_chosen_BL & is_prompt_BL)
        return jnp.where(is_hidden_BL, mask_id, rollout.tokens_BL)

    def log_probs(network: Network, params: Params, rollout: Rollout, shown_BL: Any) -> jax.Array:
        return token_log_probs(network, params, rollout, shown_BL, mask_id=mask_id)

    return Estimator(draw, log_probs)


_WRITINGS_SUFFICE = ("random", "random_filled", "ancestral", "left_to_right")


def trace_rl(*, order: str, fill: str) -> Estimator:
    """Exact log-probabilities of the sampled trajectory: TraceRL (Wang et al. 2025, equation 3).

    The log-probability of each token is computed under the distribution from which it was drawn,
    given the canvas of its step, after bans, temperature and the whole chain of the sampler
    (`dlm_jax.replay`). Random choices of positions do not depend on the parameters. The actions of
    a row are all written tokens, also after EOS, because later tokens depend on them. In orders
    that select among candidates, all candidates are actions. Without clipping, the gradient equals
    that of the expected reward up to the factor ``1 / |actions|`` (TraceRL divides by the number of
    tokens in each step instead).

    Args:
      order: ``sample.order`` of the samples.
      fill: ``sample.fill`` of the samples.
    """
    every_draw = order not in _WRITINGS_SUFFICE or fill != "parallel"

    def log_probs(network: Network, params: Params, rollout: Rollout, noise: None) -> jax.Array:
        found_BSL = replay(network, params, rollout.trace, every_draw=every_draw)
        return found_BSL.reshape(found_BSL.shape[0], -1)

    def weights(rollout: Rollout) -> jax.Array:
        trace = rollout.trace
        is_action_BSL = trace.tokens >= 0 if every_draw else trace.is_written
        is_used_B = jnp.any(rollout.is_action_BL(), axis=1)
        return _shares(is_action_BSL.reshape(is_used_B.size, -1) & is_used_B[:, None])

    return Estimator(lambda rollout, key: None, log_probs, weights, reads_trace=True)


def policy_loss(
    network: Network,
    params: Params,
    before: Params,
    reference: Params,
    rollout: Rollout,
    noise: Any,
    *,
    estimator: Estimator,
    settings: PolicySettings,
) -> Loss:
    """The clipped surrogate of the log-probabilities of an estimator.

    The figures are ``clip_share``, the total weight of the actions whose ratio is clipped, and, if
    ``kl`` is not 0, ``kl``, the divergence from the reference in nats per action. Actions with
    probability 0 under any of the parameters have weight 0.

    Args:
      network: the model.
      params: parameters to train.
      before: parameters that generated the samples; read if there are several updates.
      reference: parameters of the reference; read if ``kl`` is not 0.
      rollout: the samples.
      noise: the result of `Estimator.draw`.
      estimator: the estimator.
      settings: settings of the loss.
    """

    def log_probs(params: Params) -> jax.Array:
        return estimator.log_probs(network, params, rollout, noise)

    now_BN, weight_BN = log_probs(params), estimator.weights(rollout)
    old_BN = jax.lax.stop_gradient(log_probs(before) if settings.updates > 1 else now_BN)
    reference_BN = jax.lax.stop_gradient(log_probs(reference)) if settings.kl > 0 else old_BN
    # With changed parameters, or after rounding, a truncation in the chain may exclude an action
    # that was sampled.
    is_cut_BN = jnp.isneginf(now_BN) | jnp.isneginf(old_BN) | jnp.isneginf(reference_BN)
    weight_BN = jnp.where(is_cut_BN, 0.0, weight_BN)
    now_BN, old_BN, reference_BN = (
        jnp.where(is_cut_BN, 0.0, x_BN) for x_BN in (now_BN, old_BN, reference_BN)
    )
    # Equation 7 of PPO (Schulman et al. 2017).
    ratio_BN, advantage_B1 = jnp.exp(now_BN - old_BN), rollout.advantage_B[:, None]
    free_BN = ratio_BN * advantage_B1
    held_BN = jnp.clip(ratio_BN, 1.0 - settings.clip, 1.0 + settings.clip) * advantage_B1

    def weighted(values_BN: jax.Array) -> jax.Array:
        # Positions without weight may contain MASK, whose cost is infinite.
        return jnp.sum(jnp.where(weight_BN > 0, weight_BN * values_BN, 0.0))

    rows = jnp.sum(jnp.any(rollout.is_action_BL(), axis=1)).astype(jnp.float32)
    figures = {"clip_share": (weighted((held_BN < free_BN).astype(jnp.float32)), rows)}
    total = -weighted(jnp.minimum(free_BN, held_BN))
    if settings.kl > 0:
        distance = weighted(KL[settings.kl_estimator](reference_BN - now_BN))
        figures["kl"] = distance, rows
        total = total + settings.kl * distance
    return Loss(total, rows, figures)


KL: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k2": lambda log_ratio: 0.5 * jnp.square(log_ratio),
    "k3": lambda log_ratio: jnp.expm1(log_ratio) - log_ratio,
}
"""Estimators of the divergence from the reference, given ``log r = log p_reference - log p``
(Schulman 2020, Approximating KL divergence): ``k2`` is half the squared log-ratio, and ``k3``
``r - 1 - log r``.
"""


def _centred(rewards_G: np.ndarray) -> np.ndarray:
    return rewards_G - rewards_G.mean()


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": lambda r_G: _centred(r_G) / (np.std(r_G, ddof=1) + 1e-4),
    "grpo_mean": _centred,
    "rloo": lambda r_G: _centred(r_G) * r_G.size / (r_G.size - 1),
}
"""Functions that compute the advantages of a group from its rewards ``[G]``: divided by the
standard deviation (GRPO, Shao et al. 2024), without it (Liu et al. 2025; d1), or relative to the
mean of the other samples (RLOO, Ahmadian et al. 2024).
"""


def advantages(rewards_PG: np.ndarray, kind: str) -> np.ndarray:
    """Advantages, float32 ``[P, G]``. Samples whose reward is NaN are excluded from their groups
    and have an advantage of 0.

    In a group with fewer than two rewards, all advantages are 0.
    """
    found_PG = np.zeros(rewards_PG.shape, np.float32)
    for rewards_G, found_G in zip(rewards_PG, found_PG, strict=True):
        is_there_G = np.isfinite(rewards_G)
        if is_there_G.sum() > 1:
            found_G[is_there_G] = ADVANTAGES[kind](rewards_G[is_there_G])
    return found_PG
