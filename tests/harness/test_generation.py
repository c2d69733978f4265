"""Texts of the harness: they end at their stops, in any batch and order the same."""

import dataclasses

import pytest
import toy_model

from dlm_jax.config import SamplingParams
from dlm_jax.harness.lm import request_of, texts

MODEL = dataclasses.replace(
    toy_model.MODEL,
    sample=SamplingParams(order="left_to_right", chain=("temperature",), ignore_eos=True, steps=12),
)
CONTEXTS = ["The cat", "A rat", "", "The", "A"]


def _request(context="A", **given):
    return request_of(MODEL, context, {"max_gen_toks": 12} | given, {})


def _texts(*asked, slots=4):
    return texts(MODEL, asked, slots=slots)


def test_any_batch_size_and_order_gives_the_same_texts():
    asked = [_request(context, do_sample=True, temperature=1.0) for context in CONTEXTS]
    found = _texts(*asked)
    assert _texts(*asked, slots=1) == found
    assert _texts(*asked[::-1], slots=2)[::-1] == found
    assert [len(text) for text in found] == [12] * 5 and len(set(found)) == 5


def test_stops_and_lengths_are_obeyed():
    (whole,) = _texts(_request("The cat"))
    stop = whole[4:6]
    assert _texts(_request("The cat", until=[stop, "zzz"])) == [whole[: whole.index(stop)]]
    assert [len(text) for text in _texts(_request("The cat", max_gen_toks=3, steps=3))] == [3]


@pytest.mark.parametrize(
    ("given", "told"),
    [({name: value}, f"{name}={value!r}")
     for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
     for value in (0, "x", 1.5, True)]
    + [({"do_sample": "yes"}, "do_sample='yes'"), ({"until": 3}, "until=3"),
       ({"until": [3]}, "until="), ({"temprature": 1}, "temprature")],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(given, told):
    with pytest.raises(ValueError, match=told):
        request_of(MODEL, "A", given, {})


def test_names_and_defaults_are_those_of_the_harness():
    request, until = request_of(MODEL, "A", {"max_tokens": 3, "max_new_tokens": 2}, {})
    assert request.sample.gen_length == 2 and until == ()
    given = {"max_gen_toks": None, "max_completion_tokens": 4, "until": "x"}
    request, until = request_of(MODEL, "A", given, {})
    assert request.sample.gen_length == 4 and until == ("x",)
    for does_sample in (False, True):
        request, _ = _request(temperature=0.7, do_sample=does_sample)
        assert request.sample.temperature == (0.7 if does_sample else 0.0)
