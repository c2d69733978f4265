"""The task of repairs: what is damaged, and how."""

from benchmarks.repairs import KINDS, distance, make_repairs

TEXT = "the quick brown fox jumps over a lazy dog and then another one comes along, slowly " * 9


def test_kinds_of_damage_take_turns_and_are_what_they_are_called():
    rows = make_repairs(TEXT, TEXT, 3, 16)
    assert [row.kind for row in rows] == list(KINDS) * 4
    for row in rows:
        assert row.prompt + row.original in TEXT
        # No space is added or lost.
        assert row.damaged.count(" ") == row.original.count(" ")
        change = len(row.damaged) - len(row.original)
        assert change < 0 if row.kind in ("missing", "shorter") else change > 0
        assert distance(row.damaged, row.original) == 1 or row.kind in ("longer", "shorter")
