"""Runs that learn from a teacher: who it is, resuming, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run

import dlm_jax.config as configs
from dlm_jax.training import problem, train

FLAGS = {
    "model__depth": 1, "optim__name": "adamw", "optim__learning_rate": 0.01,
    "optim__warmup_steps": 0, "train__steps": 4, "train__log_every": 1, "train__eval_every": 0,
    "train__checkpoint_every": 2,
}  # fmt: skip
TAUGHT = {
    "objective__sdtt_share": 0.5, "objective__certainty_share": 0.25,
    "objective__certainty_steps": 2, "train__accumulate": 2,
}  # fmt: skip


def _config(out_dir: Path, **changes: Any):
    return configs.load(None, tiny_run.flags(out_dir, **(FLAGS | changes)))


def _train(out_dir: Path, **changes: Any):
    with tiny_run.on_devices(1):
        return train(_config(out_dir, **changes), report=lambda line: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@functools.cache
def _base(folder: Path, seed: int = 0):
    return _train(folder / f"base{seed}", train__steps=8, train__seed=seed)


@functools.cache
def _whole(folder: Path):
    _base(folder)
    return _train(folder / "whole", train__init_from=folder / "base0", **TAUGHT)


def _losses(out_dir: Path) -> list[dict]:
    return [line for line in tiny_run.records(out_dir) if line["kind"] == "train"]


@pytest.mark.slow
def test_the_teacher_of_a_run_is_what_it_began_with_and_resuming_is_exact(folder, monkeypatch):
    whole = _whole(folder)
    tiny_run.assert_same(whole.state.reference, _base(folder).params)
    moved = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()), whole.params, whole.state.reference
    )
    assert max(jax.tree.leaves(moved)) > 1e-3
    with monkeypatch.context() as patch:
        tiny_run.stop_after(3, patch)
        _train(folder / "stopped", train__init_from=folder / "base0", **TAUGHT)
    resumed = _train(folder / "stopped", train__init_from=folder / "base0", **TAUGHT)
    assert resumed.run.first_step == 3
    tiny_run.assert_same(resumed.state, whole.state)
    assert tiny_run.records(folder / "stopped") == tiny_run.records(folder / "whole")


def test_each_objective_is_in_the_metrics_and_adds_up_over_the_parts(folder):
    _whole(folder)
    first = _losses(folder / "whole")[0]
    assert all(np.isfinite(first[name]) for name in ("elbo", "sdtt", "certainty"))
    assert 0 < first["sdtt"] < 0.1 < first["certainty"]
    parts = 0.25 * first["elbo"] + 0.5 * first["sdtt"] + 0.25 * first["certainty"]
    assert first["loss"] == pytest.approx(parts, rel=1e-5)
    changes = TAUGHT | {"train__accumulate": 1, "train__steps": 1}
    _train(folder / "at_once", train__init_from=folder / "base0", **changes)
    at_once = _losses(folder / "at_once")[0]
    for name in ("elbo", "sdtt", "certainty", "grad_norm"):
        assert at_once[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_another_model_may_teach_and_is_the_same_all_along(folder):
    _base(folder)
    other = _base(folder, seed=1)
    changes = {"train__init_from": folder / "base0", "objective__teacher": folder / "base1"}
    outcome = _train(folder / "other", **TAUGHT | changes | {"train__steps": 2})
    tiny_run.assert_same(outcome.state.reference, other.params)
    assert _losses(folder / "other")[0]["sdtt"] > 2 * _losses(folder / "whole")[0]["sdtt"]
    with pytest.raises(ValueError, match=r"objective.teacher='.*base1', but this run has ''; set"):
        _train(folder / "other", **TAUGHT | changes | {"objective__teacher": ""})


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_by_name(folder, tmp_path):
    _base(folder)
    (tmp_path / "text").write_text("abcdefgh\n" * 200)
    _train(tmp_path / "letters", data__source=tmp_path / "text", train__steps=1)
    changes = {
        "train__init_from": folder / "base0", "objective__teacher": tmp_path / "letters",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^objective.teacher=.*letters has a different vocab"):
        _train(tmp_path / "run", **TAUGHT | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "objective.sdtt_share=0.5 needs a teacher; name a model in train.init_from"),
        ({"objective__sdtt_share": 0.9, "train__init_from": "x"},
         "objective.sdtt_share=0.9 and the other shares add up to 1.15; lower one"),
        ({"model__attention_type": "causal", "train__init_from": "x",
          "sample__order": "left_to_right"},
         "objective.sdtt_share=0.5 is not supported with model.attention_type='causal'; use 0"),
        ({"heads__train_main": False, "train__init_from": "x"},
         "objective.sdtt_share=0.5 trains the model, which is frozen"),
        ({"objective__sdtt_share": 0, "objective__certainty_share": 0, "objective__teacher": "x"},
         "objective.teacher='x' is not used; set objective.sdtt_share or"),
        ({"objective__teacher": "x", "train__init_from": "x", "model__lora_rank": 2},
         "objective.teacher='x' is not supported with adapters"),
        ({"objective__sdtt_teacher_steps": 0}, r"sdtt_teacher_steps=0 is outside \[1, 64\]; use"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_at_the_door(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        _config(tmp_path / "run", **TAUGHT | changes)
    assert "\n" not in str(error.value)


def test_a_custom_loop_must_keep_its_own_teacher(folder, tmp_path):
    _base(folder)
    changes = {"train__init_from": folder / "base0", "train__accumulate": 1}
    with pytest.raises(ValueError, match=r"objective.sdtt_share requires a teacher, whose .*train"):
        problem(_config(tmp_path / "run", **TAUGHT | changes))


@pytest.mark.slow
def test_devices_that_split_rows_and_model_learn_the_same(folder):
    _base(folder)
    changes = TAUGHT | {"train__accumulate": 1, "train__steps": 1}
    changes |= {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    _whole(folder)
    first = _losses(folder / "whole")[0]
    with tiny_run.on_devices(8):
        config = _config(folder / "cube", train__init_from=folder / "base0", **changes)
        train(config, report=lambda line: None)
    cube = _losses(folder / "cube")[0]
    for name in ("elbo", "sdtt", "certainty", "grad_norm"):
        assert cube[name] == pytest.approx(first[name], rel=1e-3, abs=1e-6), name
