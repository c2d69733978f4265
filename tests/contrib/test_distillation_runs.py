"""Distillation from end to end, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.contrib import distillation
from dlm_jax.contrib.distillation import DistillationSettings, distil, main
from dlm_jax.training import train

FLAGS = {
    "model__depth": 1, "optim__name": "adamw", "optim__learning_rate": 0.01,
    "optim__warmup_steps": 0, "train__steps": 4, "train__log_every": 1, "train__eval_every": 0,
    "train__checkpoint_every": 2,
}  # fmt: skip
SETTINGS = DistillationSettings(steps=4)


def _config(out_dir: Path, **changes: Any):
    return configs.load(None, tiny_run.flags(out_dir, **(FLAGS | changes)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@functools.cache
def _base(folder: Path) -> Path:
    path = folder / "base"
    with tiny_run.on_devices(1):
        train(_config(path, train__steps=8), report=lambda line: None)
    return path


def _distil(folder: Path, name: str, settings: Any = SETTINGS, **changes: Any):
    config = _config(folder / name, train__init_from=_base(folder), **changes)
    with tiny_run.on_devices(1):
        return distil(config, settings, report=lambda line: None)


def test_parameters_that_are_not_finite_are_not_saved(folder, monkeypatch):
    monkeypatch.setattr(
        distillation.loops.LoopState,
        "updated",
        lambda self, optimizer, grads: self._replace(
            params=jax.tree.map(lambda leaf: leaf * np.nan, self.params)
        ),
    )
    with pytest.raises(ValueError, match="^step 2: .* is not finite; lower"):
        _distil(folder, "broken", train__log_every=100)
    assert not any((folder / "broken" / "checkpoints").iterdir())


def test_the_student_begins_as_its_teacher_and_differs_from_it_in_one_step_alone(folder):
    _distil(folder, "own", train__steps=1)
    (line,) = map(json.loads, (folder / "own" / "metrics.jsonl").read_text().splitlines())
    assert 0 < line["loss"] < 0.1


def test_what_does_not_go_together_is_refused_at_the_door(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="train.init_from='' is empty; name the teacher"):
        distil(_config(tmp_path / "run"))
    with pytest.raises(ValueError, match="model.attention_type='causal' has no steps"):
        _distil(tmp_path, "run", model__attention_type="causal", sample__order="left_to_right")
    with pytest.raises(ValueError, match="teacher_steps=0 is below 1"):
        DistillationSettings(teacher_steps=0)
    for change in ({"optim__ema_decay": 0.9}, {"train__accumulate": 2}, {"mesh__fsdp": 1}):
        (key,) = (name.replace("__", ".") for name in change)
        with pytest.raises(ValueError, match=f"^{key}=.* is not supported by this loop"):
            _distil(folder, "unread", **change)
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(tiny_run.TEXT)
    packed = {"data__source": tmp_path / "*.txt", "data__layout": "documents", "data__tail": "pad"}
    with pytest.raises(ValueError, match=r"^data.pack=2 is not supported by this loop"):
        _distil(folder, "unread", data__pack=2, **packed)
    assert main(["--steps", "8", "data.source=nothing"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    assert main(["data.source"]) == 2
    assert "KEY=VALUE='data.source' has no value" in capsys.readouterr().err
