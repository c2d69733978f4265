"""Models trained from scratch in the layout of published ones, where one fits."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import tokenizers
import toy

import dlm_jax
from dlm_jax.config import Config, DataConfig, ObjectiveConfig
from dlm_jax.data import ByteTokenizer, CharacterTokenizer, SubwordTokenizer, Tokenizer, train_bpe
from dlm_jax.model.transformer import build

TEXT = "the cat sat on the mat, and the rat sat on the cat.\n" * 20
PLAIN = {"activation": "swiglu", "qk_norm": False}


def _with_mask() -> SubwordTokenizer:
    """A tokenizer.json that names MASK and EOS, but not PAD and BOS."""
    made = tokenizers.Tokenizer.from_str(train_bpe(TEXT, 270).content)
    made.add_special_tokens(["<|mask|>", "<|endoftext|>"])
    return SubwordTokenizer(made.to_str())


TOKENIZERS = {"trained": lambda: train_bpe(TEXT, 270), "file": _with_mask}


def _model(tokenizer: Tokenizer, process: str = "masked", **settings) -> dlm_jax.Model:
    shape = toy.config(vocab_size=tokenizer.vocab_size, **settings)
    config = Config(
        model=shape, data=DataConfig(seq_len=48), objective=ObjectiveConfig(process=process)
    )
    return dlm_jax.Model(
        build(shape), toy.random_params(build(shape)), tokenizer, max_length=48, config=config,
        sample=config.sample,
    )  # fmt: skip


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_model_from_scratch_is_written_where_a_family_fits_and_is_the_same_again(name, tmp_path):
    model = _model(TOKENIZERS[name](), **PLAIN)
    dlm_jax.export(model, tmp_path / "out")
    again = dlm_jax.load(tmp_path / "out")
    assert again.family == "llada" and again.sample == model.sample
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    ours, theirs = model.tokenizer, again.tokenizer
    for role in ("mask_id", "pad_id", "eos_id", "bos_id", "vocab_size"):
        assert getattr(ours, role) == getattr(theirs, role), role
    # The name of a special token is text, also in the text of a prompt.
    text = TEXT[:50] + "<|mask|> <|pad|>"
    np.testing.assert_array_equal(ours.encode(text), theirs.encode(text))
    assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text)) == text
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["mlp_hidden_size"] == model.params["blocks"]["mlp"]["up"]["kernel"].shape[2]
    tokens_BL, length_B = ours.encode(TEXT[:32])[None], np.array([12])
    logits = [toy.logits(one.network, one.params, tokens_BL, length_B) for one in (model, again)]
    np.testing.assert_array_equal(*(x[0, :12] for x in logits))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: _model(train_bpe(TEXT, 270)),
            r"^no published family can express the settings of \[model\]; llada requires "
            "model.activation='swiglu', not 'relu2', model.qk_norm=False, not True$",
        ),
        (
            lambda: _model(CharacterTokenizer.of(TEXT), **PLAIN),
            "^the model has a character tokenizer, .*; train with data.tokenizer=bpe:N or",
        ),
        (lambda: _model(ByteTokenizer(), **PLAIN), "^the model has a byte tokenizer, which no "),
        (
            lambda: _model(train_bpe(TEXT, 270), process="uniform", **PLAIN),
            "^the model was trained with objective.process='uniform', but programs of the family "
            "llada sample 'masked' models$",
        ),
    ],
    ids=["settings", "character", "byte", "process"],
)  # fmt: skip
def test_a_model_that_no_published_layout_fits_is_refused_with_the_reason(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        dlm_jax.export(model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())
