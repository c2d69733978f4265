"""What counts as a change between two frames."""

from __future__ import annotations

import pytest
from viewing_cases import frame, random_row

from dlm_jax.viewing.frames import Frame, Kind, changes

SIGNS = {"g": Kind.GIVEN, "h": Kind.HOLE, "k": Kind.KEPT, "f": Kind.FRESH, "w": Kind.REWRITTEN,
         "r": Kind.REMASKED, "i": Kind.INSERTED}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "origin", "kinds", "deleted"),
    [
        ("a.AAA", "a.AB.", None, "ghkwr", []),
        ("a..", "aA.", None, "gfh", []),
        (None, "aA.", None, "gfh", []),
        ("aAB", "aA.BB", [0, 1, -1, -1, 2], "gkiik", []),
        ("aABC", "aC.", [0, 3, -1], "gki", [1, 2]),
        ("a.B", "aAA", [0, 1, 2], "gfw", []),
        ("aABC", "aA", None, "gk", [2, 3]),
        ("ABC", "", [], "", [0, 1, 2]),
        ("", "A.", [-1, -1], "ii", []),
        ("", "", None, "", []),
    ],
)
def test_each_position_has_the_kind_of_what_happened_to_it(before, after, origin, kinds, deleted):
    old = None if before is None else frame(before)
    new = frame(after, step=1, origin=origin)
    seen = changes(old, new)
    assert [Kind(kind) for kind in seen.kinds] == [SIGNS[sign] for sign in kinds]
    assert seen.deleted.tolist() == deleted
    assert seen.count(Kind.INSERTED) == kinds.count("i")


def test_a_draft_token_was_not_committed_by_any_step():
    assert changes(None, frame("A", committed=[-1])).kinds.tolist() == [Kind.KEPT]


def test_kinds_equal_a_plain_python_account_over_random_rows():
    frames = random_row(0, seed=3)
    met = set()
    for before, after in zip(frames, frames[1:], strict=False):
        seen = changes(before, after)
        origin = range(after.tokens.size) if after.origin is None else after.origin.tolist()
        for place, came in enumerate(origin):
            kind = _told(before, after, place, came)
            met.add(kind)
            assert seen.kinds[place] == kind
        assert seen.deleted.tolist() == sorted(set(range(before.tokens.size)) - set(origin))
    assert met == set(Kind)


def _told(before: Frame, after: Frame, place: int, came: int) -> Kind:
    if after.is_frozen[place]:
        return Kind.GIVEN
    if came < 0:
        return Kind.INSERTED
    if before.is_hole[came]:
        return Kind.HOLE if after.is_hole[place] else Kind.FRESH
    if after.is_hole[place]:
        return Kind.REMASKED
    return Kind.KEPT if before.tokens[came] == after.tokens[place] else Kind.REWRITTEN


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (frame("AA"), frame("AA", row=1, step=1), "pass a row's frames in order"),
        (frame("AA", step=2), frame("AA", step=1), "pass a row's frames in order"),
        (frame("AA"), frame("AAA", step=1), "without an origin"),
    ],
)
def test_frames_that_do_not_follow_each_other_are_refused(before, after, told):
    with pytest.raises(ValueError, match=told) as error:
        changes(before, after)
    assert "\n" not in str(error.value)
