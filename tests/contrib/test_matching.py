"""A row held to a regular expression, position by position."""

import re

import candidate_cases
import numpy as np
import pytest
import toy_model

import dlm_jax
from dlm_jax.contrib import matching as matching_module
from dlm_jax.contrib.matching import matching

ALPHABET = "ab0123456789.-"
END = len(ALPHABET)
EVEN = [1 / (END + 1)] * (END + 1)


def _decode(ids):
    """The last id ends a text and stands for none."""
    return "".join(ALPHABET[token] for token in ids if token != END)


def _write(pattern, length, *, given="", seed=0, probabilities=EVEN, **changes):
    """A text of `length` new tokens behind a given one, as the loop would have it written."""
    rng = np.random.default_rng(seed)
    sampler = matching(pattern, _decode)
    tokens = np.array([ALPHABET.index(letter) for letter in given] + [-1] * length)
    for index in range(len(given), tokens.size):
        tokens[index] = sampler(
            candidate_cases.make(
                probabilities,
                tokens=tokens.copy(),
                is_hole=tokens < 0,
                first=len(given),
                index=index,
                uniform=rng.random(),
                **changes,
            )
        )
    return tokens


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        (r"\d\d-\d\d", 5),
        (r"[ab]+|\d+", 6),
        (r"\d+(\.\d+)*", 7),
        (r"(a|b\d)*", 1),
        (r"(?!00)\d\d", 2),
        (r"", 3),
        (r"\d{2}", 5),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_the_finished_text_matches_from_end_to_end(pattern, length, seed):
    tokens = _write(pattern, length, given="a-b", seed=seed)
    assert re.fullmatch(pattern, _decode(tokens[3:]))


def test_what_ends_a_text_comes_only_after_a_match():
    mostly_end = [0.001] * END + [1 - 0.001 * END]
    for seed in range(5):
        tokens = _write(r"\d{2}(\.\d)?", 6, seed=seed, probabilities=mostly_end)
        assert tokens.tolist()[2:] == [END] * 4


def test_a_greedy_row_takes_the_likeliest_that_fits():
    falling = 0.5 ** np.arange(1, END + 2)
    assert _decode(_write(r"\d[ab]-", 3, probabilities=falling, is_greedy=True)) == "0a-"


def test_no_candidate_that_fits_is_refused_by_row_and_position():
    with pytest.raises(ValueError, match=r"^row 4: none of the 15 candidates .* at position 3;"):
        _write(r"a[^\x00-\uffff]", 3, given="b.", row=4)
    with pytest.raises(ValueError, match="at position 2;"):
        _write(r"\d{5}", 3)


def test_a_hole_on_the_left_is_refused_and_the_order_named():
    candidates = candidate_cases.make(EVEN, index=2, is_hole=np.array([False, True, True]))
    with pytest.raises(ValueError, match=r"^row 0: position 2 has a hole .* at 1; use order='left"):
        matching("a*", _decode)(candidates)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^pattern='\(' is not a regular expression: .*"):
        matching("(", _decode)


def test_a_pattern_that_takes_for_ever_is_given_up_in_one_line(monkeypatch):
    monkeypatch.setattr(matching_module, "PATIENCE", 0.05)
    tokens = np.zeros(41, np.int64)
    candidates = candidate_cases.make(
        EVEN, tokens=tokens, is_hole=np.arange(41) == 40, row=3, index=40
    )
    sampler = matching("(a|a)*[bc]", lambda ids: "a" * len(ids))
    with pytest.raises(
        ValueError, match=r"row 3: pattern=.* takes more than 0.05 s at position 40"
    ):
        sampler(candidates)


@pytest.mark.parametrize(
    ("tokens", "index", "allowed"),
    [
        ([-1, -1, -1], 0, [0]),
        ([0, 1, -1], 2, [2]),
        ([0, -1, -1], 1, [1]),
        # "abc" needs three tokens; at the last of two, nothing makes a match.
        ([0, -1], 1, []),
    ],
)
def test_a_match_is_whole_at_the_last_hole_and_at_an_id_without_text(tokens, index, allowed):
    """The candidates are a, b, c and EOS; EOS is no text."""
    tokens = np.array(tokens)
    candidates = candidate_cases.make(
        [0.25] * 4, tokens=tokens, is_hole=tokens < 0, index=index, is_greedy=True
    )
    choose = matching("abc", lambda ids: "".join("abc"[token] for token in ids if 0 <= token < 3))
    for likeliest in range(4):
        order = np.argsort(np.arange(4) != likeliest, kind="stable")
        now = candidates._replace(ids=candidates.ids[order])
        if allowed:
            assert choose(now) in allowed
        else:
            with pytest.raises(ValueError, match="none of the 4 candidates is allowed"):
                choose(now)


def test_one_row_obeys_and_the_others_do_not_notice():
    settings = {"gen_length": 5, "steps": 5, "order": "left_to_right", "chain": ("temperature",)}
    decode = toy_model.TOKENIZER.decode
    prompts = ["A ", {"prompt": "The ", "host_sampler": matching("[ae]{5}", decode)}]
    ours = dlm_jax.generate(toy_model.MODEL, prompts, seed=30, **settings)
    plain = dlm_jax.generate(toy_model.MODEL, ["A ", "The "], seed=30, **settings)
    assert re.fullmatch("The [ae]{5}", ours.texts[1]) and ours.texts[1] != plain.texts[1]
    assert ours.texts[0] == plain.texts[0]
    with pytest.raises(ValueError, match="use order='left_to_right' and as many steps as new"):
        dlm_jax.generate(toy_model.MODEL, prompts, **settings | {"steps": 2})
