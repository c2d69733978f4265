"""Progress reports: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

EVERY = 10.0
"""Seconds between progress lines if the stream is not a terminal."""


class Progress:
    """A context manager that reports progress through pieces of work.

    The remaining time is estimated from the mean rate up to the last finished piece, excluding time
    spent on other work, such as compilation.

    Args:
      name: name of the task, such as ``train``.
      total: number of pieces; None if unknown.
      unit: name of a piece, such as ``step``.
      done: number of pieces finished earlier.
      idle: returns the seconds spent on other work so far.
      compiling: returns the name of the program that is being compiled, or an empty string.
      stream: stream to write to; None means standard error.
      is_shown: whether anything is written.
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
        self._start = time.perf_counter() - idle()
        self._seconds = 0.0
        self._bar: tqdm[Any] | None = None
        self._ended = threading.Event()
        to = sys.stderr if stream is None else stream
        if is_shown and getattr(to, "isatty", lambda: False)():
            # The bar is delayed, so that an early error is printed without a bar.
            self._bar = tqdm(
                total=total,
                initial=done,
                desc=name,
                unit=unit,
                file=to,
                delay=1,
                dynamic_ncols=True,
                mininterval=0.5,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
                if total is not None
                else "{desc}: {n_fmt} {unit}s [{elapsed}{postfix}]",
            )
        elif is_shown:
            _write_lines(self.line, to, self._ended)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, pieces: int = 1, *, note: str | None = None) -> None:
        """Counts pieces as done. A new `note` replaces the text after the remaining time."""
        self._done += pieces
        # Other work, such as compilation, is only known once it has ended, as it has here.
        self._seconds = self.seconds()
        self._note = self._note if note is None else note
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._extras()), refresh=False)
            self._bar.update(pieces)

    def seconds_left(self) -> float | None:
        """Estimated remaining time in seconds; None while unknown."""
        finished = self._done - self._done_before
        if self._total is None or finished <= 0:
            return None
        return self._seconds * max(0, self._total - self._done) / finished

    def seconds(self) -> float:
        """Seconds since the start, excluding time spent on other work."""
        return max(0.0, time.perf_counter() - self._start - self._idle())

    def line(self) -> str:
        """The progress as one line."""
        done = f"{self._done:,}" + ("" if self._total is None else f" of {self._total:,}")
        return ", ".join([f"{self._name}: {done} {self._unit}s", *self._extras()])

    def close(self) -> None:
        """Stops the bar or the lines; a second call has no effect."""
        self._ended.set()
        if self._bar is not None:
            self._bar.close()

    def _extras(self) -> list[str]:
        left, program = self.seconds_left(), self._compiling()
        parts = [f"compiling {program}"] if program else []
        parts += [f"{spell(left)} left"] if left is not None else []
        return [*parts, self._note] if self._note else parts


@contextlib.contextmanager
def waiting(name: str, *, stream: TextIO | None = None, is_shown: bool = True) -> Iterator[None]:
    """A context that writes a line with `name` and the seconds so far every ten seconds."""
    start, ended = time.perf_counter(), threading.Event()
    if is_shown:
        to = sys.stderr if stream is None else stream
        _write_lines(lambda: f"{name}: {spell(time.perf_counter() - start)}", to, ended)
    try:
        yield
    finally:
        ended.set()


def _write_lines(line: Callable[[], str], stream: TextIO, ended: threading.Event) -> None:
    """Starts a thread that writes lines, because compilation or a long step blocks the main
    thread.
    """

    def write() -> None:
        while not ended.wait(EVERY):
            try:
                stream.write(f"{line()}\n")
                stream.flush()
            except (OSError, ValueError):
                return  # the stream is closed

    threading.Thread(target=write, name="progress", daemon=True).start()


def spell(seconds: float) -> str:
    """A readable duration: ``45 s``, ``3 min 10 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
