"""Lines of cells: nothing lost, nothing too wide, nothing a terminal would obey."""

from __future__ import annotations

import numpy as np
import pytest
from viewing_cases import decode, frame, random_row

from dlm_jax.viewing.frames import Frame, Kind, Pieces, changes
from dlm_jax.viewing.watch import Cell, cells, paint, wrap


def signs(text: str, encoding: str = "utf-8") -> list[tuple[str, int]]:
    """Sign and columns of each cell of one token whose text is `text`."""
    one = frame("A")
    made = cells(one, changes(None, one), Pieces(lambda _: text), encoding)
    return [(cell.sign, cell.columns) for cell in made]


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("a\n", "utf-8", [("a", 1), ("⏎", 1)]),
        ("a\n", "ascii", [("a", 1), ("\\n", 2)]),
        ("\x1b[2J", "utf-8", [("␛", 1), ("[", 1), ("2", 1), ("J", 1)]),
        ("\x7f\x9b\u202e", "utf-8", [("\ufffd", 1)] * 3),
        ("漢", "utf-8", [("漢", 2)]),
        ("e\u0301", "utf-8", [("e", 1), ("\u0301", 0)]),
        ("\u0301", "utf-8", [("◌", 1), ("\u0301", 0)]),
        ("é\t", "ascii", [("?", 1), ("\\t", 2)]),
        ("\ud800", "utf-8", [("\ufffd", 1)]),
    ],
)
def test_every_character_is_a_sign_that_moves_no_cursor(text, encoding, expected):
    assert signs(text, encoding) == expected


@pytest.mark.parametrize("width", [16, 17, 40])
def test_wrapping_loses_only_spaces_between_lines_and_keeps_the_width(width):
    for one in random_row(0, seed=5, length=120):
        made = list(cells(one, changes(None, one), Pieces(decode), "utf-8"))
        lines = wrap(iter(made), width)
        assert all(sum(cell.columns for cell in line) < width for line in lines)
        assert "".join(c.sign for line in lines for c in line).replace(" ", "") == "".join(
            cell.sign for cell in made
        ).replace(" ", "")
        ends = [line[-1].ends_line for line in lines]
        assert sum(ends) == sum(cell.ends_line for cell in made)
        assert not any(cell.ends_line for line in lines for cell in line[:-1])


def test_words_are_not_broken_where_they_fit_a_line():
    made = [Cell(sign, 1, Kind.KEPT) for sign in "what light through yonder window"]
    assert ["".join(c.sign for c in line) for line in wrap(iter(made), 18)] == [
        "what light ", "through yonder ", "window",
    ]  # fmt: skip


def test_a_style_is_switched_off_before_the_next_begins():
    line = [Cell("a", 1, Kind.FRESH), Cell("b", 1, Kind.FRESH), Cell("c", 1, Kind.KEPT)]
    painted = paint(line, lambda kind: "1" if kind is Kind.FRESH else "")
    assert painted == "\x1b[1mab\x1b[0mc"


def test_one_block_stands_for_each_hole_and_another_for_what_was_remasked():
    before, after = frame("A.."), frame("...", step=1)
    made = cells(after, changes(before, after), Pieces(decode), "utf-8")
    assert [cell.sign for cell in made] == ["▒", "░", "░"]
    made = cells(after, changes(before, after), Pieces(decode), "latin-1")
    assert [cell.sign for cell in made] == ["~", "_", "_"]


def test_a_character_of_two_tokens_takes_the_kind_that_changed_most():
    ids = np.array([3, 4], np.int32)
    none = np.zeros(2, bool)
    before = Frame(0, 0, ids, none, np.array([False, True]), [0, -1], [0, 0])
    after = Frame(0, 1, ids, none, none, [0, 1], [0, 0])
    made = list(cells(after, changes(before, after), Pieces(decode), "utf-8"))
    assert made == [Cell("é", 1, Kind.FRESH)]
