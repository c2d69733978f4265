"""Regular expressions as automata: they match what Python's own module matches."""

import itertools
import re

import pytest
import regex

from dlm_jax.inference.structure import characters

ALPHABET = "ab1 \n-"


def _accepts(found, text):
    state = found.start
    for character in text:
        state = found.next_SK[state, found.class_of[character]]
    return bool(found.is_final_S[state])


@pytest.mark.parametrize(
    "pattern",
    ["", "a", "a|b", "(ab)*", "(ab|ba)*1?", "a{2}", "a{1,3}b{0,2}", "a{2,}", "(a|b)*abb", "[^a]+",
     r"\d\s?", r"[\w-]+", r"\D\W", ".*1", "(?:a+|b)+?", "((a|)b)*", "[a-b1]{2}", "x", "(|a)(|b)",
     "^a|b$", r"\A(^ab|1)\Z", "[$^a]", "a(?<=a)b", "(?<=a)b?", "(?<!a)b|.(?<=[ab])1",
     "a((?:(?<=a)|(?<!a)1)b*)*", "(a|b)*(?<![^a])"],
)  # fmt: skip
def test_it_matches_what_re_matches(pattern):
    found = characters(pattern, ALPHABET, most_states=100)
    assert not found.next_SK[0].any() and not found.is_final_S[0]
    for size in range(5):
        for text in map("".join, itertools.product(ALPHABET, repeat=size)):
            assert _accepts(found, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    "pattern", [r"\p{L}+", r"[\p{Nd}\n]\P{L}", r"[^\p{Letter}b]", r"\\p?|\p{^L}"]
)
def test_categories_are_those_of_regex(pattern):
    found = characters(pattern, ALPHABET + "\\pé", most_states=100)
    for size in range(3):
        for text in map("".join, itertools.product(ALPHABET + "\\pé", repeat=size)):
            assert _accepts(found, text) == (regex.fullmatch(pattern, text) is not None), text


def test_equal_states_are_one():
    # The dead state, and one for each number of letters that are still to come.
    assert len(characters("(aa|ab|ba|bb)", ALPHABET, most_states=100).next_SK) == 4
    assert len(characters("(a|b)*", ALPHABET, most_states=100).next_SK) == 2


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("(", "unterminated"), (r"(a)\1", "GROUPREF at position 3"),
     ("a^b", "AT at position 1"), (r"a\bb", "AT at position 1"),
     ("b(?=a)a", "ASSERT at position 1"), ("(?<=ab)b", "ASSERT at position 0"),
     (r"\p{Xy}", "not a Unicode general category"),
     ("(?i)a", "flags"), ("(?s:.)", "flags"), ("a{70000}", "too large"),
     ("(a|b)*a(a|b){9}", "more than 100 states"), ("(" * 5000 + ")" * 5000, "recursion")],
)  # fmt: skip
def test_what_it_does_not_know_is_refused(pattern, told):
    with pytest.raises(ValueError, match=told):
        characters(pattern, ALPHABET, most_states=100)
