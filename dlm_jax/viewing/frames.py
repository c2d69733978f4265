"""Snapshots of a row (frames), the changes between them, and the texts of their tokens.

Shape legend: ``n`` is the number of live positions of the row; frames exclude PAD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from dlm_jax import Row


def piece_reader(
    decode: Callable[[Any], str], names: Mapping[int, str] | None = None
) -> Callable[[int], str]:
    """A function that returns what stands for an id: its label in `names`, its text, or ``⟨id⟩``.

    `decode` maps a sequence of ids to text. A token that is a part of a character is U+FFFD.
    """
    names = names or {}

    @functools.cache
    def piece(token: int) -> str:
        return names.get(token) or decode(np.array([token], np.int32)) or f"⟨{token}⟩"

    return piece


@dataclass(frozen=True, eq=False)
class Frame:
    """The live canvas of one row after `step` steps. Its arrays are those of `dlm_jax.Row`.

    Attributes:
      row: index of the row; identifies the frames that belong together.
      is_hole: bool ``[n]``, True where a token is missing; its id is ignored.
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
