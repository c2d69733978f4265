"""Everything that writes a file replaces it whole, keeps links, and names a full disk."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import viewing_cases

import dlm_jax.config as configs
from dlm_jax.batch.results import Results
from dlm_jax.checkpoint import save_weights
from dlm_jax.data.token_files import write_tokens
from dlm_jax.metrics import MetricsLog, plot_losses
from dlm_jax.storage import replacing
from dlm_jax.training.files import write_config
from dlm_jax.viewing.trace import write_trace


def _metrics(path: Path) -> None:
    MetricsLog(path, step=1).close()


def _config(path: Path) -> None:
    write_config(configs.load(None, tiny_run.flags(path.parent)), path.parent)


def _results(path: Path) -> None:
    with Results(path, fingerprint="a" * 64) as results:
        results.write({"id": 1})
        results.finish([1])


WRITERS = {
    "metrics.jsonl": _metrics,
    "config.toml": _config,
    "loss.png": lambda path: plot_losses([{"kind": "train", "step": 1, "loss": 1.0}], path),
    "out.safetensors": lambda path: save_weights(path, {"w": np.ones(2, np.float32)}, {}),
    "ids.npy": lambda path: write_tokens(path, np.arange(3), vocab_size=9),
    "page.html": lambda path: write_trace(
        path, [[viewing_cases.frame("A")]], viewing_cases.decode, title=""
    ),
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


def test_leftovers_of_kills_go_once_they_are_old_and_no_one_else_s_does(tmp_path):
    old, young, other = (
        tmp_path / name for name in (".x.1.writing", ".x.2.writing", ".xy.1.writing")
    )
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    with replacing(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert {path.name for path in tmp_path.iterdir()} == {"x", young.name, other.name}
