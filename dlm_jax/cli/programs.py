"""Where the programs begin, before anything heavy is imported: Ctrl-C ends them without a trace.

Python raises Ctrl-C as an exception wherever the program happens to be. In the middle of a
compilation that leaves objects of XLA alive, which crash the interpreter on its way out. So a
program that has nothing to save yet is ended by the signal itself, and one that was interrupted in
its work leaves without taking the interpreter down piece by piece.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading

from dlm_jax.cli.ends import End


def train() -> int:
    """``train.py``: until its loop listens to signals, Ctrl-C ends it at once."""
    _default_interrupt()
    return _run("train")


def sample() -> int:
    """``sample.py``."""
    return _run("sample")


def evaluate() -> int:
    """``python -m dlm_jax.evaluate``."""
    return _run("evaluate")


def export() -> int:
    """``python -m dlm_jax.export``."""
    return _run("export")


def serve() -> int:
    """``python -m dlm_jax.serve``."""
    return _run("serve")


def lm_eval() -> int:
    """``dlm-lm-eval``: lm-evaluation-harness with the model ``dlm_jax``."""
    return _run("lm_eval")


def _default_interrupt() -> None:
    is_heard = threading.current_thread() is threading.main_thread()
    # The first process of a container is not ended by signals that it does not handle.
    may_end = is_heard and os.getpid() != 1
    if may_end and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(name: str) -> int:
    handler = signal.getsignal(signal.SIGINT)
    _default_interrupt()
    main = importlib.import_module(f"dlm_jax.cli.{name}").main
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    code = main()
    if code == End.INTERRUPTED:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    return code
