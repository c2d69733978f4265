"""Progress reports: one line, rewritten on a terminal, and otherwise repeated every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

EVERY = 10.0
"""Seconds between progress lines if the stream is not a terminal."""

_CLEAR = "\r\x1b[K"


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Reports progress through pieces of work until it is closed.

    `done` of `total` pieces (None if unknown) were finished earlier. The remaining time is that of
    the mean rate up to the last finished piece, without the seconds that `idle` returns, which went
    into other work. `compiling` returns the name of a program while it is compiled.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        *,
        done: int = 0,
        idle: Callable[[], float] = lambda: 0.0,
        compiling: Callable[[], str] = lambda: "",
        stream: TextIO | None = None,
        is_shown: bool = True,
    ):
        self._name, self._total, self._unit = name, total, unit
        self._done_before = self._done = done
        self._idle, self._note, self._compiling = idle, "", compiling
        self._start, self._seconds = time.perf_counter() - idle(), 0.0
        self.close = _repeat(self.line, stream) if is_shown else lambda: None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, pieces: int = 1, *, note: str | None = None) -> None:
        """Counts pieces as done. A new `note` replaces the text after the remaining time."""
        self._done += pieces
        # Other work, such as compilation, is only known once it has ended, as it has here.
        self._seconds = self.seconds()
        self._note = self._note if note is None else note

    def seconds(self) -> float:
        """Seconds since the start, excluding time spent on other work."""
        return max(0.0, time.perf_counter() - self._start - self._idle())

    def line(self) -> str:
        """The progress as one line."""
        total, finished = self._total, self._done - self._done_before
        of = "" if total is None else f" of {total:,}"
        parts = [f"{self._name}: {self._done:,}{of} {self._unit}s"]
        if program := self._compiling():
            parts.append(f"compiling {program}")
        if total is not None and finished > 0:
            seconds = self._seconds * max(0, total - self._done) / finished
            parts.append(f"{spell(seconds)} left")
        return ", ".join(filter(None, (*parts, self._note)))


@contextlib.contextmanager
def waiting(name: str, *, stream: TextIO | None = None, is_shown: bool = True) -> Iterator[None]:
    """A context that writes a line with `name` and the seconds so far every ten seconds."""
    start, end = time.perf_counter(), lambda: None
    if is_shown:
        end = _repeat(lambda: f"{name}: {spell(time.perf_counter() - start)}", stream)
    try:
        yield
    finally:
        end()


def say(line: str) -> None:
    """Prints a line to standard error, in place of a progress line on a terminal."""
    clear = _CLEAR if sys.stderr.isatty() else ""
    print(f"{clear}{line}", file=sys.stderr, flush=True)


def _repeat(line: Callable[[], str], stream: TextIO | None) -> Callable[[], None]:
    """Starts a thread that writes lines, because compilation or a long step blocks the main
    thread. Returns a function that ends it.
    """
    to, ended = sys.stderr if stream is None else stream, threading.Event()
    is_terminal = to.isatty()

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            while not ended.wait(1.0 if is_terminal else EVERY):
                to.write(f"{_CLEAR}{line()}" if is_terminal else f"{line()}\n")
                to.flush()
            if is_terminal:
                to.write(_CLEAR)
                to.flush()

    thread = threading.Thread(target=write, name="progress", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        if is_terminal:
            thread.join(1.0)

    return end


def spell(seconds: float) -> str:
    """A readable duration: ``45 s``, ``3 min 10 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
