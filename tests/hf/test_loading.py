"""A published directory becomes the network that its formulas describe, and comes back whole."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import published_cases as cases
import pytest
import safetensors.numpy
from oracles.published import Oracle

import dlm_jax
from dlm_jax.config import SamplingParams
from dlm_jax.hf.family import read_settings, recommended, settings_fields
from dlm_jax.hf.tensors import Shards
from dlm_jax.inference.request import settings_of_call

FAMILIES = list(cases.CONFIGS)
LENGTHS = np.array([13, 7])
# What config.json may say that programs do not read where a model runs, or have a default for.
IDLE = {"auto_map", "conplemenrary_mask", "sliding_window", "layer_types"}


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request, tmp_path_factory):
    directory = cases.write(tmp_path_factory.mktemp(request.param) / "model", request.param)
    return request.param, directory, dlm_jax.load(directory)


def _tokens():
    return np.random.default_rng(1).integers(0, cases.NUM_TOKENS, (2, 13)).astype(np.int32)


def _near(found, wanted):
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(np.asarray(found) / scale, wanted / scale, atol=1e-5)


def test_hidden_states_and_logits_are_those_of_the_formulas(loaded):
    name, _, model = loaded
    oracle = Oracle(cases.CONFIGS[name], cases.tensors(name, cases.CONFIGS[name]))
    tokens = _tokens()
    hidden, _ = jax.jit(lambda p, t, n: model.network.trunk(p, t, n, None))(
        model.params, tokens, LENGTHS
    )
    for row, length in enumerate(LENGTHS):
        given = tokens[row, :length]
        block = np.arange(length) // (1 if model.is_causal else model.network.block_length or 99)
        may_see = block[:, None] >= block[None]
        wanted = oracle.hidden(given, may_see=may_see)
        logits = oracle.logits(given, may_see=may_see)
        if name in ("dream", "fast_dllm", "qwen2"):
            # the prediction of a position stands one place to its left
            order = np.maximum(np.arange(length) - 1, 0)
            wanted, logits = wanted[order], logits[order]
        _near(hidden[row, :length], wanted)
        _near(model.network.readout(model.params, hidden[row, :length]), logits)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sdar_moe", {"num_experts_per_tok": 1}),
        ("sdar_moe", {"norm_topk_prob": False}),
        ("llada2", {"num_experts_per_tok": 1}),
    ],
)
def test_the_weights_of_experts_are_those_of_the_family(name, changes, tmp_path, monkeypatch):
    config = cases.CONFIGS[name] | changes
    monkeypatch.setitem(cases.CONFIGS, name, config)
    model = dlm_jax.load(cases.write(tmp_path / "model", name))
    oracle = Oracle(config, cases.tensors(name, config))
    tokens, block = _tokens(), np.arange(13) // model.network.block_length
    hidden, _ = model.network.trunk(model.params, tokens, np.array([13, 13]), None)
    _near(hidden[0], oracle.hidden(tokens[0], may_see=block[:, None] >= block[None]))
    dlm_jax.export(model, tmp_path / "out")
    assert dlm_jax.load(tmp_path / "out").config == model.config


def test_loading_exporting_and_loading_is_the_identity(loaded, tmp_path):
    name, directory, model = loaded
    files = dlm_jax.export(model, tmp_path / "out", max_shard_bytes=20_000)
    assert sum(file.endswith(".safetensors") for file in files) > 2
    cases.assert_same_model(dlm_jax.load(tmp_path / "out"), model)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert cases.CONFIGS[name].keys() - IDLE <= said.keys()  # their programs ask for some of them
    ours, theirs = Shards(tmp_path / "out"), Shards(directory)
    assert set(ours.entries) == set(theirs.entries)
    for tensor in theirs.entries:
        np.testing.assert_array_equal(ours.read(tensor), theirs.read(tensor))


def test_bfloat16_stays_as_it_is_stored(tmp_path):
    directory = cases.write(tmp_path / "model", "dream", num_shards=1)
    made = cases.tensors("dream", cases.CONFIGS["dream"])
    half = {name: value.astype(ml_dtypes.bfloat16) for name, value in made.items()}
    safetensors.numpy.save_file(half, directory / "model.safetensors")
    model = dlm_jax.load(directory)
    assert model.config is not None
    assert model.config.model.compute_dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {np.dtype(ml_dtypes.bfloat16)}
    wide = dlm_jax.load(directory, dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.params)} == {np.dtype(np.float32)}
    kernel = half["model.layers.1.mlp.up_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(wide.params["blocks"]["mlp"]["up"]["kernel"][1], kernel)


def test_tensors_of_several_dtypes_lose_nothing(tmp_path):
    directory = cases.write(tmp_path / "model", "dream", num_shards=1)
    made = cases.tensors("dream", cases.CONFIGS["dream"])
    norm, kernel = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in made.items()}
    stored |= {norm: made[norm], kernel: made[kernel]}
    safetensors.numpy.save_file(stored, directory / "model.safetensors")
    params = dlm_jax.load(directory).params
    np.testing.assert_array_equal(params["norm"]["scale"], made[norm])
    found = params["blocks"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(found[1], made[kernel].T)
    other = stored["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(found[0], other.T)
    stored[norm] = np.ones(24, np.int64)
    safetensors.numpy.save_file(stored, directory / "model.safetensors")
    with pytest.raises(ValueError, match=f"the tensor '{norm}' has dtype I64; only F32"):
        dlm_jax.load(directory)


def _with(directory, tensor, shape):
    """Writes a tensor of another shape, or none."""
    made = cases.tensors("dream", cases.CONFIGS["dream"])
    made.pop(tensor, None)
    made |= {} if shape is None else {tensor: np.zeros(shape, np.float32)}
    cases.write_weights(directory, made, 1)


def _truncate(directory, by):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-by])


CONFIG, UP = "config.json", "model.layers.1.mlp.up_proj.weight"
BAD = {
    "a tensor is missing": (lambda d: _with(d, UP, None), [f"lacks the tensor '{UP}'"]),
    "a tensor is surplus": (lambda d: _with(d, "model.extra.weight", (2,)), ["model.extra.weight"]),
    "a shape is wrong": (lambda d: _with(d, UP, (3, 4)), [UP, "(3, 4)", "(40, 24)"]),
    "a field is unknown": (lambda d: cases.edit(d / CONFIG, gated_attention=True),
                           ["config.json: gated_attention=True"]),
    "a field is not implemented": (lambda d: cases.edit(d / CONFIG, rope_scaling={"type": "su"}),
                                   ["config.json: rope_scaling="]),
    "a field is missing": (lambda d: cases.edit(d / CONFIG, hidden_size=...),
                           ["config.json", "'hidden_size'"]),
    "a field has another type": (lambda d: cases.edit(d / CONFIG, hidden_size="wide"),
                                 ["config.json: hidden_size='wide'"]),
    "an architecture is unknown": (lambda d: cases.edit(d / CONFIG, architectures=["DreamModelX"]),
                                   ["architectures=['DreamModelX']", "'DreamModel'"]),
    "a shard is truncated": (lambda d: _truncate(d, 10), ["model.safetensors is truncated"]),
    "a shard is cut in its header": (lambda d: _truncate(d, 10**9), ["model.safetensors"]),
    "there are pickles alone": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), ["safetensors"]),
    "a tokenizer is of another model": (lambda d: cases.edit(d / CONFIG, mask_token_id=151666),
                                        ["config.json", "mask_token_id=151666"]),
    "a tokenizer has more ids": (
        lambda d: (d / "tokenizer.json").write_text(
            cases.tokenizer_json().replace('"z":25', '"z":99')), ["tokenizer.json"]),
    "a tokenizer is broken": (lambda d: (d / "tokenizer.json").write_text("{}"),
                              ["tokenizer.json"]),
    "a config is no JSON": (lambda d: (d / CONFIG).write_text("{"), ["config.json"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return cases.write(tmp_path_factory.mktemp("good") / "model", "dream", num_shards=1)


@pytest.mark.parametrize("what", BAD)
def test_bad_directories_are_refused_with_one_line_that_names_file_and_field(what, good, tmp_path):
    directory = shutil.copytree(good, tmp_path / "model")
    spoil, told = BAD[what]
    spoil(directory)
    with pytest.raises(ValueError) as refusal:
        dlm_jax.load(directory)
    line = str(refusal.value)
    assert "\n" not in line
    assert all(word in line for word in told), line


def test_a_stored_matrix_that_the_config_ties_is_not_read(tmp_path):
    directory = cases.write(tmp_path / "model", "qwen2", num_shards=1)
    tensors = cases.tensors("qwen2", cases.CONFIGS["qwen2"])
    table = tensors["model.embed_tokens.weight"]
    cases.write_weights(directory, tensors | {"lm_head.weight": table[::-1].copy()}, 1)
    assert "head" not in dlm_jax.load(directory).params
    cases.edit(directory / CONFIG, tie_word_embeddings=False)
    model = dlm_jax.load(directory)
    np.testing.assert_array_equal(np.asarray(model.params["head"]["kernel"]).T, table[::-1])


def test_an_index_that_names_another_file_is_refused(tmp_path):
    directory = cases.write(tmp_path / "model", "dream", num_shards=2)
    index = directory / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    # A tensor of the first file, which the index lists in the second.
    first, *_, last = sorted(where, key=where.get)
    for files, message in (
        ({}, "has no weight_map"),
        (dict.fromkeys(where, "../weights.safetensors"), "weight_map"),
        (where | {first: where[last]}, "does not list there"),
    ):
        cases.edit(index, weight_map=files)
        with pytest.raises(ValueError, match=message):
            dlm_jax.load(directory)
    (directory / where[last]).unlink()
    cases.edit(index, weight_map=where)
    with pytest.raises(ValueError, match=rf"{where[last]} does not exist"):
        dlm_jax.load(directory)


def _recommending(directory, **fields):
    cases.edit(directory / "generation_config.json", **fields)
    return directory


def test_a_directory_recommends_what_its_generation_config_says(tmp_path):
    """Over the family's first preset; what is given explicitly counts over both."""
    directory = _recommending(
        cases.write(tmp_path / "model", "llada"), temperature=0.7, top_p=0.9, top_k=20, steps=9,
        repetition_penalty=1.05, max_new_tokens=12, do_sample=True, dlm_jax={"order": "entropy"},
    )  # fmt: skip
    told = []
    model = dlm_jax.load(directory, report=told.append)
    found = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "steps": 9,
             "gen_length": 12, "order": "entropy", "penalty_last_n": -1}  # fmt: skip
    assert {name: getattr(model.sample, name) for name in found} == found
    assert model.sample.block_length == model.presets["llada"]["block_length"]
    assert settings_of_call(model, {"top_p": 1.0}).top_p == 1.0
    assert settings_of_call(model, model.presets["llada"]).temperature == 0.0
    (line,) = told
    assert "temperature=0.7" in line and "order='entropy'" in line
    plain = cases.write(tmp_path / "plain", "llada")
    dlm_jax.load(plain, report=told.append)
    assert len(told) == 1
    greedy = _recommending(plain, temperature=0.7, do_sample=False, max_new_tokens=4096)
    sample = dlm_jax.load(greedy).sample
    # A text longer than the canvas takes the room that its prompt leaves.
    assert (sample.temperature, sample.gen_length) == (0.0, 0)


