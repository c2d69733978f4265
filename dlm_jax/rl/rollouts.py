"""Sampling and scoring for the steps of policy optimisation."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from dlm_jax.data import Setup
from dlm_jax.diffusion.likelihood import half_width, plus_minus
from dlm_jax.distributed.partitions import batch_sharding, share_of_batch
from dlm_jax.distributed.processes import gathered
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.generate import Texts, all_requests, texts_of
from dlm_jax.inference.model import Model
from dlm_jax.rl.policy import Rollout, advantages
from dlm_jax.sampling.replay import Trace
from dlm_jax.settings import SettingError
from dlm_jax.types import Network, Params, Status

Reward = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""``(prompts, answers) -> rewards``, one reward per answer; higher is better."""


class RewardError(ValueError):
    """An error that ends a run with an invalid sample or reward."""


def reward_function(name: str) -> Reward:
    """Returns the reward function that ``rl.reward`` names (``module:function``).

    Raises:
      SettingError: the function does not exist.
    """
    module, colon, function = name.partition(":")
    remedy = "write module:function, such as dlm_jax.tasks:arithmetic"
    if not colon or not module or not function:
        raise SettingError("rl.reward", name, "is not module:function", remedy)
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # any exception of a module
        raise SettingError("rl.reward", name, f"cannot be imported ({error})", remedy) from None
    if not callable(found):
        raise SettingError("rl.reward", name, f"is not a function of {module}", remedy)
    return cast(Reward, found)


