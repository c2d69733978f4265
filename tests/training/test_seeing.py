"""Laws of what a run tells of itself: where its time went, trackers, traces."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types

import jax
import pytest
import tiny_run
import toy

import dlm_jax.config as configs
from dlm_jax.cli import train
from dlm_jax.cli.train import parse_span
from dlm_jax.model.transformer import build
from dlm_jax.training import metrics, trainer
from dlm_jax.training.metrics import MetricsLog, read_records
from dlm_jax.training.plan import model_flops
from dlm_jax.training.trainer import Trainer, describe, prepare

SHORT = {
    "train__steps": 6,
    "train__log_every": 2,
    "train__eval_every": 3,
    "train__checkpoint_every": 0,
    "optim__warmup_steps": 1,
    "optim__name": "adamw",
    "model__depth": 1,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a trace and TensorBoard, on a device that says what it can do."""
    out_dir = tmp_path_factory.mktemp("seen") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "peak_flops", lambda device: 1e12)
        given = SHORT | {"train__trackers": "tensorboard"}
        with tiny_run.on_devices(1):
            run = tiny_run.prepare(
                configs.load(None, tiny_run.flags(out_dir, **given)), report=lambda line: None
            )
        with run.checkpoints:
            tiny_run.run_loop(run, profile=(3, 4))
    return out_dir, run


def _lines(out_dir, kind="train"):
    return [line for line in read_records(out_dir / "metrics.jsonl") if line["kind"] == kind]


def test_every_line_tells_where_the_time_went(finished):
    out_dir, run = finished
    rows, length = run.config.train.batch_size, run.config.data.seq_len
    flops = model_flops(run.state.params, run.config.model, num_rows=rows, num_positions=length)
    for line in _lines(out_dir):
        assert 0 <= line["input_seconds"] <= line["step_seconds"]
        assert line["tokens_per_second"] == pytest.approx(rows * length / line["step_seconds"])
        assert line["flop_utilisation"] == pytest.approx(flops / line["step_seconds"] / 1e12)


def _events(out_dir):
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((out_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_event_files_hold_every_number_of_the_metrics(finished):
    out_dir, _ = finished
    shown = {
        (value.tag, event.step): value.simple_value
        for event in _events(out_dir)
        for value in event.summary.value
    }
    lines = read_records(out_dir / "metrics.jsonl")
    wanted = {
        (f"{line['kind']}/{name}", line["step"]): value
        for line in lines
        for name, value in line.items()
        if name not in ("kind", "step", "time", "run")
    }
    assert shown.keys() == wanted.keys()
    for key, value in wanted.items():
        assert shown[key] == pytest.approx(value, rel=1e-6)


def test_a_trace_begins_and_ends_once_and_waits_for_its_last_step(tmp_path, monkeypatch):
    log: list[object] = []
    place = Trainer._place

    def noting(trainer, rows):
        log.append(trainer.step + 1)
        return place(trainer, rows)

    monkeypatch.setattr(Trainer, "_place", noting)
    monkeypatch.setattr("jax.profiler.start_trace", lambda path: log.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: log.append("stop"))
    settle = Trainer.settle

    def settling(trainer):
        settle(trainer)
        log.append(f"settled {trainer.step}")

    monkeypatch.setattr(Trainer, "settle", settling)
    given = SHORT | {"train__log_every": 6, "train__eval_every": 6}
    flags = tiny_run.flags(tmp_path, **given)
    with tiny_run.on_devices(1):
        run = tiny_run.prepare(configs.load(None, flags), report=print)
    with run.checkpoints:
        tiny_run.run_loop(run, profile=(3, 4))
    assert log[: log.index(6)] == [1, 2, "start", 3, 4, "settled 4", "stop", 5]


@pytest.mark.parametrize("text", ["10", "10:", ":3", "3:2", "0:4", "a:b", "-1:3", "1:2:3"])
def test_spans_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="--profile .*"):
        parse_span(text)
    assert parse_span("10:13") == (10, 13)


def test_weights_and_biases_is_given_the_records_where_it_is_asked_for(tmp_path, monkeypatch):
    log: list[tuple] = []

    class Run:
        def log(self, values, *, step):
            log.append((step, values))

        def finish(self):
            log.append(("finish",))

    module = types.ModuleType("wandb")
    module.init = lambda **given: log.append(("init", given["name"], given["id"])) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for identity in ("a", "a", "b"):
        write, close = metrics.TRACKERS["wandb"][1](tmp_path / "run", {"a": 1}, identity, 0)
        write(3, {"train/loss": 2.5})
        close()
    assert log[1:3] == [(3, {"train/loss": 2.5}), ("finish",)]
    assert log[0][:2] == ("init", "run")
    assert log[0] == log[3], "started again, it is the same run there"
    assert log[6][2] != log[0][2], "another run in the directory is another one there"


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(tmp_path, capsys, monkeypatch):
    def refused(value):
        given = tiny_run.flags(tmp_path / "run", train__trackers=value)
        with pytest.raises(SystemExit) as caught, tiny_run.on_devices(1):
            train.main([part for name, text in given.items() for part in (f"--{name}", text)])
        assert caught.value.code == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    assert "has 'tensorbord', which is not one of tensorboard, wandb; did you" in refused(
        "tensorbord"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        "train.trackers=wandb requires wandb, which is not installed; pip install 'dlm_jax[wandb]'"
        in refused("wandb")
    )
    assert "requires tensorboardX, which is not installed; pip install 'dlm_jax[tensorboard]'" in (
        refused("tensorboard")
    )


def test_a_tracker_that_ctrl_c_interrupts_is_closed(tmp_path):
    closed = []

    def write(step, figures):
        raise KeyboardInterrupt

    trackers = {"one": lambda: (write, lambda: closed.append(1))}
    log = MetricsLog(tmp_path / "metrics.jsonl", step=6, trackers=trackers)
    with pytest.raises(KeyboardInterrupt), contextlib.closing(log):
        log.write(kind="train", step=7)
    assert closed == [1]


def test_the_summary_has_the_size_what_is_not_the_default_and_undeclared_matrices(tmp_path):
    said: list[str] = []

    def network(config):
        return dataclasses.replace(build(config), axes=None)

    with tiny_run.on_devices(1):
        flags = tiny_run.flags(tmp_path / "run", optim__name="adamw")
        run = prepare(configs.load(None, flags), network=network, report=said.append)
    with run.checkpoints:
        describe(run, said.append)
    total = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    assert any(line.startswith(f"model of {total:,} parameters on cpu, mesh ") for line in said)
    (line,) = [line for line in said if line.startswith("not default: [model]")]
    assert "depth=2 width=16 heads=2" in line
    (line,) = [line for line in said if line.startswith("without Network.axes, matrices by rank: ")]
    assert set(line.split(": ")[1].split(", ")) == toy.matrices(build(run.config.model))


def test_the_plot_of_a_run_is_drawn_on_demand(finished, tmp_path, capsys):
    picture = finished[0] / "loss.png"
    assert train.main(["--plot", str(picture.parent)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().err
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        train.main(["--plot", str(tmp_path / "nowhere")])
    assert "has no metrics.jsonl; pass the directory of a run" in capsys.readouterr().err
