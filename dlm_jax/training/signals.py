"""Signals that ask a run to save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """A request by a signal to stop the run."""

    def __init__(self) -> None:
        self.signal_number = 0

    def at(self, step: int) -> int:
        """The signal that stops the run after `step`, or 0. The result is the same on every
        process.

        With several processes, each process must call this method once after every step.
        """
        if jax.process_count() == 1:
            return self.signal_number
        return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Converts the first Ctrl-C, SIGTERM or SIGHUP (closed terminal) to a stop request.

    A second Ctrl-C or SIGTERM has its default effect. A second SIGHUP has no effect, because
    terminals often send two when they close. If SIGHUP was already ignored, for example by
    ``nohup``, it remains ignored.

    With several processes, the preemption service of JAX handles SIGTERM and chooses the same step
    on all processes. Other signals are forwarded to the service as SIGTERM. Outside the main thread
    this context manager has no effect, because Python delivers signals only to the main thread.
    """
    stop, seen, is_alone = StopRequest(), set[int](), jax.process_count() == 1
    watched: list[int] = []
    if threading.current_thread() is threading.main_thread():
        watched = [signal.SIGINT, signal.SIGHUP, *[signal.SIGTERM] * is_alone]
    previous = {int(number): signal.getsignal(number) for number in watched}
    if previous.get(signal.SIGHUP) is signal.SIG_IGN:
        del previous[signal.SIGHUP]

    def request(number: int, _: Any) -> None:
        if number not in seen:
            seen.add(number)
            stop.signal_number = number
            if not is_alone:
                os.kill(os.getpid(), signal.SIGTERM)
        elif number != signal.SIGHUP:
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    try:
        for number in previous:
            signal.signal(number, request)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
