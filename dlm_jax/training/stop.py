"""A request to stop, by a signal, that every process of a run sees at the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from dlm_jax.checkpoint import Checkpoints


class StopRequest:
    """Whether a signal has requested a stop."""

    def __init__(self) -> None:
        self._signal_number = 0

    def at(self, step: int) -> int:
        """The signal to stop for after `step`, or 0; the same answer on every process.

        With several processes, each must ask once after every step.
        """
        if jax.process_count() == 1:
            return self._signal_number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0

    def _note(self, number: int) -> None:
        self._signal_number = number


@contextlib.contextmanager
def stop_on_signals(checkpoints: Checkpoints) -> Iterator[StopRequest]:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP (a closed terminal) into a request.

    A second Ctrl-C or SIGTERM says on standard error what `checkpoints` lack and acts as usual; a
    second SIGHUP changes nothing, since terminals that close often send two. A SIGHUP that was
    ignored before, by ``nohup``, stays ignored.

    With several processes it is JAX's own preemption service that listens, to SIGTERM alone, and
    agrees with the others on a step; the other signals are passed on to it as that. Outside the
    main thread, where Python hears no signals, nothing is changed.
    """
    stop = StopRequest()
    hears_signals = threading.current_thread() is threading.main_thread()
    is_alone = jax.process_count() == 1
    watched = [signal.SIGINT, signal.SIGHUP] if hears_signals else []
    watched += [signal.SIGTERM] if hears_signals and is_alone else []
    previous = {int(number): signal.getsignal(number) for number in watched}
    if previous.get(signal.SIGHUP) is signal.SIG_IGN:
        del previous[signal.SIGHUP]
    seen: set[int] = set()

    def request(number: int, _: Any) -> None:
        # Printed by `write` alone: the signal may have come in the middle of printing.
        if number not in seen:
            seen.add(number)
            stop._note(number)
            if not is_alone:
                os.kill(os.getpid(), signal.SIGTERM)
        elif number != signal.SIGHUP:
            with contextlib.suppress(OSError):
                os.write(2, f"\n{_lost(checkpoints)}\n".encode())
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    try:
        for number in previous:
            signal.signal(number, request)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _lost(checkpoints: Checkpoints) -> str:
    steps = checkpoints.steps()
    after = f"what came after step {steps[-1]} is lost" if steps else "nothing was saved"
    return f"ended at once: {after}; the same command goes on from there"
