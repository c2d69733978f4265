"""The best model of a run stays, whatever comes after it."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.store import Checkpoints, load_params
from dlm_jax.training import trainer
from dlm_jax.training.resume import FOLDER, Best

META = {"config": {"model": {}}, "tokenizer": {}}


@contextlib.contextmanager
def _best(out_dir, **changes):
    config = configs.load(None, tiny_run.flags(out_dir, **changes))
    with Checkpoints(out_dir / FOLDER, keep=1) as checkpoints:
        yield Best(checkpoints, config, META | {"run": ""}, is_new=False)


def _params(value):
    return {"w": np.full(3, value, np.float32)}


def _offer(best, step, figure):
    found = best.offer(step, figure, _params(step), META | {"run": ""})
    best.wait()
    return found


def _saved(out_dir):
    return load_params(out_dir / FOLDER)[0]["w"].tolist()


def test_the_lowest_figure_is_saved_and_a_later_run_knows_it(tmp_path):
    with _best(tmp_path) as best:
        offers = [_offer(best, *pair) for pair in ((2, 3.0), (4, 2.0), (6, 2.5), (8, math.nan))]
    assert offers == [True, True, False, False]
    assert _saved(tmp_path) == [4.0] * 3
    with _best(tmp_path) as best:
        # A killed run takes the same steps again.
        assert [_offer(best, *pair) for pair in ((2, 3.0), (4, 2.0), (12, 1.5))] == [
            False, False, True,
        ]  # fmt: skip
    assert _saved(tmp_path) == [12.0] * 3


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_damaged_model_is_replaced_and_figures_over_other_windows_are_not_compared(
    tmp_path, is_damaged
):
    with _best(tmp_path) as best:
        assert _offer(best, 8, 2.0)
    if is_damaged:
        (tmp_path / FOLDER / "step_00000008" / "manifest" / "metadata").write_text("{")
    with _best(tmp_path, **({} if is_damaged else {"train__eval_windows": 2})) as best:
        assert best.figure is None
        assert _offer(best, 10, 9.0)
    assert _saved(tmp_path) == [10.0] * 3


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
