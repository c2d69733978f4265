"""Canvases made of prompts, templates, ids and drafts, and what is refused."""

import numpy as np
import pytest
import toy_model

from dlm_jax.inference.request import make_canvas, make_requests

TOKENIZER = toy_model.TOKENIZER
MASK = TOKENIZER.mask_id


def _make(asked, *, gen_length=0, room=32):
    return make_canvas(TOKENIZER, asked, gen_length=gen_length, room=room)


def _ids(*parts):
    """Ids of texts, and as many holes as a number says."""
    return [
        token
        for part in parts
        for token in ([MASK] * part if isinstance(part, int) else TOKENIZER.encode(part).tolist())
    ]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, _ids(32)),
        ({"prompt": "The "}, _ids("The ", 28)),
        ({"prompt": None}, _ids(32)),
        ({"template": "<hole:3>cat<hole:2>"}, _ids(3, "cat", 2)),
        ({"template": "a <hole:1><hole:2> rat"}, _ids("a ", 3, " rat")),
        ({"tokens": _ids("The ")}, _ids("The ", 28)),
        ({"tokens": _ids(2, "at", 1), "infill": True}, _ids(2, "at", 1)),
    ],
)
def test_given_tokens_and_holes_stand_where_they_were_put(asked, expected):
    tokens, is_draft = _make(asked)
    assert tokens.tolist() == expected
    assert tokens.dtype == np.int32
    assert is_draft is None


def test_gen_length_counts_what_follows_or_fills_a_marker_without_a_number():
    assert _make({"prompt": "A "}, gen_length=3)[0].tolist() == _ids("A ", 3)
    assert _make({"tokens": _ids("A ")}, gen_length=3)[0].tolist() == _ids("A ", 3)
    asked = {"template": "A <hole>t<hole:1>"}
    assert _make(asked, gen_length=2)[0].tolist() == _ids("A ", 2, "t", 1)


def test_settings_of_a_prompt_precede_those_of_the_call():
    call = {"max_length": 8, "seed": 3}
    (made,) = make_requests(toy_model.MODEL, {"prompt": "A ", "max_length": 16, "seed": 5}, call, 2)
    assert (made.tokens.size, made.seed) == (16, 5)
    (made,) = make_requests(toy_model.MODEL, {"prompt": "A "}, call, 2)
    assert (made.tokens.size, made.seed) == (8, 5)
    assert [one.seed for one in make_requests(toy_model.MODEL, "A ", call, 2, 3)] == [5, 6, 7]


def test_a_draft_follows_the_prompt_and_is_not_frozen():
    tokens, is_draft = _make({"prompt": "The ", "draft": "cat"}, gen_length=2)
    assert tokens.tolist() == _ids("The cat", 2)
    assert is_draft.tolist() == [False] * 4 + [True] * 3 + [False] * 2
    assert _make({"draft": "cat"})[0].tolist() == _ids("cat")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": "a", "tokens": [1]}, "prompt and tokens cannot be combined; pass only one"),
        ({"prompt": "a", "template": "a"}, "prompt and template cannot be combined"),
        ({"template": "a cat"}, "template has no <hole>; write <hole:8>"),
        ({"template": "a<hole:0>"}, "<hole:0> is a gap of 0 tokens, outside 1 to 32"),
        ({"template": "a<hole:-3>"}, "<hole:-3> is a gap of -3 tokens"),
        ({"template": "a<hole>"}, "<hole> is a gap of 0 tokens"),
        (
            {"template": "a<hole:40>"},
            "<hole:40> is a gap of 40 tokens",
        ),
        ({"template": "a<hole:30> cat"}, "template of 35 tokens, including holes, exceeds"),
        ({"prompt": 0}, "prompt=0 is not a string"),
        ({"template": 3}, "template=3 is not a string"),
        ({"prompt": ["a"]}, "prompt=['a'] is not a string"),
        ({"tokens": []}, "tokens must be a non-empty list of ids"),
        ({"tokens": [1.5]}, "tokens must be a non-empty list of ids"),
        ({"tokens": [[1], [1, 2]]}, "tokens must be a non-empty list of ids"),
        ({"tokens": [99]}, "tokens contain id 99, outside the vocabulary of"),
        ({"tokens": [1, MASK]}, "tokens contain MASK"),
        ({"tokens": [1], "infill": True}, "tokens contain no MASK"),
        ({"tokens": [1], "infill": 1}, "infill=1 is not a bool"),
        ({"prompt": "a", "infill": True}, "infill requires tokens"),
        ({"tokens": [MASK] * 33, "infill": True}, "tokens of 33 tokens, including holes, exceeds"),
        ({"draft": ""}, "draft is empty"),
        ({"draft": "a" * 33}, "prompt and draft of 33 tokens"),
        ({"template": "<hole:1>", "draft": "a"}, "draft follows a prompt"),
        ({"prompt": "a" * 32}, "prompt of 32 tokens leaves no space on the canvas of 32"),
    ],
)
def test_bad_request_is_refused_in_one_line(asked, said):
    with pytest.raises(ValueError, match="^[^\n]*$") as refusal:
        _make(asked)
    assert said in str(refusal.value)