def test_a_temperature_of_a_directory_holds_at_all_steps_and_an_end_is_kept(tmp_path):
    implied = SamplingParams(temperature=0.8, temperature_end=0.4)
    for sample in (
        implied,
        dataclasses.replace(implied, temperature=0.0, temperature_end=-1.0, top_k=5),
        dataclasses.replace(implied, temperature=0.7),
        dataclasses.replace(implied, temperature_end=0.2, top_k=5),
    ):
        fields = settings_fields(sample, implied)
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        assert recommended(implied, read_settings(tmp_path, 64, lambda said: {})) == sample


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"temperature": 0.7}, 0.0),
        ({"top_p": 0.9}, 0.0),
        ({"do_sample": None, "temperature": 0.7}, 0.0),
        ({"do_sample": True, "top_p": 0.9}, 1.0),
        ({"temperature": 0.7, "dlm_jax": {"temperature": 0.5}}, 0.5),
        ({"max_new_tokens": 7, "eos_token_id": 1}, None),
    ],
)
def test_sampling_is_off_unless_do_sample_is_true(tmp_path, fields, temperature):
    """As Hugging Face reads the file; one that says nothing of sampling leaves it to the family."""
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert read_settings(tmp_path, 9).get("temperature") == temperature


@pytest.mark.parametrize(
    "field", ["do_sample", "temperature", "top_p", "top_k", "steps", "max_new_tokens"]
)
def test_a_recommendation_that_is_no_value_is_refused_by_file_and_name(tmp_path, field):
    directory = _recommending(cases.write(tmp_path / "model", "llada"), **{field: "x"})
    name = {"max_new_tokens": "gen_length"}.get(field, field)
    with pytest.raises(ValueError, match=f"generation_config.json: {name}='x'"):
        dlm_jax.load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_p": 0.9},
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2, "gen_length": 10, "steps": 7},
        {"temperature": 0.0, "order": "entropy", "gen_length": 0, "logit_bias": ((3, -math.inf),)},
        {"chain": ("temperature", "top_k"), "confidence_of": "filtered"},
    ],
)
@pytest.mark.parametrize("name", ["llada", "dream", "sdar"])
def test_what_a_model_recommends_is_written_and_read_again(tmp_path, name, changes):
    model = dlm_jax.load(cases.write(tmp_path / "model", name))
    model = dataclasses.replace(model, sample=dataclasses.replace(model.sample, **changes))
    dlm_jax.export(model, tmp_path / "out")
    assert dlm_jax.load(tmp_path / "out").sample == model.sample
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    if changes.get("temperature"):
        assert (said["temperature"], said["max_new_tokens"], said["do_sample"]) == (0.7, 10, True)
        # What has a field of its own is read from it, so that users can edit it.
        cases.edit(tmp_path / "out" / "generation_config.json", temperature=0.3, top_k=7)
        edited = dlm_jax.load(tmp_path / "out").sample
        assert edited == dataclasses.replace(model.sample, temperature=0.3, top_k=7)
