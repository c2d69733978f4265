"""Prefixes of prompts: a row that finds its own equals one that computes it, bit for bit."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import toy
import toy_model

from dlm_jax.config import MeshConfig, SamplingParams
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.model.transformer import build
from dlm_jax.settings import SettingError

TOKENIZER = toy_model.TOKENIZER
SYSTEM = "The cats sat here as the rats ate the rest. " * 4
SETTINGS = {"cache": "exact", "gen_length": 8, "steps": 8, "temperature": 0.8, "seed": 3}
KINDS = {
    "block_causal": ({"block_length": 4}, {"order": "low_confidence"}),
    "causal": ({"start_id": TOKENIZER.mask_id}, {"order": "left_to_right"}),
    "shifted causal": ({"logit_alignment": "shifted"}, {"order": "left_to_right"}),
    "shifted": ({"block_length": 4, "logit_alignment": "shifted"}, {"order": "random"}),
}


def _model(kind, **more):
    changes, settings = KINDS[kind]
    kind = {"shifted": "block_causal", "shifted causal": "causal"}.get(kind, kind)
    network = build(
        toy.config(vocab_size=TOKENIZER.vocab_size, attention_type=kind, **changes, **more)
    )
    sample = SamplingParams(chain=("temperature",))
    params = toy.random_params(network)
    return Model(
        network, params, TOKENIZER, max_length=256, sample=sample, is_causal=kind == "causal"
    ), SETTINGS | settings


def _rows(engine, model, prompts, settings):
    requests = [r for p in prompts for r in make_requests(model, p, settings)]
    return sorted(engine.run(requests), key=lambda row: row.number)


def _same_bits(row, other):
    for name in ("tokens", "logprobs", "committed"):
        np.testing.assert_array_equal(getattr(row, name), getattr(other, name))


@pytest.mark.parametrize(
    "kind",
    [
        "block_causal",
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("shifted causal", marks=pytest.mark.slow),
        pytest.param("shifted", marks=pytest.mark.slow),
    ],
)
def test_a_row_that_finds_its_prefix_equals_one_that_computes_it_and_one_without(kind):
    model, settings = _model(kind)
    # The last prompt shares a chunk with the first, but not what precedes it.
    prompts = [SYSTEM + "A rat", SYSTEM + "The cat ", SYSTEM[:70], "T" * 64 + SYSTEM[64:]]
    sizes = {"sizes": (2,), "canvases": (256,)}
    with Engine(model, prefix_mib=64, **sizes) as engine:
        first = _rows(engine, model, prompts, settings)
        computed = engine.report().prefix_computed
        again = _rows(engine, model, prompts, settings)
        report = engine.report()
    unit = 1 if model.is_causal else 4
    total = sum(len(prompt) // unit for prompt in prompts) * unit
    # The whole chunks of 64 of the second and third prompt are those of the first one.
    assert computed == total - 128 - 64
    # The rest of a prompt is no whole chunk, and is computed again.
    assert report.prefix_computed - computed == total - 3 * 128 - 64
    for row, other in zip(first, again, strict=True):
        _same_bits(row, other)
    with Engine(model, prefix_mib=64, **sizes) as engine:
        for prompt, row in reversed(list(zip(prompts, first, strict=True))):
            _same_bits(_rows(engine, model, [prompt], settings)[0], row)
    with Engine(model, **sizes) as engine:
        for row, plain in zip(first, _rows(engine, model, prompts, settings), strict=True):
            np.testing.assert_array_equal(row.tokens, plain.tokens)
            np.testing.assert_allclose(row.logprobs, plain.logprobs, rtol=1e-4, atol=1e-4)
            assert row.counters.positions < plain.counters.positions
        assert engine.report().prefix_computed == 0


def test_a_row_reads_nothing_that_the_row_before_it_in_the_slot_has_cached():
    model, settings = _model("block_causal")
    settings = settings | {"gen_length": 4, "steps": 4}  # they end in their first block
    prompts = ["The cats", "A rat at", "sat here", "the rest"]
    sizes = {"sizes": (2,), "canvases": (256,)}
    with Engine(model, **sizes) as engine:
        rows = _rows(engine, model, prompts, settings)
    for prompt, row in zip(prompts, rows, strict=True):
        with Engine(model, **sizes) as engine:
            _same_bits(_rows(engine, model, [prompt], settings)[0], row)


@pytest.mark.parametrize(
    "axes", [{"data": 4}, pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)]
)
def test_rows_on_any_device_of_a_mesh_find_the_prefixes_of_all(axes):
    """Six rows with one system prompt, of which each device runs one or two, equal those of an
    engine that finds nothing; no device holds the cache of the rows of others.
    """
    model, settings = _model("block_causal")
    alone = _rows(Engine(model, sizes=(8,), canvases=(256,)), model, [SYSTEM + "A rat"], settings)
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])
    places = shardings(model.params, axes_of(model.network), mesh)
    model = dataclasses.replace(model, params=jax.device_put(model.params, places))
    prompts = [SYSTEM + end for end in ("A rat", "The cat ", "A cat", "The ", "As", "rats")]
    with Engine(model, prefix_mib=64, sizes=(8,), canvases=(256,)) as engine:
        for prompt in prompts:
            engine.submit(make_requests(model, prompt, settings)[0])
        engine.step(0)
        (queue,) = engine.queues
        for leaf in jax.tree.leaves(queue.slots._state.cache.kv_cache):
            assert leaf.addressable_shards[0].data.shape[0] == 2
        rows = sorted(engine.run(), key=lambda row: row.number)
        assert engine.report().prefix_found == 5 * 128
    for prompt, row in zip(prompts, rows, strict=True):
        with Engine(model, prefix_mib=64, sizes=(8,), canvases=(256,)) as engine:
            _same_bits(_rows(engine, model, [prompt], settings)[0], row)
            assert engine.report().prefix_found == 0
    assert rows[0].tokens.tolist() == alone[0].tokens.tolist()


@pytest.mark.slow
def test_the_least_recently_used_prefixes_go_first_and_texts_stay():
    model, settings = _model("block_causal", width=1024)
    prompts = [letter * 64 for letter in "ach"]
    with Engine(model, prefix_mib=2, sizes=(1,), canvases=(128,)) as engine:
        # A chunk takes 2 layers x 64 positions x 1024 x keys and values in float32: 1 MiB.
        first = [_rows(engine, model, [p], settings)[0] for p in prompts]
        assert engine.report().prefix_found == 0
        again = [_rows(engine, model, [p], settings)[0] for p in reversed(prompts)]
        assert engine.report().prefix_found == 128
    for row, other in zip(first, reversed(again), strict=True):
        _same_bits(row, other)


@pytest.mark.slow
def test_a_guided_row_and_one_without_the_cache_compute_their_own():
    model, settings = _model("block_causal")
    with Engine(model, prefix_mib=1, sizes=(1,), canvases=(256,)) as engine:
        for more in ({"guidance": 1.0}, {"cache": "none"}):
            _rows(engine, model, [SYSTEM], settings | more)
        assert engine.report().prefix_computed == 0


def test_refusals_name_the_setting():
    model, _ = _model("block_causal")
    for value in (-1, True, 0.5):
        with pytest.raises(SettingError, match="^prefix_mib="):
            Engine(model, prefix_mib=value)
    network = build(toy.config(vocab_size=TOKENIZER.vocab_size))
    both_ways = Model(network, toy.random_params(network), TOKENIZER, max_length=32)
    with pytest.raises(SettingError, match="^prefix_mib=1 needs a causal or block-causal model"):
        Engine(both_ways, prefix_mib=1)
