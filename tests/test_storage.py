"""Everything that writes a file replaces it whole, keeps links, and names a full disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import buckets
import numpy as np
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.batch.json_lines import Line, Results
from dlm_jax.data.corpus import store_arrays
from dlm_jax.store import save_weights
from dlm_jax.store.files import check_bucket, located, replacing
from dlm_jax.training.init_from import write_config
from dlm_jax.training.metrics import MetricsLog


def _metrics(path: Path) -> None:
    MetricsLog(path, step=1).close()


def _config(path: Path) -> None:
    write_config(configs.load(None, tiny_run.flags(path.parent)), path.parent)


def _results(path: Path) -> None:
    with Results(path, fingerprint="a" * 64) as results:
        results.write({"line": 1})
        results.finish([Line(1)])


WRITERS = {
    "metrics.jsonl": _metrics,
    "config.toml": _config,
    "out.safetensors": lambda path: save_weights(path, {"w": np.ones(2, np.float32)}, {}),
    "ids.npz": lambda path: store_arrays(path, {"ids": np.arange(3)}),
    "out.jsonl": _results,
}


@pytest.fixture(params=WRITERS)
def writer(request):
    return request.param, WRITERS[request.param]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path, writer, is_there):
    name, write = writer
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "run" / name
    if is_there:
        target.touch()
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert os.readlink(link) == str(target)
    assert target.is_file()
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_an_error_of_the_disk_and_leaves_what_was_there(
    tmp_path, writer, monkeypatch
):
    name, write = writer
    path = tmp_path / name
    path.touch()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write(path)
    assert error.value.errno == errno.ENOSPC
    assert name in str(error.value.filename)
    assert path.read_bytes() == b""
    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_an_error_in_the_block_names_its_file_and_not_the_target(tmp_path):
    with pytest.raises(OSError, match="No such file") as error, replacing(tmp_path / "target"):
        os.stat(tmp_path / "absent")
    assert error.value.filename == str(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_synced_fails_no_write(tmp_path, monkeypatch):
    syncing = os.fsync

    def files_alone(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        syncing(descriptor)

    path = tmp_path / "x"
    monkeypatch.setattr(os, "fsync", files_alone)
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.filterwarnings("default")
def test_buckets_that_are_not_there_or_not_open_are_refused_in_one_line(monkeypatch):
    def closed(*_, **__):
        raise PermissionError("Access Denied")

    with buckets.bucket() as url:
        check_bucket("train.checkpoint_dir", f"{url}/deep/inside")
        assert buckets.files_under(located(url)) == []
        with pytest.raises(ValueError, match="dir=s3://no-such-pail/x cannot be read or written"):
            check_bucket("train.checkpoint_dir", "s3://no-such-pail/x")
        monkeypatch.setattr(type(located(url)), "write_bytes", closed)
        with pytest.raises(ValueError, match=rf"{url} cannot be .*\(Access Denied\); check"):
            check_bucket("train.checkpoint_dir", url)
