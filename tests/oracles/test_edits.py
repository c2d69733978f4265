"""The oracle of structural edits against rows worked out by hand, and laws it keeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from . import edits
from .edits import Params

SPACE, MASK, NEW = 0, 1, 9


def logs(probabilities: Sequence[float]) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probabilities]


def row_of(text: str, frozen: str = "", inserted: str = "", mark: str = "") -> list[edits.Cell]:
    """One cell per character: `_` is a space, `?` a hole; the others list positions, as "035"."""
    tokens = [{"_": SPACE, "?": MASK}.get(c, ord(c)) for c in text]
    flags = [[str(i) in f for i in range(len(text))] for f in (frozen, inserted, mark)]
    return edits.row_from(tokens, *flags)


def text_of(row: Sequence[edits.Cell]) -> str:
    return "".join({SPACE: "_", MASK: "?", NEW: "+"}.get(c.token) or chr(c.token) for c in row)


def marks_of(row: Sequence[edits.Cell]) -> str:
    return "".join("^" if c.mark else "." for c in row)


def applied(text: str, inserts: Sequence[int], deletes: Sequence[int], **kwargs) -> tuple[str, str]:
    row, _ = edits.apply(row_of(text, **kwargs), inserts, deletes, token=NEW)
    return text_of(row), marks_of(row)


def scores_of(row: list[edits.Cell], own: Sequence[float], right: Sequence[float], **kwargs):
    return edits.scores(row, logs(own), logs(right), mask=MASK, **kwargs)


def chosen(row: list[edits.Cell], own: Sequence[float], right: Sequence[float], **kwargs):
    params = Params(**{"delete_margin": 0.0, "delete_lambda": 0.0, "cooldown": 0} | kwargs)
    return edits.select(row, logs(own), logs(right), params, mask=MASK, space=SPACE)


def test_ratios_run_from_start_to_end():
    assert [edits.ratio_at(0.4, 0.0, s, 5, "linear") for s in range(5)] == pytest.approx(
        [0.4, 0.3, 0.2, 0.1, 0.0]
    )
    cosine = [edits.ratio_at(0.0, 0.4, s, 5, "cosine") for s in range(5)]
    root = math.sqrt(0.5)
    assert cosine == pytest.approx([0.0, 0.2 * (1 - root), 0.2, 0.2 * (1 + root), 0.4])
    assert edits.ratio_at(0.4, 0.1, 0, 1, "cosine") == pytest.approx(0.4)
    assert edits.ratio_at(0.4, 0.1, 0, 1, "linear") == 0.4
    with pytest.raises(ValueError, match="use linear or cosine"):
        edits.ratio_at(0.4, 0.0, 0, 5, "sine")


def test_scores_of_a_plain_row():
    # d1 = 0.5, -0.5, 0.2, none; less a margin of 0.1: 0.4, 0, 0.1, none; half the right one's.
    row = row_of("abcd")
    s = scores_of(row, [0.2, 0.6, 0.5, 0.9], [0.7, 0.1, 0.7, 0.3], margin=0.1, lam=0.5)
    assert s.uncertainty == pytest.approx([0.8, 0.4, 0.5, 0.1])
    assert s.gap == pytest.approx([0.0, 0.8, 0.5, 0.5])
    assert s.deletion == pytest.approx([0.4, 0.05, 0.1, 0.0])


def test_frozen_cells_and_holes_are_not_uncertain():
    own = [0.1, 0.2, 0.3, 0.4, 0.5]
    s = scores_of(row_of("ab?de", frozen="01"), own, [0.0] * 5)
    assert s.uncertainty == pytest.approx([0, 0, 0, 0.6, 0.5])
    assert s.gap == pytest.approx([0, 0, 0, 0.6, 0.6])


def test_a_hole_zeroes_the_terms_that_name_it():
    own, right = [0.1] * 5, [0.6] * 5
    full = scores_of(row_of("abcde"), own, right, margin=0.1, lam=0.5).deletion
    assert full == pytest.approx([0.6, 0.6, 0.6, 0.4, 0.0])
    # With a hole at 2, terms 1 (names 1, 2) and 2 (names 2, 3) are gone: 0 and 1 lose theirs.
    holed = scores_of(row_of("ab?de"), own, right, margin=0.1, lam=0.5).deletion
    assert holed == pytest.approx([0.4, 0.0, 0.2, 0.4, 0.0])


def test_no_second_term_beside_the_last_position_and_nothing_read_beyond_the_row():
    row = edits.row_from([50, 51, 52, 53], length=2)
    own, right = logs([0.1, 0.2]) + [math.nan] * 2, logs([0.5]) + [math.nan] * 3
    s = edits.scores(row, own, right, mask=MASK, margin=0.1, lam=0.5)
    assert s.deletion == pytest.approx([0.3, 0.0])
    assert s.gap == pytest.approx([0.0, 0.9])


@pytest.mark.parametrize("length", [0, 1])
def test_the_shortest_rows_have_no_edits(length: int):
    row = row_of("abc"[:length])
    assert scores_of(row, [0.2] * length, [0.9] * length) == ([0.8] * length, [0.0] * length,
                                                             [0.0] * length)  # fmt: skip
    got = chosen(row, [0.2] * length, [0.9] * length, insert_ratio=1.0, delete_ratio=1.0)
    assert got == (set(), set(), 0, got.margin)


def test_budgets_count_live_unfrozen_cells_and_forgive_rounding():
    own = [0.5, 0.4, 0.3, 0.2, 0.1, 0.6]
    assert chosen(row_of("abcdef"), own, [0.0] * 6, insert_ratio=0.49).inserts == {4, 5}
    assert chosen(row_of("abcdef"), own, [0.0] * 6, insert_ratio=0.49999).inserts == {3, 4, 5}
    frozen = chosen(row_of("abcdef", frozen="0"), own, [0.0] * 6, insert_ratio=0.49999)
    assert frozen.inserts == {4, 5}, "half of five"


def test_ties_go_to_the_lower_position_and_are_certain():
    row = row_of("abcdef")
    got = chosen(row, [0.5] * 6, [0.7] * 6, insert_ratio=0.5, delete_ratio=0.5)
    assert (got.inserts, got.deletes) == ({1, 2, 3}, {0, 1, 2})
    assert got.margin > 100


def test_nothing_is_chosen_without_a_positive_score():
    row = row_of("abcd")
    got = chosen(row, [1.0] * 4, [0.5] * 4, insert_ratio=1.0, delete_ratio=1.0)
    assert (got.inserts, got.deletes) == (set(), set())
    # d1 is 0.3 at most, so a margin of 0.4 leaves nothing but what the controller asks for.
    asked = {"delete_ratio": 1.0, "delete_margin": 0.4}
    right = [0.5, 0.5, 0.4, 0.5]
    assert chosen(row, [0.2] * 4, right, **asked).deletes == set()
    got = chosen(row, [0.2] * 4, right, targets_length=True, target=2, **asked)
    assert got.deletes == {0, 1}, "what fits least well"
    got = chosen(row, [1.0] * 4, [0.5] * 4, targets_length=True, target=5, capacity=8)
    assert got.inserts == {1}


def test_what_is_never_deleted():
    row = row_of("a__?ef", frozen="0", inserted="2")
    got = chosen(row, [0.1] * 6, [0.5] * 6, delete_ratio=1.0)
    assert got.deletes == {4}, "1 is a given space, 3 a hole, 5 last, and 3 zeroes the term of 2"
    weighted = chosen(row, [0.1] * 6, [0.5] * 6, delete_ratio=1.0, delete_lambda=0.5)
    assert weighted.deletes == {4}, "the second term of the hole is positive, and does not count"
    assert edits.is_protected(row, 5, mask=MASK, space=SPACE)
    row = row_of("a__def", frozen="0", inserted="2")
    assert chosen(row, [0.1] * 6, [0.5] * 6, delete_ratio=1.0).deletes == {2, 3, 4}
    params = Params(delete_ratio=1.0)
    no_space = edits.select(row, logs([0.1] * 6), logs([0.5] * 6), params, mask=MASK, space=None)
    assert no_space.deletes == {1, 2, 3, 4}


def test_gaps_need_an_unfrozen_side():
    # Frozen: 0, 1, 4, 5. Gaps 1 and 5 lie inside frozen islands.
    row = row_of("abcdef", frozen="0145")
    got = chosen(row, [0.2] * 6, [0.0] * 6, insert_ratio=1.0)
    assert got.inserts == {2, 3}, "a budget of two; 4 ties with them and is higher"
    got = chosen(row, [0.2, 0.2, 0.9, 0.1, 0.2, 0.2], [0.0] * 6, insert_ratio=1.0)
    assert got.inserts == {3, 4}, "right of the last unfrozen cell, before a frozen one"


def test_cooldown_passes_over_positions_and_gaps_near_a_mark():
    row = row_of("abcdefgh", mark="3")
    own, right = [0.1] * 8, [0.5] * 8
    for cooldown, inserts, deletes in [
        (0, set(range(1, 8)), set(range(7))),
        (1, {1, 5, 6, 7}, {0, 1, 5, 6}),
        (2, {6, 7}, {0, 6}),
    ]:
        got = chosen(row, own, right, insert_ratio=1.0, delete_ratio=1.0, cooldown=cooldown)
        assert (got.inserts, got.deletes) == (inserts, deletes)
    few = chosen(row, own, right, insert_ratio=0.25, delete_ratio=0.38, cooldown=2)
    assert (few.inserts, few.deletes) == ({6, 7}, {0, 6}), "the budget goes to the next best"


def test_refusing_leaves_room_for_what_was_deleted():
    row = row_of("abcdef")
    own, right = [0.5, 0.4, 0.3, 0.2, 0.1, 0.6], [0.0, 0.0, 0.7, 0.0, 0.0, 0.0]
    kwargs = {"insert_ratio": 0.5, "delete_ratio": 0.5, "trims": False}
    got = chosen(row, own, right, capacity=6, **kwargs)
    assert (got.inserts, got.deletes, got.refused) == ({4}, {2}, 2), "4 and 5 tie"
    got = chosen(row, own, right, capacity=8, **kwargs)
    assert (got.inserts, got.refused) == ({3, 4, 5}, 0)
    got = chosen(row, own, right, capacity=6, insert_ratio=0.5, trims=False)
    assert (got.inserts, got.refused) == (set(), 3)
    got = chosen(row, own, right, capacity=6, insert_ratio=0.5)
    assert (got.inserts, got.refused) == ({3, 4, 5}, 0), "trimming refuses nothing"


def test_the_length_controller_adds_at_most_three():
    row, own, right = row_of("abcdefgh"), [0.1] * 8, [0.5] * 8
    for target, inserts, deletes in [(2, 0, 3), (6, 0, 2), (8, 0, 0), (9, 1, 0), (20, 3, 0)]:
        got = chosen(row, own, right, targets_length=True, target=target, capacity=20)
        assert (len(got.inserts), len(got.deletes)) == (inserts, deletes)
        assert not any(chosen(row, own, right, target=target)[:2]), "off"
    got = chosen(row, own, right, targets_length=True, target=6, insert_ratio=0.25,
                 delete_ratio=0.25)  # fmt: skip
    assert (len(got.inserts), len(got.deletes)) == (2, 4), "beside the ratios"


def test_margins_shrink_where_a_decision_is_close():
    row = row_of("abc")
    base = chosen(row, [0.5, 0.9, 0.9], [0.0] * 3, insert_ratio=0.4).margin
    assert base > 1000
    close = chosen(row, [0.5, 0.9, 0.5 + 1e-8], [0.0] * 3, insert_ratio=0.4)
    assert close.inserts == {1}
    assert close.margin == pytest.approx(0.01, rel=1e-3)
    positive = chosen(row, [1.0, 1 - 1e-8, 1.0], [0.0] * 3, insert_ratio=1.0)
    assert positive.inserts == {1, 2}
    assert positive.margin < 1
    count = chosen(row, [0.5, 0.9, 0.9], [0.0] * 3, insert_ratio=(1 - 1e-3 - 1e-8) / 3)
    assert count.inserts == set()
    assert count.margin < 1
    barely = {"delete_ratio": 1.0, "delete_margin": 0.2}
    assert chosen(row, [0.1] * 3, [0.3 - 1e-8, 0, 0], **barely).margin < 1
    assert chosen(row, [0.1] * 3, [0.3 + 1e-8, 0, 0], **barely).margin < 1
    assert chosen(row, [0.1] * 3, [0.4, 0, 0], **barely).margin > 1000
    assert chosen(row, [0.1] * 3, [0.1] * 3, delete_ratio=1.0).margin > 1000, "exactly nothing"


def test_rock_becomes_fox_by_one_deletion_and_back_by_one_insertion():
    assert applied("rock", [], [1]) == ("rck", ".^.")
    assert applied("fox", [1], []) == ("f+ox", ".^..")


def test_plans_by_hand():
    assert applied("abcd", [], []) == ("abcd", "....")
    assert applied("abcd", [1, 2], []) == ("a+b+cd", ".^.^..")
    assert applied("abcd", [2], [2]) == ("ab+d", "..^^"), "at one place: the new one, then d"
    assert applied("abcd", [3], [2]) == ("ab+d", "..^."), "the new one moved into c's place"
    assert applied("abcd", [], [1, 2]) == ("ad", ".^")
    assert applied("abcd", [2], [1, 2]) == ("a+d", ".^^")
    assert applied("abcd", [], [0, 1, 2, 3]) == ("", "")
    assert applied("abcd", [1, 3], [0, 1, 2, 3]) == ("++", "^^")
    assert applied("abcd", [0, 4], [3]) == ("+abc+", "^...^")
    assert applied("", [0], []) == ("+", "^")


def test_flags_move_with_their_tokens_and_old_marks_end():
    row = row_of("abcd", frozen="3", inserted="1", mark="0")
    out, trimmed = edits.apply(row, [1], [2], token=NEW)
    assert trimmed == 0
    assert text_of(out) == "a+bd"
    assert [c.origin for c in out] == [0, None, 1, 3]
    assert [c.frozen for c in out] == [False, False, False, True]
    assert [c.inserted for c in out] == [False, True, True, False]
    assert marks_of(out) == ".^.^"


def test_trimming_takes_the_rightmost_unfrozen_tokens():
    def trimmed(inserts: list[int], deletes: list[int], capacity: int, frozen: str):
        row = row_of("abcdef", frozen=frozen)
        row, count = edits.apply(row, inserts, deletes, token=NEW, capacity=capacity)
        return text_of(row), marks_of(row), count

    assert trimmed([1, 2], [], 6, "0") == ("a+b+cd", ".^.^..", 2)
    assert trimmed([1, 2], [4], 6, "0") == ("a+b+cd", ".^.^..", 1), "the marked f is gone"
    assert trimmed([1, 2], [3, 4], 6, "0") == ("a+b+cf", ".^.^.^", 0)
    assert trimmed([1, 2], [], 6, "045") == ("a+b+ef", ".^.^..", 2), "frozen ones stay"
    assert trimmed([5], [], 6, "01234") == ("abcde+", ".....^", 1)
    assert trimmed([5], [], 6, "012345") == ("abcdef", "......", 1), "the new one itself"
    with pytest.raises(ValueError, match="capacity=5 is below 6 frozen tokens"):
        edits.apply(row_of("abcdef", frozen="012345"), [], [], token=NEW, capacity=5)


def test_every_plan_keeps_the_order_of_survivors_and_puts_new_tokens_at_their_gaps():
    text = "abcd"
    subsets = [c for n in range(5) for c in itertools.combinations(range(4), n)]
    for inserts, deletes in itertools.product(subsets, subsets):
        expected = "".join(
            ("+" if i in inserts else "") + ("" if i in deletes else c) for i, c in enumerate(text)
        )
        got, marks = applied(text, inserts, deletes)
        assert got == expected
        for i, name in enumerate(sorted(inserts)):
            place = name + i - sum(d < name for d in deletes)
            assert got[place] == "+"
            assert marks[place] == "^"
        for name in deletes:
            place = name + sum(i <= name for i in inserts) - sum(d < name for d in deletes)
            assert marks[place : place + 1] in ("^", "")
