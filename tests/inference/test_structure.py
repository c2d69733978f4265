"""Structure: every row matches its pattern, in any order, whatever runs beside it."""

import dataclasses
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import toy_model
from sampling.propose import test_constrained as constrained

import dlm_jax
from dlm_jax.config import SamplingParams
from dlm_jax.data import ByteTokenizer, CharacterTokenizer
from dlm_jax.inference.request import make_requests
from dlm_jax.sampling.positions import steps_needed
from dlm_jax.structured import Structures

TOKENIZER, PATTERNS = constrained.TOKENIZER, constrained.PATTERNS[:4]
MODEL = dataclasses.replace(
    constrained.MODEL, max_length=48, sample=SamplingParams(chain=("temperature",), steps=24)
)


def _texts(patterns, given=2, **settings):
    prompts = [{"prompt": "ab", "structure": pattern} for pattern in patterns]
    settings = {"gen_length": 24, "steps": 24, "seed": 1} | settings
    result = dlm_jax.generate(MODEL, prompts, **settings)
    return [text[given:] for text in result.texts], result


def test_a_recommended_ignore_eos_no_longer_holds_beside_a_structure():
    model = dataclasses.replace(MODEL, sample=dataclasses.replace(MODEL.sample, ignore_eos=True))
    for settings, ignores in (({}, True), ({"structure": "a+"}, False)):
        (request,) = make_requests(model, "ab", {"gen_length": 24} | settings)
        assert request.sample.ignore_eos == ignores


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "left_to_right"},
        pytest.param({"order": "low_confidence", "block_length": 6}, marks=pytest.mark.slow),
        {"order": "random"},
        pytest.param(
            {"order": "left_to_right", "temperature": 0.0},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["left_to_right", "blocks", "any_order", "greedy"],
)
def test_every_text_matches_its_pattern(settings):
    texts, result = _texts(PATTERNS * 2, **settings)
    for text, pattern in zip(texts, PATTERNS * 2, strict=True):
        assert re.fullmatch(pattern, text), (text, pattern)
    for text in texts[3::4]:
        assert set(json.loads(text)) == {"a", "b"}
    assert {status.name for status in result.status} == {"DONE"}


def test_a_row_ends_when_its_text_is_whole():
    _, result = _texts(PATTERNS * 2, order="left_to_right")
    assert (result.steps == result.lengths - 2).all() and (result.steps < 24).any()
    assert (result.forwards == result.steps).all()


def test_a_row_is_the_same_whatever_patterns_run_beside_it():
    together, _ = _texts(PATTERNS, order="random", batch_size=4)
    some = PATTERNS[1::2]  # every one is alone below
    apart = [_texts([pattern] * 4, order="random", batch_size=4)[0] for pattern in some]
    result = [
        dlm_jax.generate(
            MODEL, [{"prompt": "ab", "structure": p, "seed": 1 + place}], gen_length=24, steps=24,
            order="random",
        ).texts[0][2:]
        for place, p in enumerate(PATTERNS)
    ]  # fmt: skip
    assert together == result
    assert [texts[place] for place, texts in zip((1, 3), apart, strict=True)] == together[1::2]


def test_given_text_behind_the_gap_is_part_of_the_match():
    """A scaffold: the fixed parts stand there, and the gaps are filled to fit them."""
    template = '{"a": <hole:2>, "b": "<hole:2>"}'
    result = dlm_jax.generate(
        MODEL, [{"template": template, "structure": r'[0-9]{2}, "b": "(x|yz)"\}'}],
        steps=4, order="random",
    )  # fmt: skip
    assert re.fullmatch(r'\{"a": [0-9]{2}, "b": "yz"\}', result.texts[0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"structure": "("}, "structure='\\('"),
        ({"structure": "[A-Z]"}, "structure='\\[A-Z\\]'"),
        ({"structure": "a+", "steps": 5}, "steps=5 is less than the 24"),
        ({"structure": "a+", "order": "threshold"}, "order='threshold'"),
        ({"structure": "a+", "schedule": "cosine"}, "schedule='cosine'"),
        ({"structure": "a+", "remask": "scheduled"}, "tokens that do not change"),
        ({"structure": 3}, "structure=3"),
        ({"structure": "a" * 40_000}, "40000 characters"),
    ],
)
def test_what_cannot_be_held_is_refused(settings, told):
    settings = {"gen_length": 24, "steps": 24} | settings
    with pytest.raises(ValueError, match=told):
        dlm_jax.generate(MODEL, ["ab"], **settings)


