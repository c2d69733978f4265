"""The text of an unfinished canvas, by the steps that wrote it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlm_jax.data import Tokenizer
from dlm_jax.inference.reader import UNFINISHED
from dlm_jax.inference.results import Row

HOLE = "\N{LIGHT SHADE}"
"""The text of a hole in a displayed canvas."""


def text_parts(
    tokenizer: Tokenizer, row: Row, start: int, end: int | None = None
) -> list[tuple[str, int | None]]:
    """Splits the canvas from `start` to `end` into runs of tokens that were written in the same
    step.

    The texts of the runs concatenate to the text of the canvas. Each run is paired with the
    step that wrote it, -1 for tokens that no step wrote, or None for holes, which are shown as
    `HOLE`. A character whose tokens were written in several steps belongs to the run of its
    last token.
    """
    tokens, ages = row.tokens[start:end], row.committed[start:end]
    ages = np.where(tokens == tokenizer.mask_id, -2, ages)
    edges = np.flatnonzero(np.diff(ages, prepend=-3, append=-3)).tolist()
    parts: list[tuple[str, int | None]] = []
    segment: list[tuple[int, int]] = []
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        if ages[first] == -2:
            parts += _between_holes(tokenizer, tokens, ages, segment)
            parts.append((HOLE * (last - first), None))
            segment = []
        else:
            segment.append((first, last))
    return parts + _between_holes(tokenizer, tokens, ages, segment)


def _between_holes(
    tokenizer: Tokenizer, tokens: np.ndarray, ages: np.ndarray, runs: Sequence[tuple[int, int]]
) -> list[tuple[str, int | None]]:
    """Decodes the runs between two holes into texts that concatenate to the text between the
    holes.
    """
    if not runs:
        return []
    begin, end = runs[0][0], runs[-1][1]
    whole = tokenizer.decode(tokens[begin:end])
    texts = [tokenizer.decode(tokens[first:last]) for first, last in runs]
    if "".join(texts) != whole:  # a decoder strips spaces, or a character spans two runs
        upto = [tokenizer.decode(tokens[begin:last]) for _, last in runs[:-1]]
        places = [0, *(len(text.rstrip(UNFINISHED)) for text in upto), len(whole)]
        texts = [whole[a:b] for a, b in zip(places[:-1], places[1:], strict=True)]
    return [(text, int(ages[first])) for text, (first, _) in zip(texts, runs, strict=True)]
