"""Training that begins with a published model: all of it, adapters, heads, a causal one turned."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import published_cases as cases
import pytest

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.config import ModelConfig
from dlm_jax.model.lora import merged
from dlm_jax.model.transformer import build
from dlm_jax.training.trainer import prepare, run_loop

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    (folder / "text.txt").write_text(TEXT)
    for name in ("dream", "qwen2"):
        cases.write(folder / name, name)
    lines = [json.dumps({"prompt": "the quick ", "response": "brown fox."})] * 40
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


def _run(directories, out, source, objective=None, **changes):
    flags = {
        "train.init_from": str(directories / source),
        "train.out_dir": str(out),
        "data.source": str(directories / "text.txt"),
        "data.cache_dir": str(out.parent / "cache"),
        "data.seq_len": "16",
        "train.steps": "3",
        "train.batch_size": "8",
        "train.eval_windows": "2",
        "train.eval_every": "0",
        "optim.warmup_steps": "1",
        "optim.name": "adamw",
    } | {name.replace("__", "."): str(value) for name, value in changes.items()}
    return prepare(configs.load(None, flags), objective=objective, report=lambda line: None)


def test_a_run_takes_shape_tokenizer_and_parameters_of_the_directory(directories, tmp_path):
    model = dlm_jax.load(directories / "dream")
    run = _run(directories, tmp_path / "run", "dream", data__source=directories / "pairs.jsonl",
               data__layout="documents", data__seq_len=24)  # fmt: skip
    assert run.config.model == dataclasses.replace(model.config.model)
    assert run.corpus.tokenizer == model.tokenizer
    jax.tree.map(np.testing.assert_array_equal, run.state.params, model.params)
    outcome = run_loop(run)
    assert outcome.reason == "finished"
    trained = dlm_jax.load(tmp_path / "run")
    files = dlm_jax.export(trained, tmp_path / "out")
    assert "config.json" in files
    again = dlm_jax.load(tmp_path / "out")
    assert again.family == "dream"
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)


@pytest.mark.slow
def test_adapters_train_alone_and_are_merged_on_export(directories, tmp_path):
    lora = {"model__lora_rank": 2, "model__lora_targets": "query,value,down"}
    run = _run(directories, tmp_path / "run", "dream", **lora)
    before = jax.tree.map(np.asarray, run.state.params)
    num_adapters = sum(leaf.size for leaf in jax.tree.leaves(before["adapters"]))
    num_moments = sum(leaf.size for leaf in jax.tree.leaves(run.state.opt_state) if leaf.ndim)
    assert num_moments == 2 * num_adapters
    after = run_loop(run).params
    for name, tree in before.items():
        if name != "adapters":
            jax.tree.map(np.testing.assert_array_equal, after[name], tree)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after["adapters"], before["adapters"])
    assert all(jax.tree.leaves(moved))
    trained = dlm_jax.load(tmp_path / "run")
    dlm_jax.export(trained, tmp_path / "out")
    plain = dlm_jax.load(tmp_path / "out")
    assert "adapters" not in plain.params
    tokens, length = jnp.arange(12, dtype=jnp.int32)[None], jnp.array([12])
    ours, theirs = (
        jax.jit(model.network.trunk)(model.params, tokens, length, None)[0]
        for model in (trained, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_fresh_adapters_change_nothing_and_targets_must_exist():
    config = ModelConfig(depth=2, width=16, heads=2, vocab_size=9)
    adapted = dataclasses.replace(config, lora_rank=3, lora_targets=("key", "up"))
    key = jax.random.key(0)
    plain, params = build(config).init(key), build(adapted).init(key)
    jax.tree.map(np.testing.assert_array_equal, merged(params, adapted), plain)
    wrong = dataclasses.replace(adapted, lora_targets=("kay",))
    with pytest.raises(ValueError, match="lora_targets contains 'kay'"):
        build(wrong).init(key)


@pytest.mark.parametrize("alignment", [pytest.param("same", marks=pytest.mark.slow), "shifted"])
def test_a_causal_model_is_turned_into_a_diffusion_one(directories, tmp_path, alignment):
    run = _run(directories, tmp_path / alignment, "qwen2", model__logit_alignment=alignment)
    model = run.config.model
    assert (model.attention_type, model.logit_alignment) == ("bidirectional", alignment)
    assert model.qkv_bias and model.tied_head
    assert run_loop(run).reason == "finished"


def test_what_contradicts_the_directory_is_refused(directories, tmp_path):
    with pytest.raises(ValueError, match=r"has model\.depth=3, but the config has 7"):
        _run(directories, tmp_path / "run", "dream", model__depth=7)
    with pytest.raises(ValueError, match=r"model\.lora_rank=2 trains adapters"):
        _run(directories, tmp_path / "run", "dream", model__lora_rank=2, heads__train_main="false",
             model__add_sampler_head="true")  # fmt: skip