class Judge:
    """Calls a reward function and reports or rejects invalid rewards.

    Args:
      name: name of the function, ``module:function``.
      leaves_out: whether samples without a valid reward are excluded. If False, the first such
        sample ends the run.
      report: called with one line about excluded samples.
    """

    def __init__(self, name: str, *, leaves_out: bool, report: Callable[[str], None]):
        self._name, self._leaves_out, self._report = name, leaves_out, report
        self._function, self._lock = reward_function(name), threading.Lock()

    def rewards(self, prompts: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        """Rewards, float64 ``[N]``; NaN for excluded samples.

        Raises:
          RewardError: the function does not return one number per sample, a reward is invalid and
            not excluded, or no sample remains.
        """
        try:
            found, bad = self._called(prompts, answers), {}
        except RewardError:
            raise
        except Exception as error:
            if not self._leaves_out:
                raise self._refused(f"raised {_brief(error)}") from error
            found, bad = self._one_by_one(prompts, answers)
        for place in np.flatnonzero(~np.isfinite(found)):
            bad.setdefault(int(place), f"gave {found[place]}")
        if bad:
            first = min(bad)
            what = f"{bad[first]} for {prompts[first]!r} and {answers[first]!r}"[:200]
            if not self._leaves_out:
                raise self._refused(what)
            if len(bad) == len(answers) and jax.process_count() == 1:
                raise RewardError(f"rl.reward={self._name} {what}, and no samples remain")
            self._report(f"{len(bad)} samples are excluded: rl.reward={self._name} {what}")
            found[list(bad)] = np.nan
        return found

    def _called(self, prompts: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        # Asynchronous samples and an evaluation may be judged at the same time.
        with self._lock:
            returned = self._function(list(prompts), list(answers))
        found = np.asarray(returned, np.float64)
        if found.shape != (len(answers),):
            raise RewardError(
                f"rl.reward={self._name} returned rewards of shape {found.shape} for "
                f"{len(answers)} "
                "samples; return one number per sample"
            )
        return found.copy()

    def _one_by_one(
        self, prompts: Sequence[str], answers: Sequence[str]
    ) -> tuple[np.ndarray, dict[int, str]]:
        found, bad = np.full(len(answers), np.nan), {}
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            try:
                found[place] = self._called([prompt], [answer])[0]
            except RewardError:
                raise
            except Exception as error:
                bad[place] = f"raised {_brief(error)}"
        return found, bad

    def _refused(self, what: str) -> RewardError:
        return RewardError(f"rl.reward={self._name} {what}; fix it, or use rl.bad_reward=leave_out")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class Rollouts:
    """Generates samples from a model with their advantages, and evaluates the mean reward.

    The samples of a step depend only on the parameters, the seed of the run and the step.
    `needs_trace` says whether the loss reads `Rollout.trace`, and `report` is called with one-line
    messages.
    """

    def __init__(
        self,
        setup: Setup,
        network: Network,
        *,
        needs_trace: bool,
        report: Callable[[str], None],
    ):
        if setup.config.rl.asynchronous and jax.process_count() > 1:
            raise SettingError(
                "rl.asynchronous", True, "requires a single process", "use false, or one process"
            )
        self._setup, self._network, self._needs_trace = setup, network, needs_trace
        settings = setup.config.rl
        batch_size = setup.config.train.batch_size
        self._share = share_of_batch(batch_sharding(setup.mesh, batch_size), batch_size)
        parts, windows = self._share[1], setup.config.train.eval_windows
        if (batch_size // settings.group) % parts:
            raise SettingError(
                "rl.group",
                settings.group,
                f"leaves {batch_size // settings.group} prompts for {parts} processes",
                "use a smaller group or a larger train.batch_size",
                ("train.batch_size",),
            )
        if windows < parts:
            raise SettingError(
                "train.eval_windows", windows, f"is less than the {parts} processes", "raise it"
            )
        self._judge = Judge(
            settings.reward, leaves_out=settings.bad_reward == "leave_out", report=report
        )

    def check(self, params: Params) -> None:
        """Raises ValueError if the settings do not allow sampling."""
        model = self._model(params)
        all_requests(model, [""], 1, {"trace": self._needs_trace, "steps": model.sample.steps})

    def make(
        self, params: Params, step: int, rows: Mapping[str, np.ndarray]
    ) -> tuple[Rollout, dict[str, float]]:
        """Returns the samples of a step as host arrays, and the values of metrics.

        Args:
          params: parameters of the policy.
          step: step of the run, counted from 0.
          rows: the P rows of the corpus that this process provides. The given tokens of each row
            are its prompt.
        """
        settings = self._setup.config.rl
        made = self._sampled(params, rows, settings.group, step, trace=self._needs_trace)
        wholes = (Status.DONE, Status.CANVAS_FULL)
        is_whole_B = np.array([status in wholes for status in made.status])
        rewards_B = np.where(is_whole_B, self._rewards(made, rows, settings.group), np.nan)
        is_kept_B = np.isfinite(rewards_B)
        advantage_B = advantages(rewards_B.reshape(-1, settings.group), settings.advantage)
        rollout = self._rollout(made, rows, advantage_B.reshape(-1), is_kept_B)
        is_action_BL = rollout.step_BL >= 0
        logprobs_BL = made.logprobs[:, : is_action_BL.shape[1]]
        logprobs = logprobs_BL[is_action_BL[:, : logprobs_BL.shape[1]]]
        rewards_N, is_whole_N, logprobs_M = map(
            np.concatenate, zip(*self._parts((rewards_B, is_whole_B, logprobs)), strict=True)
        )
        if not is_whole_N.any():
            raise RewardError("no sample of a step was finished; raise sample.steps")
        kept = rewards_N[np.isfinite(rewards_N)]
        if not kept.size:
            raise RewardError("no sample of a step has a reward; raise sample.steps")
        figures = {
            "reward": float(kept.mean()),
            "reward_deviation": float(kept.std()),
            "length": logprobs_M.size / kept.size,
            "entropy": -float(logprobs_M.mean()),
            "left_out": float(rewards_N.size - kept.size),
        }
        return rollout, figures

    def measured(self, params: Params, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The mean reward of one sample per prompt, with fixed seeds.

        All processes pass the same rows.
        """
        part, parts = self._share
        is_there = np.asarray(rows["length"]) > 0
        rows = {
            name: np.array_split(np.asarray(column)[is_there], parts)[part]
            for name, column in rows.items()
        }
        made = self._sampled(params, rows, 1, -1, trace=False)
        rewards = np.concatenate(self._parts(self._rewards(made, rows, 1)))
        found = rewards[np.isfinite(rewards)]
        if not found.size:
            raise RewardError("no sample of an evaluation has a reward; raise sample.steps")
        figures = {"reward": float(found.mean())}
        if found.size > 1:
            figures["standard_error"] = float(found.std(ddof=1) / math.sqrt(found.size))
        return figures | {"windows": int(found.size)}

    def _model(self, params: Params) -> Model:
        config = self._setup.config
        return Model(
            network=self._network,
            params=params,
            tokenizer=self._setup.tokenizer,
            max_length=config.data.seq_len,
            sample=config.sample,
        )

    def _sampled(
        self, params: Params, rows: Mapping[str, np.ndarray], group: int, step: int, *, trace: bool
    ) -> Texts:
        """The samples for these rows, with the seeds that a single process uses."""
        parts = self._parts(
            [
                {"tokens": tokens[:given]} if given else {"prompt": ""}
                for tokens, given in zip(rows["tokens"], rows["given"], strict=True)
            ]
        )
        part = self._share[0]
        prompts = list(itertools.chain(*parts))
        first = group * sum(map(len, parts[:part]))
        own = range(first, first + group * len(parts[part]))
        train = self._setup.config.train
        number = len(prompts) * group
        drawn = np.random.SeedSequence([train.seed, step + 1]).generate_state(1, np.uint64)[0]
        seed = int(drawn % np.uint64(2**32 - number))
        model = self._model(params)
        try:
            requests = all_requests(model, prompts, group, {"seed": seed, "trace": trace})
            # The same program runs for all steps, on a canvas as long as a row of the corpus.
            with Engine(
                model,
                batch_size=train.batch_size,
                sizes=[train.batch_size],
                canvases=[self._setup.config.data.seq_len],
                max_waiting=None,
            ) as engine:
                if jax.process_count() > 1:
                    engine.reserve(requests)
                rows_of_part = engine.run(requests[place] for place in own)
                made = {own[row.number]: row for row in rows_of_part}
        except ValueError as error:
            raise RewardError(f"samples of step {step + 1} cannot be generated: {error}") from None
        for row in made.values():
            if row.error is not None:
                raise row.error
        return texts_of(model, made)

    def _parts(self, own: Any) -> list[Any]:
        """The values of all processes, in the order of their rows in the batch."""
        return [part for _, part in sorted(dict(gathered((self._share[0], own))).items())]

    def _rewards(self, made: Texts, rows: Mapping[str, np.ndarray], group: int) -> np.ndarray:
        decode = self._setup.tokenizer.decode
        prompts = [
            decode(tokens[:given])
            for tokens, given in zip(rows["tokens"], rows["given"], strict=True)
        ]
        given_B = np.repeat(rows["given"], group)
        answers = [
            decode(tokens[given:length])
            for tokens, given, length in zip(made.tokens, given_B, made.lengths, strict=True)
        ]
        return self._judge.rewards([one for one in prompts for _ in range(group)], answers)

    def _rollout(
        self,
        made: Texts,
        rows: Mapping[str, np.ndarray],
        advantage_B: np.ndarray,
        is_kept_B: np.ndarray,
    ) -> Rollout:
        config, tokenizer = self._setup.config, self._setup.tokenizer
        seq_len = config.data.seq_len
        given_B = np.repeat(rows["given"], config.rl.group).astype(np.int32)
        asked = config.sample.gen_length
        length_B = given_B + asked if asked else np.full_like(given_B, seq_len)
        tokens_BL, step_BL = (np.full((given_B.size, seq_len), -1, np.int32) for _ in range(2))
        width = min(seq_len, made.tokens.shape[1])
        tokens_BL[:, :width], step_BL[:, :width] = made.tokens[:, :width], made.committed[:, :width]
        place_1L = np.arange(seq_len)[None]
        tokens_BL = np.where(place_1L < made.lengths[:, None], tokens_BL, tokenizer.eos_id)
        tokens_BL = np.where(place_1L < length_B[:, None], tokens_BL, tokenizer.pad_id)
        step_BL = np.where(is_kept_B[:, None] & (place_1L < made.lengths[:, None]), step_BL, -1)
        trace = None if made.trace is None else self._fixed(made.trace)
        columns: list[Any] = [
            tokens_BL.astype(np.int32),
            length_B.astype(np.int32),
            given_B,
            step_BL.astype(np.int32),
            advantage_B,
            trace,
        ]
        return Rollout(*columns)

    def _fixed(self, trace: Trace) -> Trace:
        """Pads a trace to the maximum numbers of steps and positions of the run.

        One program then replays all traces, and a resumed run gives the same results.
        """
        config, pad_id = self._setup.config, self._setup.tokenizer.pad_id
        num_positions, num_steps = config.data.seq_len, config.sample.steps
        fills = {"tokens": -1, "canvas": pad_id, "is_frozen": True}
        by_step = ("canvas", "tokens", "is_written", "logprobs", "entropy", "confidence", "level")

        def padded(name: str, *sizes: int) -> np.ndarray:
            found = np.asarray(getattr(trace, name))
            width = [
                (0, 0),
                *((0, n - have) for n, have in zip(sizes, found.shape[1:], strict=True)),
            ]
            return np.pad(found, width, constant_values=fills.get(name, 0))

        arrays = {name: padded(name, num_steps, num_positions) for name in by_step}
        arrays["choice_logprobs"] = padded("choice_logprobs", num_steps)
        arrays["is_frozen"] = padded("is_frozen", num_positions)
        return dataclasses.replace(trace, **arrays, width=num_positions)


def reward_line(figures: Mapping[str, float]) -> str:
    half = half_width(figures.get("standard_error", math.nan), int(figures["windows"]))
    return f"reward {figures['reward']:.4f}{plus_minus(half)} of {figures['windows']:.0f} prompts"
