"""Held-out text with one misprint per row, and the quality of repairs.

A letter is missing, doubled or wrong, two letters are missing, doubled or transposed, or a word is
replaced by a longer or shorter word. No space is added or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("missing", "doubled", "longer", "shorter")
MORE_KINDS = ("two missing", "two doubled", "transposed", "wrong")


class Repair(NamedTuple):
    """One row of the task.

    Attributes:
      prompt: given text before the damage.
      damaged: the text to repair.
      original: the text before the damage.
      kind: kind of damage, one of `KINDS` or `MORE_KINDS`.
    """

    prompt: str
    damaged: str
    original: str
    kind: str


def make_repairs(
    held_out: str,
    corpus: str,
    seed: int,
    number: int,
    *,
    prompt: int = 64,
    length: int = 64,
    kinds: Sequence[str] = KINDS,
) -> list[Repair]:
    """Makes `number` rows from the whole text, with alternating kinds."""
    rng = np.random.default_rng(seed)
    vocabulary: dict[int, list[str]] = {}
    for word in corpus.split():
        if word.isalpha() and word.islower():
            vocabulary.setdefault(len(word), []).append(word)
    found: list[Repair] = []
    while len(found) < number:
        start = int(rng.integers(0, len(held_out) - prompt - length))
        text = held_out[start + prompt : start + prompt + length]
        kind = kinds[len(found) % len(kinds)]
        damaged = _damaged(text, kind, vocabulary, rng)
        if damaged is not None:
            found.append(Repair(held_out[start : start + prompt], damaged, text, kind))
    return found


def _damaged(
    text: str, kind: str, vocabulary: dict[int, list[str]], rng: np.random.Generator
) -> str | None:
    """The text with one misprint, not in its first or last word; None if no misprint fits."""
    places = [i for i in range(8, len(text) - 8) if text[i].isalpha()]
    if not places:
        return None
    place = int(rng.choice(places))
    if kind == "missing":
        return text[:place] + text[place + 1 :]
    if kind == "doubled":
        return text[:place] + text[place] + text[place:]
    if kind == "wrong":
        others = sorted({sign for sign in text if sign.islower()} - {text[place]})
        return text[:place] + str(rng.choice(others)) + text[place + 1 :] if others else None
    if kind in MORE_KINDS:
        return _two(text, kind, place)
    begin, end = place, place
    while text[begin - 1].isalpha() and begin > 1:
        begin -= 1
    while end < len(text) and text[end].isalpha():
        end += 1
    change = int(rng.integers(1, 4)) * (1 if kind == "longer" else -1)
    size = end - begin + change
    if begin < 4 or end > len(text) - 4 or size < 1 or size not in vocabulary:
        return None
    other = str(rng.choice(vocabulary[size]))
    return text[:begin] + other + text[end:]


def _two(text: str, kind: str, place: int) -> str | None:
    """The text with two damaged letters at a position; None if these are not two letters."""
    pair = text[place : place + 2]
    if not pair.isalpha():
        return None
    if kind == "two missing":
        return text[:place] + text[place + 2 :]
    if kind == "two doubled":
        return text[: place + 2] + pair + text[place + 2 :]
    return text[:place] + pair[::-1] + text[place + 2 :] if pair[0] != pair[1] else None


def distance(a: str, b: str) -> int:
    """Levenshtein distance: the minimum number of inserted, deleted and replaced characters."""
    row = np.arange(len(b) + 1)
    other = np.array([ord(sign) for sign in b])
    for number, sign in enumerate(a, 1):
        replaced = row[:-1] + (other != ord(sign))
        best = np.minimum(row[1:] + 1, replaced)
        best = np.concatenate([[number], best])
        # insertions run along the row
        row = np.minimum.accumulate(best - np.arange(best.size)) + np.arange(best.size)
    return int(row[-1])


class Score(NamedTuple):
    """The results of a set of rows.

    Attributes:
      exact: share of rows that equal the original.
      distance: mean edit distance to the original.
      by_kind: share of exact rows, by kind of damage.
    """

    exact: float
    distance: float
    by_kind: dict[str, float]


def score(repairs: Sequence[Repair], texts: Sequence[str]) -> Score:
    """The score of the repaired texts, which include the prompts."""
    ends = [text[len(r.prompt) :] for r, text in zip(repairs, texts, strict=True)]
    exact = np.array([end == r.original for r, end in zip(repairs, ends, strict=True)])
    far = [distance(end, r.original) for r, end in zip(repairs, ends, strict=True)]
    kinds = np.array([repair.kind for repair in repairs])
    return Score(
        float(exact.mean()),
        float(np.mean(far)),
        {kind: float(exact[kinds == kind].mean()) for kind in dict.fromkeys(kinds.tolist())},
    )
