"""The processes of a pod start before anything else that a program does."""

from __future__ import annotations

import jax
import pytest

from dlm_jax.cli import common, sample, train
from dlm_jax.cli.ends import End
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
        (train.main, ["--plot", "no_run_here"]),
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


def test_a_jax_that_hides_its_service_is_told_and_the_work_is_done(monkeypatch, capsys):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_client", lambda: None)
    assert run_together(lambda: 4, lambda error: 70, print) == 4
    assert "hides its coordination service" in capsys.readouterr().err
