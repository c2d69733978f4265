"""The best model of a run stays, whatever comes after it."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.store import Checkpoints, load_params
from dlm_jax.training import trainer
from dlm_jax.training.resume import Best

META = {"config": {}}


def _best(out_dir, *, run="", is_new=False, **changes):
    config = configs.load(None, tiny_run.flags(out_dir, **changes))
    return Best(config, META | {"run": run}, is_new=is_new)


def _params(value):
    return {"w": np.full(3, value, np.float32)}


def _offer(best, step, figure):
    found = best.offer(step, figure, _params(step), META)
    best.wait()
    return found


def _kept(out_dir):
    return load_params(out_dir / "best")[0]["w"].tolist()


def test_the_lowest_figure_is_kept_and_a_later_run_knows_it(tmp_path):
    best = _best(tmp_path)
    assert [_offer(best, *pair) for pair in ((2, 3.0), (4, 2.0), (6, 2.5), (8, float("nan")))] == [
        True, True, False, False,
    ]  # fmt: skip
    best.close()
    assert _kept(tmp_path) == [4.0] * 3
    best = _best(tmp_path)
    assert best.figure == 2.0
    assert not _offer(best, 10, 2.0)
    assert _offer(best, 12, 1.5)
    best.close()
    assert _kept(tmp_path) == [12.0] * 3


def test_a_run_that_was_killed_takes_the_same_steps_again_and_the_best_stays(tmp_path):
    best = _best(tmp_path)
    assert _offer(best, 8, 2.0)
    best.close()
    best = _best(tmp_path)
    assert [_offer(best, *pair) for pair in ((6, 2.5), (8, 2.0))] == [False, False]
    best.close()
    assert _kept(tmp_path) == [8.0] * 3


def test_figures_over_other_windows_are_not_compared(tmp_path):
    best = _best(tmp_path)
    assert _offer(best, 8, 2.0)
    best.close()
    best = _best(tmp_path, train__eval_windows=2)
    assert best.figure is None
    assert _offer(best, 6, 9.0)
    best.close()
    assert _kept(tmp_path) == [6.0] * 3


def test_a_damaged_one_is_replaced(tmp_path):
    best = _best(tmp_path)
    assert _offer(best, 8, 2.0)
    best.close()
    (tmp_path / "best" / "step_00000008" / "manifest" / "metadata").write_text("{")
    best = _best(tmp_path)
    assert best.figure is None
    assert _offer(best, 10, 9.0)
    best.close()
    assert _kept(tmp_path) == [10.0] * 3


@pytest.fixture
def falling_then_rising(monkeypatch):
    """Evaluations that are best in the middle of the run."""
    figures = iter([3.0, 2.0, 4.0, 5.0])
    of = trainer.bound_of

    def bound_of(nats_N, free_N):
        found = of(nats_N, free_N)
        return found | {"bound": next(figures)}

    monkeypatch.setattr(trainer, "bound_of", bound_of)


def test_a_run_keeps_its_best_model_beside_the_newest(tmp_path, falling_then_rising):
    seen = {}
    tiny_run.run(
        tmp_path, train__sample_every=1, optim__ema_decay=0.9,
        show_sample=lambda run, state, step: seen.update(
            {step: np.asarray(state.best_params["embedding"])}
        ),
    )  # fmt: skip
    best, newest = dlm_jax.load(tmp_path / "best"), dlm_jax.load(tmp_path)
    np.testing.assert_array_equal(best.params["embedding"], seen[12])
    assert (np.asarray(newest.params["embedding"]) != seen[12]).any()
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step_00000012"]
    assert load_params(tmp_path / "best")[1]["bound"] == 2.0


def test_a_loaded_model_has_the_average_of_the_parameters_where_there_is_one(tmp_path):
    state = {"params": _params(1.0), "ema": _params(2.0)}
    with Checkpoints(tmp_path / "averaged", keep=1) as checkpoints:
        checkpoints.save(1, state, META)
    with Checkpoints(tmp_path / "plain", keep=1) as checkpoints:
        checkpoints.save(1, {"params": _params(1.0)}, META)
    assert load_params(tmp_path / "averaged")[0]["w"].tolist() == [2.0] * 3
    assert load_params(tmp_path / "plain")[0]["w"].tolist() == [1.0] * 3
