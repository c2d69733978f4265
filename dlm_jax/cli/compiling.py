"""How long a program has been compiling, so that speeds can be told without it."""

from __future__ import annotations

import functools
import time

import jax.monitoring


class CompileClock:
    """Seconds of wall-clock time in which JAX traced, lowered or compiled since it was made.

    JAX tells of each such stretch when it ends; one inside another counts once.
    """

    def __init__(self) -> None:
        self._stretches: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    @property
    def seconds(self) -> float:
        """So far."""
        return sum(end - start for start, end in self._stretches)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        start = end - duration_secs
        # What lies inside has ended before, so it stands at the end of the list.
        while self._stretches and self._stretches[-1][1] > start:
            start = min(start, self._stretches.pop()[0])
        self._stretches.append((start, end))


@functools.cache
def compile_clock() -> CompileClock:
    """The one of this process, from the first call on."""
    return CompileClock()
