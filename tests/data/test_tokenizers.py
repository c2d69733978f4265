"""Laws of tokenizers: exact round trips, specials apart from text, stored forms, and refusals."""

from __future__ import annotations

import itertools
import json
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dlm_jax.data import tokenizers as tokenizers_module
from dlm_jax.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    SubwordTokenizer,
    Tokenizer,
    check_fits,
    from_json,
    make_tokenizer,
    train_bpe,
)

TEXT = "Now is the winter of our discontent\nmade glorious summer by this sun of York;\n" * 20
BPE = train_bpe(TEXT, 300)
SMALL = CharacterTokenizer("\n abc\u00e9\U0001f600")
PLAIN: list[Tokenizer] = [ByteTokenizer(), SMALL]

# Its merges join white space, so that a cut in a wrong place changes the ids.
RUNS = "".join("".join(run) + "a" for run in itertools.product("\n \t\r\u00a0", repeat=3))
SPACED = train_bpe(RUNS * 2, 285)

# White space of every kind beside letters: where cutting a text could show.
LINES = st.text(alphabet="ab' .\n\r\t\u00a0\u0085\x1c\u2028\u3000\u00e9\u4e2d<|>", max_size=40)


def _library(model, trainer, *, splitter, decoder=None, normalizer=None, text=TEXT):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    if decoder:
        tokenizer.decoder = decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def _byte_level(specials=("<|endoftext|>",), alphabet=True):
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
        special_tokens=list(specials),
        show_progress=False,
    )
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _library(models.BPE(), trainer, splitter=splitter, decoder=decoders.ByteLevel())


def _word_piece():
    trainer = trainers.WordPieceTrainer(
        vocab_size=120,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    tokenizer = _library(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        splitter=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
        normalizer=normalizers.BertNormalizer(),
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=99)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def _unigram():
    trainer = trainers.UnigramTrainer(
        vocab_size=80,
        special_tokens=["<pad>", "</s>", "<unk>", "<mask>"],
        unk_token="<unk>",
        initial_alphabet=list("<>/|mask "),
        show_progress=False,
    )
    splitter, decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _library(models.Unigram(), trainer, splitter=splitter, decoder=decoder)


def _words():
    trainer = trainers.WordLevelTrainer(special_tokens=["<mask>", "<unk>"], show_progress=False)
    splitter = pre_tokenizers.WhitespaceSplit()
    return _library(models.WordLevel(unk_token="<unk>"), trainer, splitter=splitter)


def _pairs():
    """A BPE of letters without an unknown token: by itself it drops what it does not know."""
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    return _library(models.BPE(), trainer, splitter=pre_tokenizers.Whitespace())


def _few_bytes():
    return _byte_level(alphabet=False)


FILES = {f.__name__.strip("_"): f for f in (_byte_level, _word_piece, _unigram, _words, _pairs)}


@pytest.fixture(params=FILES, scope="module")
def of_file(request):
    return SubwordTokenizer(FILES[request.param]().to_str())


@given(st.text(max_size=60), st.sampled_from(["byte", "character", "bpe"]))
@settings(deadline=None)
def test_any_text_comes_back_from_its_ids_and_none_of_them_is_special(text, kind):
    tokenizer = BPE if kind == "bpe" else make_tokenizer(kind, text + "x")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert not set(ids.tolist()) & {*tokenizer.banned_ids, tokenizer.mask_id, tokenizer.eos_id}


@given(st.lists(LINES, max_size=12).map("\n".join), st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_a_text_encoded_in_parts_has_the_ids_of_the_whole(text, chunk):
    whole = tokenizers.Tokenizer.from_str(SPACED.content).encode(text).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers_module, "_CHUNK", chunk)
        patch.setattr(tokenizers_module, "_CHUNKS_AT_ONCE", 2)
        assert SPACED.encode(text).tolist() == whole


def test_a_row_of_any_ids_decodes(of_file):
    for tokenizer in (BPE, of_file):
        assert isinstance(tokenizer.decode(np.arange(tokenizer.vocab_size)), str)
    (first,) = BPE.encode("\u00e9")[:1]
    assert BPE.decode([first, *BPE.encode("a")]) == "\ufffda"
    assert ByteTokenizer().decode([0xC3, ord("a"), 0xFF]) == "\ufffda\ufffd"
    assert isinstance(ByteTokenizer().decode(np.arange(260)), str)


def test_specials_stand_for_no_text(of_file):
    characters = CharacterTokenizer.of("of our sun")
    for tokenizer in (ByteTokenizer(), characters, BPE, of_file):
        ids = tokenizer.encode("of our sun").tolist()
        around = [tokenizer.bos_id, *ids, tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id]
        assert tokenizer.decode(around) == tokenizer.decode(ids)
        assert tokenizer.decode(ids).split() == ["of", "our", "sun"]
        assert tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (["<|mdm_mask|>", "<|startoftext|>"], {"mask": 0, "bos": 1}),
        (["<s>", "</s>", "<mask>", "<pad>"], {"bos": 0, "eos": 1, "mask": 2, "pad": 3}),
        (["<|im_end|>", "<|endoftext|>", "<|mask|>"], {"eos": 1, "mask": 2}),
        (["<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cMASK\uff5c>"], {"eos": 0, "mask": 1}),
        (["mask", "<masked>", "[eos"], {}),
    ],
)
def test_specials_are_found_by_their_usual_names(names, roles):
    tokenizer = SubwordTokenizer(_byte_level(names).to_str())
    appended = iter(range(300, 304))
    for role in ("mask", "pad", "bos", "eos"):
        found = getattr(tokenizer, f"{role}_id")
        assert found == (roles[role] if role in roles else next(appended))


