"""Law 11: what carries the identity of another run is never continued, kept or mixed."""

from __future__ import annotations

import shutil

import pytest
import tiny_run

from dlm_jax.store import load_meta, load_params
from dlm_jax.store.checkpoints import read_manifest
from dlm_jax.training.init_from import config_of_run
from dlm_jax.training.metrics import read_records

SHORT = {"train__steps": 8, "train__keep_checkpoints": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs of one config."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("ours", "theirs"):
        tiny_run.run(folder / name, **SHORT)
    return folder / "ours", folder / "theirs"


@pytest.fixture
def ours(runs, tmp_path):
    return shutil.copytree(runs[0], tmp_path / "run")


def _identities(out_dir):
    """Of the checkpoints, the best model and the lines of metrics."""
    found = {load_meta(out_dir, report=print)["run"], load_meta(out_dir / "best")["run"]}
    found |= {
        read_manifest(path)["run"] for part in ("checkpoints", "best")
        for path in (out_dir / part).iterdir()
    }  # fmt: skip
    return found | {record["run"] for record in read_records(out_dir / "metrics.jsonl")}


def _listing(out_dir):
    return {path: path.stat().st_mtime_ns for path in out_dir.rglob("*") if path.is_file()}


def _refused(out_dir, told, **changes):
    before = _listing(out_dir)
    with pytest.raises(ValueError, match=told) as error:
        tiny_run.run(out_dir, **SHORT | {"train__steps": 12} | changes)
    assert "\n" not in str(error.value)
    assert _listing(out_dir) == before


def test_all_that_a_run_writes_carries_one_identity_and_that_of_no_other_run(runs):
    (ours,), (theirs,) = map(_identities, runs)
    assert ours and theirs and ours != theirs


def test_a_run_that_goes_on_keeps_its_identity(ours):
    before = _identities(ours)
    tiny_run.run(ours, **SHORT | {"train__steps": 12})
    assert _identities(ours) == before


def test_a_checkpoint_of_another_run_is_neither_continued_nor_loaded(runs, ours):
    shutil.copytree(
        runs[1] / "checkpoints" / "step_00000008", ours / "checkpoints" / "step_00000009"
    )
    told = (
        r"contains checkpoints of several runs \(steps \[8\] of run \w+, \[9\] of run \w+\); move"
    )
    _refused(ours, told)
    for load in (load_params, config_of_run):
        with pytest.raises(ValueError, match=told):
            load(ours)


def test_a_checkpoint_of_another_run_in_the_place_of_the_own_is_not_continued(runs, ours):
    shutil.rmtree(ours / "checkpoints")
    shutil.copytree(runs[1] / "checkpoints", ours / "checkpoints")
    told = rf"{ours}/best has the best model of another run; move "
    _refused(ours, told)
    shutil.rmtree(ours / "best")
    _refused(
        ours,
        r"contains metrics of run \w+, which has other checkpoints or another config; move",
    )


def test_the_best_model_of_another_model_is_not_kept_as_that_of_a_new_run(ours):
    shutil.rmtree(ours / "checkpoints")
    told = (
        "best has the best model of another run; move the directory elsewhere, or use another train"
    )
    _refused(ours, told, model__width=32)


def test_the_best_model_of_another_text_under_the_same_config_is_not_lost(tmp_path):
    source, run = tmp_path / "text.txt", tmp_path / "run"
    source.write_text(tiny_run.TEXT)
    flags = {"data__source": str(source), "train__steps": 3, "train__eval_every": 1}
    tiny_run.run(run, **flags)
    shutil.rmtree(run / "checkpoints")
    source.write_text(tiny_run.TEXT.replace("lazy", "busy"))
    _refused(run, "best has the best model of another run; move", **flags)


def test_a_run_killed_before_its_first_checkpoint_may_begin_anew_with_another_free_key(ours):
    (before,) = _identities(ours)
    shutil.rmtree(ours / "checkpoints")
    config = ours / "config.toml"
    text = config.read_text()
    assert tiny_run.run(ours, **SHORT, train__log_every=4).reason == "finished"
    assert before not in _identities(ours) and config.read_text() != text


@pytest.mark.slow
def test_a_run_that_began_anew_and_stopped_before_its_first_best_continues(ours, monkeypatch):
    """The best model that it found is of a run that died before its first checkpoint."""
    (before,) = _identities(ours)
    shutil.rmtree(ours / "checkpoints")
    with monkeypatch.context() as patch:
        tiny_run.stop_after(2, patch)
        assert tiny_run.run(ours, **SHORT).reason == "interrupted"
    assert tiny_run.run(ours, **SHORT).reason == "finished"
    assert before not in _identities(ours)


def test_a_new_run_of_another_config_changes_nothing_where_metrics_lie(ours):
    for part in ("checkpoints", "best"):
        shutil.rmtree(ours / part)
    told = r"metrics of run \w+, which has other checkpoints or another config; move it"
    _refused(ours, told, model__width=32)
    text = ours.parent / "other.txt"
    text.write_text("Another text that is read from the start. " * 60)
    _refused(ours, told, data__source=str(text))


@pytest.mark.parametrize("name", ["best", "checkpoints"])
def test_what_is_no_directory_is_refused_before_the_run_begins(tmp_path, name):
    out_dir = tmp_path / "run"
    out_dir.mkdir()
    (out_dir / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"{name} is not a directory; pass"):
        tiny_run.run(out_dir, **SHORT)
    assert [path.name for path in out_dir.iterdir()] == [name]
