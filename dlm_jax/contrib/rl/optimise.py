"""Policy optimisation of a model on rewards for its own samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax.config
from dlm_jax import Model, Status, sampler
from dlm_jax.contrib import loops
from dlm_jax.contrib.rl.policy import (
    Estimator,
    PolicySettings,
    Rollout,
    advantages,
    diffu_grpo,
    policy_loss,
    trace_rl,
)
from dlm_jax.sampling.rule_tools import key_of
from dlm_jax.settings import SettingError, require
from dlm_jax.training import Batch, Problem, problem

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
      estimator: replaces the estimator that ``settings.loss`` names.
      report: called with one-line messages.

    Raises:
      ValueError: settings are incompatible, or no sample of a step has a reward.
    """
    settings = settings or PolicySettings()
    if isinstance(config, str | PathLike):
        config = dlm_jax.config.load(str(config))
    _check(config, settings)
    task = problem(config, report=report)
    config, network = task.setup.config, task.network
    if estimator is None and settings.loss == "trace":
        estimator = trace_rl(order=config.sample.order, fill=config.sample.fill)
    elif estimator is None:
        estimator = diffu_grpo(prompt_mask=settings.prompt_mask, mask_id=task.setup.mask_id)
    init_key, noise_key = jax.random.split(key_of(config.train.seed))
    params, optimizer = task.start(init_key, report), task.optimizer()
    reference = jax.tree.map(jnp.copy, params) if settings.kl > 0 else {}
    sample = _Samples(task, params, settings, reads_trace=estimator.reads_trace)

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

    prompts: list[Iterator[Batch]] = []

    def take_step(state: loops.LoopState, step: int) -> tuple[loops.LoopState, dict[str, Any]]:
        if not prompts:
            prompts.append(task.batches(step // settings.updates))
        batch = next(prompts[0])
        rows = sample(state.params, batch.tokens_BL, batch.given_B, settings.group, step)
        rewards_B = _rewards(task, reward, rows)
        is_kept_B = np.isfinite(rewards_B)
        advantage_PG = advantages(rewards_B.reshape(-1, settings.group), settings.advantage)
        rollout = rows._replace(
            step_BL=np.where(is_kept_B[:, None], rows.step_BL, -1),
            advantage_B=advantage_PG.reshape(-1),
        )
        kept = rewards_B[is_kept_B]
        if not kept.size:
            raise ValueError(f"no sample of step {step} has a reward; raise sample.steps")
        figures = {
            "reward": kept.mean(),
            "reward_deviation": kept.std(),
            "length": (rollout.step_BL >= 0).sum() / kept.size,
            "left_out": rewards_B.size - kept.size,
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


class _Samples:
    """Samples of the policy, of one shape, from one compiled program."""

    def __init__(self, task: Problem, params: Any, settings: PolicySettings, *, reads_trace: bool):
        self._setup = setup = task.setup
        config = setup.config
        model = Model(task.network, params, setup.tokenizer, config.data.seq_len, config.sample)
        policy = sampler(model, trace=reads_trace)

        def draw(params: Any, tokens_BL: Any, length_B: Any, seed_B: Any) -> Any:
            state = policy.init(tokens_BL, length_B, seed_B)
            return policy.finish(policy.run(params, state, config.sample.steps))

        self._draw = jax.jit(draw, compiler_options=dict(policy.compiler_options))

    def __call__(self, params: Any, tokens: Any, given: Any, group: int, step: int) -> Rollout:
        """`group` answers to each prompt. Samples that end with holes are no actions."""
        config, tokenizer = self._setup.config, self._setup.tokenizer
        tokens_BL, given_B = (np.repeat(np.asarray(x), group, axis=0) for x in (tokens, given))
        seq_len, asked = config.data.seq_len, config.sample.gen_length
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
        drawn = np.random.SeedSequence([config.train.seed, step % 2**32])
        seed_B = drawn.generate_state(len(given_B), np.uint32)
        made = self._draw(params, canvas_BL.astype(np.int32), length_B.astype(np.int32), seed_B)
        status_B = np.asarray(made.status)
        is_whole_B = np.isin(status_B, [int(Status.DONE), int(Status.CANVAS_FULL)])
        is_text_BL = place_1L < np.asarray(made.lengths)[:, None]
        answer_BL = np.where(is_text_BL, np.asarray(made.tokens), tokenizer.eos_id)
        is_action_BL = is_text_BL & is_whole_B[:, None]
        columns: dict[str, Any] = dict(
            tokens_BL=np.where(place_1L < length_B[:, None], answer_BL, tokenizer.pad_id),
            length_B=length_B.astype(np.int32),
            given_B=given_B.astype(np.int32),
            step_BL=np.where(is_action_BL, np.asarray(made.committed), -1),
            advantage_B=np.zeros(len(given_B), np.float32),
            trace=made.trace,
        )
        return Rollout(**columns)


def _rewards(task: Problem, reward: Reward, rows: Any) -> np.ndarray:
    """The rewards of the samples, float64 ``[B]``; NaN for unfinished samples."""
    decode = task.setup.tokenizer.decode
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
        settings.loss != "trace" or sample.temperature > 0,
        "sample.temperature",
        0.0,
        "makes no random choices, which loss='trace' requires",
        "use 1",
    )
    require(
        config.train.steps % settings.updates == 0,
        "train.steps",
        config.train.steps,
        f"is not a multiple of updates={settings.updates}",
        "change one of them",
    )
