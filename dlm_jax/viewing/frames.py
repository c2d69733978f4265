"""Snapshots of a row (frames), the changes between them, and the texts of their tokens.

Shape legend: ``n`` is the number of live positions of the row; frames exclude PAD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from dlm_jax import Row
from dlm_jax.data import Tokenizer

_BROKEN = "\ufffd"
# A character has at most four bytes, and therefore at most four tokens.
_MOST_TOKENS = 4


class Span(NamedTuple):
    """The text at the adjacent positions ``start`` to ``stop - 1``."""

    start: int
    stop: int
    text: str


class Pieces:
    """Decodes ids to texts and caches the results.

    Args:
      decode: maps a sequence of ids to text, with U+FFFD for incomplete characters.
      names: labels for ids without text; ids without a label are shown as ``⟨id⟩``.
    """

    def __init__(self, decode: Callable[[Any], str], names: Mapping[int, str] | None = None):
        self._decode = decode
        self._names = dict(names or {})
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of adjacent `ids`; never empty."""
        key = tuple(ids)
        if key not in self._known:
            text = self._decode(np.asarray(key, np.int32))
            name = self._names.get(key[0]) if len(key) == 1 else None
            self._known[key] = name or text or "".join(f"⟨{token}⟩" for token in key)
        return self._known[key]

    def is_part(self, token: int) -> bool:
        """Returns whether `token` is incomplete, but can form a character with its neighbours."""
        return _BROKEN in self((token,))

    def joined(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        """The shortest prefix of `ids` that decodes to complete characters, or None.

        The first id must be part of a character.
        """
        for size in range(2, min(_MOST_TOKENS, len(ids)) + 1):
            if _BROKEN not in self(ids[:size]):
                return tuple(ids[:size])
        return None

    def split(self, tokens: np.ndarray, is_hole: np.ndarray) -> Iterator[Span]:
        """The pieces of a canvas from left to right; each hole is a piece without text."""
        ids, start = tokens.tolist(), 0
        hole_at = [*np.flatnonzero(is_hole).tolist(), len(ids)]
        for stop in hole_at:
            while start < stop:
                near = ids[start : min(stop, start + _MOST_TOKENS)]
                whole = (self.joined(near) if self.is_part(near[0]) else None) or near[:1]
                yield Span(start, start + len(whole), self(whole))
                start += len(whole)
            if start < len(ids):
                yield Span(start, start + 1, "")
            start = stop + 1


@dataclass(frozen=True, eq=False)
class Frame:
    """The live canvas of one row after some steps, as host arrays.

    Attributes:
      row: index of the row; identifies the frames that belong together.
      step: number of steps taken so far.
      tokens: int32 ``[n]``; ids at holes are ignored.
      is_frozen: bool ``[n]``, True where the token was given.
      is_hole: bool ``[n]``, True where a token is missing.
      committed: int32 ``[n]``, the step that wrote each token; -1 at given tokens, drafts and
        holes.
      logprobs: float32 ``[n]``, log-probability in nats of each token when committed; 0 at given
        tokens and holes.
      status: ``"running"``, ``"done"``, ...
      origin: int32 ``[n]``, the index of each position in the previous frame, ascending; -1 for an
          inserted position. None if no position moved; the end may have been cut.
      steps: the maximum number of steps, or None if unknown.
    """

    row: int
    step: int
    tokens: np.ndarray
    is_frozen: np.ndarray
    is_hole: np.ndarray
    committed: np.ndarray
    logprobs: np.ndarray
    status: str = "running"
    origin: np.ndarray | None = None
    steps: int | None = None


class Kind(IntEnum):
    """How a position changed since the previous frame.

    A ``GIVEN`` position is frozen. ``HOLE`` and ``KEPT`` positions are unchanged (``KEPT`` includes
    a token that was committed again). A ``FRESH`` token was a hole before, a ``REWRITTEN`` token
    was another token, and a ``REMASKED`` hole was a token. An ``INSERTED`` position is new and may
    be a hole or a token.
    """

    GIVEN = 0
    HOLE = 1
    KEPT = 2
    FRESH = 3
    REWRITTEN = 4
    REMASKED = 5
    INSERTED = 6


class Changes(NamedTuple):
    """The changes between two frames of a row.

    Attributes:
      kinds: int8 ``[n]``, the `Kind` of each position in the later frame.
      deleted: int32, positions of the earlier frame that were deleted, ascending.
      origin: int32 ``[n]``, index in the earlier frame of each position; -1 for a new position.
    """

    kinds: np.ndarray
    deleted: np.ndarray
    origin: np.ndarray

    def count(self, kind: Kind) -> int:
        return int((self.kinds == kind).sum())


def changes(before: Frame | None, after: Frame) -> Changes:
    """The kind of each position in `after`, and the positions of `before` that were deleted.

    If `before` is None, every token that a step committed is fresh, and no position is inserted or
    deleted.
    """
    if before is None:
        is_fresh = ~after.is_hole & (after.committed >= 0)
        kinds = np.where(after.is_hole, Kind.HOLE, np.where(is_fresh, Kind.FRESH, Kind.KEPT))
        kinds = np.where(after.is_frozen, Kind.GIVEN, kinds).astype(np.int8)
        return Changes(kinds, np.zeros(0, np.int32), np.full(kinds.size, -1, np.int32))
    origin = np.arange(after.tokens.size) if after.origin is None else after.origin
    is_gone = np.ones(before.tokens.size, bool)
    is_gone[origin[origin >= 0]] = False
    deleted = np.flatnonzero(is_gone).astype(np.int32)
    if not before.tokens.size:
        return Changes(np.full(origin.size, Kind.INSERTED, np.int8), deleted, origin)
    was_hole = before.is_hole[origin]
    is_same = before.tokens[origin] == after.tokens
    kinds = np.where(
        after.is_hole,
        np.where(was_hole, Kind.HOLE, Kind.REMASKED),
        np.where(was_hole, Kind.FRESH, np.where(is_same, Kind.KEPT, Kind.REWRITTEN)),
    )
    kinds = np.where(origin < 0, Kind.INSERTED, kinds)
    kinds = np.where(after.is_frozen, Kind.GIVEN, kinds).astype(np.int8)
    return Changes(kinds, deleted, origin)


def frame_of(number: int, row: Row, *, mask_id: int, steps: int | None = None) -> Frame:
    """A frame of the row in its current state; `steps` is the row's maximum number of steps."""
    return Frame(
        row=number,
        step=row.steps,
        tokens=row.tokens,
        is_frozen=row.is_frozen,
        is_hole=(row.tokens == mask_id) & ~row.is_frozen,
        committed=row.committed,
        logprobs=row.logprobs,
        status=row.status.name.lower(),
        steps=steps,
        origin=row.origin,
    )


def special_names(tokenizer: Tokenizer) -> dict[int, str]:
    found = {getattr(tokenizer, f"{name}_id"): name for name in ("mask", "pad", "bos", "eos")}
    return {id_: f"⟨{name}⟩" for id_, name in found.items() if id_ is not None}
