"""What the config asks a model to be trained for, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stage_cases as cases

import dlm_jax.config as configs
from dlm_jax.config import ObjectiveConfig
from dlm_jax.training.tasks import make_objectives

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def _objectives(rows: int, **objective: Any):
    config = cases.config({"batch_size": rows}, objective=ObjectiveConfig(**objective))
    return make_objectives(config, cases.TOKENIZER)


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
        _objectives(rows, **shares)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_objective_of_a_shipped_config_has_rows(path):
    config = configs.load(path)
    rows, shares = config.train.batch_size, ("denoising_share", "proofreading_share")
    objective = {name: getattr(config.objective, name) for name in shares}
    assert _objectives(rows, **objective)
