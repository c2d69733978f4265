"""Distillation from end to end: who teaches, resuming, and what is refused."""

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
from dlm_jax.store import load_params, save_weights
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
def _base(folder: Path, seed: int = 0) -> Path:
    path = folder / f"base{seed}"
    with tiny_run.on_devices(1):
        train(_config(path, train__steps=8, train__seed=seed), report=lambda line: None)
    return path


def _distil(folder: Path, name: str, settings: Any = SETTINGS, **changes: Any):
    config = _config(folder / name, train__init_from=_base(folder), **changes)
    with tiny_run.on_devices(1):
        return distil(config, settings, report=lambda line: None)


def _losses(out_dir: Path) -> list[float]:
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


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


def test_another_model_may_teach(folder):
    """The initial parameters are their own teacher, from which another one differs more."""
    for name, teacher in (("own", ""), ("other", str(_base(folder, seed=1)))):
        _distil(folder, name, DistillationSettings(teacher=teacher), train__steps=1)
    (own,), (other,) = (_losses(folder / name) for name in ("own", "other"))
    assert 0 < own < 0.1 and other > 2 * own


def test_a_teacher_that_computes_otherwise_is_refused_by_name(folder, tmp_path):
    params, meta = load_params(_base(folder))
    meta["config"]["model"]["rope_theta"] = 100.0
    teacher = str(tmp_path / "turned.safetensors")
    save_weights(teacher, params, meta)
    with pytest.raises(ValueError) as error:
        _distil(folder, "turned", DistillationSettings(teacher=teacher))
    why = "has model.rope_theta=100.0, but the config has 10000.0"
    assert str(error.value).startswith("teacher: ") and why in str(error.value)


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_by_name(folder, tmp_path):
    (tmp_path / "text").write_text("abcdefgh\n" * 200)
    with tiny_run.on_devices(1):
        config = _config(tmp_path / "letters", data__source=tmp_path / "text", train__steps=1)
        train(config, report=lambda line: None)
    teacher = str(tmp_path / "letters")
    with pytest.raises(ValueError, match=r"^teacher=.*letters' has another vocabulary"):
        _distil(tmp_path, "run", DistillationSettings(teacher=teacher))


def test_what_does_not_go_together_is_refused_at_the_door(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="teacher='' is empty; name it, or train.init_from"):
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
    assert main(["--teacher", "nowhere.safetensors", "data.source=nothing"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    assert main(["data.source"]) == 2
    assert "KEY=VALUE='data.source' has no value" in capsys.readouterr().err
