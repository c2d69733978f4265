"""Caches from the front door: with every rule that stays in its block, and refusals in one line."""

import dataclasses

import jax
import numpy as np
import pytest
import toy
import toy_model

import dlm_jax
from dlm_jax.config import MeshConfig, SamplingParams
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build

TOKENIZER = toy_model.TOKENIZER
SHORT = SamplingParams(steps=16, gen_length=16, chain=("temperature",), temperature=0.8)


def _model(**changes) -> Model:
    network = build(toy.config(vocab_size=TOKENIZER.vocab_size, **changes))
    return Model(
        network, toy.random_params(network), TOKENIZER, max_length=32, sample=SHORT,
        is_causal=changes.get("attention_type") == "causal",
    )  # fmt: skip


BLOCKS = _model(attention_type="block_causal", block_length=4)
CAUSAL = _model(attention_type="causal", start_id=TOKENIZER.mask_id)
BOTH_WAYS = _model(add_sampler_head=True, add_critic_head=True)
SHIFTED = _model(logit_alignment="shifted")
NEXT = {"order": "left_to_right"}
PROMPTS = ["The cat ", "A rat", "The "]

EXACT = {
    "low_confidence": {"order": "low_confidence", "temperature": 0.0},
    "threshold": {"order": "threshold", "threshold": 0.2},
    "ancestral": {"order": "ancestral", "steps": 12},
    "refined": {"order": "low_confidence", "schedule": "all", "remask": "scheduled", "steps": 16},
    "resampled": {"order": "threshold", "resample": True, "steps": 12},
    "renoised": {"order": "random", "renoise": "mask", "renoise_start": 0.3, "steps": 24},
    "guided": {"order": "low_confidence", "guidance": 1.0},
    "rewritten": {"order": "joint_threshold", "threshold": 0.2, "rewrite_threshold": 0.1,
                  "rewrite_steps": 2, "steps": 40},
    "in parts": {"order": "threshold", "threshold": 0.2, "block_length": 2, "threshold_alone": 4},
}  # fmt: skip


def _same(ours, theirs):
    assert ours.texts == theirs.texts
    assert (ours.steps == theirs.steps).all() and ours.status == theirs.status
    np.testing.assert_array_equal(ours.committed, theirs.committed)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT)
def test_every_rule_writes_beside_finished_blocks_what_it_writes_without_a_cache(case):
    """Seven rows in two slots: they stand in different blocks, and slots are filled again."""
    settings = EXACT[case] | {"num_samples": 2, "batch_size": 2}
    ours = dlm_jax.generate(BLOCKS, PROMPTS, cache="exact", **settings)
    theirs = dlm_jax.generate(BLOCKS, PROMPTS, **settings)
    _same(ours, theirs)
    # A row that ends at an early EOS has few blocks to gain from.
    settings |= {"ignore_eos": True}
    ours = dlm_jax.generate(BLOCKS, PROMPTS, cache="exact", **settings)
    theirs = dlm_jax.generate(BLOCKS, PROMPTS, **settings)
    assert ours.counters.positions.sum() < (theirs.forwards * theirs.lengths).sum()


APPROXIMATE = {
    "wavefront": {"fill": "wavefront", "order": "low_confidence", "steps": 8},
    "critic": {"fill": "wavefront", "order": "low_confidence", "schedule": "all",
               "remask": "scheduled", "remask_by": "critic", "steps": 8},
    "guided": {"order": "low_confidence", "guidance": 1.0},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", APPROXIMATE)
def test_every_rule_writes_in_a_row_that_is_always_fresh_what_it_writes_without_a_cache(case):
    settings = APPROXIMATE[case] | {"num_samples": 2, "batch_size": 2, "block_length": 4}
    prompts = [*PROMPTS[:2], {"template": "The <hole:5>sat. A <hole:3>"}]
    ours = dlm_jax.generate(BOTH_WAYS, prompts, cache="dual", cache_refresh=1, **settings)
    _same(ours, dlm_jax.generate(BOTH_WAYS, prompts, **settings))


def test_a_shifted_model_that_is_always_fresh_writes_what_it_writes_without_a_cache():
    """The first position of a block is predicted by the one before it, which is kept."""
    settings = {"order": "low_confidence", "block_length": 4, "batch_size": 2, "gen_length": 12}
    ours = dlm_jax.generate(SHIFTED, PROMPTS, cache="dual", cache_refresh=1, **settings)
    _same(ours, dlm_jax.generate(SHIFTED, PROMPTS, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 4])
@pytest.mark.parametrize("cache", ["exact", "dual"])
def test_several_devices_keep_their_own_rows(cache, fsdp):
    """Each holds one row; they are due for whole forwards at different steps."""
    model = BLOCKS if cache == "exact" else BOTH_WAYS
    settings = {"order": "low_confidence", "cache": cache, "block_length": 4, "num_samples": 4}
    here = dlm_jax.generate(model, PROMPTS[:2], **settings)
    mesh = make_mesh(MeshConfig(fsdp=fsdp))
    spread = jax.device_put(model.params, shardings(model.params, axes_of(model.network), mesh))
    there = dlm_jax.generate(dataclasses.replace(model, params=spread), PROMPTS[:2], **settings)
    _same(there, here)


@pytest.mark.parametrize(
    ("model", "settings", "line"),
    [
        (BLOCKS, {"block_length": 8}, "block_length=8 is neither the training value 4"),
        (BLOCKS, {"block_length": 3}, "block_length=3 is neither the training value 4"),
        (BLOCKS, {"edit": True, "schedule": "all", "resample": True}, "edit=True moves tokens"),
        (BLOCKS, {"cache": "dual"}, "cache='dual' supports only bidirectional models"),
        (BOTH_WAYS, {"cache": "exact"}, "cache='exact' requires model.attention_type='causal', or"),
        (BOTH_WAYS, {"cache": "dual"}, "cache='dual' computes one block per step, but block"),
        (BOTH_WAYS, {"cache": "duel"}, "cache='duel' is not one of none, exact, dual"),
        (BOTH_WAYS, {"cache": "dual", "block_length": 4, "cache_refresh": -1}, "cache_refresh=-1"),
        (BOTH_WAYS, {"cache": "dual", "block_length": 4, "edit": True, "resample": True,
                     "schedule": "all"}, "edit=True moves tokens, which cache='dual'"),
        (CAUSAL, {"cache": "exact", "order": "random"}, "order='random' is not supported by"),
        (CAUSAL, {"cache": "exact", "steps": 4, **NEXT}, "steps=4 is less than the 16 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(model, settings, line):
    with pytest.raises(ValueError, match="^[^\n]+$") as refusal:
        dlm_jax.generate(model, ["The "], **settings)
    assert line in str(refusal.value)


def test_text_behind_a_hole_is_refused_where_the_model_cannot_see_it():
    with pytest.raises(ValueError, match="^tokens are given after a hole, where a block-causal"):
        dlm_jax.generate(BLOCKS, [{"template": "The <hole:4> sat"}])


def test_a_network_that_keeps_nothing_is_refused():
    network = dataclasses.replace(toy_model.MODEL.network, cached=None)
    model = dataclasses.replace(toy_model.MODEL, network=network)
    with pytest.raises(ValueError, match="^cache='dual' requires a network that supports a cache"):
        dlm_jax.generate(model, [""], cache="dual", block_length=4)
