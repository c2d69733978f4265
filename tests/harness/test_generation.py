"""Texts of the harness: they end at their stops, in any batch and order the same."""

import dataclasses

import pytest
import toy_model

from dlm_jax.config import SamplingParams
from dlm_jax.harness.lm import asked_of, texts

MODEL = dataclasses.replace(
    toy_model.MODEL,
    sample=SamplingParams(order="left_to_right", chain=("temperature",), ignore_eos=True, steps=12),
)
CONTEXTS = ["The cat", "A rat", "", "The", "A"]


def _texts(asked, slots=4):
    return texts(MODEL, asked, common={}, slots=slots, seed=0)


def _asked(**given):
    given = {"max_gen_toks": 12, "until": []} | given
    return [asked_of(MODEL, context, given) for context in CONTEXTS]


def test_any_batch_size_and_order_gives_the_same_texts():
    asked = _asked(do_sample=True, temperature=1.0)
    found = _texts(asked)
    assert _texts(asked, slots=1) == found
    assert _texts(asked[::-1], slots=2)[::-1] == found
    assert [len(text) for text in found] == [12] * 5 and len(set(found)) == 5


def test_stops_and_lengths_are_obeyed():
    whole = _texts(_asked())
    stop = whole[0][4:6]
    cut = _texts([asked_of(MODEL, "The cat", {"until": [stop, "zzz"], "max_gen_toks": 12})])
    assert cut == [whole[0][: whole[0].index(stop)]]
    short = _texts([asked_of(MODEL, "The cat", {"until": [], "max_gen_toks": 3, "steps": 3})])
    assert len(short[0]) == 3


def test_no_tokens_are_no_text_and_no_canvas():
    none = asked_of(MODEL, "The cat", {"until": [], "max_gen_toks": 0})
    some = asked_of(MODEL, "The cat", {"until": [], "max_gen_toks": 3, "steps": 3})
    found = _texts([none, some, none])
    assert [len(text) for text in found] == [0, 3, 0]


@pytest.mark.parametrize(
    ("given", "told"),
    [({name: value}, f"{name}={value!r}")
     for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
     for value in (-1, "x", 1.5, True)]
    + [({"do_sample": "yes"}, "do_sample='yes'"), ({"until": 3}, "until=3")],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(given, told):
    with pytest.raises(ValueError, match=told):
        asked_of(MODEL, "A", given)


def test_names_of_a_length_are_those_of_the_harness():
    assert asked_of(MODEL, "A", {"max_tokens": 3, "max_new_tokens": 2}).length == 2
    assert asked_of(MODEL, "A", {"max_gen_toks": None, "max_completion_tokens": 4}).length == 4


def test_without_sampling_the_temperature_is_zero():
    assert asked_of(MODEL, "A", {"temperature": 0.7}).settings["temperature"] == 0.0
    assert (
        asked_of(MODEL, "A", {"temperature": 0.7, "do_sample": True}).settings["temperature"] == 0.7
    )
    assert asked_of(MODEL, "A", {"until": "x"}).until == ("x",)


def test_unknown_settings_are_refused_with_their_request():
    with pytest.raises(ValueError, match="request 1: .*temprature"):
        _texts([asked_of(MODEL, "A", {}), asked_of(MODEL, "A", {"temprature": 1})])
    with pytest.raises(ValueError, match="until="):
        asked_of(MODEL, "A", {"until": [3]})
