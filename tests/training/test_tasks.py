"""What the config asks a model to be trained for, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import stage_cases as cases
import toy

import dlm_jax.config as configs
from dlm_jax.config import Config, ObjectiveConfig, TrainConfig
from dlm_jax.data import Setup
from dlm_jax.objectives.objective import Mixture
from dlm_jax.training.tasks import make_mixture, make_task

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def _mixture(rows: int, **objective: Any):
    config = Config(
        model=toy.config(),
        objective=ObjectiveConfig(**objective),
        train=TrainConfig(batch_size=rows),
    )
    return make_mixture(Setup(config, cast(Any, cases.Tokenizer()), cases.mesh()))


@pytest.mark.parametrize(
    ("rows", "shares", "message"),
    [
        (8, {"proofreading_share": 0.05},
         r"objective.proofreading_share=0.05 is less than one of train.batch_size=8 rows, so it "
         r"would never be trained; raise the share to 0.125, or train.batch_size to 20"),
        (4, {"denoising_share": 0.5, "proofreading_share": 0.49}, "the ELBO's share 0.01"),
    ],
)  # fmt: skip
def test_a_share_of_less_than_a_row_is_refused_with_one_that_trains(rows, shares, message):
    with pytest.raises(ValueError, match=message):
        _mixture(rows, **shares)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_objective_of_a_shipped_config_has_rows(path):
    config = configs.load(path)
    rows, shares = config.train.batch_size, ("denoising_share", "proofreading_share")
    objective = {name: getattr(config.objective, name) for name in shares}
    assert not _mixture(rows, **objective).without_rows(rows)


def test_an_objective_of_ones_own_sees_batches_cut_as_the_config_says():
    def objective(batch, key):
        raise NotImplementedError

    config = Config(model=toy.config(), objective=ObjectiveConfig(random_length_share=0.25))
    setup = Setup(config, cast(Any, cases.Tokenizer()), cases.mesh())
    task = make_task(setup, toy.network(), lambda setup: objective)
    assert task.mixture.random_length_share == 0.25
    # A mixture of one's own says so itself.
    own = Mixture({"objective": objective}, {"objective": 1.0})
    assert make_task(setup, toy.network(), lambda setup: own).mixture is own
