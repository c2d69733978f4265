"""What of a row is told before it has ended: only what will not change, cut at stops."""

import dataclasses
import re

import numpy as np
import pytest
import toy_model

from dlm_jax.data.tokenizers import HubTokenizer, bpe_json, qwen_split
from dlm_jax.inference.request import make_requests
from dlm_jax.inference.results import Row, TextReader, stops_of
from dlm_jax.types import Status

MODEL = toy_model.MODEL
TOKENIZER = MODEL.tokenizer
MASK, EOS = TOKENIZER.mask_id, TOKENIZER.eos_id


def _request(prompt="A ", **settings):
    (made,) = make_requests(MODEL, prompt, {"gen_length": 8, "steps": 8} | settings)
    return made


def _row(text, *, block=0, status=Status.RUNNING, given=2):
    """A row with these characters; ``_`` is a hole, ``$`` the end of a generation."""
    special = {"_": MASK, "$": EOS}
    ids = [special[c] if c in special else int(TOKENIZER.encode(c)[0]) for c in text]
    n = len(ids)
    return Row(
        np.array(ids, np.int32), np.arange(n) < given, np.zeros(n, np.float32),
        np.zeros(n, np.int32), 0, block, status,
    )  # fmt: skip


def _told(reader, *rows):
    told = [[(piece.text, piece.is_last) for piece in reader.pieces(row)] for row in rows]
    return [[one for one in pieces if one != ("", False)] for pieces in told]


@pytest.mark.parametrize("order", ["left_to_right", "random"])
def test_what_stands_before_the_first_hole_is_told_at_once(order):
    reader = TextReader(MODEL, _request(order=order))
    told = _told(
        reader, _row("A ________"), _row("A The_____"), _row("A The ca__"),
        _row("A The cat.", status=Status.DONE),
    )  # fmt: skip
    assert told == [[], [("The", False)], [(" ca", False)], [("t.", True)]]


def test_other_orders_tell_what_stands_before_the_first_hole_too():
    reader = TextReader(MODEL, _request(order="random", block_length=2))
    told = _told(
        reader, _row("A _he_____"), _row("A T_e c___"), _row("A The c___"),
        _row("A The cat.", status=Status.DONE),
    )  # fmt: skip
    assert told == [[], [("T", False)], [("he c", False)], [("at.", True)]]


@pytest.mark.parametrize("settings", [{"remask": "scheduled", "schedule": "all"}, {
    "resample": True, "order": "threshold"}, {"order": "joint_threshold"}])  # fmt: skip
def test_rows_that_rewrite_tell_of_blocks_they_have_left(settings):
    reader = TextReader(MODEL, _request(block_length=4, **settings))
    told = _told(
        reader, _row("A The ____"), _row("A The ca__", block=1),
        _row("A The rat.", block=1, status=Status.DONE),
    )  # fmt: skip
    assert told == [[], [("The ", False)], [("rat.", True)]]


def test_a_stop_ends_the_text_and_what_may_begin_one_is_held_back():
    reader = TextReader(MODEL, _request(order="left_to_right"), ("cat", "xx"))
    told = _told(reader, _row("A The c___"), _row("A The ca__"), _row("A The cat."))
    assert told == [[("The ", False)], [], [("", True)]]
    reader = TextReader(MODEL, _request(order="left_to_right"), ("cat",))
    told = _told(reader, _row("A The ca__"), _row("A The can_"))
    assert told == [[("The ", False)], [("can", False)]]


def test_a_stop_in_an_earlier_block_hides_what_follows():
    reader = TextReader(MODEL, _request(order="random", block_length=2), ("e",))
    row = _row("A The cat.", block=4, status=Status.DONE)
    assert _told(reader, row) == [[("Th", True)]]
    text, places, is_stopped = reader.whole(row)
    assert (text, is_stopped, len(places)) == ("Th", True, 3)


@pytest.mark.parametrize("stops", [("b", "a"), ("a", "b"), ("rat", "at"), ("at ", "at")])
def test_a_text_ends_at_the_first_of_its_stops_whatever_their_order(stops):
    reader = TextReader(MODEL, _request(order="left_to_right"), stops)
    row = _row("A The at rat ", status=Status.DONE)
    first = min("The at rat ".find(stop) for stop in stops if stop in "The at rat ")
    assert reader.whole(row)[0] == "The at rat "[:first]
    assert "".join(piece.text for piece in reader.pieces(row)) == "The at rat "[:first]


class _Bytes:
    """A tokenizer of bytes, whose decoder drops the space that begins a text."""

    mask_id, eos_id = MASK, EOS

    def decode(self, ids):
        return bytes(int(id_) for id_ in ids).decode("utf-8", errors="replace").removeprefix(" ")


