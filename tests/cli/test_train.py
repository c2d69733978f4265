"""``train.py`` as its users meet it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import tiny_run

from dlm_jax.cli import train
from dlm_jax.training.metrics import read_records

SMALL = {"model__depth": 1, "optim__name": "adamw"}
"""What compiles faster than the tiny run."""


def _arguments(out_dir: Path, **changes: object) -> list[str]:
    given = tiny_run.flags(out_dir, **SMALL | changes)
    return [part for name, value in given.items() for part in (f"--{name}", value)]


def _refusal(capsys, out_dir: Path, *more: str, **changes: object) -> str:
    """The one line with which bad input is refused; nothing may be left of the run."""
    before = set(out_dir.parent.iterdir())
    with pytest.raises(SystemExit) as exit_, tiny_run.on_devices(1):
        train.main([*_arguments(out_dir, **changes), *more])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert set(out_dir.parent.iterdir()) == before
    return err


def test_the_program_trains_and_prints_only_samples_and_started_again_only_samples(tmp_path):
    out_dir = tmp_path / "runs" / "deep"
    texts = []
    for attempt in range(2):
        child = tiny_run.program(*_arguments(out_dir, train__steps=6, train__sample_every=5))
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        samples = out.removesuffix("\n").split("\n---\n")
        assert len(samples) == 3, out
        assert all(0 < len(sample) <= 16 for sample in samples), out
        assert "Warning" not in err
        assert ("nothing to train" in err) == (attempt == 1)
        assert ("held-out bound" in err) == (attempt == 0)
        assert ("sample at step 5" in err) == (attempt == 0)
        texts.append(out)
    assert texts[0] == texts[1]
    names = sorted(path.name for path in out_dir.iterdir())
    assert names == ["best", "checkpoints", "config.toml", "loss.png", "metrics.jsonl"]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_interrupted_program_says_so_in_its_exit_code_and_continues(tmp_path, number):
    tiny_run.needs(number)
    arguments = _arguments(tmp_path, train__steps=100_000, train__eval_every=0)
    child = tiny_run.program(*arguments)
    deadline = time.monotonic() + 240
    while not read_records(tmp_path / "metrics.jsonl"):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.1)
    child.send_signal(number)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 128 + number, err
    assert out == ""
    assert "Traceback" not in err
    (step,) = re.findall(r"interrupted: saved at step (\d+); the same command resumes", err)
    assert (tmp_path / "checkpoints" / f"step_{int(step):08d}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.3, 1.5, 3.0, 4.0, 5.0, 6.0])
def test_ctrl_c_before_the_first_step_ends_without_a_trace(tmp_path, after):
    out_dir = tmp_path / "run"
    changes = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "x")}
    child = tiny_run.program(*_arguments(out_dir, train__steps=100_000), **changes)
    time.sleep(after)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    # By the signal itself, or by the loop, which then has saved its first steps.
    assert child.returncode in (-signal.SIGINT, 128 + signal.SIGINT), err
    assert out == ""
    assert "Traceback" not in err and "Segmentation" not in err
    if child.returncode > 0:
        assert "interrupted: saved at step" in err
    assert not read_records(out_dir / "metrics.jsonl") or child.returncode > 0


def test_a_run_that_is_not_finite_exits_with_1(tmp_path, capsys):
    changes = {"optim__learning_rate": 1e38, "train__checkpoint_every": 1}
    with tiny_run.on_devices(1):
        assert train.main(_arguments(tmp_path, **changes)) == 1
    assert capsys.readouterr().out == ""
    # The loss was finite, the parameters after it are not: nothing is saved.
    assert not [*(tmp_path / "checkpoints").iterdir()]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train.stepz", "3"], "unknown argument '--train.stepz'; did you mean '--train.steps'?"),
        (["--train.steps"], "argument --train.steps: expected one argument"),
        (["--sample.gen_length", "17"], "sample.gen_length=17 does not fit the canvas"),
        (["--num-processes", "2"], "--num-processes has no effect without --distributed"),
        (["--data.source", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--data.seq_len", "5000"], "fewer than one window of seq_len=5000"),
        (["--model.vocab_size", "3"], "model.vocab_size=3 is smaller than the tokenizer's"),
        (["--mesh.tensor", "2"], "do not multiply to 1, the number of devices"),
        (["--objective.patterns", "random,spam"], "did you mean 'span'?"),
        (["--objective.denoising_share", "0.01"], "is less than one of train.batch_size=8 rows"),
        (["--train.accumulate", "3"], "does not divide train.batch_size=8; use a divisor"),
        (["--model.attention_type", "causal"], "use left_to_right"),
        (["--resume", "nowhere"], "--train.out_dir has no effect with --resume"),
        (["--resume", "r", "--config", "c"], "--resume and --config cannot be combined"),
        (["--data.tokenizer", "init"], "data.tokenizer='init' requires train.init_from, which"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, capsys, more, message):
    assert message in _refusal(capsys, tmp_path / "run", *more)


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_needs_no_other_flag_and_the_directory_may_have_moved(tmp_path, capsys, elsewhere):
    where = {"train__checkpoint_dir": str(tmp_path / "elsewhere")} if elsewhere else {}
    where |= SMALL
    with pytest.MonkeyPatch.context() as patch:
        tiny_run.stop_after(5, patch)
        stopped = tiny_run.run(tmp_path / "run", **where)
    assert stopped.reason == "interrupted"
    (tmp_path / "run").rename(tmp_path / "moved")
    with tiny_run.on_devices(1):
        assert train.main(["--resume", str(tmp_path / "moved")]) == 0
    err = capsys.readouterr().err
    assert f"continuing {tmp_path / 'moved'} from step 5 of 24" in err
    assert "not default: [model] depth=1 width=16 heads=2" in err
    tiny_run.run(tmp_path / "whole", **SMALL)
    assert tiny_run.records(tmp_path / "moved") == tiny_run.records(tmp_path / "whole")
    assert not (tmp_path / "run").exists()


def test_a_run_that_has_saved_nothing_is_not_resumed_and_it_says_how_to_start_it(tmp_path, capsys):
    for made in (False, True):
        if made:
            (tmp_path / "config.toml").write_text("")
        with pytest.raises(SystemExit) as exit_:
            train.main(["--resume", str(tmp_path)])
        err = capsys.readouterr().err
        assert exit_.value.code == 2
        assert err.startswith(f"error: --resume {tmp_path}: ") and err.count("\n") == 1
        assert (f"restart it with --config {tmp_path}/config.toml" in err) == made


def test_a_run_keeps_a_config_that_trains_the_same_anew(tmp_path, capsys):
    flags = _arguments(tmp_path / "run", train__steps=3, train__eval_every=0)
    with tiny_run.on_devices(1):
        assert train.main(flags) == 0
    given = (tmp_path / "run" / "config.toml").read_text()
    assert "depth = 1  # default: 6" in given
    capsys.readouterr()
    assert train.main(["--config", str(tmp_path / "run" / "config.toml"), "--print-config"]) == 0
    out, err = capsys.readouterr()
    plain = [line for line in given.splitlines() if not line.startswith("#")]
    assert out.splitlines() == plain[1:] and err == ""
    with tiny_run.on_devices(1):
        elsewhere = ["--train.out_dir", str(tmp_path / "again")]
        assert train.main(["--config", str(tmp_path / "run" / "config.toml"), *elsewhere]) == 0
    assert tiny_run.records(tmp_path / "again") == tiny_run.records(tmp_path / "run")


def test_the_config_is_printed_and_nothing_is_done(tmp_path, capsys):
    assert train.main([*_arguments(tmp_path / "run"), "--print-config", "--model.qkv_bias"]) == 0
    out, err = capsys.readouterr()
    assert "qkv_bias = true  # default: false" in out.splitlines() and err == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_data_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(b"good text\n" * 20 + b"\xff")
    line = _refusal(capsys, tmp_path / "run", data__source=path)
    assert "not UTF-8" in line and str(path) in line


def test_a_batch_that_the_devices_do_not_divide_is_refused_with_a_remedy(tmp_path):
    child = tiny_run.program(
        *_arguments(tmp_path / "run", train__batch_size=7), JAX_NUM_CPU_DEVICES="2"
    )
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (2, "")
    assert err == (
        "error: train.batch_size=7 is not divisible by the 2 devices across which the batch is "
        "split; use 8\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["train.out_dir", "train.checkpoint_dir"])
def test_a_directory_that_cannot_be_made_is_refused(tmp_path, capsys, setting):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "run").mkdir()
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        line = _refusal(capsys, tmp_path / "run", f"--{setting}", str(directory))
        assert str(directory) in line
    if os.access("/proc", os.W_OK):  # nobody can make a directory there, and root may write it
        line = _refusal(capsys, tmp_path / "run", f"--{setting}", "/proc/x")
        assert f"{setting}=/proc/x cannot be read or written (" in line
    assert (tmp_path / "file").read_text() == "precious"
