"""Quality measures of texts, and n-gram samplers for comparison."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np

from dlm_jax.inference.model import Model
from dlm_jax.inference.scoring import Score, score


def judged(judge: Model, texts: list[str]) -> Score:
    """The scores of the texts under the judge.

    Characters unknown to the judge are omitted: a byte model can write characters that are missing
    in its corpus.
    """
    tokenizer = judge.tokenizer
    known = {tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    legible = ["".join(filter(known.__contains__, text)) for text in texts]
    return score(judge, legible)


def judged_bits(judge: Model, texts: list[str]) -> tuple[float, float]:
    """Bits per character of all texts under the judge, and the standard error."""
    return judged(judge, texts).bits_per_character


def words(text: str) -> list[str]:
    """Runs of letters in lower case, except the first and last, which the canvas can truncate."""
    return [word.lower() for word in re.findall(r"[^\W\d_]+", text)][1:-1]


def known_share(texts: list[str], known: set[str]) -> float:
    """Share of all words of the texts that are in `known`."""
    found = [word for text in texts for word in words(text)]
    return sum(word in known for word in found) / max(1, len(found))


def distinct_share(texts: list[str], n: int) -> float:
    """Share of distinct character n-grams; low for repetitive text."""
    grams = [text[i : i + n] for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def word_grams(texts: list[str], n: int) -> list[tuple[str, ...]]:
    """Runs of n words within each text."""
    found = []
    for text in texts:
        row = words(text)
        found += [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    return found


def copied_share(texts: list[str], corpus: str, n: int = 4) -> float:
    """Share of the runs of n words that occur in the corpus."""
    known = set(word_grams([corpus], n))
    grams = word_grams(texts, n)
    return sum(gram in known for gram in grams) / max(1, len(grams))


class NgramSampler:
    """Samples characters by how often they follow the last ``order - 1`` characters in a corpus."""

    def __init__(self, corpus: str, order: int):
        self._size = order - 1
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for place in range(len(corpus) - self._size):
            counts[corpus[place : place + self._size]][corpus[place + self._size]] += 1
        self._next = {
            context: (list(seen), np.cumsum(list(seen.values())))
            for context, seen in counts.items()
        }
        self._starts = [m.end() for m in re.finditer("\n\n", corpus[: -self._size - 1])]
        self._corpus = corpus

    def text(self, length: int, rng: np.random.Generator) -> str:
        """A text of `length` characters that begins like a speech of the corpus."""
        start = self._starts[rng.integers(len(self._starts))]
        written = self._corpus[start : start + self._size]
        while len(written) < length:
            context = written[len(written) - self._size :]
            if context not in self._next:
                context = self._corpus[start : start + self._size]
            characters, upto = self._next[context]
            written += characters[np.searchsorted(upto, rng.integers(upto[-1]), side="right")]
        return written[:length]
