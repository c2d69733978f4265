"""The task of repairs: what is damaged, and how."""

import pytest

from benchmarks.repairs import KINDS, MORE_KINDS, distance, make_repairs

TEXT = "the quick brown fox jumps over a lazy dog and then another one comes along, slowly " * 9


def _rows(kinds, seed=3):
    return make_repairs(TEXT, TEXT, seed, 8 * len(kinds), kinds=kinds)


@pytest.mark.parametrize(
    ("kind", "change", "edits"),
    [("missing", -1, 1), ("doubled", 1, 1), ("two missing", -2, 2), ("two doubled", 2, 2),
     ("transposed", 0, 2), ("wrong", 0, 1)],
)  # fmt: skip
def test_a_kind_of_damage_is_what_it_is_called(kind, change, edits):
    for row in _rows((kind,)):
        assert row.kind == kind and row.prompt + row.original in TEXT
        assert len(row.damaged) - len(row.original) == change
        assert distance(row.damaged, row.original) == edits
        # No space is added or lost.
        assert row.damaged.count(" ") == row.original.count(" ")
        if kind == "transposed":
            assert sorted(row.damaged) == sorted(row.original)


def test_kinds_take_turns_and_the_usual_ones_are_the_default():
    assert [row.kind for row in _rows(MORE_KINDS)] == list(MORE_KINDS) * 8
    assert make_repairs(TEXT, TEXT, 5, 16) == make_repairs(TEXT, TEXT, 5, 16, kinds=KINDS)