def test_a_structure_of_n_tokens_fits_n_holes_and_takes_the_steps_of_its_fullest_block():
    assert steps_needed(np.arange(3, 13), 0, 3) == 10
    assert steps_needed(np.arange(3, 13), 4, 3) == 12
    assert steps_needed(np.array([0, 5, 6, 7]), 4, 0) == 6
    make_requests(MODEL, "", {"structure": "a{3}", "gen_length": 3})
    with pytest.raises(ValueError, match="requires at least 3 new tokens, but gen_length=2"):
        make_requests(MODEL, "", {"structure": "a{3}", "gen_length": 2})


def test_tokens_that_stand_for_several_characters_are_letters_too():
    shipped = dlm_jax.load()
    automaton = shipped.structures.automaton(r"(ROMEO|JULIET): [a-z ,']{1,40}\.")
    ids = shipped.tokenizer.encode("ROMEO: what is it, my lord.")
    assert automaton.accepts(ids)
    assert not automaton.accepts(shipped.tokenizer.encode("ROMEO: What!"))
    assert dataclasses.is_dataclass(toy_model.MODEL)


def test_tokens_that_are_a_part_of_a_character_are_letters_too():
    tokenizer = ByteTokenizer()
    automaton = Structures(
        tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,), tokenizer.banned_ids
    ).automaton("[а-я]{2}|中")
    for text, is_match in (("да", True), ("中", True), ("д", False), ("дz", False)):
        assert automaton.accepts(tokenizer.encode(text)) == is_match
    assert not automaton.accepts(tokenizer.encode("中")[:2])
    assert automaton.accepts([*tokenizer.encode("中"), tokenizer.eos_id])
    assert automaton.fewest_S[automaton.start] == 3


class _TwoNames(CharacterTokenizer):
    """The last letter is a second name of the first, as published files have "a" and <0x61>."""

    def decode(self, ids):
        return super().decode(np.where(np.asarray(ids) == 2, 0, ids))


def test_all_ids_of_a_text_fit_where_the_text_fits():
    tokenizer = _TwoNames("abc")
    structures = Structures(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,), ())
    automaton = structures.automaton("ab")
    assert automaton.accepts([0, 1]) and automaton.accepts([2, 1])
    assert not automaton.accepts([0, 2])


def _known():
    return Structures(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.eos_id,), TOKENIZER.banned_ids)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(a{1000}){1000}", "takes more than 262144 states before they are merged"),
        ("(a|b)*a(a|b){24}", "has more than 32766 states"),
        ("(?:a?b?c?d?){2000}", "takes more than 4194304 steps"),
        ("((a?){40}){50}", "takes more than 4194304 steps"),
    ],
)
def test_a_pattern_that_takes_too_much_work_is_refused_by_name(pattern, told):
    with pytest.raises(ValueError, match=told) as refusal:
        _known().automaton(pattern)
    assert f"structure={pattern[:20]!r}"[:-1] in str(refusal.value)


def test_nobody_waits_for_the_compilation_of_another_pattern(monkeypatch):
    known, goes_on, began = _known(), threading.Event(), threading.Event()
    cached = known.automaton("[abc]")
    compile_ = known._compile

    def slow(pattern):
        began.set()
        assert pattern != "slow" or goes_on.wait(60)
        return compile_(pattern)

    monkeypatch.setattr(known, "_compile", slow)
    with ThreadPoolExecutor() as threads:
        threads.submit(known.automaton, "slow")
        try:
            assert began.wait(20) and known.automaton("[abc]") is cached
            assert known.automaton("b+").accepts(TOKENIZER.encode("bb"))
        finally:
            goes_on.set()
