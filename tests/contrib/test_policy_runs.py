"""Policy optimisation from end to end: learning, resuming, and what is refused."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.contrib.arithmetic import examples
from dlm_jax.contrib.rl import PolicySettings, main, train_policy

FLAGS = {
    "data__layout": "documents", "data__seq_len": 10, "model__depth": 1, "optim__name": "adamw",
    "optim__learning_rate": 0.03, "optim__warmup_steps": 0, "train__steps": 4,
    "train__batch_size": 2, "train__log_every": 1, "train__eval_every": 4,
    "train__eval_windows": 8, "train__checkpoint_every": 2, "sample__gen_length": 4,
    "sample__steps": 2, "sample__order": "random",
}  # fmt: skip
TRACED = PolicySettings(updates=2, kl=0.1)


def ones(prompts: list[str], answers: list[str]) -> list[float]:
    """The share of an answer that is the digit 1; nothing for a prompt that is none."""
    assert all(len(prompt) == 6 and prompt.endswith("=") for prompt in prompts)
    return [answer.count("1") / 4 for answer in answers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policy")


def _flags(folder: Path, out_dir: Path, **changes: Any) -> dict[str, str]:
    path = folder / "sums.jsonl"
    if not path.exists():
        pairs = [{"prompt": p, "response": a} for p, a in examples(400)]
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tiny_run.flags(out_dir, data__source=path, **(FLAGS | changes))


def _train(folder: Path, name: str, reward: Any = ones, settings: Any = TRACED, **changes: Any):
    with tiny_run.on_devices(1):
        config = configs.load(None, _flags(folder, folder / name, **changes))
        return train_policy(config, reward, settings, report=lambda line: None)


def _records(out_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@functools.cache
def _whole(folder: Path) -> Any:
    return _train(folder, "whole")


def test_the_metrics_of_a_run_are_there_and_finite_and_its_model_samples(folder):
    params = _whole(folder)
    for number, line in enumerate(_records(folder / "whole"), 1):
        assert line["step"] == 2 * number
        assert 0 <= line["reward"] <= 1 and 0 <= line["clip_share"] <= 1
        assert line["kl"] >= 0 and 1 <= line["length"] <= 4 and line["left_out"] == 0
    (evaluation,) = _records(folder / "whole", "evaluation")
    assert evaluation["windows"] == 8 and 0 <= evaluation["reward"] <= 1
    model = dlm_jax.load(folder / "whole" / "model.safetensors")
    tiny_run.assert_same(model.params, params)
    (text,) = dlm_jax.generate(model, ["12+34="]).texts
    assert text.startswith("12+34=")


def test_a_stopped_run_ends_as_the_uninterrupted_one(folder):
    """Samples, several updates and the reference, bit for bit."""
    whole, calls = _whole(folder), []

    def stops(prompts: list[str], answers: list[str]) -> list[float]:
        calls.append(prompts)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ones(prompts, answers)

    with pytest.raises(KeyboardInterrupt):
        _train(folder, "stopped", stops)
    tiny_run.assert_same(_train(folder, "stopped"), whole)
    assert len(calls) == 2
    for kind in ("train", "evaluation"):
        assert _records(folder / "stopped", kind) == _records(folder / "whole", kind)


@pytest.mark.slow
def test_a_model_learns_what_is_rewarded(folder):
    changes = {"train__steps": 40, "train__batch_size": 8, "train__eval_every": 0}
    _train(folder, "learns", settings=PolicySettings(), **changes)
    rewards = [line["reward"] for line in _records(folder / "learns")]
    assert np.mean(rewards[:3]) < 0.15
    assert np.mean(rewards[-3:]) > 0.6


def test_a_sample_whose_reward_is_nan_is_left_out(folder):
    def skips(prompts: list[str], answers: list[str]) -> list[float]:
        return [math.nan if number % 2 else 0.5 for number in range(len(answers))]

    _train(folder, "leaves", skips, PolicySettings(), train__steps=1, train__eval_windows=2)
    (line,) = _records(folder / "leaves")
    assert line["left_out"] == 8 and line["reward"] == 0.5 and line["loss"] == 0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda prompts, answers: [1.0], r"rewards of shape \(1,\) for 16 samples; return one"),
        (lambda prompts, answers: [math.nan] * 16, "no sample of step 0 has a reward"),
    ],
)
def test_bad_rewards_end_a_run_in_one_line(folder, tmp_path, reward, message):
    with pytest.raises(ValueError, match=message) as error:
        _train(folder, str(tmp_path / "run"), reward)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": 1}, "group=1 has no baseline; use 8"),
        ({"clip": 0.0}, r"clip=0.0 is outside \(0, 1\]"),
        ({"kl": -1.0}, "kl=-1.0 is negative"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicySettings(**settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__add_critic_head": True}, "model.add_critic_head=True has no policy; use False"),
        ({"model__attention_type": "causal", "sample__order": "left_to_right"},
         "model.attention_type='causal' has no policy"),
        ({"sample__edit": True, "sample__edit_token": "mask", "sample__insert_ratio_start": 0.1},
         "moves tokens of samples"),
        ({"sample__cache": "dual", "sample__block_length": 2}, "cache='dual' has no trace"),
        ({"sample__temperature": 0.0}, "sample.temperature=0.0 makes no random choices"),
        ({"train__steps": 3}, "train.steps=3 is not a multiple of updates=2"),
        ({"sample__gen_length": 5}, "sample.gen_length=5 and a prompt of 6 tokens exceed"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_at_the_door(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        _train(folder, str(tmp_path / "run"), **changes)
    assert "\n" not in str(error.value)


def test_a_run_continues_with_the_same_settings_alone(folder):
    _whole(folder)
    with pytest.raises(ValueError, match=r"sample.temperature=0.5 differs from 1.0 of the run"):
        _train(folder, "whole", sample__temperature=0.5)
    with pytest.raises(ValueError, match=r"loop.kl=0.2 differs from 0.1 of the run"):
        _train(folder, "whole", settings=PolicySettings(updates=2, kl=0.2))


def test_the_program_ends_with_its_code(folder, tmp_path, capsys):
    keys = [f"{key.replace('__', '.')}={value}" for key, value in
            _flags(folder, tmp_path / "run", train__steps=2).items()]  # fmt: skip
    with tiny_run.on_devices(1):
        assert (
            main(["--reward", "dlm_jax.contrib.arithmetic:rewards", "--updates", "2", *keys]) == 0
        )
    assert "reward" in capsys.readouterr().err
    assert main(["--reward", "dlm_jax.contrib.arithmetic:none"]) == 2
    assert "write module:function" in capsys.readouterr().err
