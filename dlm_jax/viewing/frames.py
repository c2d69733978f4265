"""What a row looks like at one moment, and what changed since the moment before.

Shape legend: ``n`` live positions of the row; PAD is in no frame.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np

_DTYPES = {
    "tokens": np.int32,
    "is_frozen": np.bool_,
    "is_hole": np.bool_,
    "committed": np.int32,
    "logprobs": np.float32,
    "origin": np.int32,
}


@dataclass(frozen=True, eq=False)
class Frame:
    """The live canvas of one row after some steps, as host arrays.

    Attributes:
      row: number of the row, what tells its frames from those of other rows.
      step: steps taken so far.
      tokens: int32 ``[n]``; what stands at a hole is never read.
      is_frozen: bool ``[n]``, True where the token was given.
      is_hole: bool ``[n]``, True where a token is missing.
      committed: int32 ``[n]``, the step that wrote each token; -1 where given, in a draft, or a
        hole.
      logprobs: float32 ``[n]``, log-probability of each token in nats when it was committed; 0
        where given and at holes.
      status: how the row stands, in a word: ``"running"``, ``"done"``, ...
      origin: int32 ``[n]``, the place of each position in the row's previous frame, ascending, -1
        for an inserted one. None: nothing moved; the tail may have been cut.
      steps: steps the row may take in all, or None if that is unknown.

    Raises:
      ValueError: the arrays are not one-dimensional or differ in length, or a frozen position is a
        hole.
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

    def __post_init__(self):
        length = np.size(self.tokens)
        for name in (field.name for field in fields(self) if field.name in _DTYPES):
            value = getattr(self, name)
            if value is None:
                continue
            array = np.asarray(value, _DTYPES[name])
            if array.shape != (length,):
                raise ValueError(
                    f"frame of row {self.row} at step {self.step}: {name} has shape {array.shape}, "
                    f"tokens has {length} positions; give one value for each live position"
                )
            object.__setattr__(self, name, array)
        if (self.is_frozen & self.is_hole).any():
            place = int(np.flatnonzero(self.is_frozen & self.is_hole)[0])
            raise ValueError(
                f"frame of row {self.row} at step {self.step}: position {place} is frozen and a "
                "hole; a given token is never missing, so set one of the two to False"
            )


class Kind(IntEnum):
    """What a position of a frame is, seen from the frame before.

    ``GIVEN`` is frozen. ``HOLE`` and ``KEPT`` are as they were (``KEPT`` is the same token, even if
    it was committed again). ``FRESH`` was a hole, ``REWRITTEN`` another token, ``REMASKED`` a token
    that is a hole now. ``INSERTED`` was not there; it may be a hole or hold a token.
    """

    GIVEN = 0
    HOLE = 1
    KEPT = 2
    FRESH = 3
    REWRITTEN = 4
    REMASKED = 5
    INSERTED = 6


class Changes(NamedTuple):
    """What happened between two frames of a row.

    Attributes:
      kinds: int8 ``[n]``, the `Kind` of each position of the later frame.
      deleted: int32, places of the earlier frame that are gone, ascending.
      origin: int32 ``[n]``, place of each position in the earlier frame; -1 where it has none.
    """

    kinds: np.ndarray
    deleted: np.ndarray
    origin: np.ndarray

    def count(self, kind: Kind) -> int:
        """How many positions are of `kind`."""
        return int((self.kinds == kind).sum())


def changes(before: Frame | None, after: Frame) -> Changes:
    """The kind of each position of `after`, and the places of `before` that were deleted.

    Without `before` the row began as holes around its given tokens and its draft: every token that
    a step committed is fresh, and nothing is inserted or deleted.

    Raises:
      ValueError: the frames are of two rows, `after` is the earlier one, or its origin does not fit
        `before`.
    """
    if before is None:
        is_fresh = ~after.is_hole & (after.committed >= 0)
        kinds = np.where(after.is_hole, Kind.HOLE, np.where(is_fresh, Kind.FRESH, Kind.KEPT))
        kinds = np.where(after.is_frozen, Kind.GIVEN, kinds).astype(np.int8)
        return Changes(kinds, np.zeros(0, np.int32), np.full(kinds.size, -1, np.int32))
    origin = _checked_origin(before, after)
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


def _checked_origin(before: Frame, after: Frame) -> np.ndarray:
    where = f"frames of row {after.row} at steps {before.step} and {after.step}"
    if before.row != after.row:
        raise ValueError(f"{where}: the first is of row {before.row}; compare frames of one row")
    if before.step > after.step:
        raise ValueError(f"{where} go backwards; give them in the order of their steps")
    old, new = before.tokens.size, after.tokens.size
    if after.origin is None:
        if new > old:
            raise ValueError(
                f"{where}: {old} positions became {new} without an origin; "
                "give the place that each position had"
            )
        return np.arange(new, dtype=np.int32)
    moved = after.origin[after.origin >= 0]
    if (after.origin < -1).any() or (moved >= old).any() or (np.diff(moved) <= 0).any():
        raise ValueError(
            f"{where}: the origin does not ascend from -1 or 0 to at most {old - 1}; "
            "give the place of each position in the earlier frame, -1 for an inserted one"
        )
    return after.origin