def test_ids_that_cannot_be_decoded_are_banned_and_what_ends_a_text_is_not(of_file):
    for tokenizer in (*PLAIN, BPE, of_file):
        banned = tokenizer.banned_ids
        assert {tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id} <= set(banned)
        assert tokenizer.eos_id not in banned
        assert list(banned) == sorted(set(banned))
    bytes_of = tokenizers.Tokenizer.from_str(BPE.content)
    never = {bytes_of.token_to_id(chr(byte)) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    assert set(BPE.banned_ids) == never | {BPE.mask_id, BPE.pad_id, BPE.bos_id}


def test_ids_without_a_token_are_banned_and_stand_for_no_text():
    model = {"type": "WordLevel", "vocab": {"<unk>": 1, "a": 4, "b": 7}, "unk_token": "<unk>"}
    tokenizer = SubwordTokenizer(
        json.dumps({"model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}})
    )
    assert tokenizer.vocab_size == 12
    assert tokenizer.banned_ids == (0, 1, 2, 3, 5, 6, 8, 9, 10)
    assert tokenizer.decode(np.arange(12)) == "a b"


def test_a_tokenizer_is_its_content(of_file):
    for tokenizer in (ByteTokenizer(), CharacterTokenizer.of("of our sun"), BPE, of_file):
        ids = tokenizer.encode("of our sun").tolist()
        stored = json.loads(json.dumps(tokenizer.to_json(), sort_keys=True))
        twins = [from_json(stored), pickle.loads(pickle.dumps(tokenizer))]
        if isinstance(tokenizer, SubwordTokenizer):
            twins.append(SubwordTokenizer(json.dumps(json.loads(tokenizer.content), indent=2)))
            assert isinstance(stored["tokenizer_json"], str)
        for twin in twins:
            assert twin == tokenizer
            assert hash(twin) == hash(tokenizer)
            assert twin.encode("of our sun").tolist() == ids
    assert train_bpe(TEXT, 299) != BPE
    assert CharacterTokenizer("ab") != CharacterTokenizer("abc")


@pytest.mark.parametrize("make", [_word_piece, _unigram, _words, _pairs, _few_bytes])
def test_characters_the_file_has_no_ids_for_are_refused(make):
    tokenizer = SubwordTokenizer(make().to_str())
    with pytest.raises(ValueError, match=r"'\\u4e2d' \(U\+4E2D\) at position 3 has no id .*; remo"):
        tokenizer.encode("of \u4e2d our")


def test_pieces_that_a_model_knows_as_a_whole_are_not_spelled():
    words = {"the": 0, "cat": 1, "<m>": 2}
    split = {"type": "Whitespace"}
    for model in (
        {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        {"type": "BPE", "vocab": words, "merges": [], "ignore_merges": True},
    ):
        tokenizer = SubwordTokenizer(json.dumps({"model": model, "pre_tokenizer": split}))
        assert tokenizer.encode("the cat").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "letters", "text"),
    [
        ({"continuing_subword_prefix": "##"}, ("a", "b", "##b", "##c"), "a c ab"),
        ({"end_of_word_suffix": "</w>"}, ("a", "b", "a</w>"), "ba ab"),
        ({}, ("a", "b", "<m>"), "a<b m"),
    ],
)
def test_a_letter_that_is_known_elsewhere_is_refused_where_a_bpe_drops_it(changes, letters, text):
    vocab = {letter: id_ for id_, letter in enumerate(letters)}
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []} | changes}
    data["pre_tokenizer"] = {"type": "Whitespace"}
    if "<m>" in vocab:
        flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
        data["added_tokens"] = [{"id": vocab["<m>"], "content": "<m>", "normalized": False} | flags]
    with pytest.raises(ValueError, match="has no id"):
        SubwordTokenizer(json.dumps(data)).encode(text)


