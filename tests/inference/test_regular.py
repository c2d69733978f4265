"""Regular expressions as automata: they match what Python's own module matches."""

import itertools
import re

import pytest
from byte_automata import accepts

from dlm_jax.structured.regex import compile_regex

ALPHABET = "ab1 \n-"


@pytest.mark.parametrize(
    "pattern",
    ["", "a", "a|b", "(ab)*", "(ab|ba)*1?", "a{2}", "a{1,3}b{0,2}", "a{2,}", "(a|b)*abb", "[^a]+",
     r"\d\s?", r"[\w-]+", r"\D\W", ".*1", "(?:a+|b)+?", "((a|)b)*", "[a-b1]{2}", "x", "(|a)(|b)",
     "^ab$", r"\A(ab|1)\Z", "[$^a]", "a|ab", "(ab|a)(b1)?", "a*?b", "a{,2}",
     "[a-]", "[^-a]", "(?P<name>a)b", r"[\x30-1]", "a{", "}", "a{,}", "[]a]+", "[^]a]", r"\0|a",
     "(?<=a)b|a", "a?(?<!a)b", "a*(?<=a)(a|b)(?<!b)", r"(?:(?<=1)|(?<!1)-)a",
     r"[ab]*(?<=-)1|-(?<=\-)",
     "((?:(?<!1)-|(?<=1))[ab])*1", "(?<=a)", "(?<!a)",
     "((?<!b)(?<!-)a|b|-)*", "(|a|b){0,3}1"],
)  # fmt: skip
def test_it_matches_what_re_matches(pattern):
    automaton = compile_regex(pattern, most_states=4000)
    assert not automaton.next_SK[0].any() and not automaton.is_final_S[0]
    for size in range(5):
        for text in map("".join, itertools.product(ALPHABET, repeat=size)):
            assert accepts(automaton, text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("name", [r"\d", r"\w", r"\s", r"[^\W\d]", ".", r"[^a\s]"])
def test_a_class_has_the_characters_that_re_matches(name):
    automaton = compile_regex(name, most_states=4000)
    for code in [*range(0x3000), *range(0x3000, 0x110000, 37)]:
        if not 0xD800 <= code < 0xE000:
            assert accepts(automaton, chr(code)) == (re.fullmatch(name, chr(code)) is not None)


def test_characters_of_several_bytes_are_letters():
    automaton = compile_regex("[é-Ж中]😀?", most_states=100)
    assert accepts(automaton, "é") and accepts(automaton, "中😀") and not accepts(automaton, "é中")


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("(", "unterminated"), (r"(a)\1", "groupref is not supported"), ("a^b", "at is not supported"),
     (r"a\bb", "at is not supported"), ("b(?=a)a", "assert is not supported; use no flags"),
     ("(?<=ab)b", "look only behind at one ASCII character"), ("(^a)*", "only at the ends"),
     ("^a$|^b$", "only at the ends"),
     ("a*+", "possessive_repeat is not supported"), ("(?i)a", "flags"), ("(?s:.)", "flags"),
     ("a{70000}", "more than 100 states"), (r"\p{L}", "bad escape"),
     ("(a|b)*a(a|b){9}", "more than 100 states"), ("(" * 5000 + ")" * 5000, "nested too deeply"),
     ("(?<=\u00e9)a", "look only behind"), ("(a{99999}){99999}", "states before they are merged"),
     ("".join(rf"[\w{chr(n)}]" for n in range(58, 98)) * 3 + r"\w{800}", "states before they are"),
     ("".join(rf"[^\w{chr(n)}]" for n in range(1000, 1300)), "arcs of different characters"),
     (r"\ud800", "matches no text"), (r"[^\s\S]", "matches no text")],
)  # fmt: skip
def test_what_it_does_not_know_is_refused(pattern, told):
    with pytest.raises(ValueError, match=told):
        compile_regex(pattern, most_states=100)
