"""Texts of tokens as one reads them: whole characters, also where one is spread over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_BROKEN = "\ufffd"
# A character has at most four bytes, so it spreads over at most four tokens.
_MOST_TOKENS = 4


class Piece(NamedTuple):
    """The text of the neighbouring positions ``start`` to ``stop - 1``."""

    start: int
    stop: int
    text: str


class Pieces:
    """Texts of ids, each decoded once.

    Args:
      decode: text of a sequence of ids; U+FFFD where their bytes are no whole character.
      names: what to show for ids that stand for no text; the rest of these show as ``⟨id⟩``.
    """

    def __init__(self, decode: Callable[[Any], str], names: Mapping[int, str] | None = None):
        self._decode = decode
        self._names = dict(names or {})
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, ids: Sequence[int]) -> str:
        """Text of neighbouring `ids`; never empty."""
        key = tuple(ids)
        if key not in self._known:
            text = self._decode(np.asarray(key, np.int32))
            name = self._names.get(key[0]) if len(key) == 1 else None
            self._known[key] = name or text or "".join(f"⟨{token}⟩" for token in key)
        return self._known[key]

    def is_part(self, token: int) -> bool:
        """True if `token` alone is no whole text, but may be one together with its neighbours."""
        return _BROKEN in self((token,))

    def joined(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        """The fewest of the first `ids` that are whole characters together, or None.

        The first one must be a part of a character.
        """
        for size in range(2, min(_MOST_TOKENS, len(ids)) + 1):
            if _BROKEN not in self(ids[:size]):
                return tuple(ids[:size])
        return None

    def split(self, tokens: np.ndarray, is_hole: np.ndarray) -> Iterator[Piece]:
        """The pieces of a canvas from left to right; a hole is a piece of its own, with no text."""
        ids, start = tokens.tolist(), 0
        hole_at = [*np.flatnonzero(is_hole).tolist(), len(ids)]
        for stop in hole_at:
            while start < stop:
                near = ids[start : min(stop, start + _MOST_TOKENS)]
                whole = (self.joined(near) if self.is_part(near[0]) else None) or near[:1]
                yield Piece(start, start + len(whole), self(whole))
                start += len(whole)
            if start < len(ids):
                yield Piece(start, start + 1, "")
            start = stop + 1
