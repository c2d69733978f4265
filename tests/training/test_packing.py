"""Law of packing: each text of a row is trained as if it stood alone in a row of its own."""

from __future__ import annotations

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import toy

import dlm_jax.config as configs
from dlm_jax.data import load_corpus
from dlm_jax.distributed.partitions import axes_of, batch_sharding, shardings
from dlm_jax.model.transformer import build
from dlm_jax.training import problem

SEQ_LEN, PACK = 24, 3
LENGTHS = [5, 9, 3, 14, 2, 7, 4, 11, 6, 3, 8, 2, 16, 5, 3, 9]


@functools.cache
def _texts() -> str:
    path = tiny_run.text_file().with_name("pairs.jsonl")
    rng = np.random.default_rng(0)
    word = lambda size: "".join(map(chr, rng.integers(97, 123, size)))  # noqa: E731
    lines = [{"prompt": word(1 + size % 4), "response": word(size)} for size in LENGTHS * 3]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _flags(**changes: object) -> dict[str, object]:
    given = {"data__source": _texts(), "data__layout": "documents", "data__tail": "pad"}
    sizes = {"data__seq_len": SEQ_LEN, "data__pack": PACK, "train__batch_size": 4}
    return given | sizes | {"data__tokenizer": "byte", "model__depth": 1} | changes


def _problem(tmp_path, devices: int = 1, **changes: object):
    with tiny_run.on_devices(devices):
        flags = tiny_run.flags(tmp_path / "run", **_flags(**changes))
        return problem(configs.load(None, flags))


_CAUSAL = {"model__attention_type": "causal", "sample__order": "left_to_right"}
_SHIFTED = {"model__logit_alignment": "shifted"}
_HEADS = {
    "model__add_sampler_head": True,
    "model__add_critic_head": True,
    "heads__start_critic_iteration": 0,
    "heads__end_critic_iteration": 0,
}
KINDS = {
    "full": {},
    "full, shifted": _SHIFTED,
    "causal": _CAUSAL,
    "causal, shifted": _CAUSAL | _SHIFTED,
    "per row": {"objective__normaliser": "rows", "objective__random_length_share": 1.0},
    "patterns": {"objective__denoising_share": 0.5, "objective__normaliser": "masked"},
    "uniform noise": {"objective__process": "uniform"},
    "heads": _HEADS | {"model__sampler_context": 2},
    "heads, parallel fill": {"objective__process": "mixed"} | _HEADS,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_loss_and_gradients_are_those_of_texts_in_rows_of_their_own(kind, tmp_path):
    training = _problem(tmp_path, **KINDS[kind])
    params, batch = toy.random_params(training.network), next(training.batches())
    assert batch.length_B.shape == (4, PACK) and np.sum(batch.length_B > 0) > 6
    run = jax.jit(training.gradient)
    loss, gradient = run(params, batch, jax.random.key(1))
    alone, expected = run(params, batch.unpacked(), jax.random.key(1))
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    for name, leaf in expected.items():
        for mine, theirs in zip(
            jax.tree.leaves(gradient[name]), jax.tree.leaves(leaf), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("mesh", [{"mesh__fsdp": 4}, {"mesh__data": 2, "mesh__tensor": 2}])
@pytest.mark.parametrize("kind", ["full", "per row", "heads"])
def test_loss_and_gradients_on_four_devices_are_those_on_one(kind, mesh, tmp_path):
    alone = _problem(tmp_path, **KINDS[kind])
    shared = _problem(tmp_path, devices=4, **mesh, **KINDS[kind])
    params, batch = toy.random_params(alone.network), next(alone.batches())
    assert (batch.length_B[:, 1] > 0).all()
    loss, gradient = jax.jit(alone.gradient)(params, batch, jax.random.key(1))

    places = shardings(params, axes_of(shared.network, params), shared.mesh)
    rows = batch_sharding(shared.mesh, len(batch.length_B))
    axis = "tensor" if "mesh__tensor" in mesh else "fsdp"
    assert any(axis in str(place.spec) for place in jax.tree.leaves(places))
    run = jax.jit(shared.gradient, in_shardings=(places, rows, None))
    found, split = run(
        jax.device_put(params, places), jax.device_put(batch, rows), jax.random.key(1)
    )
    assert len(found.sharding.device_set) == 4
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    chex.assert_trees_all_close(split, gradient, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("changes", [{}, {"logit_alignment": "shifted"}])
@pytest.mark.parametrize("kind", ["bidirectional", "causal"])
def test_a_text_is_computed_alone_and_others_do_not_see_it(kind, changes):
    start = {"start_id": toy.MASK} if kind == "causal" and not changes else {}
    network = build(toy.config(attention_type=kind, **changes, **start))
    params, rng = toy.random_params(network), np.random.default_rng(1)
    tokens_BL = jnp.asarray(rng.integers(0, 8, (1, 20)), jnp.int32)
    length_BT = jnp.array([[6, 5, 0, 7]])
    run = jax.jit(lambda tokens, length: network.trunk(params, tokens, length, None)[0])
    hidden_LD = run(tokens_BL, length_BT)[0]
    other_LD = run(tokens_BL.at[0, 6:11].set(7 - tokens_BL[0, 6:11]), length_BT)[0]
    for first, stop in ((0, 6), (11, 18)):
        np.testing.assert_array_equal(hidden_LD[first:stop], other_LD[first:stop])
        alone_LD = run(tokens_BL[:, first:stop], jnp.array([stop - first]))[0]
        begin = int(not network.predicts_first)
        np.testing.assert_allclose(hidden_LD[first:stop][begin:], alone_LD[begin:], atol=2e-5)
    assert np.abs(hidden_LD[7:11] - other_LD[7:11]).max() > 0.01
    assert np.isfinite(hidden_LD).all()


def test_a_packed_run_resumes_within_an_epoch(tmp_path, monkeypatch):
    given = _flags(
        train__steps=7, train__accumulate=2, train__checkpoint_every=99, optim__name="adamw"
    )
    whole = tiny_run.run(tmp_path / "whole", **given)
    corpus = whole.run.corpus
    assert 4 < len(corpus.train_rows) < 7 * 4 and len(corpus.train_rows) % 4
    with monkeypatch.context() as patch:
        tiny_run.stop_after(3, patch)
        assert tiny_run.run(tmp_path / "parts", **given).reason == "interrupted"
    outcome = tiny_run.run(tmp_path / "parts", **given)
    tiny_run.assert_same(outcome.state, whole.state)
    assert tiny_run.records(tmp_path / "parts") == tiny_run.records(tmp_path / "whole")


def test_packed_rows_have_fewer_rows_of_the_same_targets():
    sizes = {"tokenizer": "byte", "seq_len": SEQ_LEN, "layout": "documents", "tail": "pad"}
    alone, packed = (load_corpus(_texts(), pack=pack, **sizes) for pack in (1, PACK))
    assert len(packed.train_rows) < len(alone.train_rows) / 2
    assert packed.num_train_tokens == alone.num_train_tokens
    assert len(packed.val_rows) == len(alone.val_rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__tail": "eos"}, "data.pack=3 requires .* set data.layout='documents' and"),
        ({"data__layout": "windows"}, "data.pack=3 requires .* data.tail='pad'"),
        ({"objective__proofreading_share": 0.5}, "data.pack=3 .*proofreading_share=0.5"),
        (
            {"model__attention_type": "block_causal", "model__block_length": 8},
            "data.pack=3 requires a network with full or causal attention",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused_in_one_line(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        _problem(tmp_path, **changes)
    assert "\n" not in str(error.value)
