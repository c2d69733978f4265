"""Laws of the tokenizers: round trips, where the specials are, and what they refuse."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_jax.data.tokenizers import (
    TOKENIZERS,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    from_json,
    make_tokenizer,
    noise_ids,
)

TEXTS = st.text(max_size=60)
SMALL = CharacterTokenizer("\n abc\u00e9\U0001f600")
BOTH: list[Tokenizer] = [ByteTokenizer(), SMALL]


@given(TEXTS, st.sampled_from(TOKENIZERS))
@settings(deadline=None)
def test_any_text_comes_back_from_its_ids(text, kind):
    tokenizer = make_tokenizer(kind, text + "x")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text


@given(TEXTS, st.sampled_from(TOKENIZERS))
@settings(deadline=None)
def test_no_text_encodes_to_a_special_or_banned_id(text, kind):
    tokenizer = make_tokenizer(kind, text + "x")
    specials = {tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
    assert not set(tokenizer.encode(text).tolist()) & (specials | set(tokenizer.banned_ids))


@given(st.lists(st.integers(0, 259), max_size=40))
@settings(deadline=None)
def test_any_row_of_ids_decodes(ids):
    assert isinstance(ByteTokenizer().decode(ids), str)


@given(TEXTS)
@settings(deadline=None)
def test_character_ids_follow_the_order_of_the_code_points(text):
    tokenizer = CharacterTokenizer.of(text + "x")
    assert tokenizer.characters == "".join(sorted(set(text + "x")))
    assert tokenizer.encode(tokenizer.characters).tolist() == list(range(tokenizer.num_text_ids))


@pytest.mark.parametrize("tokenizer", BOTH)
def test_specials_are_distinct_and_come_last(tokenizer):
    specials = [tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    assert specials == list(range(tokenizer.vocab_size - 4, tokenizer.vocab_size))
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize("tokenizer", BOTH)
def test_what_ends_a_generation_may_be_proposed_and_the_other_specials_may_not(tokenizer):
    banned = tokenizer.banned_ids
    assert {tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id} <= set(banned)
    assert tokenizer.eos_id not in banned
    assert list(banned) == sorted(set(banned))


def test_bytes_that_occur_in_no_utf8_text_are_banned():
    possible = {byte for n in range(0x110000) if not 0xD800 <= n < 0xE000 for byte in _utf8(n)}
    assert set(range(256)) - possible == {i for i in ByteTokenizer().banned_ids if i < 256}


def _utf8(point: int) -> bytes:
    return chr(point).encode()


@pytest.mark.parametrize("tokenizer", BOTH)
def test_specials_stand_for_no_text(tokenizer):
    a, b = tokenizer.encode("ab").tolist()
    ids = [tokenizer.bos_id, a, tokenizer.mask_id, b, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(np.array(ids, np.int32)) == "ab"
    assert tokenizer.decode([]) == ""


def test_bytes_that_are_no_text_are_shown_as_replacement():
    assert ByteTokenizer().decode([0xC3, ord("a"), 0xFF]) == "\ufffda\ufffd"


@pytest.mark.parametrize("tokenizer", BOTH)
def test_a_piece_has_the_id_that_decodes_to_it(tokenizer):
    assert tokenizer.decode([tokenizer.space_id]) == " "
    assert tokenizer.decode([tokenizer.piece_id("b")]) == "b"
    assert tokenizer.piece_id("ab") is None
    assert tokenizer.piece_id("") is None


def test_a_piece_the_tokenizer_lacks_has_no_id():
    assert CharacterTokenizer("ab").space_id is None
    assert ByteTokenizer().piece_id("\u00e9") is None


@pytest.mark.parametrize("tokenizer", BOTH)
def test_a_tokenizer_survives_json_and_pickle(tokenizer):
    tokenizer.encode("a b")
    assert from_json(json.loads(json.dumps(tokenizer.to_json()))) == tokenizer
    assert pickle.loads(pickle.dumps(tokenizer)) == tokenizer


def test_tokenizers_with_other_characters_differ():
    assert CharacterTokenizer("ab") != CharacterTokenizer("abc")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SMALL.encode("abxc"), r"'x' \(U\+0078\) at position 2 .* byte tokenizer"),
        (lambda: SMALL.encode("a\U0001f601"), r"U\+1F601\) at position 1 "),
        (lambda: SMALL.encode("\ud800"), r"U\+D800\) at position 0 "),
        (lambda: ByteTokenizer().encode("ab\udcff"), r"lone surrogate \(U\+DCFF\) at position 2"),
        (lambda: ByteTokenizer().decode([1, 260]), r"id 260 at position 1 is outside .* 260; "),
        (lambda: SMALL.decode([-1]), r"id -1 at position 0 is outside"),
        (lambda: SMALL.decode([[1, 2]]), r"shape \(1, 2\).*decode a row of integers"),
        (lambda: SMALL.decode([0.5]), r"float64; decode a row of integers"),
        (lambda: CharacterTokenizer.of(""), "characters is empty"),
        (lambda: CharacterTokenizer("ba"), "not distinct and ascending"),
        (lambda: CharacterTokenizer("aa"), "not distinct and ascending"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_noise_is_text_or_eos():
    tokenizer = CharacterTokenizer.of("abc")
    letters = tokenizer.encode("abc").tolist()
    assert noise_ids(tokenizer) == tuple(sorted([*letters, tokenizer.eos_id]))
