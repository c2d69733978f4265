"""A request to stop, by Ctrl-C or SIGTERM, that every process of a run sees at the same step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


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
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first Ctrl-C or SIGTERM into a request; a second one acts as usual.

    With several processes it is JAX's own preemption service that listens, to SIGTERM alone, and
    agrees with the others on a step. Outside the main thread, where Python hears no signals,
    nothing is changed.
    """
    stop = StopRequest()
    hears_signals = threading.current_thread() is threading.main_thread()
    is_alone = jax.process_count() == 1
    watched = [signal.SIGINT, signal.SIGTERM] if hears_signals and is_alone else []
    previous = {number: signal.getsignal(number) for number in watched}

    def request(number: int, _: Any) -> None:
        # Nothing is printed here: the signal may have come in the middle of printing.
        stop._note(number)
        for other, handler in previous.items():
            signal.signal(other, handler)

    try:
        for number in watched:
            signal.signal(number, request)
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
