"""A model of another forward process, from its config to texts."""

from typing import Any, cast

import jax
import numpy as np
import pytest
import stage_cases
import tiny_run
import toy

import dlm_jax
from dlm_jax.config import Config, ObjectiveConfig
from dlm_jax.data import Setup
from dlm_jax.heads.critic import CriticHead
from dlm_jax.model.transformer import build
from dlm_jax.objectives.processes import PROCESSES
from dlm_jax.training.tasks import make_mixture


@pytest.mark.slow
@pytest.mark.parametrize("process", ["mixed"])
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
    assert model.process == PROCESSES[process]
    texts = dlm_jax.generate(model, ["The "], num_samples=2).texts
    assert all(text.startswith("The ") for text in texts)
    score = dlm_jax.score(model, ["quick brown"], prompts=["The "], num_draws=8)
    assert not score.is_exact and 0 < score.nats_per_token[0] < 6
    with pytest.raises(ValueError, match=f"trained with objective.process='{process}'"):
        dlm_jax.generate(model, ["The "], order="low_confidence")


HEADS = {
    "train__steps": 120, "train__eval_every": 120,
    "train__checkpoint_every": 120, "model__add_sampler_head": True,
    "heads__start_sampler_iteration": 0, "heads__sampler_reveal": 0.5,
    "heads__start_critic_iteration": 0, "heads__end_critic_iteration": 0,
    "heads__critic_alpha": 1.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("process", ["uniform"])
def test_heads_learn_from_random_tokens(process, tmp_path):
    heads = HEADS | {"objective__process": process}
    alone = {"objective__process": process, "train__steps": 12, "train__eval_every": 12}
    tiny_run.run(tmp_path / "alone", **alone)
    tiny_run.run(tmp_path / "beside", **heads | alone)
    model_losses = [
        [line["loss" if name == "alone" else "elbo"] for line in found if "loss" in line]
        for name in ("alone", "beside")
        if (found := tiny_run.records(tmp_path / name))
    ]
    # The sampler head leaves the trunk alone.
    assert model_losses[0] == model_losses[1]
    tiny_run.run(tmp_path / "both", model__add_critic_head=True, **heads)
    lines = [line for line in tiny_run.records(tmp_path / "both") if "sampler" in line]
    assert lines[-1]["sampler"] < lines[0]["sampler"] - 0.2
    model = dlm_jax.load(tmp_path / "both")
    (text,) = dlm_jax.generate(model, ["The "], steps=4).texts
    assert text.startswith("The ")
    with pytest.raises(ValueError, match="remask='scheduled' is not supported"):
        dlm_jax.generate(model, ["The "], remask="scheduled", remask_by="critic")


def test_the_critic_is_asked_which_tokens_are_random():
    """The whole record: the canvas of the process, read as it is, against the sum by hand."""
    config = Config(
        model=toy.config(depth=1, add_critic_head=True),
        objective=ObjectiveConfig(process="uniform"),
    )
    setup = Setup(config, cast(Any, stage_cases.Tokenizer()), stage_cases.mesh())
    head, batch = CriticHead()(setup), stage_cases.batch(0)
    example = make_mixture(setup).draw(batch, jax.random.key(0))
    network = build(config.model)
    params = network.init(jax.random.key(1))
    assert head is not None
    noise = head.draw(example, jax.random.key(2))
    hidden_BLD, _ = network.trunk(params, example.shown_BL, batch.length_B, None)
    drawn = example._replace(noise=noise, hidden_BLD=hidden_BLD)
    loss = jax.jit(lambda params: head.loss(network, params, drawn))(params)
    critic = network.heads["critic"]
    logit_BL = np.asarray(critic(params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1])))
    logit_BL = logit_BL.reshape(example.shown_BL.shape).astype(np.float64)
    is_wrong_BL = np.asarray(example.shown_BL != batch.tokens_BL)
    is_live_BL = np.arange(is_wrong_BL.shape[1])[None] < np.asarray(batch.length_B)[:, None]
    nats_BL = np.log1p(np.exp(np.where(is_wrong_BL, -logit_BL, logit_BL)))
    assert is_wrong_BL.sum() > 4
    assert float(loss.sum / loss.weight) == pytest.approx(nats_BL[is_live_BL].mean(), rel=1e-4)
