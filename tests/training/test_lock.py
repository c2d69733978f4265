"""Two trainings never write one directory."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.store import Checkpoints
from dlm_jax.store.files import DirectoryLock
from dlm_jax.training.trainer import prepare, run_loop


def _locks(directory) -> bool:
    try:
        DirectoryLock().lock_all({"train.out_dir": directory})
    except ValueError:
        return False
    return True


def test_a_directory_is_one_process_s_until_it_lets_go(tmp_path):
    lock = DirectoryLock()
    lock.lock_all({"train.out_dir": tmp_path})
    with pytest.raises(ValueError, match="is in use by another run; wait until it ends, or use"):
        DirectoryLock().lock_all({"train.out_dir": tmp_path})
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert not pool.apply(_locks, (tmp_path,))
        lock.release()
        lock.release()
        assert pool.apply(_locks, (tmp_path,))
    assert list(tmp_path.iterdir()) == []


def _prepare(out_dir, **changes):
    with tiny_run.on_devices(1):
        given = configs.load(None, tiny_run.flags(out_dir, **changes))
        return prepare(given, report=lambda line: None)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_second_training_in_a_directory_is_refused_and_changes_nothing(tmp_path, is_there):
    out_dir = tmp_path / "run"
    if is_there:
        out_dir.mkdir()
    first = _prepare(out_dir)
    before = list(out_dir.rglob("*"))
    with pytest.raises(ValueError, match="train.out_dir=.* is in use by another run"):
        _prepare(out_dir)
    assert list(out_dir.rglob("*")) == before
    first.checkpoints.close()
    _prepare(out_dir).checkpoints.close()


def test_a_refused_run_lets_go_of_its_directory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a record of metrics"):
            _prepare(tmp_path)


def test_checkpoints_of_a_run_that_started_at_the_same_time_are_refused(tmp_path, monkeypatch):
    lock_all = DirectoryLock.lock_all

    def lock_later(lock, places, *, create=False):
        if create:
            with Checkpoints(tmp_path / "shared", keep=1) as others:
                others.save(3, {"params": {"w": np.ones(1)}}, {"run": "other"})
        lock_all(lock, places, create=create)

    monkeypatch.setattr(DirectoryLock, "lock_all", lock_later)
    with pytest.raises(ValueError, match="shared contains checkpoints of a run that started at"):
        _prepare(tmp_path / "run", train__checkpoint_dir=tmp_path / "shared")


@pytest.mark.parametrize("is_there", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_second_training_of_the_same_checkpoints_is_refused_and_the_first_goes_on(
    tmp_path, is_there
):
    shared = tmp_path / "shared"
    if is_there:
        shared.mkdir()
    given = {"train__checkpoint_dir": shared, "train__steps": 3, "train__eval_every": 0}
    first = _prepare(tmp_path / "a", **given)
    with pytest.raises(ValueError, match=f"train.checkpoint_dir={shared} is in use by another run"):
        _prepare(tmp_path / "b", **given)
    with first.checkpoints:
        assert run_loop(first).step == 3
    assert first.checkpoints.steps() == [3]
