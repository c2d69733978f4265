"""Law 8: resume is continue."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.training.init_from import check_same_run, config_of_run
from dlm_jax.training.signals import StopRequest
from dlm_jax.training.trainer import Trainer

STEPS = int(tiny_run.FLAGS["train.steps"])


class Killed(Exception):
    """Stands for a kill: nothing after it runs."""


def _kill_after(step: int, patch: pytest.MonkeyPatch) -> None:
    def killed(stop: StopRequest, at: int) -> int:
        if at == step:
            raise Killed
        return 0

    patch.setattr(StopRequest, "at", killed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """A run that nothing interrupted: its directory and its outcome."""
    out_dir = tmp_path_factory.mktemp("whole") / "run"
    return out_dir, tiny_run.run(out_dir, train__keep_checkpoints=9)


def _assert_same_run(out_dir: Path, outcome, whole) -> None:
    whole_dir, expected = whole
    assert (outcome.reason, outcome.step, outcome.bound) == ("finished", STEPS, expected.bound)
    tiny_run.assert_same(outcome.state, expected.state)
    assert tiny_run.records(out_dir) == tiny_run.records(whole_dir)


@pytest.mark.slow
def test_a_run_stopped_at_any_steps_ends_as_the_uninterrupted_one(tmp_path, whole):
    # Between lines of metrics, where a line and an evaluation are due, and at a checkpoint.
    for step in (1, 5, 6, 8, 23):
        with pytest.MonkeyPatch.context() as patch:
            tiny_run.stop_after(step, patch)
            outcome = tiny_run.run(tmp_path)
        assert (outcome.reason, outcome.step) == ("interrupted", step)
        assert outcome.signal_number == signal.SIGTERM
    _assert_same_run(tmp_path, tiny_run.run(tmp_path), whole)


def test_a_run_killed_between_checkpoints_ends_as_the_uninterrupted_one(tmp_path, whole):
    with pytest.MonkeyPatch.context() as patch:
        _kill_after(7, patch)
        with pytest.raises(Killed):
            tiny_run.run(tmp_path)
    _assert_same_run(tmp_path, tiny_run.run(tmp_path), whole)


def _copy_until(step: int, whole, out_dir: Path) -> Path:
    """The uninterrupted run as it was when the checkpoint of `step` was its newest."""
    shutil.copytree(whole[0], out_dir)
    for path in (out_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return out_dir


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(tmp_path, whole):
    out_dir = _copy_until(8, whole, tmp_path / "run")
    newest = out_dir / "checkpoints" / "step_00000008" / "state"
    for path in newest.rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with open(out_dir / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    lines: list[str] = []
    started: list[int] = []
    take_step = Trainer.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trainer, "take_step", lambda loop: (started.append(loop.step), take_step(loop))[1]
        )
        outcome = tiny_run.run(out_dir, report=lines.append)
    assert started[0] == 4
    assert len(lines) == 1
    assert "damaged checkpoint" in lines[0]
    assert "using step 4 instead" in lines[0]
    _assert_same_run(out_dir, outcome, whole)


def test_a_run_with_only_damaged_checkpoints_does_not_start_again_and_delete_them(tmp_path):
    kept = tmp_path / "run" / "checkpoints" / "step_00000008" / "state" / "arrays"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(ValueError, match=r"no usable checkpoint in .*; restart in another"):
        tiny_run.run(tmp_path / "run")
    assert kept.exists()


def test_a_resumed_run_reads_its_arrays_once(tmp_path, whole, monkeypatch):
    out_dir = _copy_until(20, whole, tmp_path / "run")
    reads: list[str] = []
    restore = ocp.PyTreeCheckpointHandler.restore

    def counted(self, directory, args=None):
        reads.append(directory.parent.name)
        return restore(self, directory, args=args)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", counted)
    assert config_of_run(out_dir).train.steps == STEPS
    assert reads == []
    _assert_same_run(out_dir, tiny_run.run(out_dir), whole)
    assert reads == ["step_00000020"]


@functools.cache
def _close():
    return functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices_to_float_tolerance(tmp_path, whole):
    out_dir = _copy_until(4, whole, tmp_path / "run")
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    outcome = tiny_run.run(out_dir, devices=8, **mesh)
    assert len(outcome.state.params["embedding"].sharding.device_set) == 8
    jax.tree.map(_close(), jax.device_get(outcome.state), jax.device_get(whole[1].state))
    for ours, theirs in zip(tiny_run.records(out_dir), tiny_run.records(whole[0]), strict=True):
        assert ours.keys() == theirs.keys()
        _close()([v for v in ours.values() if v != ours["kind"]],
                 [v for v in theirs.values() if v != theirs["kind"]])  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.width", 32),
        ("data.tokenizer", "byte"),
        ("optim.learning_rate", 0.01),
        ("train.steps", 23),
        ("train.seed", 1),
    ],
)
def test_a_directory_of_a_run_that_differs_is_refused_by_the_key(whole, key, value):
    before = _listing(whole[0])
    told = rf"has a run with {key}=.* to resume it, or use another train.out_dir$"
    with pytest.raises(ValueError, match=told) as error:
        tiny_run.run(whole[0], **{key.replace(".", "__"): value})
    assert "delete" not in str(error.value)
    assert _listing(whole[0]) == before


@pytest.mark.slow
def test_a_run_may_go_on_for_more_steps_and_says_what_that_means(tmp_path, whole):
    """The steps are those of a run of as many from there on; the schedule is the longer one's."""
    changes = {"train__eval_every": 0, "optim__learning_rate": 0.01}
    tiny_run.run(tmp_path, **changes)
    lines: list[str] = []
    outcome = tiny_run.run(tmp_path, **changes, train__steps=36, report=lines.append)
    assert (outcome.reason, outcome.step) == ("finished", 36)
    assert [line for line in lines if line.startswith("train.steps increases from 24 to 36")]
    rates = {r["step"]: r["learning_rate"] for r in tiny_run.records(tmp_path)
             if r["kind"] == "train"}  # fmt: skip
    assert rates[3] == pytest.approx(0.01)
    assert rates[24] == pytest.approx(0.01 * (1 + math.cos(math.pi * 21 / 22)) / 2, rel=1e-4)
    assert rates[27] == pytest.approx(0.01 * (1 + math.cos(math.pi * 24 / 34)) / 2, rel=1e-4)
    assert list(rates) == list(range(3, 37, 3))
    again: list[str] = []
    assert tiny_run.run(tmp_path, **changes, train__steps=36, report=again.append).step == 36
    assert again == []


