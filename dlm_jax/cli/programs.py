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
from typing import Any


def needed(module: str, what: str, extra: str = "") -> Any:
    """A module that `what` needs and that an installation can lack: of an application, or of the
    packages of an `extra`.

    Raises:
      ValueError: the module, or one that it imports, is not there.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = f"dlm_jax[{extra}]" if extra else "dlm_jax"
        raise ValueError(
            f"{what} needs {error.name}; install it with: pip install '{package}'"
        ) from None


def _run(name: str, extra: str = "") -> int:
    handler = signal.getsignal(signal.SIGINT)
    # In the first process of a container, unhandled signals have no effect.
    if os.getpid() != 1 and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What imports make stays, and looking for garbage among it takes a fifth of a second.
    gc.disable()
    ends = importlib.import_module("dlm_jax.cli.ends")
    with ends.refusals():
        main = needed(f"dlm_jax.{name}", "the program", extra).main
    gc.freeze()
    gc.enable()
    # The training loop handles signals itself; before the loop starts, Ctrl-C ends the program
    # immediately.
    if name != "cli.train":
        signal.signal(signal.SIGINT, handler)
    code = main()
    if code == ends.End.INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


train = functools.partial(_run, "cli.train")
sample = functools.partial(_run, "cli.sample")
evaluate = functools.partial(_run, "cli.evaluation")
export = functools.partial(_run, "cli.exporter")
serve = functools.partial(_run, "serving.server", "serve")
lm_eval = functools.partial(_run, "harness.lm_eval", "eval")
