"""Two trainings never write one directory."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.training.lock import FILE, DirectoryLock
from dlm_jax.training.run import prepare


def _acquire(directory) -> bool:
    lock = DirectoryLock()
    try:
        lock.acquire(directory)
    except ValueError:
        return False
    return lock.is_held


def test_a_directory_is_one_process_s_until_it_lets_go(tmp_path):
    lock = DirectoryLock()
    lock.acquire(tmp_path)
    with pytest.raises(ValueError, match="is in use by another training; wait for its end, or use"):
        DirectoryLock().acquire(tmp_path)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert not pool.apply(_acquire, (tmp_path,))
        lock.release()
        lock.release()
        assert pool.apply(_acquire, (tmp_path,))
    assert list(tmp_path.iterdir()) == []


def test_where_directories_cannot_be_locked_a_file_in_them_is(tmp_path, monkeypatch):
    opening = os.open

    def files_alone(path, *args, **kwargs):
        if str(path) == str(tmp_path):
            raise OSError(9, "Bad file descriptor")
        return opening(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", files_alone)
    lock = DirectoryLock()
    lock.acquire(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    with pytest.raises(ValueError, match="is in use by another training"):
        DirectoryLock().acquire(tmp_path)
    lock.release()
    DirectoryLock().acquire(tmp_path)


def _prepare(out_dir):
    with tiny_run.on_devices(1):
        return prepare(configs.load(None, tiny_run.flags(out_dir)), report=lambda line: None)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_second_training_in_a_directory_is_refused_and_changes_nothing(tmp_path, is_there):
    out_dir = tmp_path / "run"
    if is_there:
        out_dir.mkdir()
    first = _prepare(out_dir)
    before = list(out_dir.rglob("*"))
    with pytest.raises(ValueError, match="train.out_dir=.* is in use by another training"):
        _prepare(out_dir)
    assert list(out_dir.rglob("*")) == before
    first.checkpoints.close()
    _prepare(out_dir).checkpoints.close()


def test_a_refused_run_lets_go_of_its_directory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a record of metrics"):
            _prepare(tmp_path)
