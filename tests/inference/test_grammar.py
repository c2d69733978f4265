"""Grammars as regular expressions: loops are exact, other recursion ends at a depth."""

import itertools
import re

import pytest

from benchmarks.schemas import GRAMMARS
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.grammar import is_grammar, regex_of_grammar
from dlm_jax.inference.structure import Structures

LAUGHS = (
    "\n".join(f"x{place} ::= x{place + 1} x{place + 1}" for place in range(25)) + '\nx25 ::= ""'
)


def test_sums_nest_to_the_depth():
    grammar = """
        # sums
        root ::= term ("+" term)*
        term ::= [0-9]+ | "(" root ")"
    """
    pattern = regex_of_grammar(grammar, depth=2)
    assert re.fullmatch(pattern, "1+(2+(3+45))+6")
    assert not re.fullmatch(pattern, "(((1)))") and not re.fullmatch(pattern, "1+")
    assert re.fullmatch(regex_of_grammar(grammar), "(((1)))")


@pytest.mark.parametrize(
    ("grammar", "letters"),
    [('root ::= "a" root | "b"', "ab"), ('root ::= root "a" | "b" | "c"', "abc"),
     ('root ::= ("a" | "b"?){2} [^a]', "abc"), ('root ::= "a\\x62" .\n  | "c"', "abc"),
     ('root ::= "a" root "b" | "c"', "abc")],
)  # fmt: skip
def test_texts_are_those_of_the_rules(grammar, letters):
    texts = {
        'root ::= "a" root | "b"': "a*b", 'root ::= root "a" | "b" | "c"': "[bc]a*",
        'root ::= ("a" | "b"?){2} [^a]': "(a|b?){2}[^a]", 'root ::= "a\\x62" .\n  | "c"': "ab.|c",
        'root ::= "a" root "b" | "c"': "c|acb|aacbb|aaacbbb",
    }[grammar]  # fmt: skip
    for size in range(6):
        for text in map("".join, itertools.product(letters, repeat=size)):
            found = re.fullmatch(regex_of_grammar(grammar), text)
            assert (found is None) == (re.fullmatch(texts, text) is None), text


def test_a_grammar_is_a_structure():
    letters = CharacterTokenizer.of("0123456789+*-()xyesno,=ab")
    known = Structures(letters, letters.vocab_size, (letters.eos_id,), letters.banned_ids)
    for grammar, pattern in GRAMMARS.items():
        assert is_grammar(grammar) and not is_grammar(pattern)
        for text in ("1+2*3", "((x))", "a=12,b=3", "yes,no,yes"):
            fits = known.automaton(grammar).accepts(letters.encode(text))
            assert fits == (re.fullmatch(pattern, text) is not None)
    with pytest.raises(ValueError, match="structure='root ::= x' cannot be used: line 1"):
        known.automaton("root ::= x")


@pytest.mark.parametrize(
    ("grammar", "told"),
    [("a ::= [b]", "no rule 'root'"), ('root ::= "a', "line 1 .* cannot be parsed"),
     ('root ::= (\n"a"', "opens a group"), ("root ::= *", "nothing to repeat"),
     ("root ::= root", "depth of at most 3"), ('root ::= "a"\n\n"b"', "line 3 .* not begin"),
     ('root ::= "a"\nroot ::= "b"', "line 2 .* again"), ("root ::= a\n  b", "not begin a rule"),
     ('root ::= "a"\n  | x', "line 2 .* refers to 'x'"),
     ("root ::= root root root root [0-9] | [0-9]", "rule 'root' .* more than"),
     ("root ::= x0\n" + LAUGHS, "rule 'x.*' of the grammar expands to more than")],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_by_line(grammar, told):
    with pytest.raises(ValueError, match=told):
        regex_of_grammar(grammar, longest=200)
