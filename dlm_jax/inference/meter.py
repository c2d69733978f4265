"""How an engine is doing: a line every few seconds, for people or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from dlm_jax.inference.engine import Engine
from dlm_jax.inference.report import Report


class Meter:
    """Writes how an engine is doing; call `tick` as often as you like.

    Args:
      engine: which.
      every: seconds between two lines, more than 0.
      stream: where they go; None is standard error.
      as_json: whether each is a JSON object instead of a sentence.
      clock: seconds that have passed.

    Raises:
      ValueError: `every` is not more than 0.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        every: float = 5.0,
        stream: TextIO | None = None,
        as_json: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not every > 0:
            raise ValueError(f"every={every} seconds must be more than 0")
        self._engine, self._every, self._clock = engine, every, clock
        self._stream = sys.stderr if stream is None else stream
        self._as_json = as_json
        self._start = self._last = clock()
        self._before = engine.report().work

    def tick(self) -> None:
        """Writes a line if it is time for one."""
        if self._clock() - self._last >= self._every:
            self.tell()

    def tell(self) -> None:
        """Writes a line of what was done since the last one."""
        now, report = self._clock(), self._engine.report()
        figures = self._figures(report, max(now - self._last, 1e-9), now - self._start)
        line = json.dumps(figures) if self._as_json else _sentence(figures)
        self._last, self._before = now, report.work
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def _figures(self, report: Report, seconds: float, since: float) -> dict[str, Any]:
        work, before = report.work._asdict(), self._before._asdict()
        rates = {f"{name}_per_second": round((work[name] - before[name]) / seconds, 3)
                 for name in ("rows", "tokens", "forwards")}  # fmt: skip
        return {
            "seconds": round(since, 3),
            "rows": report.work.rows,
            "tokens": report.work.tokens,
            **rates,
            "running": report.running,
            "slots": report.slots,
            "waiting": report.waiting,
            "occupancy": round(report.occupancy, 4),
            "programs": len(report.programs),
        }


def _sentence(figures: dict[str, Any]) -> str:
    rates = (f"{figures[f'{name}_per_second']:,.1f} {name}/s"
             for name in ("rows", "tokens", "forwards"))  # fmt: skip
    return (
        f"engine: {', '.join(rates)}; {figures['running']} of {figures['slots']} slots busy, "
        f"{figures['waiting']} waiting, {figures['programs']} programs"
    )
