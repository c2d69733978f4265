"""Figures of a text's quality that need no model."""

from __future__ import annotations

import re


def words(text: str) -> list[str]:
    """Runs of letters in lower case, without the first and last, which the canvas may have cut."""
    return [word.lower() for word in re.findall(r"[^\W\d_]+", text)][1:-1]


def known_share(texts: list[str], known: set[str]) -> float:
    """Share of the words of all texts together that are in `known`."""
    found = [word for text in texts for word in words(text)]
    return sum(word in known for word in found) / max(1, len(found))


def distinct_share(texts: list[str], n: int) -> float:
    """Share of different n-grams of characters among all of them; low for repetitive text."""
    grams = [text[i : i + n] for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / max(1, len(grams))
