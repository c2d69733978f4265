"""Host samplers that hold a row to a rule: a regular expression, from left to right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import regex

from dlm_jax.inference.candidates import Candidates, HostSampler

PATIENCE = 10.0
"""Seconds that the candidates of one position may take to be matched."""


def matching(pattern: str, decode: Callable[[Any], str]) -> HostSampler:
    """A host sampler whose row writes a text that `pattern` matches from end to end.

    Each position takes a candidate after which the text can still grow into a match, as
    `Candidates.choose` does: by temperature and seed of the row. The last position takes one that
    completes the match, and so does an id that stands for no text, such as one that ends a
    generation. Nothing looks ahead: a pattern that needs more or fewer tokens than the row has
    left ends in the error below. Given tokens at the start of the row are not part of the text.

    A row with such a sampler needs ``order="left_to_right"`` and a step for every new token.
    Where tokens are parts of characters, an unfinished character counts as U+FFFD.

    Args:
      pattern: of the module `regex`, which reads what `re` does.
      decode: text of ids, as `Tokenizer.decode`.

    Some patterns, such as ``(a|a)*[bc]``, take a time that doubles with every character; a position
    gets `PATIENCE` seconds.

    Raises:
      ValueError: `pattern` is none. From the sampler: no candidate fits, matching takes too long,
        or a hole stands left of the position; the line names row, position and remedy.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from None

    def choose(candidates: Candidates) -> int:
        _check_order(candidates)
        written = candidates.tokens[candidates.first : candidates.index]
        before = decode(written)
        is_last = not candidates.is_hole[candidates.index + 1 :].any()
        end = time.monotonic() + PATIENCE

        def fits(token: int) -> bool:
            text = decode(np.append(written, token))
            is_whole = is_last or text == before
            left = max(end - time.monotonic(), 1e-3)
            return compiled.fullmatch(text, partial=not is_whole, timeout=left) is not None

        try:
            return candidates.choose([fits(token) for token in candidates.ids])
        except TimeoutError:
            raise ValueError(
                f"row {candidates.row}: pattern={pattern!r} takes more than {PATIENCE:g} s at "
                f"position {candidates.index}; write one without repeats inside repeats"
            ) from None

    choose.__name__ = f"matching {pattern!r}"
    return choose


def _check_order(candidates: Candidates) -> None:
    holes = np.flatnonzero(candidates.is_hole[: candidates.index])
    if holes.size:
        raise ValueError(
            f"row {candidates.row}: position {candidates.index} has a hole on its left, at "
            f"{holes[0]}; use order='left_to_right' and as many steps as new tokens"
        )
