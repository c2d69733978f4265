"""Where the programs begin, before anything heavy is imported: Ctrl-C ends them without a trace.

Python raises Ctrl-C as an exception wherever the program happens to be. In the middle of a
compilation that leaves objects of XLA alive, which crash the interpreter on its way out. So a
program that has nothing to save yet is ended by the signal itself, and one that was interrupted in
its work leaves without taking the interpreter down piece by piece.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import threading

from dlm_jax.cli.ends import End


def _run(name: str) -> int:
    handler = signal.getsignal(signal.SIGINT)
    is_heard = threading.current_thread() is threading.main_thread()
    # The first process of a container is not ended by signals that it does not handle.
    if is_heard and os.getpid() != 1 and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module(f"dlm_jax.cli.{name}").main
    # The loop of a training listens to signals itself; until then Ctrl-C ends it at once.
    if handler is not None and name != "train":
        signal.signal(signal.SIGINT, handler)
    code = main()
    if code == End.INTERRUPTED:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    return code


train = functools.partial(_run, "train")
sample = functools.partial(_run, "sample")
evaluate = functools.partial(_run, "evaluation")
export = functools.partial(_run, "exporter")
serve = functools.partial(_run, "server")
lm_eval = functools.partial(_run, "lm_eval")
