"""Policy optimisation: `train_policy` trains a model on rewards for its own samples.

python -m dlm_jax.contrib.rl --config FILE --reward MODULE:FUNCTION --updates 4 train.steps=800

An `Estimator` gives the log-probabilities of the actions in a sample. The loss is the surrogate of
PPO and GRPO::

    loss = -mean_rows sum_n w_n ( min(r_n A, clip(r_n, 1 - c, 1 + c) A) - beta KL_n ),
    r_n = exp(log p_n - log p_old_n),

where ``w`` are the weights of the estimator, which add up to 1 over the actions in a row.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import Model, Network, Status, replay, sampler
from dlm_jax.contrib import loops
from dlm_jax.objectives.losses import Loss, cross_entropy, hidden_of
from dlm_jax.sampling import key_of
from dlm_jax.settings import SettingError, require
from dlm_jax.training import Batch, Task, problem

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
      group: number of samples per prompt, at least 2.
      clip: distance from 1 at which probability ratios are clipped, in (0, 1].
      updates: number of updates per batch of samples, at least 1.
      kl: weight of the divergence from the initial model, at least 0.
    """

    group: int = 8
    clip: float = 0.2
    updates: int = 1
    kl: float = 0.0

    def __post_init__(self) -> None:
        require(self.group >= 2, "group", self.group, "has no baseline", "use 8")
        require(0 < self.clip <= 1, "clip", self.clip, "is outside (0, 1]", "use 0.2")
        require(self.updates >= 1, "updates", self.updates, "is below 1", "use 1")
        require(self.kl >= 0, "kl", self.kl, "is negative", "use 0")


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
        # The estimator k3, r - 1 - ln r (Schulman 2020, Approximating KL divergence).
        log_ratio_BN = reference_BN - now_BN
        distance = weighted(jnp.expm1(log_ratio_BN) - log_ratio_BN)
        figures["kl"] = distance, rows
        total = total + settings.kl * distance
    return Loss(total, rows, figures)


def advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """The advantages of samples in their groups, float32 ``[P, G]``: the reward minus the mean,
    divided by the standard deviation (GRPO, Shao et al. 2024).

    Samples whose reward is NaN are excluded from their groups and have an advantage of 0. In a
    group with fewer than two rewards, all advantages are 0.
    """
    found_PG = np.zeros(rewards_PG.shape, np.float32)
    for rewards_G, found_G in zip(rewards_PG, found_PG, strict=True):
        is_there_G = np.isfinite(rewards_G)
        if is_there_G.sum() > 1:
            r_G = rewards_G[is_there_G]
            found_G[is_there_G] = (r_G - r_G.mean()) / (np.std(r_G, ddof=1) + 1e-4)
    return found_PG


