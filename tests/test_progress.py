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


def test_only_the_work_of_this_run_says_what_is_left(monkeypatch):
    """Not what was done before, and no time that went into compiling."""
    now, waited = [100.0], [5.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    shown = Progress("train", 100, "step", done=90, idle=lambda: waited[0], is_shown=False)
    now[0] += 70.0
    waited[0] += 60.0
    shown.update(5, note="fast")
    now[0] += 540.0
    assert shown.line() == "train: 95 of 100 steps, 10 s left, fast"
    shown.close()


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
    stream.close()
    with progress.waiting("compiling the step", stream=(again := io.StringIO())):
        time.sleep(0.1)
    assert set(again.getvalue().splitlines()) == {"compiling the step: 0 s"}


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
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")],
)
def test_durations_are_said_as_people_say_them(seconds, said):
    assert spell(seconds) == said
