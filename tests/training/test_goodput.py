"""Laws of the wall clock of a run."""

from __future__ import annotations

import types

import pytest
import tiny_run

from dlm_jax.training import metrics, trainer
from dlm_jax.training.metrics import read_records, wall_of
from dlm_jax.training.signals import StopRequest
from dlm_jax.training.trainer import Trainer

GIVEN = {"train__steps": 12, "train__log_every": 3, "train__eval_every": 6}
STEP, COMPILE, EVALUATE, SAVE, DOWN = 1.0, 100.0, 10.0, 5.0, 1000.0


class Killed(Exception):
    pass


@pytest.fixture
def now(monkeypatch):
    """A clock that advances by a fixed time in each activity of a run."""
    clock = [1e6]
    fake = types.SimpleNamespace(time=lambda: clock[0])
    monkeypatch.setattr(metrics, "time", fake)

    def lasting(owner, name, seconds):
        usual = getattr(owner, name)

        def slow(*args, **named):
            clock[0] += seconds
            return usual(*args, **named)

        monkeypatch.setattr(owner, name, slow)

    lasting(Trainer, "take_step", STEP)
    lasting(Trainer, "_compile_train_step", COMPILE)
    lasting(Trainer, "held_out", EVALUATE)
    lasting(trainer.Checkpoints, "save", SAVE)
    return clock


def _kill_after(step, out_dir, given):
    def kill(stop, at):
        if at == step:
            raise Killed
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRequest, "at", kill)
        with pytest.raises(Killed):
            tiny_run.run(out_dir, **given)


@pytest.mark.parametrize("has_metrics", [True, False])
def test_the_parts_of_a_restart_add_up_to_the_time_since_the_first_start(now, has_metrics):
    def passes(clock, part, seconds):
        now[0] += seconds
        clock.charge(part)
        return clock.figures()

    start, first = now[0], metrics.WallClock()
    passes(first, "compile", 10)
    saved = passes(first, "steps", 20)
    last = passes(first, "steps", 8)
    now[0] += DOWN
    second = metrics.WallClock()
    second.resume(saved, last if has_metrics else {})
    figures = passes(second, "restore", 5)
    lost = 8 if has_metrics else 0
    expected = {"compile": 10, "steps": 20, "restore": 5, "lost": lost, "down": DOWN + 8 - lost}
    assert wall_of(figures) == expected
    assert sum(expected.values()) == now[0] - start
    assert figures["goodput"] == pytest.approx(20 / (now[0] - start))
    now[0] += DOWN
    third = metrics.WallClock()
    third.resume(saved, figures)
    wall = {"compile": 10, "steps": 20, "lost": lost + 5, "down": 2 * DOWN + 8 - lost}
    assert wall_of(passes(third, "restore", 0)) == wall | {"restore": 0}
    assert sum(wall.values()) == now[0] - start


@pytest.mark.slow
@pytest.mark.parametrize("saved", [4, 0])
def test_repeated_steps_are_lost_and_the_parts_add_up_to_the_wall_time(tmp_path, now, saved):
    start = now[0]
    given = GIVEN | {"train__checkpoint_every": saved}
    _kill_after(7, tmp_path, given)
    now[0] += DOWN
    assert tiny_run.run(tmp_path, **given).reason == "finished"
    last = read_records(tmp_path / "metrics.jsonl")[-1]
    wall = wall_of(last)
    assert wall["steps"] == 12 * STEP
    assert sum(wall.values()) == pytest.approx(last["time"] - start)
    assert last["goodput"] == pytest.approx(12 * STEP / sum(wall.values()))
    # The metrics end with the evaluation of step 6, before the best model is saved.
    assert wall["down"] == SAVE + STEP + DOWN
    if saved:
        assert wall["lost"] == 2 * STEP + SAVE + EVALUATE
        assert wall["compile"] == 2 * COMPILE
    else:
        assert wall["lost"] == COMPILE + 6 * STEP + EVALUATE
        assert wall["compile"] == COMPILE


def test_the_first_step_is_reported_with_its_parts(now, capsys, tmp_path):
    tiny_run.run(tmp_path, **GIVEN)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "first step" in line]
    assert line.startswith(f"first step after {COMPILE + STEP:.1f} s: ")
    assert "restore 0.0 s" in line and "step 1.0 s" in line
    assert "compile 100.0 s" in line or "programs cached) 100.0 s" in line
