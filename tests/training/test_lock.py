"""Two trainings never write one directory."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
from pathlib import Path

import buckets
import jax.numpy as jnp
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.store import Checkpoints
from dlm_jax.store.files import LOCK, DirectoryLock, located
from dlm_jax.training.trainer import prepare, run_loop


def _locks(directory) -> bool:
    try:
        return DirectoryLock().lock(directory, "train.out_dir")
    except ValueError:
        return False


def test_a_directory_is_one_process_s_until_it_lets_go(tmp_path):
    lock = DirectoryLock()
    lock.lock(tmp_path, "train.out_dir")
    with pytest.raises(ValueError, match="is in use by another run; wait until it ends, or use"):
        DirectoryLock().lock(tmp_path, "train.out_dir")
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


def _save(checkpoints, step):
    checkpoints.save(step, {"x": jnp.ones(2)}, {})
    checkpoints.wait()


def test_in_a_bucket_who_claims_last_has_it_and_the_one_before_changes_nothing_more():
    with buckets.bucket() as url:
        old, new = DirectoryLock(), DirectoryLock()
        root = located(f"{url}/run")
        old.claim(root)
        with (
            Checkpoints(root, keep=9, check=old.check) as ours,
            Checkpoints(root, keep=9, check=new.check) as theirs,
        ):
            _save(ours, 1)
            ours.save(2, {"x": jnp.ones(2)}, {})
            new.claim(root)
            with contextlib.suppress(OSError):
                ours.wait()  # complete before the claim, or not at all
            before = ours.steps()
            for step in (7, 8):
                with pytest.raises(OSError, match="taken over by another run"):
                    _save(ours, step)
            assert ours.steps() == before
            _save(theirs, 9)
            assert theirs.steps() == [*before, 9]
        old.release()
        new.check()
        new.release()
        assert not (root / LOCK).exists()


def test_a_save_that_is_overtaken_while_it_is_written_does_not_appear(tmp_path):
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 2:
            raise OSError(16, "taken over by another run", "x")

    with Checkpoints(tmp_path, keep=1, check=check) as checkpoints:
        with pytest.raises(OSError, match="taken over by another run"):
            _save(checkpoints, 1)
        assert checkpoints.steps() == []


@pytest.fixture
def without_locks(monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)


def test_where_nothing_can_be_locked_the_last_claim_counts(tmp_path, without_locks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = DirectoryLock(), DirectoryLock()
    assert not old.lock(tmp_path, "train.out_dir")
    for path in (tmp_path, Path(".")):
        old.claim(path)
    old.check()
    new.claim(tmp_path)
    new.check()
    with pytest.raises(OSError, match="taken over by another run"):
        old.check()
    new.release()
    with pytest.raises(OSError, match="taken over by another run"):
        old.check()
