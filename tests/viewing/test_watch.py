"""The terminal view, read back from a terminal made of a list of lines."""

from __future__ import annotations

import io
import re

import pytest
from viewing_cases import decode, frame, random_row

from dlm_jax.viewing import watch as watching
from dlm_jax.viewing.frames import Kind, changes
from dlm_jax.viewing.watch import Watch, wrapped


class Stream(io.StringIO):
    """A stream that says whether it is a terminal, and what it can write."""

    def __init__(self, *, is_terminal: bool, encoding: str = "utf-8"):
        super().__init__()
        self._is_terminal, self._encoding = is_terminal, encoding

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._is_terminal


def screen(text: str) -> list[str]:
    """The lines a terminal shows after `text`, colours left out."""
    lines, at, written = [""], 0, ""
    for part in re.split(r"(\x1b\[\d*[A-Za-z]|\n|\r)", re.sub(r"\x1b\[[\d;]*m", "", text)):
        if part == "\n":
            at, written = at + 1, ""
            lines += [""] * (at + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            at -= int(part[2:-1])
            assert at >= 0
        elif part == "\x1b[J":
            lines = [*lines[:at], ""]
        elif part == "\x1b[K":
            lines[at] = written
        elif part and part != "\r":
            assert "\x1b" not in part
            written = part
            lines[at] = part + lines[at][len(part) :]
    return lines


def test_a_terminal_shows_the_last_step_only_and_a_pipe_all_of_them():
    rows = [random_row(row, seed=row) for row in range(3)]
    steps = [list(frames) for frames in zip(*rows, strict=True)]
    terminal, pipe = Stream(is_terminal=True), Stream(is_terminal=False)
    in_place = Watch(decode, terminal, width=40, height=60)
    plain = Watch(decode, pipe, width=40)
    sizes = []
    for frames in steps:
        in_place.show(frames)
        start = pipe.tell()
        plain.show(frames)
        sizes.append(pipe.getvalue()[start:])
    assert "\x1b" not in pipe.getvalue()
    assert "".join(sizes) == pipe.getvalue()
    assert screen(terminal.getvalue())[:-1] == sizes[-1].rstrip("\n").split("\n")


def test_nothing_drawn_in_place_is_higher_or_wider_than_the_terminal():
    rows = [random_row(row, seed=row, length=150) for row in range(6)]
    for height in (6, 10, 24):
        terminal = Stream(is_terminal=True)
        watch = Watch(decode, terminal, width=30, height=height)
        for frames in zip(*rows, strict=True):
            watch.show(frames)
            shown = screen(terminal.getvalue())
            assert len(shown) <= height
            assert max(map(len, shown)) < 30
            assert re.search(r"and \d more row", shown[-2])
        assert shown[0].startswith("row 0  step 12/12")


def test_the_header_tells_what_the_step_did():
    pipe = Stream(is_terminal=False)
    watch = Watch(decode, pipe, width=80)
    watch.show([frame("aAAA..", row=3, steps=8)])
    watch.show([frame("aAB...", row=3, step=1, steps=8)])
    watch.show([frame("aABA.", row=3, step=2, steps=8, origin=[0, 1, 2, 3, -1], status="done")])
    headers = [line for line in pipe.getvalue().splitlines() if line.startswith("row")]
    assert headers == [
        "row 3  step 0/8  holes 2  fresh 3",
        "row 3  step 1/8  holes 3  rewritten 1  remasked 1",
        "row 3  step 2/8  holes 1  fresh 1  inserted 1  deleted 2  done",
    ]


def test_colour_is_for_terminals_without_no_color(monkeypatch):
    def has_colour(is_terminal: bool) -> bool:
        stream = Stream(is_terminal=is_terminal)
        Watch(decode, stream, width=40).show([frame("A.")])
        return "m" in re.findall(r"\x1b\[[\d;]*([A-Za-z])", stream.getvalue())

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colour(True)
    assert not has_colour(False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(True)
    monkeypatch.setenv("NO_COLOR", "")
    assert has_colour(True)


def test_what_a_narrow_encoding_cannot_write_never_reaches_it():
    pipe = Stream(is_terminal=False, encoding="ascii")
    watch = Watch(decode, pipe, width=40, names={13: "⟨eos⟩"})
    for one in random_row(0, seed=1):
        watch.show([one])
    assert pipe.getvalue().isascii() and "?eos?" in pipe.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n", "a⏎"), ("\x1b[2J", "␛[2J"), ("\x7f\x9b\u202e", "\ufffd" * 3), ("漢", "漢"),
     ("e\u0301", "e\ufffd"), ("\ud800", "\ufffd")],
)  # fmt: skip
def test_every_character_is_a_glyph_that_moves_no_cursor(text, shown):
    one = frame("A")
    lines = wrapped(one, changes(None, one), lambda _: text, 40)
    assert ["".join(sign for sign, _ in line) for line in lines] == [shown]


def test_wide_glyphs_take_two_columns():
    one = frame("AAA")
    lines = wrapped(one, changes(None, one), lambda _: "漢", 5)
    assert [len(line) for line in lines] == [2, 1]


def test_a_hole_that_was_a_token_has_a_sign_of_its_own():
    before, after = frame("A.."), frame("...", step=1)
    (line,) = wrapped(after, changes(before, after), str, 9)
    assert [sign for sign, _ in line] == ["▒", "░", "░"]
    assert [kind for _, kind in line] == [Kind.REMASKED, Kind.HOLE, Kind.HOLE]


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only by sleeping; the sleeps."""
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watching.time, "sleep", sleep)
    return now, slept


def test_a_terminal_shows_each_step_long_enough_and_no_longer_than_the_step_takes(clock):
    now, slept = clock
    frames = list(random_row(0, seed=1))[:3]
    watch = Watch(decode, Stream(is_terminal=True), width=40, height=20, pace=0.1)
    watch.show(frames[:1])
    assert slept == []
    now[0] += 0.03  # a fast step
    watch.show(frames[1:2])
    assert slept == [pytest.approx(0.07)]
    now[0] += 5.0  # a slow one
    watch.show(frames[2:3])
    assert len(slept) == 1
    assert watch.waited == pytest.approx(0.07)