def test_a_character_of_several_tokens_is_told_when_the_last_of_them_is_there():
    reader = TextReader(
        dataclasses.replace(MODEL, tokenizer=_Bytes()), _request(order="left_to_right")
    )
    whole = "x\u00e9\u20ac!"
    ids, told = np.array([*b"A ", *whole.encode()]), []
    for end in range(2, ids.size + 1):
        tokens = np.where(np.arange(ids.size) < end, ids, MASK)
        row = dataclasses.replace(_row("A The ca"[: ids.size].ljust(ids.size, "a")), tokens=tokens)
        told.append("".join(piece.text for piece in reader.pieces(row)))
    assert told == ["", "x", "", "\u00e9", "", "", "\u20ac", "!"]


def test_infills_have_a_text_for_each_gap():
    (infill,) = make_requests(MODEL, {"template": "A <hole:2>t<hole:1>."}, {"steps": 3})
    reader = TextReader(MODEL, infill)
    row = _row("A cat .", status=Status.DONE)
    row = dataclasses.replace(row, is_frozen=infill.tokens != MASK)
    assert reader.is_infill and reader.filled(row) == ["ca", " "]


def _published():
    """A tokenizer of a published model over the letters of `TOKENIZER`, with two special tokens
    beside those of the model: ``<|end|>`` has no text, ``<think>`` has.
    """
    letters = {"\u0120" if c == " " else c: n for n, c in enumerate(TOKENIZER.characters)}
    names = ["<|mask|>", "<|pad|>", "<|eos|>", "<|end|>", "<think>"]
    ids = range(len(letters), len(letters) + len(names))
    added = {id_: (name, name != "<think>") for id_, name in zip(ids, names, strict=True)}
    return HubTokenizer(bpe_json(letters, [], added, (qwen_split(1),)), *ids[:3]), ids[3]


@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("block_length", [0, 2])
@pytest.mark.parametrize("by_id", [False, True])
def test_a_text_ends_at_a_special_token_that_is_a_stop(keeps_stop, block_length, by_id):
    tokenizer, end = _published()
    model = dataclasses.replace(MODEL, tokenizer=tokenizer)
    (request,) = make_requests(
        model, "A ", {"gen_length": 6, "steps": 6, "order": "left_to_right",
                      "block_length": block_length},
    )  # fmt: skip
    stops, ids = stops_of(tokenizer, None if by_id else ["<|end|>", "zz"], [end] if by_id else None)
    tokens = np.concatenate([tokenizer.encode("A cat"), [end], tokenizer.encode("ra")])
    row = _row("A catTra")
    row = dataclasses.replace(row, tokens=tokens.astype(np.int32), block=9, status=Status.DONE)
    reader = TextReader(model, request, stops, ids, keeps_stop=keeps_stop)
    expected = "cat" + "<|end|>" * (keeps_stop and not by_id)
    assert reader.whole(row) == (expected, range(2, 6), True)
    pieces = reader.pieces(row)
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].is_last and pieces[-1].places.stop == 6
    # Before the stop is written, the text goes on.
    open_ = dataclasses.replace(row, tokens=row.tokens.copy(), block=0, status=Status.RUNNING)
    open_.tokens[5:] = tokenizer.mask_id
    assert not any(one.is_last for one in TextReader(model, request, stops, ids).pieces(open_))


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_text_ends_at_an_id_and_has_its_text_only_if_it_keeps_stops(keeps_stop):
    stop = int(TOKENIZER.encode("t")[0])
    reader = TextReader(MODEL, _request(order="left_to_right"), (), [stop], keeps_stop=keeps_stop)
    whole = reader.whole(_row("t cat ran", given=2))
    assert whole == ("cat"[: 2 + keeps_stop], range(2, 5), True)
    assert _told(reader, _row("t ca____"), _row("t catra_"))[-1][-1][1]


@pytest.mark.parametrize(
    ("stop", "ids", "told"),
    [
        (5, None, "stop=5 is not a string or a list"),
        (["a", 5], None, "stop"),
        ("", None, "empty"),
        (["a"] * 17, None, "has 17 values; use at most 16"),
        (None, list(range(17)), "stop_token_ids has 17 values"),
        (None, [10**30], "stop_token_ids"),
        (None, [-1], "is not a list of ids"),
        (None, [True], "is not a list of ids"),
        (None, 3, "is not a list of ids"),
        ("<|end|>\n", None, "has the special token '<|end|>' among text"),
    ],
)
def test_stops_that_cannot_end_a_text_are_refused(stop, ids, told):
    tokenizer, _ = _published()
    with pytest.raises(ValueError, match=re.escape(told)):
        stops_of(tokenizer, stop, ids)
    assert stops_of(tokenizer, ["<think>", "a"], [0]) == (("<think>", "a"), (0,))
