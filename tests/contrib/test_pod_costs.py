"""``python -m dlm_jax.contrib.pod_costs``: the plan of a run, and estimates of its steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_run

from dlm_jax.contrib.pod_costs import Cost, main, utilisation


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


def test_utilisation_is_the_work_of_the_model_over_that_of_the_chip():
    chip = SimpleNamespace(flops=100.0)
    plan: Any = SimpleNamespace(chip=chip, flops=30.0)
    assert utilisation(plan, Cost(seconds=0.5)) == pytest.approx(0.6)
    assert math.isnan(utilisation(cast(Any, SimpleNamespace(chip=None)), Cost(seconds=0.5)))
