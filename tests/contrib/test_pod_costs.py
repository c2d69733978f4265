"""``python -m dlm_jax.contrib.pod_costs``: the plan of a run, and estimates of its steps."""

from __future__ import annotations

import tiny_run

from dlm_jax.contrib.pod_costs import main


def test_the_program_prints_the_plan_and_the_estimates(tmp_path, capsys):
    given = tiny_run.flags(tmp_path / "run", mesh__fsdp=4)
    assert main([f"{key}={value}" for key, value in given.items()]) == 0
    out = capsys.readouterr().out
    assert "mesh         data=2 fsdp=4 tensor=1 on 8 devices" in out
    assert "TFLOP per device and step, with recomputation" in out
    assert "collectives  " in out and "GiB per device and step" in out
    assert "not estimated: the peak performance of this device is unknown" in out
    assert not (tmp_path / "run").exists()


def test_bad_input_ends_with_its_code_in_one_line(capsys):
    assert main(["--topology", "pod"]) == 2
    err = capsys.readouterr().err
    assert "--topology=pod is not a topology" in err and err.count("\n") == 1