@pytest.mark.parametrize(
    "splitter",
    [
        pre_tokenizers.CharDelimiterSplit("-"),
        pre_tokenizers.Split("-", behavior="removed"),
        pre_tokenizers.Punctuation("removed"),
        pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.CharDelimiterSplit("-")]
        ),
    ],
)
def test_a_character_that_the_splitting_removes_is_refused(splitter):
    model = models.WordLevel({"a": 0, "b": 1, "?": 2, " ": 3}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = splitter
    tokenizer = SubwordTokenizer(made.to_str())
    assert tokenizer.encode("a").tolist() == [0]
    assert tokenizer.encode("").tolist() == []
    with pytest.raises(ValueError, match=r"'-' \(U\+002D\) at position 1 has no id"):
        tokenizer.encode("a-b")


def test_white_space_and_what_the_normalizer_removes_are_not_lost():
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    made.normalizer = normalizers.Replace("*", "")
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    assert SubwordTokenizer(made.to_str()).encode("a  *b ").tolist() == [0, 1]


def test_the_position_of_a_lost_character_is_that_in_the_whole_text(monkeypatch):
    monkeypatch.setattr(tokenizers_module, "_CHUNK", 4)
    monkeypatch.setattr(tokenizers_module, "_CHUNKS_AT_ONCE", 2)
    lines = "of our\n" * 5
    with pytest.raises(ValueError, match=rf"U\+4E2D\) at position {len(lines)} has no id"):
        SubwordTokenizer(_few_bytes().to_str()).encode(lines + "\u4e2d")


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("a\tb\n", r"'\\t' \(U\+0009\) at position 1"),
        ("ab\n", r"'\\n' \(U\+000A\) at position 2"),
        ("ab\u00e9ab", r"'\\xe9' \(U\+00E9\) at position 2"),
        ("\u00e9", r"'\\xe9' \(U\+00E9\) at position 0"),
    ],
)
@pytest.mark.parametrize("splitter", [None, "Metaspace", "ByteLevel"])
def test_the_character_that_a_bpe_drops_is_named(splitter, text, lost):
    """The offsets of the library are wrong after such a character."""
    vocab = {letter: id_ for id_, letter in enumerate("ab \u2581\u0120")}
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []}}
    given = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if splitter == "Metaspace":
        given = {"replacement": "\u2581", "prepend_scheme": "always", "split": True}
    if splitter:
        data["pre_tokenizer"] = {"type": splitter} | given
    tokenizer = SubwordTokenizer(json.dumps(data))
    assert len(tokenizer.encode("a b")) == 3 + (splitter == "Metaspace")
    with pytest.raises(ValueError, match=f"{lost} has no id"):
        tokenizer.encode(text)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"model": 3}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        '{"model": {"type": "WordLevel", "vocab": {"a": "0"}, "unk_token": "a"}}',
        BPE.content[: len(BPE.content) // 2],
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken \(.*\); use") as caught:
        SubwordTokenizer.of_file(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_piece_has_the_id_that_adds_it_to_a_text():
    ids = [*BPE.encode("of"), BPE.space_id, *BPE.encode("s")]
    assert BPE.decode(ids).startswith("of ")
    assert BPE.decode([BPE.piece_id(" of")]) == " of"
    assert BPE.piece_id("") is BPE.piece_id("\u4e2d") is None
    assert SubwordTokenizer(_word_piece().to_str()).space_id is None
    for tokenizer in PLAIN:
        assert tokenizer.decode([tokenizer.space_id]) == " "
        assert tokenizer.decode([tokenizer.piece_id("b")]) == "b"
        assert tokenizer.piece_id("ab") is tokenizer.piece_id("") is None
    assert CharacterTokenizer("ab").space_id is ByteTokenizer().piece_id("\u00e9") is None


def test_a_text_that_spells_a_special_never_becomes_one(of_file):
    specials = {of_file.mask_id, of_file.pad_id, of_file.bos_id, of_file.eos_id}
    for name in ("<mask>", "[MASK]", "</s>", "<|endoftext|>", "[CLS]"):
        for text in (name, f"of{name}our", f"of {name} our"):
            try:
                ids = of_file.encode(text).tolist()
            except ValueError:
                continue  # refused: it has no ids, or only a special's
            assert not specials & set(ids)
    byte_level = SubwordTokenizer(_byte_level().to_str())
    assert byte_level.decode(byte_level.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_truncation_padding_template_and_dropout_of_a_file_are_off():
    tokenizer = SubwordTokenizer(_word_piece().to_str())
    text = "now is the winter of our discontent made glorious summer"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    data = json.loads(_byte_level().to_str())
    data["model"]["dropout"] = 0.9
    tokenizer = SubwordTokenizer(json.dumps(data))
    assert len({tuple(tokenizer.encode(TEXT).tolist()) for _ in range(3)}) == 1


def _huge() -> str:
    data = json.loads(train_bpe("twelve chars", 260).content)
    data["model"]["vocab"][next(iter(data["model"]["vocab"]))] = 2**31
    return json.dumps(data)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SMALL.encode("abxc"), r"'x' \(U\+0078\) at position 2 .* byte tokenizer"),
        (lambda: SMALL.encode("\ud800"), r"U\+D800\) at position 0 "),
        (lambda: BPE.encode("ab\udcff"), r"lone surrogate \(U\+DCFF\) at position 2"),
        (lambda: BPE.decode([1, 300]), r"id 300 at position 1 is outside .* 300; "),
        (lambda: SMALL.decode([-1]), r"id -1 at position 0 is outside"),
        (lambda: SMALL.decode([[1, 2]]), r"shape \(1, 2\).*decode a row of integers"),
        (lambda: CharacterTokenizer.of(""), "not distinct and ascending, or there are none"),
        (lambda: train_bpe("a", 259), "use bpe:260 to bpe:261, or more text"),
        (lambda: train_bpe("twelve chars", 10**20), "12 characters; use bpe:260 to bpe:272"),
        (lambda: check_fits(ByteTokenizer(), 259), "has 260 ids, but .* 259 logits; use"),
        (lambda: make_tokenizer("bpe:1e3", "a"), "'bpe:1e3' is unknown; use one of byte, char"),
        (lambda: make_tokenizer("no/t.json", "a"), r"no/t\.json cannot be read \(No such.*; pass"),
        (lambda: from_json(["byte"]), "is not a tokenizer; it is damaged"),
        (lambda: from_json({"type": "subword", "tokenizer_json": "{"}), "tokenizer.json is broken"),
        (lambda: SubwordTokenizer(_huge()), "it has more than 4194304 ids"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_bpe_learns_its_merges_from_the_training_text_alone():
    train, held_out = "abab cdcd " * 40, "xyxy zwzw " * 400
    made = make_tokenizer("bpe:262", train + held_out, train_text=train)
    assert made.to_json() == make_tokenizer("bpe:262", train).to_json()
    assert made.to_json() != make_tokenizer("bpe:262", train + held_out).to_json()
