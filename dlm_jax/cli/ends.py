"""How the programs end: one table of exit codes, and what becomes of errors and closed streams.

=====  =======================================================================================
0      done: everything that was asked for is there
1      not finite: the loss of a training, or what a model computes, is NaN or infinite
2      refused: the input is bad; one line on standard error says what and the remedy
3      done in part: some requests of a file ended in an error, which their results hold
4      done, but for a page (``--trace``) that could not be written
5      what the program is for could not be written, on a full disk, say; what was saved stays
6      out of memory
70     a defect of the program, or of a rule of one's own; with a traceback
75     another process of the run was lost, or refused; the same command goes on
128+n  stopped by signal n: 129 terminal closed, 130 Ctrl-C, 141 reader gone, 143 SIGTERM
=====  =======================================================================================

Messages that cannot be written, because standard error is closed or full, change nothing. Texts
that the encoding of standard output cannot hold are written with escapes.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from dlm_jax.store.files import is_full

Main = Callable[..., int]
"""A program: takes its arguments, those of the process if None, and returns its exit code."""


class End(enum.IntEnum):
    """How a program ended; its exit code (see the module)."""

    DONE = 0
    NOT_FINITE = 1
    REFUSED = 2
    PARTLY = 3
    NO_PAGE = 4
    UNWRITTEN = 5
    NO_MEMORY = 6
    DEFECT = 70
    LOST = 75
    READER_GONE = 128 + signal.SIGPIPE
    INTERRUPTED = 128 + signal.SIGINT


class NotFiniteError(Exception):
    """Parameters or outputs are NaN or infinite; the message says which."""


def program(main: Main) -> Main:
    """Makes `main` end in one of `End`, whatever it raises; unwritten output is an error."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        with _steady_streams():
            try:
                code = main(argv)
                with _output():
                    print(end="", flush=True)
            except KeyboardInterrupt:
                print("stopped", file=sys.stderr)
                return End.INTERRUPTED
            except SystemExit:
                # What --help printed may be read by a program that has enough of it.
                with contextlib.suppress(AttributeError):
                    _end_quietly()
                raise
            except Exception as error:
                return end_of(error)
            return code

    return guarded


def _end_quietly() -> None:
    """Sends what was printed on its way, or to nowhere if nobody takes it."""
    try:
        sys.stdout.flush()
    except OSError:
        _to_nowhere(sys.stdout)


def check_output() -> None:
    if sys.stdout is None:
        raise ValueError("standard output is closed; leave it open, or send it to a file")


def keep_output_for_texts() -> None:
    """Sends what libraries print on standard output of their own accord where messages go.

    The collectives of CPUs greet there, for example. `sys.stdout` goes on as it was.
    """
    ours = sys.stdout
    if not isinstance(ours, io.TextIOWrapper) or ours.fileno() != 1:
        return
    ours.flush()
    sys.stdout = open(  # noqa: SIM115
        os.dup(1), "w", encoding=ours.encoding, errors=ours.errors,
        buffering=1 if ours.line_buffering else -1,
    )  # fmt: skip
    os.dup2(2, 1)


def emit(text: str) -> None:
    """Nothing, once the text stands on standard output, in a line of its own.

    Raises:
      OSError: it cannot be written, because the disk is full, say.
    """
    with _output():
        print(text, flush=True)


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Gives errors of standard output its name."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns errors of what validates, the library's way to refuse bad input, into exit code 2.

    Their one line goes to standard error. Wrap what validates, not what computes: an error there is
    a defect, and its traceback is wanted.
    """
    try:
        yield
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, BrokenPipeError) or is_full(error):
            raise
        say_error(error)
        raise SystemExit(End.REFUSED) from None


def say_error(error: object) -> None:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)


def end_of(error: Exception) -> End:
    """Says what an error means, and what the program ends with."""
    if isinstance(error, NotFiniteError):
        say_error(error)
        return End.NOT_FINITE
    if isinstance(error, BrokenPipeError):
        _to_nowhere(sys.stdout)
        return End.READER_GONE
    if isinstance(error, OSError) and error.errno is not None:
        _to_nowhere(sys.stdout)
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}{error.strerror}; what was saved before stays")
        return End.UNWRITTEN
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        detail = str(error).strip().split("\n")[0][:200] or "an array could not be made"
        say_error(f"out of memory: {detail}; use smaller batches, canvases or models")
        return End.NO_MEMORY
    traceback.print_exception(error)
    return End.DEFECT


class _Forgiving(io.RawIOBase):
    """Bytes to a file descriptor; those that it does not take are dropped."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return size


@contextlib.contextmanager
def _steady_streams() -> Iterator[None]:
    """Streams that no text and no closed end stop; as they were once it is over."""
    # A file that is opened later would else get the number of a closed stream, and its messages.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before, hook = sys.stderr, sys.unraisablehook
    sys.unraisablehook = _say_unraisable
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif sys.stderr is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(
            _Forgiving(2),  # type: ignore[arg-type]
            sys.stderr.encoding,
            "backslashreplace",
            write_through=True,
        )
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if before is not None:
            sys.stderr = before


def _say_unraisable(told: sys.UnraisableHookArgs) -> None:
    # A save that failed leaves tensorstore with results for an event loop that has ended.
    if str(told.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(told)


def _to_nowhere(stream: TextIO | None) -> None:
    """Sends what a broken stream still holds to nowhere, so that Python's own end is quiet."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, stream.fileno())  # type: ignore[union-attr]
        os.close(number)
