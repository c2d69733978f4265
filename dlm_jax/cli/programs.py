"""Entry points of the programs. Ctrl-C prints no traceback, even during the imports.

Python can raise KeyboardInterrupt anywhere. During a compilation, the exception leaves XLA objects
alive that crash the interpreter at exit, so a program that handles the interrupt exits without
finalising the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys

from dlm_jax.cli.ends import End


def _say_unraisable(told: sys.UnraisableHookArgs) -> None:
    # After a failed save, tensorstore may deliver results to a closed event loop.
    if str(told.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(told)


def _run(name: str) -> int:
    sys.unraisablehook = _say_unraisable
    handler = signal.getsignal(signal.SIGINT)
    # In the first process of a container, unhandled signals have no effect.
    if os.getpid() != 1 and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What imports make stays, and looking for garbage among it takes a fifth of a second.
    gc.disable()
    main = importlib.import_module(f"dlm_jax.cli.{name}").main
    gc.freeze()
    gc.enable()
    # The training loop handles signals itself; before the loop starts, Ctrl-C ends the program
    # immediately.
    if name != "train":
        signal.signal(signal.SIGINT, handler)
    code = main()
    if code == End.INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


train = functools.partial(_run, "train")
sample = functools.partial(_run, "sample")
evaluate = functools.partial(_run, "evaluation")
export = functools.partial(_run, "exporter")
serve = functools.partial(_run, "server")
lm_eval = functools.partial(_run, "lm_eval")
