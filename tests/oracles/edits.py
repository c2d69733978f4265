"""Plain-Python reference of the structural edits of one row: what is inserted and deleted, and how.

Written from the rules in docs/, in float64.
A row is the list of its live cells; an edit is `list.insert` or `del`, one at a time. Gap g lies
between positions g and g+1 and is called g+1 here, where its token goes. A hole is an unfrozen
cell that holds MASK.

Choices where the texts are silent:
- Frozen cells have uncertainty 0, but terms of the deletion score read them like any others.
- A zeroed deletion term is 0 after the margin; a last position has no term, so neither has the
  second one of its left neighbour.
- The deletion score of a protected position is the bare formula; protection belongs to `select`.
- Holes are counted in "live unfrozen", the number that budgets are a share of.
- Whatever is protected, or cooling down, is passed over, and the budget goes to the next best.
- Insertions and deletions do not exclude each other: both may happen at one place.
- The length controller adds to the budgets, seeing the length before this step's edits, and what it
  adds is made for any score: the text that fits has none, and would never shrink. The document's
  own cap on its insertions is an overflow, judged like others after the deletions that were really
  selected.
- Edits happen in the document's order, insertions right to left before deletions left to right,
  so that an insertion just right of a deleted token is what moves into its place, and is marked.
- Marks of earlier steps end when a step's edits are applied, also when there are none.
- Trimming comes last, may drop what was just inserted or a given space, and marks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

NUDGE = 3  # most edits per step that the length controller asks for
SCORE_TOLERANCE = 1e-6  # of a score in float32, before the weight of its second term
RATIO_TOLERANCE = 2.5e-7  # of ratio * n in float32, per n


@dataclass(frozen=True)
class Cell:
    """One live position; `origin` is its index before the edits, None where an edit made it."""

    token: int
    frozen: bool = False
    inserted: bool = False
    mark: bool = False
    origin: int | None = None


@dataclass(frozen=True)
class Params:
    """What one row asks for in one step; `cooldown` 0 is off, not `trims` is refuse."""

    insert_ratio: float = 0.0
    delete_ratio: float = 0.0
    delete_margin: float = 0.02
    delete_lambda: float = 0.3
    cooldown: int = 1
    trims: bool = True
    targets_length: bool = False
    capacity: int = 1 << 30
    target: int = 0


class Choice(NamedTuple):
    """The edits of one step, in indices before any of them."""

    inserts: set[int]
    """A new token goes just before the token that is now at this position."""
    deletes: set[int]
    refused: int
    """Insertions that would have been made, had there been room (never with `trims`)."""
    margin: float
    """Distance of the closest decision, in float32 tolerances; below 1 it may go the other way."""


class Edited(NamedTuple):
    """A row after its edits, and how many tokens were trimmed from its tail."""

    row: list[Cell]
    trimmed: int


class _Candidate(NamedTuple):
    position: int
    score: float
    signed: float  # the score, or how far it stays below zero; -inf where that is certain
    inputs: tuple[float | None, ...]  # equal inputs give equal scores in any precision


_Worth = dict[int, tuple[float, tuple[float | None, ...]]]
"""Worth and inputs by position."""


class _Term(NamedTuple):
    value: float = 0.0
    signed: float = -math.inf
    inputs: tuple[float | None, ...] = (None, None)


def ratio_at(start: float, end: float, step: int, steps: int, schedule: str) -> float:
    """The ratio at `step` (from 0) of `steps`: `start` first (and if only), `end` last."""
    t = step / (steps - 1) if steps > 1 else 0.0
    if schedule == "linear":
        return start + (end - start) * t
    return end + (start - end) * (1 + math.cos(math.pi * t)) / 2


def row_from(
    tokens: Sequence[int],
    frozen: Sequence[bool] | None = None,
    inserted: Sequence[bool] | None = None,
    mark: Sequence[bool] | None = None,
    *,
    length: int | None = None,
) -> list[Cell]:
    """Cells of the first `length` positions (all without it); flags that are left out are unset."""
    n = len(tokens) if length is None else int(length)
    flags = [[False] * n if f is None else f for f in (frozen, inserted, mark)]
    return [Cell(int(tokens[i]), *(bool(f[i]) for f in flags), origin=i) for i in range(n)]


def is_hole(cell: Cell, mask: int) -> bool:
    """Whether the cell is waiting for a token."""
    return cell.token == mask and not cell.frozen


def _is_scored(cell: Cell, mask: int) -> bool:
    return not cell.frozen and not is_hole(cell, mask)


def _term(row: Sequence[Cell], own: Sequence[float], right: Sequence[float], i: int,
          margin: float, mask: int) -> _Term:  # fmt: skip
    """Delta 1 at i less the margin, clamped: how gladly i would hold its right neighbour."""
    if i + 1 >= len(row) or is_hole(row[i], mask) or is_hole(row[i + 1], mask):
        return _Term()
    a, b = float(own[i]), float(right[i])
    signed = math.exp(b) - math.exp(a) - margin
    if signed > 0:
        return _Term(signed, signed, (a, b))
    return _Term(0.0, -math.inf if b <= a and margin >= 0 else signed)


def _gap_candidate(row: Sequence[Cell], own: Sequence[float], i: int, mask: int) -> _Candidate:
    """The gap between i-1 and i: `1 - p` of its less certain side."""
    sides = [float(own[j]) for j in (i - 1, i) if _is_scored(row[j], mask)]
    if not sides or min(sides) >= 0:
        return _Candidate(i, 0.0, -math.inf, ())
    score = 1 - math.exp(min(sides))
    return _Candidate(i, score, score, (min(sides),))


def _deletion_candidate(row: Sequence[Cell], own: Sequence[float], right: Sequence[float], i: int,
                        params: Params, mask: int) -> _Candidate:  # fmt: skip
    if i + 1 >= len(row):
        return _Candidate(i, 0.0, -math.inf, ())
    first, second = (_term(row, own, right, j, params.delete_margin, mask) for j in (i, i + 1))
    if params.delete_lambda == 0:
        second = _Term()
    score = first.value + params.delete_lambda * second.value
    weighted = params.delete_lambda * second.signed if second.signed > -math.inf else -math.inf
    signed = score if score > 0 else max(first.signed, weighted)
    return _Candidate(i, score, signed, first.inputs + second.inputs)


def is_protected(row: Sequence[Cell], i: int, *, mask: int, space: int | None) -> bool:
    """Whether position i is never deleted: frozen, a hole, last, or a space no edit inserted."""
    cell = row[i]
    is_given_space = cell.token == space and not cell.inserted
    return cell.frozen or is_hole(cell, mask) or is_given_space or i == len(row) - 1


def is_cooling(row: Sequence[Cell], i: int, cooldown: int) -> bool:
    """Whether position i, or the gap of that name, is too close to an edit of the last step."""
    return cooldown > 0 and any(c.mark and abs(j - i) <= cooldown for j, c in enumerate(row))


def _budget(ratio: float, n: int) -> tuple[int, float]:
    """`floor(ratio*n + 1e-3)`, and its distance from another count in tolerances."""
    x = float(ratio) * n + 1e-3
    return math.floor(x), abs(x - round(x)) / (RATIO_TOLERANCE * n) if n else math.inf


def _best(candidates: Iterable[_Candidate], k: int, lam: float) -> tuple[set[int], float]:
    """The k best positive candidates, ties to the lower position, and the margin in tolerances."""
    ranked = sorted(candidates, key=lambda c: (-c.score, c.position))
    chosen = [c for c in ranked if c.score > 0][:k]
    others = ranked[len(chosen) :]
    distances = [c.score for c in chosen]
    if len(chosen) < k:
        distances += [-c.signed for c in others]
    distances += [
        a.score - b.signed for a in chosen for b in others
        if not (b.score > 0 and a.inputs == b.inputs)
    ]  # fmt: skip
    closest = min(distances, default=math.inf)
    return {c.position for c in chosen}, closest / (SCORE_TOLERANCE * (1 + lam))


def select(
    row: Sequence[Cell],
    own_logp: Sequence[float],
    right_logp: Sequence[float],
    params: Params,
    *,
    mask: int,
    space: int | None,
) -> Choice:
    """The edits of one step, all chosen on this one snapshot.

    Takes log p of each token, and of its right neighbour, under the distribution at the position
    itself. `space` is None where the vocabulary has none: then no token is protected as a space.
    """
    n_unfrozen = sum(not cell.frozen for cell in row)
    k_insert, insert_margin = _budget(params.insert_ratio, n_unfrozen)
    k_delete, delete_margin = _budget(params.delete_ratio, n_unfrozen)
    excess = len(row) - params.target if params.targets_length else 0
    shrink, grow = min(NUDGE, max(0, excess)), min(NUDGE, max(0, -excess))

    free = [i for i in range(len(row)) if not is_cooling(row, i, params.cooldown)]
    deletable = [i for i in free if not is_protected(row, i, mask=mask, space=space)]
    found = [_deletion_candidate(row, own_logp, right_logp, i, params, mask) for i in deletable]
    worth = _worth(row, own_logp, right_logp, found, mask)
    deletes, delete_closest = _best_or_due(
        found, worth, k_delete + shrink, shrink, params.delete_lambda
    )
    legal = [i for i in free if i > 0 and not (row[i - 1].frozen and row[i].frozen)]
    gaps = [_gap_candidate(row, own_logp, i, mask) for i in legal]
    scored: _Worth = {c.position: (c.score, c.inputs) for c in gaps}
    wanted, wanted_closest = _best_or_due(gaps, scored, k_insert + grow, grow, 0.0)
    inserts, insert_closest = wanted, wanted_closest
    if not params.trims:
        room = max(0, params.capacity - (len(row) - len(deletes)))
        inserts, insert_closest = _best_or_due(
            gaps, scored, min(k_insert + grow, room), min(grow, room), 0.0
        )
    closest = min(insert_margin, delete_margin, delete_closest, wanted_closest, insert_closest)
    return Choice(inserts, deletes, len(wanted) - len(inserts), closest)


def _best_or_due(
    candidates: Sequence[_Candidate], worth: _Worth, k: int, due: int, lam: float
) -> tuple[set[int], float]:
    """The k best positive candidates and, if these are fewer than `due`, the worthiest others."""
    chosen, closest = _best(candidates, k, lam)
    others = {i: value for i, value in worth.items() if i not in chosen}
    more, more_closest = _highest(others, max(0, due - len(chosen)))
    return chosen | more, min(closest, more_closest / (SCORE_TOLERANCE * (1 + lam)))


def _worth(
    row: Sequence[Cell],
    own_logp: Sequence[float],
    right_logp: Sequence[float],
    candidates: Iterable[_Candidate],
    mask: int,
) -> _Worth:
    """The worth of each deletion: its score or, below all scores, the lead of the next token."""
    worth: _Worth = {}
    for candidate in candidates:
        i, inputs, value = candidate.position, candidate.inputs, candidate.score
        if value <= 0:
            lead = -1.0
            inputs = (None,)
            if not is_hole(row[i + 1], mask):
                own, right = float(own_logp[i]), float(right_logp[i])
                # The same token twice has no lead in any precision.
                inputs = (0.0, 0.0) if own == right else (own, right)
                lead = math.exp(right) - math.exp(own)
            value = lead - 2
        worth[i] = (value, inputs)
    return worth


def _highest(worth: _Worth, k: int) -> tuple[set[int], float]:
    """The k positions of highest worth, and how far they are from those left out."""
    ranked = sorted(worth, key=lambda i: (-worth[i][0], i))
    chosen, others = ranked[:k], ranked[k:]
    distances = [
        worth[a][0] - worth[b][0] for a in chosen for b in others if worth[a][1] != worth[b][1]
    ]
    return set(chosen), min(distances, default=math.inf)


def apply(
    row: Sequence[Cell],
    inserts: Iterable[int],
    deletes: Iterable[int],
    *,
    token: int,
    capacity: int | None = None,
) -> Edited:
    """The row after the edits, one at a time; any plan will do, not only those of `select`.

    Names are indices before any edit: an insertion of name i goes just before the token at i, or
    at the end where i is the length. With a `capacity` the rightmost unfrozen tokens beyond it are
    trimmed. Origins are renumbered first.
    """
    cells = [replace(cell, mark=False, origin=i) for i, cell in enumerate(row)]
    for name in sorted(set(inserts), reverse=True):
        cells.insert(name, Cell(token, inserted=True, mark=True))
    for name in sorted(set(deletes)):
        place = [cell.origin for cell in cells].index(name)
        del cells[place]
        if place < len(cells):
            cells[place] = replace(cells[place], mark=True)
    trimmed = 0
    while capacity is not None and len(cells) > capacity:
        unfrozen = [i for i, cell in enumerate(cells) if not cell.frozen]
        del cells[unfrozen[-1]]
        trimmed += 1
    return Edited(cells, trimmed)
