"""A model of another forward process, from its config to texts."""

import numpy as np
import pytest
import tiny_run

import dlm_jax
from dlm_jax.config import Config, HeadsConfig, ModelConfig, ObjectiveConfig, RLConfig


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


HEADS = {
    "objective__process": "uniform", "train__steps": 120, "train__eval_every": 120,
    "train__checkpoint_every": 120, "model__add_sampler_head": True,
    "heads__start_sampler_iteration": 0, "heads__sampler_reveal": 0.5,
    "heads__start_critic_iteration": 0, "heads__end_critic_iteration": 0,
    "heads__critic_alpha": 1.0,
}  # fmt: skip


@pytest.mark.slow
def test_heads_learn_from_random_tokens(tmp_path):
    alone = {"objective__process": "uniform", "train__steps": 12, "train__eval_every": 12}
    tiny_run.run(tmp_path / "alone", **alone)
    tiny_run.run(tmp_path / "beside", **HEADS | alone)
    model_losses = [
        [line["loss" if name == "alone" else "elbo"] for line in found if "loss" in line]
        for name in ("alone", "beside")
        if (found := tiny_run.records(tmp_path / name))
    ]
    # The sampler head leaves the trunk alone.
    assert model_losses[0] == model_losses[1]
    tiny_run.run(tmp_path / "both", model__add_critic_head=True, **HEADS)
    lines = [line for line in tiny_run.records(tmp_path / "both") if "sampler" in line]
    assert lines[-1]["sampler"] < lines[0]["sampler"] - 0.2
    model = dlm_jax.load(tmp_path / "both")
    true_L = np.asarray(model.tokenizer.encode(tiny_run.TEXT[:16]))
    other_L = np.asarray(model.tokenizer.encode(tiny_run.TEXT[7:23]))
    shown_NL = np.where(np.eye(16, dtype=bool) & (other_L != true_L), other_L, true_L)
    is_wrong_NL = shown_NL != true_L
    hidden_NLD, _ = model.network.trunk(model.params, shown_NL, np.full(16, 16), None)
    assert model.network.critic is not None
    logit_NL = np.asarray(model.network.critic(model.params, hidden_NLD.reshape(256, -1)))
    wrong, right = (logit_NL.reshape(16, 16)[at] for at in (is_wrong_NL, ~is_wrong_NL))
    assert (wrong[:, None] > right[None]).mean() > 0.8
    # Waves and remasking need holes; the texts do not.
    assert dlm_jax.generate(model, ["The "], num_samples=2).texts
    for settings, line in (
        ({"fill": "wavefront"}, "fill='wavefront' is not supported with order='posterior'"),
        ({"remask": "scheduled", "remask_by": "critic"}, "remask='scheduled' is not supported"),
    ):
        with pytest.raises(ValueError, match=line):
            dlm_jax.generate(model, ["The "], **settings)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {
                "model": ModelConfig(add_sampler_head=True),
                "heads": HeadsConfig(sampler_trunk_share=0.5),
            },
            "is not supported with heads.sampler_trunk_share",
        ),
        ({"model": ModelConfig(mode="sequence_scorer")}, "is not supported with model.mode"),
        ({"rl": RLConfig(reward="dlm_jax.tasks:arithmetic")}, "is not supported with rl.reward"),
    ],
)
def test_what_reads_holes_is_refused_beside_another_process(changes, line):
    with pytest.raises(ValueError, match="^objective.process='uniform' [^\n]+$") as refusal:
        Config(objective=ObjectiveConfig(process="uniform"), **changes)
    assert line in str(refusal.value)
