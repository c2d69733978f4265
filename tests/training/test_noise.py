"""A model of another forward process, from its config to texts."""

import jax
import numpy as np
import pytest
import stage_cases
import tiny_run
import toy

import dlm_jax
from dlm_jax.config import Config, ObjectiveConfig
from dlm_jax.heads import critic
from dlm_jax.model.transformer import build
from dlm_jax.objectives.objective import draw_all
from dlm_jax.objectives.processes import PROCESSES
from dlm_jax.training.tasks import make_objectives


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


def test_the_critic_is_asked_which_tokens_are_random():
    """The whole record: the canvas of the process, read as it is, against the sum by hand."""
    config = Config(
        model=toy.config(depth=1, add_critic_head=True),
        objective=ObjectiveConfig(process="uniform"),
    )
    head = critic.make_head(config, mask_id=toy.MASK, banned_ids=toy.BANNED)
    batch = stage_cases.batch(0)
    objectives = make_objectives(config, stage_cases.TOKENIZER)
    example = draw_all(objectives, batch, jax.random.key(0))
    network = build(config.model)
    params = network.init(jax.random.key(1))
    noise = head.draw(example, jax.random.key(2))
    hidden_BLD, _ = network.trunk(params, example.shown_BL, batch.length_B, None)
    drawn = example._replace(noise=noise, hidden_BLD=hidden_BLD)
    loss = jax.jit(lambda params: head.loss(network, params, drawn))(params)
    judge, flat_PD = network.heads["critic"], hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    logit_BL = np.asarray(judge(params, flat_PD))
    logit_BL = logit_BL.reshape(example.shown_BL.shape).astype(np.float64)
    is_wrong_BL = np.asarray(example.shown_BL != batch.tokens_BL)
    is_live_BL = np.arange(is_wrong_BL.shape[1])[None] < np.asarray(batch.length_B)[:, None]
    nats_BL = np.log1p(np.exp(np.where(is_wrong_BL, -logit_BL, logit_BL)))
    assert is_wrong_BL.sum() > 4
    assert float(loss.sum / loss.weight) == pytest.approx(nats_BL[is_live_BL].mean(), rel=1e-4)
