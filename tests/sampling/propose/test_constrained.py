"""The constrained fill: matches that are drawn together have the law of the model, conditioned."""

import json
import re

import constrained_cases as constrained
import numpy as np
import pytest
import toy

import dlm_jax
from dlm_jax.config import SamplingParams
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.structured import regex_of_schema

TOKENIZER = CharacterTokenizer.of('abcxyz0123456789{}[]":,. -\n')
NETWORK = build(toy.config(vocab_size=TOKENIZER.vocab_size))
MODEL = Model(
    NETWORK, toy.random_params(NETWORK), TOKENIZER, max_length=64,
    sample=SamplingParams(chain=("temperature", "top_k"), steps=24, order="random_filled"),
)  # fmt: skip
EOS = TOKENIZER.eos_id
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}
PATTERNS = [
    r"[abc]{2,5}x(y|zz)*", r"[0-9]{3}-[0-9]{2}", r"(a|b)*c", regex_of_schema(SCHEMA),
    regex_of_schema({"type": "object"}),
]  # fmt: skip


def _texts(prompts, model=MODEL, **settings):
    result = dlm_jax.generate(
        model, prompts, **{"gen_length": 24, "steps": 8, "fill": "constrained"} | settings
    )
    return result.texts, result


TEXTS = 5 * constrained.ROWS


