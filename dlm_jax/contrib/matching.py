"""A host sampler that constrains a row to a regular expression."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import regex

from dlm_jax import Candidates
from dlm_jax.settings import SettingError

PATIENCE = 10.0
"""Time limit in seconds for matching the candidates of one position."""


def matching(pattern: str, decode: Callable[[Any], str]) -> Callable[[Candidates], int]:
    """Returns a host sampler that constrains a row to full matches of `pattern`.

    At each position, a candidate is allowed if the text up to and including it is a prefix of a
    match. `Candidates.choose` selects one of the allowed candidates according to the temperature
    and seed of the row. At the last position, and for any id without text, such as EOS, the text
    must be a full match. The sampler does not look ahead, so it raises an error if the pattern
    needs more or fewer tokens than remain in the row. Given tokens at the start of the row are not
    part of the text.

    A row with such a sampler needs ``order="left_to_right"`` and one step for every new token. If a
    token decodes to part of a character, the incomplete character is decoded as U+FFFD.

    Args:
      pattern: regular expression for the module `regex`, which accepts the syntax of `re`.
      decode: a function that maps ids to text, like `Tokenizer.decode`.

    For some patterns, such as ``(a|a)*[bc]``, the matching time doubles with every character. It is
    limited to `PATIENCE` seconds per position.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise SettingError("pattern", pattern, f"is not a regular expression: {error}") from None

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
                f"position {candidates.index}; avoid nested repeats"
            ) from None

    choose.__name__ = f"matching {pattern!r}"
    return choose


def _check_order(candidates: Candidates) -> None:
    holes = np.flatnonzero(candidates.is_hole[: candidates.index])
    if holes.size:
        raise ValueError(
            f"row {candidates.row}: position {candidates.index} has a hole on its left at "
            f"{holes[0]}; use order='left_to_right' and as many steps as new tokens"
        )
