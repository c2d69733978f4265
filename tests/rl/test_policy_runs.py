"""Policy optimisation from end to end through `train`: learning, resuming, and what is refused."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.cli.ends import End
from dlm_jax.cli.train import main
from dlm_jax.data import Setup
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import NetworkObjective
from dlm_jax.progress import Progress
from dlm_jax.rl import Rollouts, objective_of
from dlm_jax.rl.rollouts import Judge, RewardError
from dlm_jax.training import problem, train
from dlm_jax.training.optimisers import by_update

FLAGS = {
    "data__source": "task:arithmetic", "data__layout": "documents", "data__seq_len": 10,
    "model__depth": 1, "optim__name": "adamw", "optim__learning_rate": 0.03,
    "optim__warmup_steps": 0, "train__steps": 4, "train__batch_size": 16, "train__log_every": 1,
    "train__eval_every": 0, "train__eval_windows": 8, "train__checkpoint_every": 2,
    "rl__reward": f"{__name__}:ones", "sample__gen_length": 4, "sample__steps": 2,
}  # fmt: skip


def ones(prompts: list[str], answers: list[str]) -> list[float]:
    """The share of an answer that is the digit 1; nothing for a prompt that is none."""
    assert all(len(prompt) == 6 and prompt.endswith("=") for prompt in prompts)
    return [answer.count("1") / 4 for answer in answers]


def fails_sometimes(prompts: list[str], answers: list[str]) -> list[float]:
    if any(answer.startswith("1") for answer in answers):
        raise KeyError("no such answer")
    return [math.nan if answer.startswith("2") else 0.5 for answer in answers]


def too_few(prompts: list[str], answers: list[str]) -> list[float]:
    return [1.0]


def raises(prompts: list[str], answers: list[str]) -> list[float]:
    raise RuntimeError("no\nverifier")


def _flags(out_dir: Path, **changes: Any) -> dict[str, str]:
    return tiny_run.flags(out_dir, **(FLAGS | changes))


def _train(out_dir: Path, report: Any = lambda line: None, **changes: Any):
    parts = {name: changes.pop(name) for name in ("objective",) if name in changes}
    with tiny_run.on_devices(1):
        config = configs.load(None, _flags(out_dir, **changes))
        return train(config, report=report, **parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policy")


TRACED = {"rl__loss": "trace", "rl__updates": 2, "rl__kl": 0.1, "train__accumulate": 2}


ASYNCHRONOUS = TRACED | {"rl__asynchronous": True}


_NOTES: list[str] = []
"""The progress notes of `_whole`."""


@functools.cache
def _whole(folder: Path):
    update = Progress.update

    def noted(bar: Progress, *args: Any, note: str = "", **more: Any) -> None:
        _NOTES.extend([note] * bool(note))
        update(bar, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "update", noted)
        return _train(folder / "whole", **TRACED)


def _lines(out_dir: Path) -> list[dict]:
    return [line for line in tiny_run.records(out_dir) if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [TRACED, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_a_stopped_run_ends_as_the_uninterrupted_one(tmp_path, monkeypatch, flags):
    """Samples, several updates and the reference, bit for bit."""
    whole = _train(tmp_path / "whole", **flags)
    with monkeypatch.context() as patch:
        tiny_run.stop_after(3, patch)
        assert _train(tmp_path / "stopped", **flags).reason == "interrupted"
    resumed = _train(tmp_path / "stopped", **flags)
    assert resumed.run.first_step == 3
    tiny_run.assert_same(resumed.state, whole.state)
    assert tiny_run.records(tmp_path / "stopped") == tiny_run.records(tmp_path / "whole")


def _total(params: Any) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))


def _with_total(setup: Setup) -> NetworkObjective:
    """The loss of ``[rl]``, and the sum of the parameters that its ratios are relative to."""
    inner = objective_of(setup)

    def anchor(network: Any, params: Any, reference: Any, noise: Any) -> Any:
        assert inner.anchor is not None
        return inner.anchor(network, params, reference, noise) | {"total": _total(params)}

    def loss(network: Any, params: Any, noise: Any) -> Loss:
        found = inner.loss(network, params, noise)
        figure = noise["total"] * noise["rows"], noise["rows"]
        return found._replace(figures=found.figures | {"total": figure})

    return NetworkObjective(inner.draw, loss, anchor)


@pytest.mark.slow
def test_asynchronous_samples_and_their_ratios_are_one_step_behind(tmp_path, monkeypatch):
    make, used, now = Rollouts.make, {}, []

    def noted(self: Rollouts, params: Any, step: int, rows: Any) -> Any:
        used[step] = float(_total(params))
        return make(self, params, step, rows)

    monkeypatch.setattr(Rollouts, "make", noted)
    with tiny_run.on_devices(1):
        config = configs.load(None, _flags(tmp_path, rl__asynchronous=True))
        outcome = train(
            config, objective=_with_total, report=lambda line: None,
            callbacks=[lambda run, state, record: now.append(float(_total(state.params)))],
        )  # fmt: skip
    first = float(_total(outcome.run.network.init(jax.random.split(jax.random.key(0))[0])))
    behind = [first, first, *now[:2]]
    np.testing.assert_allclose([used[step] for step in range(4)], behind, atol=1e-4)
    records = [line["total"] for line in _lines(tmp_path)]
    np.testing.assert_allclose(records, behind, atol=1e-4)
    assert len({round(total, 3) for total in now}) == 4


@pytest.mark.slow
def test_two_processes_draw_the_samples_of_one(tmp_path):
    rewards = "def digits(prompts, answers):\n    return [a.count('1') / 4 for a in answers]\n"
    (tmp_path / "rewards.py").write_text(rewards)
    changes = {"rl__reward": "rewards:digits", "rl__loss": "trace", "train__eval_every": 4,
               "train__eval_windows": 15}  # fmt: skip

    def started(name: str, *arguments: object, **more: Any) -> Any:
        flags = _flags(tmp_path / name, **changes, **more)
        return tiny_run.program(
            *arguments, *(part for key, value in flags.items() for part in (f"--{key}", value)),
            PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            TF_CPP_MIN_LOG_LEVEL="3",
        )  # fmt: skip

    place = "--distributed", "--coordinator", f"127.0.0.1:{tiny_run.free_port()}"
    two = [started("two", *place, "--num-processes", 2, "--process-id", i, mesh__data=2)
           for i in range(2)]  # fmt: skip
    for child in [*two, started("one")]:
        _, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
    one, both = (tiny_run.records(tmp_path / name) for name in ("one", "two"))
    assert [line["kind"] for line in one] == [line["kind"] for line in both]
    for left, right in zip(one, both, strict=True):
        for name in ("reward", "length", "entropy", "loss", "grad_norm", "windows"):
            if name in left:
                assert right[name] == pytest.approx(left[name], rel=1e-3, abs=1e-5), name
    assert {line["reward"] > 0 for line in one} == {True}


def test_the_metrics_of_a_run_are_there_and_finite(folder):
    state = _whole(folder).state
    for line in _lines(folder / "whole"):
        assert 0 <= line["reward"] <= 1 and 0 <= line["clip_share"] <= 1
        assert line["kl"] >= 0 and 1 <= line["length"] <= 4 and 0 < line["entropy"] < 4
        assert line["left_out"] == 0
    first = _whole(folder).run.network.init(jax.random.split(jax.random.key(0))[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.reference, first)
    assert int(state.step) == 4
    evaluation = tiny_run.records(folder / "whole")[-1]
    assert evaluation["windows"] == 8 and 0 <= evaluation["reward"] <= 1
    # Two updates a step: the cosine has fallen half at the second of four steps.
    rates = [line["learning_rate"] for line in _lines(folder / "whole")]
    np.testing.assert_allclose(rates, 0.03 * 0.5 * (1 + np.cos(np.pi * np.arange(4) / 4)))


def test_a_warm_up_may_have_more_updates_than_the_run_has_steps(tmp_path):
    flags = _flags(tmp_path, rl__updates=4, optim__warmup_steps=2)
    made, _ = by_update(configs.load(None, flags), None, 4)
    assert (made.optim.warmup_steps, made.train.steps) == (8, 16)
    # A schedule of one's own goes on by steps.
    _, schedule = by_update(configs.load(None, flags), lambda step: 0.5**step, 4)
    assert [schedule(count) for count in (0, 3, 4, 8, 15)] == [1.0, 1.0, 0.5, 0.25, 0.125]
    one = configs.load(None, _flags(tmp_path, train__steps=1, optim__warmup_steps=50))
    assert by_update(one, None, 4)[0].train.steps == 4


@pytest.mark.slow
def test_a_model_learns_what_is_rewarded(folder):
    changes = {"train__steps": 40, "train__batch_size": 64, "train__eval_every": 40}
    outcome = _train(folder / "learns", **changes)
    assert outcome.run.checkpoints.steps()
    rewards = [line["reward"] for line in _lines(folder / "learns")]
    assert np.mean(rewards[:3]) < 0.15
    assert np.mean(rewards[-3:]) > 0.6


@pytest.mark.slow
def test_adapters_alone_learn_and_are_the_reference(folder):
    base = {"rl__reward": "", "train__steps": 1, "model__width": 16}
    _train(folder / "base", **base)
    outcome = _train(
        folder / "lora", rl__kl=0.1, model__lora_rank=2, train__init_from=folder / "base",
        train__steps=3,
    )  # fmt: skip
    start = _train(folder / "base", **base).params
    for name, tree in start.items():
        tiny_run.assert_same(outcome.state.params[name], tree)
    assert set(outcome.state.reference) == {"adapters"}
    moved = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()),
        outcome.state.params["adapters"], outcome.state.reference["adapters"],
    )  # fmt: skip
    assert max(jax.tree.leaves(moved)) > 1e-3
    assert [line["kl"] > 0 for line in _lines(folder / "lora")] == [False, True, True]


def test_samples_that_are_left_out_are_reported_and_counted(folder):
    said: list[str] = []
    name = f"{__name__}:fails_sometimes"
    _train(
        folder / "leaves", said.append, rl__reward=name, rl__bad_reward="leave_out",
        train__steps=1, train__batch_size=64,
    )  # fmt: skip
    (line,) = _lines(folder / "leaves")
    assert line["left_out"] > 0 and line["reward"] == 0.5 and line["grad_norm"] == 0
    told = [one for one in said if "samples are excluded" in one]
    assert told and name in told[0] and "\n" not in told[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "raised RuntimeError: no verifier; fix it, or use rl.bad_reward=leave_out"),
        (
            "too_few",
            r"returned rewards of shape \(1,\) for 2 samples; return one number per sample",
        ),
    ],
)
def test_bad_rewards_end_a_call_in_one_line(function, message):
    judge = Judge(f"{__name__}:{function}", leaves_out=False, report=lambda line: None)
    with pytest.raises(RewardError, match=message) as error:
        judge.rewards(["1+1=", "1+2="], ["2", "3"])
    assert "\n" not in str(error.value)


def test_a_judge_tells_rewards_that_are_missing_from_those_that_are_there():
    said: list[str] = []
    judge = Judge(f"{__name__}:fails_sometimes", leaves_out=True, report=said.append)
    found = judge.rewards(["p"] * 4, ["1", "2", "3", "4"])
    np.testing.assert_array_equal(found, [np.nan, np.nan, 0.5, 0.5])
    assert said == [
        f"2 samples are excluded: rl.reward={__name__}:fails_sometimes raised KeyError: 'no such "
        "answer' for 'p' and '1'"
    ]
    with pytest.raises(RewardError, match="no samples remain"):
        judge.rewards(["p", "p"], ["1", "2"])
    strict = Judge(f"{__name__}:fails_sometimes", leaves_out=False, report=said.append)
    with pytest.raises(RewardError, match="gave nan for 'p' and '2'; fix it"):
        strict.rewards(["p", "p"], ["2", "3"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl__group": 1}, "rl.group=1 is outside .*; use 8; a group of one has no baseline"),
        ({"rl__group": 5}, "rl.group=5 does not divide train.batch_size=16"),
        ({"rl__reward": "ones"}, "rl.reward='ones' is not module:function; write"),
        ({"rl__reward": "no_such_module:f"}, "cannot be imported .*; write module:function"),
        ({"rl__reward": "dlm_jax.tasks:none"}, "is not a function of dlm_jax.tasks"),
        ({"rl__loss": "grpo"}, "rl.loss='grpo' is not one of diffu_grpo"),
        ({"model__add_critic_head": True},
         "model.add_critic_head=True is not supported with rl.reward"),
        ({"model__attention_type": "causal", "sample__order": "left_to_right"},
         "model.attention_type='causal' is not supported with rl.reward"),
        ({"sample__edit": True, "sample__edit_token": "mask", "sample__insert_ratio_start": 0.1},
             "rl.reward=.* requires samples whose tokens do not move"),
        ({"rl__loss": "trace", "sample__cache": "dual", "sample__block_length": 2},
             "cache='dual' has no trace"),
        ({"rl__loss": "trace", "sample__temperature": 0.0},
             "sample.temperature=0.0 makes no random choices, which rl.loss='trace' requires; "
             "use 1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_at_the_door(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        _train(tmp_path / "run", **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_settings_of_the_samples_are_part_of_a_run(folder):
    _whole(folder)
    with pytest.raises(ValueError, match="sample.temperature=1.0, but this run has 0.5"):
        _train(folder / "whole", **TRACED | {"sample__temperature": 0.5})


def test_a_problem_has_no_samples(tmp_path):
    with pytest.raises(ValueError, match="rl.reward=.* requires samples"):
        problem(configs.load(None, _flags(tmp_path / "run")))


def test_the_program_ends_with_its_code_where_a_reward_fails(tmp_path, capsys):
    flags = _flags(tmp_path / "run", rl__reward=f"{__name__}:raises")
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    with tiny_run.on_devices(1), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == End.REFUSED
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "no verifier" in one]
    assert "rl.bad_reward=leave_out" in line
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--rl.group", "1"])
    assert "--rl.group 1" in capsys.readouterr().err


def test_the_progress_line_shows_the_reward(folder):
    rewards = [line["reward"] for line in _lines(_whole(folder).run.out_dir)]
    assert [note.split(",")[0] for note in _NOTES] == [f"reward {x:.3f}" for x in rewards]
