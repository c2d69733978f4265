"""How an engine is doing: a line every few seconds, and the same as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from dlm_jax.inference.engine import Engine
from dlm_jax.inference.report import Report


class Meter:
    """Tells how an engine is doing; call `tick` as often as you like.

    Args:
      engine: which.
      every: seconds between two lines, more than 0.
      write: takes each line; by default it goes to standard error.
      records: a text file that takes the same figures as a JSON object a line; None: nowhere.
      clock: seconds that have passed.

    Raises:
      ValueError: `every` is not more than 0.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        every: float = 5.0,
        write: Callable[[str], Any] | None = None,
        records: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not every > 0:
            raise ValueError(f"every={every} seconds must be more than 0")
        self._engine, self._every, self._clock = engine, every, clock
        self._write, self._records = write or _to_standard_error, records
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
        self._last, self._before = now, report.work
        self._write(_sentence(figures))
        if self._records is not None:
            try:
                self._records.write(f"{json.dumps(figures)}\n")
                self._records.flush()
            except OSError as error:
                # What is told of the work must not end it.
                self._records = None
                self._write(
                    f"warning: figures cannot be recorded: {error.strerror}; they are left out"
                )

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


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
