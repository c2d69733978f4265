"""The processes of a pod start before anything else that a program does."""

from __future__ import annotations

import jax
import pytest

from dlm_jax.cli import common, sample, train
from dlm_jax.cli.ends import End, code_of, end_of
from dlm_jax.distributed import processes
from dlm_jax.distributed.processes import run_together

HOSTS = ["--distributed", "--coordinator", "here:1", "--num-processes", "2", "--process-id", "0"]


class _Started(Exception):
    pass


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (train.main, ["--resume", "no_run_here"]),
        (train.main, ["--config", "no_config_here.toml"]),
        (train.main, ["--config", "no_config_here.toml", "--print-config"]),
        (train.main, ["--resume", "no_run_here", "--dry-run"]),
        (sample.main, ["--checkpoint", "no_run_here"]),
        (sample.main, ["--rules", "no_module_here"]),
        (sample.main, ["--host-sampler", "no_module_here:f", "--prompt", "a"]),
        (sample.main, ["--prompts", "no_file_here", "--output", "out.jsonl"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_processes_start_before_files_and_modules_are_read(
    tmp_path, monkeypatch, capsys, main, flags
):
    def start(*args, **settings):
        raise _Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sample, "start_jax", lambda: None)
    monkeypatch.setattr(common, "keep_output_for_texts", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", start)
    assert main([*flags, *HOSTS]) == End.DEFECT
    assert "_Started" in capsys.readouterr().err


def test_a_single_process_runs_its_work_and_touches_no_device(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: pytest.fail("a device was started"))
    assert run_together(lambda: 3, lambda error: 70, print) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(28, "No space left on device"), 5), (SystemExit(2), 2), (KeyboardInterrupt(), 130),
     (RuntimeError("connection reset"), 70)],
)  # fmt: skip
def test_a_failed_process_ends_with_its_own_code(monkeypatch, error, code):
    slept = []

    class Ended(BaseException):
        pass

    def fail():
        raise error

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.os, "_exit", end)
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    with pytest.raises(Ended) as caught:
        run_together(fail, code_of, end_of)
    assert caught.value.args == (code,)
    # An error without a known cause may be due to a lost process, which is waited for.
    assert (max(slept) > processes.HEARTBEAT_SECONDS) == (code == 70)
