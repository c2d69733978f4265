"""The ids that a structure leaves are those that some filling of the other holes completes."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.data import CharacterTokenizer
from dlm_jax.sampling.transforms import At, Context, structure
from dlm_jax.sampling.transforms.structure import Structure
from dlm_jax.structured import Structures

TOKENIZER = CharacterTokenizer.of("abc")
MASK, EOS, PAD = TOKENIZER.mask_id, TOKENIZER.eos_id, TOKENIZER.pad_id
V = TOKENIZER.vocab_size
KNOWN = Structures(TOKENIZER, V, (EOS,), TOKENIZER.banned_ids)
# Rows of a pattern, of how many tokens are given, and of a canvas: ``_`` a hole, ``$`` EOS.
ROWS = [
    (r"(ab|ba)*c?", 0, "____"),
    (r"(ab|ba)*c?", 1, "c_a__"),
    (r"a{1,3}(b|c){2}", 2, "ab___c"),
    (r"[^a]+a", 0, "__a_"),
    (r"(a|b)*abb", 1, "a___$"),
    (r"a*", 3, "abc__"),
    (r"(ab)*", 0, "_b__"),
]


class _Row:
    def __init__(self, pattern):
        self.structure = KNOWN.automaton(pattern)


def _ids(canvas):
    special = {"_": MASK, "$": EOS}
    return [special[c] if c in special else int(TOKENIZER.encode(c)[0]) for c in canvas]


def _is_word(pattern, ids):
    """Whether ids are a text of the pattern with EOS, if anything, behind it."""
    text = "".join("$" if id_ == EOS else TOKENIZER.decode([id_]) for id_ in ids).rstrip("$")
    return "$" not in text and re.fullmatch(pattern, text) is not None


def _completing(pattern, given, canvas, place):
    """The ids at a hole with which some filling of the others is a word, by trying all."""
    ids = _ids(canvas)
    holes = [i for i, id_ in enumerate(ids) if id_ == MASK]
    found = set()
    for filling in itertools.product([*range(3), EOS], repeat=len(holes)):
        whole = list(ids)
        for hole, id_ in zip(holes, filling, strict=True):
            whole[hole] = id_
        if _is_word(pattern, whole[given:]):
            found.add(whole[place])
    return found


@pytest.fixture(scope="module", params=["words", "scattered"])
def left(request):
    """The ids that are left at each hole of each row, all rows side by side.

    Sets of states are reduced as words, or scattered as in automata of many states.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "scattered":
            patch.setattr(structure, "_MOST_REDUCED", 0)
        return _left()


def _left():
    longest = max(len(canvas) for _, _, canvas in ROWS) + 1
    tokens = np.full((len(ROWS), longest), PAD, np.int32)
    order = np.full(tokens.shape, -1, np.int32)
    is_visible = np.zeros(tokens.shape, bool)
    length = np.array([len(canvas) for _, _, canvas in ROWS], np.int32)
    for row, (_, given, canvas) in enumerate(ROWS):
        tokens[row, : len(canvas)] = _ids(canvas)
        is_visible[row, : len(canvas)] = tokens[row, : len(canvas)] != MASK
        order[row, given:] = 0
    transform = Structure.pack([_Row(pattern) for pattern, _, _ in ROWS], None)
    context = Context(*map(jnp.asarray, (tokens, order, is_visible, length)))
    ways = transform.init(context)
    holes = np.argwhere(tokens == MASK)
    at = At(
        jnp.asarray(holes[:, 0], jnp.int32), jnp.asarray(holes[:, 1], jnp.int32), jnp.zeros(0),
        jnp.ones(len(holes), bool),
    )  # fmt: skip
    logits = np.asarray(transform.apply(ways, jnp.zeros((len(holes), V)), at))
    return {
        tuple(hole): set(np.flatnonzero(np.isfinite(row)).tolist())
        for hole, row in zip(holes.tolist(), logits, strict=True)
    }


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_what_is_left_is_what_completes(left, row):
    pattern, given, canvas = ROWS[row]
    for place, character in enumerate(canvas):
        if character == "_":
            assert left[row, place] == _completing(pattern, given, canvas, place), place


def test_without_an_id_no_hole_becomes_it():
    a, b, c = (int(TOKENIZER.encode(letter)[0]) for letter in "abc")
    found = KNOWN.automaton("ac|bb").without(frozenset({a}))
    assert found.accepts([b, b]) and not found.accepts([a, c])
    start_S = np.arange(len(found.is_final_S)) == found.start
    behind_S = found.after(start_S, None)  # any id at a hole
    assert found.after(behind_S, b).any() and not found.after(behind_S, c).any()


def test_rows_without_structure_and_padding_are_left_alone():
    transform = Structure.pack([_Row("a*")], None)
    off = Structure(transform.arcs._replace(start=jnp.zeros(1, jnp.int32)))
    assert not off.is_active().any() and transform.is_active().all()
