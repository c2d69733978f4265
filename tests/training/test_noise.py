"""A model of another forward process, from its config to texts."""

import jax
import numpy as np
import pytest
import stage_cases
import toy

from dlm_jax.config import Config, ObjectiveConfig
from dlm_jax.heads import critic
from dlm_jax.model.transformer import build
from dlm_jax.objectives.objective import draw_all
from dlm_jax.training.tasks import make_objectives


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
