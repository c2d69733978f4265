"""A block-causal model, from its config to texts: trained, evaluated, loaded, and cached."""

import numpy as np
import pytest
import tiny_run

import dlm_jax
from dlm_jax.config import Config, ModelConfig, ObjectiveConfig, SamplingParams


@pytest.mark.slow
def test_a_block_causal_model_learns_and_writes_with_an_exact_cache(tmp_path):
    outcome = tiny_run.run(
        tmp_path, model__attention_type="block_causal", model__block_length=4,
        objective__denoising_share=0.25, train__steps=60, train__eval_every=60,
        sample__cache="exact", sample__steps=16,
    )  # fmt: skip
    (bound,) = [
        line["bound"] for line in tiny_run.records(tmp_path) if line["kind"] == "evaluation"
    ]
    assert outcome.bound == bound < np.log(len(set(tiny_run.TEXT))) - 0.1
    model = dlm_jax.load(tmp_path)
    ours = dlm_jax.generate(model, ["The "], num_samples=3, temperature=0.0)
    theirs = dlm_jax.generate(model, ["The "], num_samples=3, temperature=0.0, cache="none")
    assert ours.texts == theirs.texts
    score = dlm_jax.score(model, ["quick brown"], prompts=["The "], num_draws=8)
    assert not score.is_exact and 0 < score.nats_per_token[0] < 6


@pytest.mark.parametrize(
    ("section", "changes", "line"),
    [
        ("model", {"block_length": 1}, "model.block_length=1 is not supported with"),
        ("model", {"attention_type": "causal"}, "model.block_length=4 is not supported with"),
        ("sample", {"block_length": 8}, "sample.block_length=8 is neither model.block_length=4"),
        ("objective", {"proofreading_share": 0.5}, "objective.proofreading_share=0.5 moves"),
    ],
)
def test_what_a_block_causal_config_cannot_be_is_refused(section, changes, line):
    kinds = {"model": ModelConfig, "sample": SamplingParams, "objective": ObjectiveConfig}
    given = {"model": {"attention_type": "block_causal", "block_length": 4}}
    given[section] = given.get(section, {}) | changes
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        Config(**{name: kinds[name](**values) for name, values in given.items()})
    assert line in str(refusal.value)
