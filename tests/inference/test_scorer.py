"""Texts judged by a sequence scorer, in the library and at the command line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saved_model
import toy
import toy_model

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli import evaluation
from dlm_jax.inference.scoring import corrupted_share, held_out_errors
from dlm_jax.model.transformer import build
from dlm_jax.store import Checkpoints

TOKENIZER = toy_model.TOKENIZER
NETWORK = build(toy.config(mode="sequence_scorer", vocab_size=TOKENIZER.vocab_size))
MODEL = dataclasses.replace(toy_model.MODEL, network=NETWORK, params=toy.random_params(NETWORK))
CONFIG = dataclasses.replace(
    saved_model.CONFIG,
    model=dataclasses.replace(saved_model.CONFIG.model, mode="sequence_scorer"),
    objective=configs.ObjectiveConfig(patterns=("random",)),
)
TEXTS = ["The cat sat.", "A", "rat ran", "tTahse.cat "]


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch):
    """The program sets up JAX for its process; here that process goes on."""
    monkeypatch.setattr(evaluation, "start_jax", lambda *args: None)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "scorer"
    meta = {"config": configs.to_dict(CONFIG), "tokenizer": TOKENIZER.to_json()}
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(7, {"params": MODEL.params}, meta)
    return folder


_trunk = jax.jit(NETWORK.trunk)


def _share(text: str) -> float:
    """The scorer's answer for one row, in NumPy but for the trunk."""
    ids = TOKENIZER.encode(text)
    tokens = jnp.asarray(np.pad(ids, (0, 64 - len(ids)), constant_values=TOKENIZER.pad_id))[None]
    hidden, _ = _trunk(MODEL.params, tokens, jnp.array([len(ids)]), None)
    head = MODEL.params["scorer_head"]
    inner, out = jax.device_get((head["inner"], head["out"]))
    mean = np.asarray(hidden)[0, : len(ids)].mean(0)
    x = mean @ inner["kernel"] + inner["bias"]
    logit = (x / (1 + np.exp(-x))) @ out["kernel"] + out["bias"]
    return float(1 / (1 + np.exp(-logit[0])))


def test_each_text_has_its_own_share_whatever_is_judged_beside_it():
    expected = [_share(text) for text in TEXTS]
    assert np.ptp(expected) > 0.02
    np.testing.assert_allclose(corrupted_share(MODEL, TEXTS), expected, rtol=1e-4)
    np.testing.assert_allclose(corrupted_share(MODEL, TEXTS, batch_size=3), expected, rtol=1e-4)
    np.testing.assert_allclose(corrupted_share(MODEL, TEXTS[::-1])[::-1], expected, rtol=1e-4)


def test_a_text_longer_than_the_canvas_is_the_mean_of_its_windows_by_their_length():
    text = ("The cat sat. A rat ran." * 2)[:33]
    windows = [text[:17], text[17:]]
    expected = sum(_share(window) * len(window) for window in windows) / 33
    assert np.ptp([_share(window) for window in windows]) > 0.01
    shares = corrupted_share(MODEL, ["rat ran", text])
    np.testing.assert_allclose(shares, [_share("rat ran"), expected], rtol=1e-4)
    assert shares.dtype == np.float64


def test_a_loaded_scorer_is_the_scorer(run_dir):
    loaded = dlm_jax.load(run_dir)
    np.testing.assert_allclose(
        dlm_jax.corrupted_share(loaded, TEXTS), corrupted_share(MODEL, TEXTS)
    )
    with pytest.raises(ValueError, match="is a sequence scorer, which does not generate"):
        dlm_jax.generate(loaded)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "there are no texts to score"),
        (["The cat", ""], "text 1: the text is empty"),
        ([""], "the text is empty"),
        (["The cat", 3], "text 1: 3 is not a string"),
        (["Zebra"], r"'Z' \(U\+005A\)"),
    ],
)
def test_texts_that_cannot_be_judged_are_refused_in_one_line(texts, said):
    with pytest.raises(ValueError, match=f"^{said}|{said}") as refused:
        corrupted_share(MODEL, texts)
    assert "\n" not in str(refused.value)


def test_a_string_is_one_text():
    assert corrupted_share(MODEL, TEXTS[0]).tolist() == corrupted_share(MODEL, TEXTS[:1]).tolist()


def test_another_model_and_another_batch_size_are_refused():
    for judge in (corrupted_share, held_out_errors):
        with pytest.raises(ValueError, match="is not a sequence scorer; load one"):
            judge(toy_model.MODEL, ["The cat"])
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        corrupted_share(MODEL, TEXTS, batch_size=0)
    with pytest.raises(ValueError, match="has no training config"):
        held_out_errors(MODEL, {})


def _said(run_dir, capsys, *flags):
    assert evaluation.main(["--checkpoint", str(run_dir), *map(str, flags)]) == 0
    return capsys.readouterr().out


def test_files_are_judged_one_by_one(run_dir, tmp_path, capsys):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("The cat sat.")
    two.write_text("A rat ran.\n---\nThe rat sat.\n")
    lines = _said(run_dir, capsys, "--text", one, two, "--split", "--json").splitlines()
    first, second = (json.loads(line) for line in lines)
    shares = corrupted_share(MODEL, ["A rat ran.", "The rat sat."])
    assert first["corrupted_share"] == pytest.approx(_share("The cat sat."), rel=1e-4)
    assert (first["texts"], first["corrupted_share_error"]) == (1, None)
    assert second["corrupted_share"] == pytest.approx(shares.mean())
    assert second["corrupted_share_error"] == pytest.approx(shares.std(ddof=1) / 2**0.5)
    plain = _said(run_dir, capsys, "--continuation", "The cat sat.")
    assert plain == f"continuation: corrupted share {_share('The cat sat.'):.4f}\n"


def test_without_texts_its_error_on_held_out_text_is_said(run_dir, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text((toy_model.TEXT + " ") * 40)
    flags = ("--held-out", corpus, "--batch-size", 4)
    record = json.loads(_said(run_dir, capsys, *flags, "--json"))
    assert (record["kind"], record["windows"]) == ("error", 2)
    assert 0 < record["squared_error"] < 1
    line = _said(run_dir, capsys, *flags)
    assert f"squared error {record['squared_error']:.5f} +- " in line
    assert "bits" not in line and line.count("\n") == 1
    other = json.loads(_said(run_dir, capsys, *flags, "--json", "--seed", 3))
    assert other["squared_error"] != record["squared_error"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-size", "0"], "argument --batch-size: 0 is not in [1, 65536]"),
        (["--continuation", "sat", "--prompt", "The "], "scores whole texts; remove the prompt"),
        (["--pairs", "pairs.jsonl"], "pairs.jsonl: a sequence scorer scores whole texts"),
        (["--continuation", ""], "the text is empty"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(run_dir, tmp_path, monkeypatch, capsys, flags,
                                                 said):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "A ", "response": "rat"}\n')
    with pytest.raises(SystemExit) as ended:
        evaluation.main(["--checkpoint", str(run_dir), *flags])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said in line