def _few(*cases, few):
    return [case if case in few else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def _draws(case, logits_LV, number=TEXTS, **settings):
    pattern, canvas, own = constrained.CASES[case]
    return constrained.draws(pattern, canvas, logits_LV, number, **own | settings)


def _law(case, logits_LV, **settings):
    pattern, canvas, own = constrained.CASES[case]
    settings = {"temperature": own.get("temperature", 1.0)} | settings
    return constrained.law(pattern, canvas, logits_LV, **settings)


@pytest.mark.parametrize("case", _few(*constrained.CASES, few=["three steps"]))
def test_texts_have_the_law_of_independent_positions_that_match(case):
    logits_LV = constrained.logits_of(case)
    drawn_NL = _draws(case, logits_LV)
    assert constrained.p_value(drawn_NL, _law(case, logits_LV)) > 1e-3
    # The test would tell: texts of another temperature are none of this law.
    assert constrained.p_value(drawn_NL, _law(case, logits_LV, temperature=1.5)) < 1e-3


@pytest.mark.parametrize(
    "case", _few("one step", "six steps", "given between", few=["given between"])
)
def test_a_greedy_row_gets_the_likeliest_match(case):
    for seed in range(3):
        logits_LV = 3 * np.random.default_rng(seed).normal(size=(7, constrained.LETTERS.vocab_size))
        drawn_NL = _draws(case, logits_LV, 1, temperature=0.0)
        weights = _law(case, logits_LV, temperature=1.0)
        best = max(weights, key=weights.__getitem__)
        assert {tuple(text) for text in drawn_NL.tolist()} == {best}


def _logits(*rows):
    """Logits of the letters a, b and c at the positions of a canvas, the given first one aside."""
    logits_LV = np.full((7, constrained.LETTERS.vocab_size), -1e4)
    logits_LV[1:, :3] = np.tile(rows, (6 // len(rows), 1))
    logits_LV[1:, constrained.EOS] = -30.0
    return logits_LV


def test_a_greedy_match_is_the_best_over_ids_and_not_the_likeliest_sum_of_ids():
    logits_LV = _logits(np.log([0.3, 0.3, 0.4]), np.log([0.4, 0.2, 0.4]))
    (text,) = np.unique(constrained.draws(
        "([ab]a|cc)*", "a______", logits_LV, 1, steps=1, temperature=0.0), axis=0)  # fmt: skip
    assert constrained.LETTERS.decode(text) == "acccccc"


def test_no_id_that_the_chain_cuts_is_written_where_others_match():
    logits_LV = _logits([0.2, 0.1, 0.0])
    settings = {"steps": 1, "top_k": 2}
    drawn_NL = constrained.draws("(aa|bb|cc)*", "a______", logits_LV, 200, **settings)
    assert set(drawn_NL[:, 1:].ravel().tolist()) == {0, 1}


def test_no_banned_id_is_written_where_the_chain_cuts_all_others():
    logits_LV = _logits([0.2, 0.1, 1.0])
    settings = {"steps": 1, "top_k": 1, "logit_bias": {0: -np.inf}}
    drawn_NL = constrained.draws("([ab]c)*", "c______", logits_LV, 1, **settings)
    assert {constrained.LETTERS.decode(text) for text in drawn_NL} == {"cbcbcbc"}


def test_the_id_on_an_arc_does_not_depend_on_the_chance_of_the_arc():
    pattern, canvas = "([bc]a|ab)*", "c______"
    logits_LV = _logits([0.0, 0.0, 0.0])
    drawn_NL = constrained.draws(pattern, canvas, logits_LV, TEXTS, steps=1)
    assert constrained.p_value(drawn_NL, constrained.law(pattern, canvas, logits_LV)) > 1e-3


def test_a_structure_that_everything_matches_changes_no_bit():
    """Without EOS, behind which nothing but EOS matches."""
    logits_LV = constrained.logits_of("one step")
    logits_LV[:, constrained.EOS] = -1e4
    _, canvas, settings = constrained.CASES["three steps"]
    made = constrained.draws("(.|\n)*", canvas, logits_LV, 1, **settings)
    plain = constrained.draws("", canvas, logits_LV, 1, **settings)
    np.testing.assert_array_equal(made, plain)
    assert len(np.unique(made, axis=0)) > 50


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"order": "threshold", "block_length": 7}, marks=pytest.mark.slow),
        pytest.param(
            {"order": "random_filled", "schedule": "all", "remask": "scheduled"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["blocks", "remasked"],
)  # fmt: skip
def test_every_text_matches_in_any_number_of_steps(settings):
    _check_texts(MODEL, settings)


def _check_texts(model, settings):
    rng = np.random.default_rng(0)
    prompts = [
        {
            "prompt": "ab", "structure": PATTERNS[row % 5], "steps": int(rng.integers(7, 65)),
            "temperature": float(rng.choice([0.0, 0.5, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 5])), "seed": row,
        }
        for row in range(60)
    ]  # fmt: skip
    if "block_length" not in settings:
        prompts = [one | {"steps": max(1, one["steps"] - 6)} for one in prompts]
    texts, result = _texts(prompts, model, batch_size=20, gen_length=40, **settings)
    for text, one in zip(texts, prompts, strict=True):
        assert re.fullmatch(one["structure"], text[2:]), (one, text)
        if one["structure"] in PATTERNS[3:]:
            assert isinstance(json.loads(text[2:]), dict)
    assert {status.name for status in result.status} == {"DONE"}
    steps = np.array([one["steps"] for one in prompts])
    assert (result.forwards <= steps).all()
    # EOS is no text. A match that ends early ends the row, unless it is remasked to the last step.
    assert (result.lengths < 42).any()
    assert (result.forwards < steps).any() != ("remask" in settings)


def test_rows_without_structure_are_those_of_the_parallel_fill_whatever_runs_beside():
    some = {"gen_length": 40, "batch_size": 20}
    plain = [{"prompt": "ab", "seed": seed} for seed in range(5)]
    held = [one | {"structure": pattern} for one, pattern in zip(plain, PATTERNS, strict=True)]
    mixed = [one for pair in zip(plain, held, strict=True) for one in pair]
    together, _ = _texts(mixed, **some)
    assert together[::2] == _texts(plain, **some, fill="parallel")[0]
    assert together[1::2] == _texts(held, **some)[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"structure": "a{30}"}, "structure requires at least 30 new"),
        ({"structure": "a+", "ignore_eos": True}, "ignore_eos"),
        ({"structure": "a+", "resample": True, "schedule": "all"}, "resample=True changes"),
        ({"structure": "a+", "edit": True, "insert_ratio_start": 0.1}, "edit=True changes"),
        ({"structure": "a+", "order": "joint_threshold"}, "order='joint_threshold' changes"),
        ({"structure": "a+", "renoise_start": 0.1}, "renoise_start=0.1 changes"),
        ({"structure": "a+", "mirostat": 2, "chain": ("temperature", "mirostat")}, "mirostat=2"),
        ({"structure": "a+b", "logit_bias": {TOKENIZER.encode("b")[0]: -np.inf},
          "chain": ("bias",)}, "structure requires"),
        ({"structure": "a+", "read_back": True}, "draws tokens together"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        _texts(["ab"], **settings)


def test_a_given_text_that_no_match_contains_is_refused():
    with pytest.raises(ValueError, match="cannot match the given text"):
        _texts([{"template": "a<hole:2>b"}], steps=2, structure="c+", gen_length=0)