def test_how_often_a_run_looks_up_may_change_without_changing_what_it_learns(tmp_path, whole):
    out_dir = _copy_until(4, whole, tmp_path / "run")
    shown: list[int] = []
    outcome = tiny_run.run(
        out_dir,
        train__log_every=2,
        train__eval_every=0,
        train__sample_every=5,
        train__checkpoint_every=0,
        show_sample=lambda run, state, step: shown.append(step),
    )
    tiny_run.assert_same(outcome.state, whole[1].state)
    steps = [line["step"] for line in tiny_run.records(out_dir) if line["kind"] == "train"]
    assert steps == [3, *range(6, 25, 2)]
    assert shown == [5, 10, 15, 20]


def test_a_finished_run_started_again_takes_no_step_and_changes_nothing(whole):
    before = _listing(whole[0])
    outcome = tiny_run.run(whole[0])
    assert (outcome.reason, outcome.step, outcome.bound) == ("finished", STEPS, whole[1].bound)
    tiny_run.assert_same(outcome.state, whole[1].state)
    assert _listing(whole[0]) == before


def test_a_run_is_not_continued_where_the_same_keys_give_other_draws(whole, monkeypatch):
    other = {"draws": [1, 2, 0.5], "version of jax": "9.9.9"}
    monkeypatch.setattr("dlm_jax.training.trainer.fingerprint", lambda: other)
    told = f"jax {jax.__version__}, which draws different random numbers from jax 9.9.9"
    with pytest.raises(ValueError, match=told):
        tiny_run.run(whole[0])


def _meta(**changes):
    """What is saved beside a checkpoint."""
    config = configs.to_dict(configs.load(None, tiny_run.flags(Path("run"), **changes)))
    corpus = {"name": "text", "sha256": "0"}
    draws = {"draws": [1], "version of jax": "1"}
    made = {"config": config, "tokenizer": {}, "corpus": corpus, "own": {}, "randomness": draws}
    return json.loads(json.dumps(made))


def test_waves_that_a_critic_learned_from_stay_and_others_may_change():
    ratio, critic = "sample__sampler_min_neighbors_ratio", {"model__add_critic_head": True}
    check_same_run(_meta(sample__sampler_even_odd=True, sample__fill="parallel"), _meta())
    for changes, saved in (
        ({"sample__sampler_even_odd": True}, _meta(**critic)),
        ({ratio: 0.3}, _meta(**critic)),
        ({"sample__fill": "wavefront"}, _meta(**critic)),
    ):
        with pytest.raises(ValueError, match=r"has a run with sample\.(sampler_|fill)"):
            check_same_run(_meta(**critic, **changes), saved)


def _listing(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


@pytest.mark.slow
def test_a_run_continues_bit_for_bit_across_the_beginnings_of_its_heads(tmp_path):
    changes = {
        "model__depth": 1,
        "model__width": 8,
        "model__add_sampler_head": "true",
        "model__add_critic_head": "true",
        "data__seq_len": 8,
        "heads__start_sampler_iteration": 2,
        "heads__start_critic_iteration": 4,
        "heads__warmup_steps": 1,
        "heads__sampler_reveal": 0.5,
        "optim__warmup_steps": 1,
        "optim__ema_decay": 0.9,
        "train__steps": 6,
        "train__log_every": 1,
        "train__eval_every": 0,
        "train__checkpoint_every": 1,
        "train__keep_checkpoints": 9,
    }
    expected = tiny_run.run(tmp_path / "whole", **changes)
    lines = tiny_run.records(tmp_path / "whole")
    train = {line["step"]: line.keys() for line in lines if line["kind"] == "train"}
    # The line of a step is numbered from 1, the beginnings from 0.
    assert [step for step, names in train.items() if "sampler" in names] == [3, 4, 5, 6]
    assert [step for step, names in train.items() if "critic" in names] == [5, 6]
    assert [step for step, names in train.items() if "critic_alpha" in names] == [5, 6]
    for step in (3, 4):
        whole = (tmp_path / "whole", expected)
        out_dir = _copy_until(step, whole, tmp_path / f"from_{step}")
        outcome = tiny_run.run(out_dir, **changes)
        tiny_run.assert_same(outcome.state, expected.state)
        assert tiny_run.records(out_dir) == lines
