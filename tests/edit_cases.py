"""Rows and what one step of edits must make of them, worked out by hand from the document."""

from __future__ import annotations

from typing import NamedTuple

LENGTH = 12
PAD, MASK, SPACE, NEW = 0, 1, 2, 3
SIGNS = {"_": SPACE, "?": MASK, "+": NEW}


class Case(NamedTuple):
    """A row, how it is edited, and what must come of it: `^` under the marks."""

    text: str
    after: str
    marks: str | None = None
    own: float | list[float] = 1.0
    right: float | list[float] = 0.0
    frozen: str = ""
    inserted: str = ""
    marked: str = ""
    insert: float = 0.0
    delete: float = 0.0
    margin: float = 0.0
    insert_margin: float = 0.0
    lam: float = 0.0
    cooldown: int = 0
    trims: bool = True
    target: int | None = None
    capacity: int = LENGTH
    refused: int = 0
    trimmed: int = 0


D1 = {"own": [0.2, 0.6, 0.5, 0.9], "right": [0.7, 0.1, 0.7, 0.3], "margin": 0.1, "lam": 0.5}
"""Gains of 0.5, -0.5 and 0.2 less the margin: the scores are 0.4, 0.05, 0.1 and, at the end, 0."""
MISFIT = {"own": 0.1, "right": 0.6}
CASES = {
    "a gap is as uncertain as the worse of its sides": Case(
        "abcd", "abc+d", "...^.", own=[0.5, 0.9, 0.8, 0.1], insert=0.25
    ),
    "ties go to the lower gap": Case("abcd", "ab+cd", own=[0.9, 0.9, 0.2, 0.9], insert=0.25),
    "counts are rounded down": Case("abcdef", "a+b+cdef", own=0.5, insert=0.49),
    "counts forgive what float32 loses": Case("abcdef", "a+b+c+def", own=0.5, insert=0.49999),
    "counts are of the unfrozen": Case("abcdef", "a+b+cdef", own=0.5, frozen="0", insert=0.49999),
    "holes are counted": Case("????ef", "????+ef", own=0.5, insert=0.2),
    "no gap between frozen tokens, but one behind them": Case(
        "abcd", "ab+c+d", own=0.5, frozen="01", insert=1.0
    ),
    "a token may push an island": Case(
        "abcd", "ab+c+d", own=[1.0, 1.0, 0.1, 1.0], frozen="3", insert=0.67
    ),
    "frozen tokens are certain": Case(
        "abcd", "abcd", own=[1.0, 0.1, 1.0, 1.0], frozen="1", insert=1.0
    ),
    "holes are certain": Case("a?cd", "a?cd", own=[1.0, 0.1, 1.0, 1.0], insert=1.0),
    "nothing is inserted without doubt": Case("abcd", "abcd", insert=1.0),
    "no gap behind the last": Case("ab", "a+b", own=[1.0, 0.1], insert=1.0),
    "the best deletion": Case("abcd", "bcd", "^..", delete=0.25, **D1),
    "the best two deletions": Case("abcd", "bd", "^^", delete=0.5, **D1),
    "all deletions that count": Case("abcd", "d", "^", delete=1.0, **D1),
    "what the margin leaves": Case("abcd", "bcd", delete=1.0, **(D1 | {"margin": 0.3, "lam": 0})),
    "a margin that leaves nothing": Case("abcd", "abcd", delete=1.0, **(D1 | {"margin": 0.6})),
    "the second difference alone": Case(
        "abc", "bc", own=[0.5, 0.2, 0.9], right=[0.5, 0.5, 0.0], frozen="1", delete=1.0, lam=0.5
    ),
    "no second difference": Case(
        "abc", "abc", own=[0.5, 0.2, 0.9], right=[0.5, 0.5, 0.0], frozen="1", delete=1.0
    ),
    # The terms of b and ? are gone, and ? itself stays.
    "a hole stays and silences its neighbours": Case("ab?de", "b?e", lam=0.5, delete=1.0, **MISFIT),
    "spaces that no edit inserted stay": Case(
        "a__def", "_f", inserted="2", delete=1.0, **MISFIT
    ),
    "frozen tokens stay": Case("abcd", "bd", "^^", frozen="1", delete=1.0, **MISFIT),
    "the last token stays": Case("abc", "c", "^", delete=1.0, **MISFIT),
    "the first unfrozen token may go": Case("abc", "ac", ".^", frozen="0", delete=0.5, **MISFIT),
    "no gap within its margin": Case(
        "abcd", "abc+d", own=[0.9, 0.6, 0.8, 0.1], insert=1.0, insert_margin=0.5
    ),
    "gaps cool down": Case(
        "abcdefg", "a+bcde+f+g", own=0.5, marked="3", insert=1.0, cooldown=1
    ),
    "tokens cool down": Case(
        "abcdefg", "bcdefg", marked="3", delete=1.0, cooldown=2, **MISFIT
    ),
    "a cooldown of 0 is none": Case("abc", "c", marked="0", delete=1.0, **MISFIT),
    "the budget goes past what cools down": Case(
        "abcdefg", "bcdfg", marked="2", delete=0.3, cooldown=1, **MISFIT
    ),
    "an insertion before a deletion": Case(
        "abc", "a+c", ".^^", own=[1.0, 0.1, 1.0], right=[0.0, 0.9, 0.0], insert=0.34, delete=0.34
    ),
    "insertions around a deletion": Case(
        "abc", "a++c", ".^^.", own=[1.0, 0.1, 1.0], right=[0.0, 0.9, 0.0], insert=0.67, delete=0.34
    ),
    "trimming takes the last token": Case(
        "abcd", "abc+", "...^", own=[1.0, 1.0, 0.9, 0.1], insert=0.25, capacity=4, trimmed=1
    ),
    "trimming takes the last that is not frozen": Case(
        "abcd", "ab+d", own=[1.0, 1.0, 0.1, 1.0], frozen="3", insert=0.34, capacity=4, trimmed=1
    ),
    "trimming may take what was inserted": Case(
        "abcd", "abcd", own=0.9, frozen="023", marked="0", cooldown=1, insert=1.0, capacity=4,
        trimmed=1,
    ),
    "what is full refuses": Case(
        "abcd", "abcd", own=0.5, insert=0.5, capacity=4, trims=False, refused=2
    ),
    "there is room for the best": Case(
        "abcd", "abc+d", own=[0.5, 0.5, 0.5, 0.1], insert=0.5, capacity=5, trims=False, refused=1
    ),
    "deletions make room": Case(
        "abcd", "+bcd", "^...", own=[0.1, 1.0, 1.0, 1.0], right=[0.9, 0.0, 0.0, 0.0], insert=0.25,
        delete=0.25, capacity=4, trims=False,
    ),
    "deletions keep the tail": Case(
        "abcd", "+bcd", own=[0.1, 1.0, 1.0, 1.0], right=[0.9, 0.0, 0.0, 0.0], insert=0.25,
        delete=0.25, capacity=4,
    ),
    "three at most to grow": Case("abcdef", "a+b+c+def", own=0.5, target=12),
    "no more than are missing": Case("abcdef", "a+bcdef", own=0.5, target=7),
    "no further than the capacity": Case("abcdef", "a+bcdef", own=0.5, target=12, capacity=7),
    "on top of the ratio": Case("abcdef", "a+b+cdef", own=0.5, target=7, insert=0.17),
    "to grow, nothing is pushed out": Case(
        "abcdef", "a+bcdef", own=0.5, target=7, insert=0.5, capacity=7, refused=3
    ),
    "growth without doubt": Case("abcdef", "a+b+c+def", target=12),
    "no growth without doubt by the ratio": Case("abcdef", "a+bcdef", target=7, insert=1.0),
    "three at most to shrink": Case("abcdef", "aef", frozen="0", target=1, **MISFIT),
    "no less than wanted": Case("abcdef", "acdef", frozen="0", target=5, **MISFIT),
    "shrinking of what fits": Case("abcdef", "def", target=1, own=0.6, right=0.1),
    "shrinking of what fits least well": Case(
        "abcdef", "adef", frozen="0", target=4, own=0.6, right=[0.1, 0.5, 0.4, 0.3, 0.2, 0.0]
    ),
    "misfits go before what fits": Case(
        "abcdef", "abcf", target=4, own=[0.6, 0.6, 0.6, 0.1, 0.6, 0.6],
        right=[0.1, 0.1, 0.1, 0.9, 0.2, 0.0], lam=0.0,
    ),
    "no shrinking of what fits by the ratio": Case(
        "abcdef", "bcdef", target=5, own=0.6, right=0.1, delete=1.0
    ),
    "a target does not shrink past what is protected": Case(
        "ab_c?", "_?", target=1, own=0.6, right=0.1
    ),
    "a row without anything": Case("", "", own=[], right=[], insert=1.0, delete=1.0, target=5),
    "a row of one": Case("a", "a", own=0.1, right=0.9, insert=1.0, delete=1.0, target=5),
}  # fmt: skip
