"""How far a program is: what is left is told in proportion to the pieces, and in lines."""

from __future__ import annotations

import io
import threading
import time

import pytest

from dlm_jax import progress
from dlm_jax.progress import Progress, spell


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a clock that stands still, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_time_that_went_into_compiling_says_nothing_about_what_is_left(clock):
    compiling = [5.0]
    with Progress("sample", 4, "row", idle=lambda: compiling[0], stream=io.StringIO()) as shown:
        clock[0] += 62.0
        compiling[0] += 60.0
        shown.update(1)
        assert shown.line() == "sample: 1 of 4 rows, 6 s left"


def test_what_was_done_before_says_nothing_about_the_pace(clock):
    with Progress("train", 100, "step", done=90, stream=io.StringIO()) as shown:
        clock[0] += 10.0
        shown.update(5)
        assert shown.line() == "train: 95 of 100 steps, 10 s left"


def test_without_a_terminal_there_is_a_line_every_so_often_though_nothing_is_done(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    stream = io.StringIO()
    with Progress("sample", 20_000, "row", stream=stream) as shown:
        time.sleep(0.1)
        shown.update(2, note="7 tokens/s")
        time.sleep(0.1)
    time.sleep(0.05)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sample: 0 of 20,000 rows"
    assert lines[-1].startswith("sample: 2 of 20,000 rows, ")
    assert lines[-1].endswith(" left, 7 tokens/s")
    assert 3 <= len(lines) <= 12
    assert "\r" not in stream.getvalue()


def test_a_stream_that_nobody_reads_ends_the_lines_and_nothing_else(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    stream = io.StringIO()
    with Progress("sample", 3, "row", stream=stream) as shown:
        stream.close()
        time.sleep(0.05)
        shown.update()
    assert not [t for t in threading.enumerate() if t.name.startswith("progress") and t.is_alive()]


def test_a_terminal_gets_one_line_that_is_rewritten_and_removed():
    stream = _Terminal()
    with Progress("sample", 3, "row", stream=stream):
        time.sleep(1.2)
    assert stream.getvalue() == "\r\x1b[Ksample: 0 of 3 rows\r\x1b[K"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")],
)
def test_durations_are_said_as_people_say_them(seconds, said):
    assert spell(seconds) == said


def test_a_long_compilation_does_not_change_the_time_left_and_is_named(clock):
    compiling = [""]
    shown = Progress("sample", 9, "row", compiling=lambda: compiling[0], is_shown=False)
    clock[0] += 3.0
    shown.update(1)
    assert shown.line() == "sample: 1 of 9 rows, 24 s left"
    compiling[0] = "rows=8 canvas=64"
    clock[0] += 540.0
    assert shown.line() == "sample: 1 of 9 rows, compiling rows=8 canvas=64, 24 s left"
    shown.close()


def test_a_wait_is_told_every_so_often_and_a_short_one_is_not(monkeypatch):
    stream = io.StringIO()
    with progress.waiting("compiling the step", stream=stream):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.waiting("compiling the step", stream=stream):
        time.sleep(0.2)
    time.sleep(0.05)
    lines = stream.getvalue().splitlines()
    assert set(lines) == {"compiling the step: 0 s"} and 2 <= len(lines) <= 11
