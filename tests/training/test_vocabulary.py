"""Fine-tuning on other text: the model's own tokenizer, and characters that it lacks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.data import ByteTokenizer, CharacterTokenizer
from dlm_jax.training.init_from import remap_vocab
from dlm_jax.training.trainer import prepare

SHORT = {"train__steps": 4, "train__eval_every": 0, "model__depth": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the tiny text."""
    out_dir = tmp_path_factory.mktemp("trained") / "run"
    tiny_run.run(out_dir, **SHORT)
    return out_dir


@pytest.fixture
def other_text(tmp_path):
    def write(more):
        path = tmp_path / "other.txt"
        path.write_text("A quick brown dog jumps over the lazy fox.\n" * 30 + more)
        return path

    return write


def _flags(out_dir, trained, text, **changes):
    given = SHORT | {"data__source": text, "train__init_from": trained, "data__tokenizer": "init"}
    return tiny_run.flags(out_dir, **(given | changes))


def _prepared(out_dir, trained, text, report=lambda line: None, **changes):
    with tiny_run.on_devices(1):
        run = prepare(configs.load(None, _flags(out_dir, trained, text, **changes)), report=report)
    run.checkpoints.close()
    return run


def test_text_without_new_characters_keeps_the_tokenizer_and_every_parameter(
    tmp_path, trained, other_text
):
    lines: list[str] = []
    # "A" is new to the tiny text.
    text = other_text("")
    text.write_text(text.read_text().replace("A", "The"))
    run = _prepared(tmp_path / "run", trained, text, lines.append)
    model = dlm_jax.load(trained)
    assert run.corpus.tokenizer == model.tokenizer
    tiny_run.assert_same(run.state.params, model.params)
    assert lines == []


@pytest.mark.parametrize("tied", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_new_characters_are_added_and_all_others_keep_their_vectors(tmp_path, other_text, tied):
    own = tmp_path / "untied"
    tiny_run.run(own, **SHORT, model__tied_head=tied)
    lines: list[str] = []
    run = _prepared(tmp_path / "run", own, other_text("é#é"), lines.append, model__tied_head=tied)
    model, tokenizer = dlm_jax.load(own), run.corpus.tokenizer
    assert set(tokenizer.characters) == set(model.tokenizer.characters) | {"A", "é", "#"}
    (line,) = lines
    assert line.startswith("3 characters of the text are new to train.init_from=")
    assert "'A' (U+0041, 30 times), '\\xe9' (U+00E9, 2 times), '#' (U+0023, 1 times)" in line
    ours, theirs = run.state.params, model.params
    for character in model.tokenizer.characters:
        here, there = tokenizer.piece_id(character), model.tokenizer.piece_id(character)
        np.testing.assert_array_equal(ours["embedding"][here], theirs["embedding"][there])
        if tied == "false":
            kernels = (tree["head"]["kernel"] for tree in (ours, theirs))
            pair = (kernel[:, i] for kernel, i in zip(kernels, (here, there), strict=True))
            np.testing.assert_array_equal(*pair)
    for special in ("mask_id", "pad_id", "bos_id", "eos_id"):
        here, there = getattr(tokenizer, special), getattr(model.tokenizer, special)
        np.testing.assert_array_equal(ours["embedding"][here], theirs["embedding"][there])
    tiny_run.assert_same(ours["blocks"], theirs["blocks"])
    fresh = np.asarray(ours["embedding"][tokenizer.piece_id("é")])
    assert np.isfinite(fresh).all() and fresh.std() > 0


def test_a_model_begun_so_writes_what_the_other_writes_before_it_has_learnt(
    tmp_path, trained, other_text
):
    """What it says of the old characters is as before, but for the share of the new ones."""
    run, model = _prepared(tmp_path / "run", trained, other_text("é")), dlm_jax.load(trained)
    text = "The quick fox "
    logits = []
    for network, params, coder in (
        (run.network, run.state.params, run.corpus.tokenizer),
        (model.network, model.params, model.tokenizer),
    ):
        ids = np.append(coder.encode(text), [coder.mask_id] * 2)[None]
        hidden, _ = network.trunk(params, ids, np.array([ids.shape[1]]), None)
        found = np.asarray(network.readout(params, hidden[0, -2:]))
        logits.append(found[:, coder.encode(model.tokenizer.characters)])
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def test_new_characters_are_refused_by_choice(tmp_path, trained, other_text):
    text = other_text("")
    with pytest.raises(ValueError, match="1 character of the text is new .* use data.new_char"):
        _prepared(tmp_path / "run", trained, text, data__new_characters="refuse")
    assert not (tmp_path / "run").exists()


def test_new_characters_that_nothing_would_train_are_refused(tmp_path, trained, other_text):
    changes = {"heads__train_main": "false", "model__add_sampler_head": "true"}
    with pytest.raises(ValueError, match="heads.train_main=False would not train them"):
        _prepared(tmp_path / "run", trained, other_text(""), **changes)


def test_the_run_goes_on_without_the_model_it_began_with(tmp_path, trained, other_text):
    text = other_text("é")
    outcome = tiny_run.run(
        tmp_path / "run", **SHORT, data__source=text, train__init_from=trained,
        data__tokenizer="init",
    )  # fmt: skip
    run = _prepared(tmp_path / "run", tmp_path / "gone", text)
    assert run.first_step == 4
    assert run.corpus.tokenizer == outcome.run.corpus.tokenizer
    tiny_run.assert_same(run.state.params, outcome.state.params)


def test_vectors_move_to_the_ids_of_a_tokenizer_with_more_characters_of_the_same_kind():
    ours = CharacterTokenizer("abc")
    trained = {"embedding": np.arange(6.0).reshape(6, 1)}
    fresh = {"embedding": jnp.full((ours.vocab_size, 1), -1.0)}
    moved = remap_vocab(trained, fresh, CharacterTokenizer("ac"), ours, "here")
    assert moved["embedding"].ravel().tolist() == [0, -1, 1, 2, 3, 4, 5]
    for other in (ByteTokenizer(), CharacterTokenizer("abx")):
        with pytest.raises(ValueError, match="here has a different tokenizer; use"):
            remap_vocab(trained, fresh, other, ours, "here")