Reward = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""``(prompts, answers) -> rewards``, one number per answer; higher is better. A sample whose reward
is NaN is left out of its group."""


def train_policy(
    config: Any,
    reward: Reward,
    settings: PolicySettings | None = None,
    *,
    estimator: Estimator | None = None,
    report: Callable[[str], None] = loops.say,
) -> dict[str, Any]:
    """Trains the model of a config on rewards, and returns its parameters; see `loops`.

    Args:
      config: a config, or the path of a TOML file. ``train.batch_size`` counts prompts, and
        ``train.steps`` updates; ``[sample]`` has the settings of the policy. The prompts are the
        given tokens of the rows of the corpus.
      reward: the reward function.
      settings: settings of the loss.
      estimator: replaces `trace_rl`.
      report: called with one-line messages.

    Raises:
      ValueError: settings are incompatible, or no sample of a step has a reward.
    """
    settings = settings or PolicySettings()
    task = problem(config, report=report)
    config, network = task.config, task.network
    _check(config, settings)
    if estimator is None:
        why, heat = "makes no random choices, which a trace requires", config.sample.temperature
        require(heat > 0, "sample.temperature", heat, why, "use 1")
        estimator = trace_rl(order=config.sample.order, fill=config.sample.fill)
    init_key, noise_key = jax.random.split(key_of(config.train.seed))
    params, optimizer = task.start(init_key, report), task.optimizer()
    reference = jax.tree.map(jnp.copy, params) if settings.kl > 0 else {}
    sample = _make_sampler(task, params, reads_trace=estimator.reads_trace)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(
        state: loops.LoopState, reference: Any, rollout: Rollout, key: jax.Array
    ) -> tuple[loops.LoopState, dict[str, jax.Array]]:
        before = state.params

        def once(state: loops.LoopState, number: jax.Array) -> tuple[loops.LoopState, Any]:
            noise = estimator.draw(rollout, jax.random.fold_in(key, number))

            def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
                found = policy_loss(
                    network, params, before, reference, rollout, noise,
                    estimator=estimator, settings=settings,
                )  # fmt: skip
                figures = {name: total / weight for name, (total, weight) in found.figures.items()}
                value = found.sum / found.weight
                return value, figures | {"loss": value}

            grads, figures = jax.grad(loss, has_aux=True)(state.params)
            return state.updated(optimizer, grads), figures

        state, figures = jax.lax.scan(once, state, jnp.arange(settings.updates))
        return state, jax.tree.map(jnp.mean, figures)

    def take_step(state: loops.LoopState, batch: Batch, step: int) -> Any:
        rows = sample(state.params, batch.tokens_BL, batch.given_B, settings.group, step)
        rewards_B = _rewards(task, reward, rows)
        is_rewarded_B = np.isfinite(rewards_B)
        rollout = rows._replace(
            step_BL=np.where(is_rewarded_B[:, None], rows.step_BL, -1),
            advantage_B=advantages(rewards_B.reshape(-1, settings.group)).reshape(-1),
        )
        rewards = rewards_B[is_rewarded_B]
        if not rewards.size:
            raise ValueError(f"no sample of step {step} has a reward; raise sample.steps")
        figures = {
            "reward": rewards.mean(),
            "reward_deviation": rewards.std(),
            "length": (rollout.step_BL >= 0).sum() / rewards.size,
            "left_out": rewards_B.size - rewards.size,
        }
        state, found = update(state, reference, rollout, jax.random.fold_in(noise_key, step))
        return state, figures | found

    def evaluate(params: Any) -> dict[str, float]:
        """The mean reward of one sample per held-out prompt, with fixed seeds."""
        rows = task.held_out()
        is_there = rows["length"] > 0
        tokens, given = rows["tokens"][is_there], rows["given"][is_there]
        size, found = config.train.batch_size * settings.group, []
        for first in range(0, len(given), size):
            # One program serves all steps, so a batch is filled up with repeated prompts.
            at = np.arange(first, first + size) % len(given)
            made = sample(params, tokens[at], given[at], 1, -1 - first)
            found.append(_rewards(task, reward, made)[: len(given) - first])
        rewards = np.concatenate(found)
        rewards = rewards[np.isfinite(rewards)]
        if not rewards.size:
            raise ValueError("no sample of an evaluation has a reward; raise sample.steps")
        error = float(rewards.std(ddof=1) / math.sqrt(rewards.size)) if rewards.size > 1 else 0.0
        figures = {"reward": float(rewards.mean()), "standard_error": error}
        return figures | {"windows": rewards.size}

    state = loops.LoopState(params, optimizer.init(params))
    return loops.run(
        task, state, take_step, settings=settings, stride=settings.updates, evaluate=evaluate,
        report=report,
    )  # fmt: skip


def _make_sampler(task: Task, params: Params, *, reads_trace: bool) -> Callable[..., Rollout]:
    """``(params, tokens, given, group, step) -> rollout``: `group` answers to each prompt, from one
    compiled program. Samples that end with holes are no actions.
    """
    config, tokenizer = task.config, task.tokenizer
    seq_len, asked = config.data.seq_len, config.sample.gen_length
    model = Model(task.network, params, tokenizer, seq_len, config.sample)
    policy = sampler(model, trace=reads_trace)

    @functools.partial(jax.jit, compiler_options=dict(policy.compiler_options))
    def draw(params: Params, tokens_BL: Any, length_B: Any, seed_B: Any) -> Any:
        state = policy.init(tokens_BL, length_B, seed_B)
        return policy.finish(policy.run(params, state, config.sample.steps))

    def sample(params: Params, tokens: Any, given: Any, group: int, step: int) -> Rollout:
        tokens_BL, given_B = (np.repeat(np.asarray(x), group, axis=0) for x in (tokens, given))
        length_B = given_B + asked if asked else np.full_like(given_B, seq_len)
        require(
            int(length_B.max()) <= seq_len,
            "sample.gen_length",
            asked,
            f"and a prompt of {int(given_B.max())} tokens exceed data.seq_len={seq_len}",
            "lower it",
        )
        place_1L = np.arange(seq_len)[None]
        canvas_BL = np.where(place_1L < given_B[:, None], tokens_BL, tokenizer.mask_id)
        canvas_BL = np.where(place_1L < length_B[:, None], canvas_BL, tokenizer.pad_id)
        seeds = np.random.SeedSequence([config.train.seed, step % 2**32])
        seed_B = seeds.generate_state(len(given_B), np.uint32)
        found = draw(params, canvas_BL.astype(np.int32), length_B.astype(np.int32), seed_B)
        status_B = np.asarray(found.status)
        is_whole_B = np.isin(status_B, [int(Status.DONE), int(Status.CANVAS_FULL)])
        is_text_BL = place_1L < np.asarray(found.lengths)[:, None]
        answer_BL = np.where(is_text_BL, np.asarray(found.tokens), tokenizer.eos_id)
        is_action_BL = is_text_BL & is_whole_B[:, None]
        columns: dict[str, Any] = dict(
            tokens_BL=np.where(place_1L < length_B[:, None], answer_BL, tokenizer.pad_id),
            length_B=length_B.astype(np.int32),
            given_B=given_B.astype(np.int32),
            step_BL=np.where(is_action_BL, np.asarray(found.committed), -1),
            advantage_B=np.zeros(len(given_B), np.float32),
            trace=found.trace,
        )
        return Rollout(**columns)

    return sample


def _rewards(task: Task, reward: Reward, rows: Any) -> np.ndarray:
    """The rewards of the samples, float64 ``[B]``; NaN for unfinished samples."""
    decode = task.tokenizer.decode
    ends_B = np.where(rows.step_BL >= 0, np.arange(rows.step_BL.shape[1]) + 1, 0).max(axis=1)
    prompts, answers = [], []
    for tokens, given, end in zip(rows.tokens_BL, rows.given_B, ends_B, strict=True):
        prompts.append(decode(tokens[:given]))
        answers.append(decode(tokens[given : max(given, end)]))
    found = np.array(reward(prompts, answers), np.float64)
    if found.shape != (len(answers),):
        raise ValueError(
            f"the reward function returned rewards of shape {found.shape} for {len(answers)} "
            "samples; return one number per sample"
        )
    return np.where(ends_B > 0, found, np.nan)


def _check(config: Any, settings: PolicySettings) -> None:
    model, sample = config.model, config.sample
    for name, value in (
        ("attention_type", "bidirectional"),
        ("add_sampler_head", False),
        ("add_critic_head", False),
    ):
        found = getattr(model, name)
        require(found == value, f"model.{name}", found, "has no policy", f"use {value!r}")
    if sample.edits or sample.renoises:
        raise SettingError("sample.edit", sample.edit, "moves tokens of samples", "remove it")
    require(
        config.train.steps % settings.updates == 0,
        "train.steps",
        config.train.steps,
        f"is not a multiple of updates={settings.updates}",
        "change one of them",
    )


def reward_function(name: str) -> Callable[..., Sequence[float]]:
    """The function ``MODULE:FUNCTION``; ValueError if it does not exist."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--reward {name!r} does not exist ({error}); write module:function, such as "
            "dlm_jax.contrib.arithmetic:rewards"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    def train(args: argparse.Namespace, config: Any, settings: PolicySettings) -> None:
        train_policy(config, reward_function(args.reward), settings)

    return loops.program(argv, "rl", PolicySettings, train, reward="MODULE:FUNCTION")


if __name__ == "__main__":
    raise SystemExit(main())
