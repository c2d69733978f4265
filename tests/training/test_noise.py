"""A model of another forward process, from its config to texts."""

import numpy as np
import pytest
import tiny_run

import dlm_jax
from dlm_jax.config import Config, ModelConfig, ObjectiveConfig, RLConfig


@pytest.mark.slow
@pytest.mark.parametrize("process", ["uniform", "mixed"])
def test_a_model_learns_is_scored_and_writes(process, tmp_path):
    changes = {"objective__process": process, "train__steps": 60, "train__eval_every": 60}
    outcome = tiny_run.run(tmp_path / "whole", **changes)
    tiny_run.run(tmp_path / "parts", train__accumulate=2, **changes)
    whole, parts = (
        [line["loss"] for line in tiny_run.records(tmp_path / name) if "loss" in line]
        for name in ("whole", "parts")
    )
    np.testing.assert_allclose(parts[:3], whole[:3], rtol=1e-3)
    assert outcome.bound < np.log(len(set(tiny_run.TEXT))) - 0.1
    model = dlm_jax.load(tmp_path / "whole")
    assert model.process.name == process
    texts = dlm_jax.generate(model, ["The "], num_samples=2).texts
    assert all(text.startswith("The ") for text in texts)
    score = dlm_jax.score(model, ["quick brown"], prompts=["The "], num_draws=8)
    assert not score.is_exact and 0 < score.nats_per_token[0] < 6
    with pytest.raises(ValueError, match=f"trained with objective.process='{process}'"):
        dlm_jax.generate(model, ["The "], order="low_confidence")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model": ModelConfig(add_critic_head=True)},
            "is not supported with model.add_critic_head",
        ),
        ({"model": ModelConfig(add_sampler_head=True)}, "supported with model.add_sampler_head"),
        ({"model": ModelConfig(mode="sequence_scorer")}, "is not supported with model.mode"),
        ({"rl": RLConfig(reward="dlm_jax.tasks:arithmetic")}, "is not supported with rl.reward"),
    ],
)
def test_what_reads_holes_is_refused_beside_another_process(changes, line):
    with pytest.raises(ValueError, match="^objective.process='uniform' [^\n]+$") as refusal:
        Config(objective=ObjectiveConfig(process="uniform"), **changes)
    assert line in str(refusal.value)
