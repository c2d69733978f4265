"""What counts as a change between two frames."""

from __future__ import annotations

from viewing_cases import frame, random_row

from dlm_jax.viewing.frames import Frame, Kind, changes


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
