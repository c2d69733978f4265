"""Laws of the names of tokenizers: what each stands for, and how a checkpoint's comes back."""

from __future__ import annotations

import pytest

from dlm_jax.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    SubwordTokenizer,
    check_fits,
    from_json,
    make_tokenizer,
    train_bpe,
)

TEXT = "the cat and the hat, the rat and the bat\n" * 3


def test_a_bpe_learns_from_the_training_text_alone():
    tokenizer = make_tokenizer("bpe:264", TEXT + "zzzz" * 99, train_text=TEXT)
    assert tokenizer == train_bpe(TEXT, 264) != train_bpe(TEXT + "zzzz" * 99, 264)


def test_characters_are_those_of_the_whole_text():
    assert make_tokenizer("character", "abc", train_text="ab") == CharacterTokenizer("abc")


def test_the_path_of_a_file_gives_the_tokenizer_in_it(tmp_path):
    tokenizer = train_bpe(TEXT, 264)
    for name in ("tokenizer.json", "other"):
        (tmp_path / name).write_text(tokenizer.content)
        assert make_tokenizer(str(tmp_path / name), TEXT) == tokenizer


def test_a_tokenizer_with_more_ids_than_the_model_has_logits_is_refused():
    for size in (260, 300):
        check_fits(ByteTokenizer(), size)
    with pytest.raises(ValueError, match="has 260 ids, but the model has 259 logits; use the"):
        check_fits(ByteTokenizer(), 259)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_tokenizer("chracter", "a"), r"'chracter' is unknown; did you mean 'char"),
        (lambda: make_tokenizer("word", "a"), "use one of byte, character, bpe:SIZE or the path"),
        (lambda: make_tokenizer("bpe:", TEXT), "'bpe:' has no size; write .* such as bpe:1024"),
        (lambda: make_tokenizer("bpe:1e3", TEXT), "'bpe:1e3' has no size"),
        (
            lambda: make_tokenizer("bpe:259", TEXT),
            "cannot contain the 256 bytes .* use at least bpe:260",
        ),
        (lambda: make_tokenizer("no/t.json", "a"), r"no/t\.json does not exist; pass the path"),
        (lambda: from_json({"type": "bytes"}), "did you mean 'byte'"),
        (lambda: from_json(["byte"]), "tokenizer type=None is unknown; use one of byte, char"),
        (lambda: from_json({"type": "byte", "size": 3}), r"no fields, but the file has \['size'\]"),
        (lambda: from_json({"type": "character"}), "stored as .* has the fields"),
        (lambda: from_json({"type": "subword", "tokenizer_json": {}}), "stored as .* the fields"),
        (lambda: from_json({"type": "subword", "tokenizer_json": "{"}), "tokenizer.json is broken"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_stored_subword_tokenizer_is_a_text_that_keeps_its_order():
    stored = train_bpe(TEXT, 264).to_json()
    assert isinstance(from_json(stored), SubwordTokenizer)
    assert isinstance(stored["tokenizer_json"], str)
