"""The best model of a run stays, whatever comes after it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.store import Checkpoints, load_params
from dlm_jax.training import trainer
from dlm_jax.training.init_from import BEST, check_identity, windows_of

META = {"config": {"model": {}}, "tokenizer": {}}


def _params(value):
    return {"w": np.full(3, value, np.float32)}


@pytest.fixture
def best(tmp_path):
    """The best model of a run, at step 8 with a figure of 2."""
    config = configs.load(None, tiny_run.flags(tmp_path))
    with Checkpoints(tmp_path / BEST, keep=1) as checkpoints:
        figures = {"figure": 2.0, "measured_on": windows_of(config)}
        checkpoints.save(8, {"params": _params(8)}, META | {"run": "", "best": figures})
        checkpoints.wait()
        yield checkpoints, config


def _figure(best, **changes):
    checkpoints, config = best
    train = dataclasses.replace(config.train, **changes)
    config = dataclasses.replace(config, train=train)
    return check_identity(checkpoints, config, META | {"run": ""}, starts_again=False)


def test_a_later_run_knows_the_figure_unless_it_measures_on_other_windows(best):
    assert _figure(best) == 2.0
    assert _figure(best, eval_windows=2) == math.inf


def test_a_damaged_best_model_has_no_figure_and_is_replaced(best, tmp_path):
    (tmp_path / BEST / "step_00000008" / "manifest" / "metadata").write_text("{")
    assert _figure(best) == math.inf
    best[0].save(10, {"params": _params(10)}, META)
    best[0].wait()
    assert load_params(tmp_path / BEST)[0]["w"].tolist() == [10.0] * 3


@pytest.fixture
def falling_then_rising(monkeypatch):
    """Evaluations that are best in the middle of the run; the first of two equal ones is."""
    figures = iter([3.0, 2.0, 2.0, math.nan])
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
