"""Exit codes of the programs, and handling of errors.

=====  =======================================================================================
0      done
1      not finite: the training loss, or the output of a model, is NaN or infinite
2      refused: the input is invalid; one line on standard error has the cause and the remedy
3      partly done: some requests in a file failed; their results contain the errors
4      done, except for a page (``--trace``) that could not be written
5      the output could not be written, for example on a full disk; saved files are kept
6      out of memory
70     a bug in the program or in a custom rule; a traceback is printed
128+n  stopped by signal n: 129 terminal closed, 130 Ctrl-C, 141 pipe closed, 143 SIGTERM
=====  =======================================================================================

If a process of a run fails or is lost, JAX ends the others by signal 6 (134 in a shell).
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

from dlm_jax.store.files import is_full

Main = Callable[..., int]
"""A program, which maps arguments to an exit code; None means the arguments of the process."""


class End(enum.IntEnum):
    """Exit codes; see the module docstring."""

    DONE = 0
    NOT_FINITE = 1
    REFUSED = 2
    PARTLY = 3
    NO_PAGE = 4
    UNWRITTEN = 5
    NO_MEMORY = 6
    DEFECT = 70
    READER_GONE = 128 + signal.SIGPIPE
    INTERRUPTED = 128 + signal.SIGINT


class NotFiniteError(Exception):
    """Parameters or outputs are NaN or infinite; the message names them."""


def program(main: Main) -> Main:
    """Decorates `main` so that exceptions and unwritten output become an `End`."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        if sys.stderr is None:  # print would write to standard output
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            code = main(argv)
            with _output():
                print(end="", flush=True)
        except (Exception, KeyboardInterrupt) as error:
            return end_of(error)
        return code

    return guarded


def check_output() -> None:
    if sys.stdout is None:
        raise ValueError("standard output is closed; keep it open, or redirect it to a file")


def keep_output_for_texts() -> None:
    """Redirects the output of libraries from standard output to standard error.

    CPU collectives, for example, write to standard output. `sys.stdout` is not redirected.
    """
    ours = sys.stdout
    if not isinstance(ours, io.TextIOWrapper) or ours.fileno() != 1:
        return
    ours.flush()
    sys.stdout = open(os.dup(1), "w", encoding=ours.encoding, errors=ours.errors)  # noqa: SIM115
    os.dup2(2, 1)


def emit(text: str) -> None:
    """Writes the text as a line to standard output and flushes the stream.

    Raises:
      OSError: the text cannot be written, for example on a full disk.
    """
    with _output():
        print(text, flush=True)


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Sets the file name of an `OSError` that a write to standard output raises."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Converts validation errors to exit code 2.

    The message is printed to standard error. Use this context only for validation: errors in
    computations are bugs and need a traceback.
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


def code_of(error: BaseException) -> End:
    """The exit code of an error."""
    if isinstance(error, KeyboardInterrupt):
        return End.INTERRUPTED
    if isinstance(error, NotFiniteError):
        return End.NOT_FINITE
    if isinstance(error, BrokenPipeError):
        return End.READER_GONE
    if isinstance(error, OSError) and error.errno is not None:
        return End.UNWRITTEN
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return End.NO_MEMORY
    return End.DEFECT


def end_of(error: BaseException) -> End:
    """Prints an error and returns its exit code."""
    code = code_of(error)
    if code in (End.READER_GONE, End.UNWRITTEN):
        # Python must exit without a message about what standard output has buffered.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code == End.INTERRUPTED:
        print("stopped", file=sys.stderr)
    elif code == End.NOT_FINITE:
        say_error(error)
    elif isinstance(error, OSError) and code == End.UNWRITTEN:
        where = f"{error.filename}: " if error.filename else ""
        say_error(f"{where}{error.strerror}; saved files are kept")
    elif code == End.NO_MEMORY:
        detail = str(error).strip().split("\n")[0][:200] or "an array could not be allocated"
        say_error(f"out of memory: {detail}; use smaller batches, canvases or models")
    elif code == End.DEFECT:
        traceback.print_exception(error)
    return code
