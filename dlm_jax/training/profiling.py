"""A trace of some steps, for the profiler of TensorBoard, XProf or Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax


def parse_span(text: str) -> tuple[int, int]:
    """(first, last) step of ``FIRST:LAST``, both counted from 1 as in the metrics.

    Raises:
      ValueError: it is none such.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise ValueError(f"--profile {text!r} is not FIRST:LAST; write two steps, such as 10:13")
    span = int(first[:12]), int(last[:12])
    if not 1 <= span[0] <= span[1]:
        raise ValueError(f"--profile {text!r}: steps count from 1, and the last follows the first")
    return span


class Profile:
    """Traces a span of steps of the devices of this process into a directory.

    Args:
      span: (first, last) step from 1; None traces nothing.
      directory: made when the trace begins.
    """

    def __init__(self, span: tuple[int, int] | None, directory: Path):
        self._span, self._directory, self._is_on = span, directory, False

    def before(self, step: int) -> None:
        """Begins at the first step of the span, or later in it after a restart."""
        if self._span is not None and not self._is_on and self._span[0] <= step <= self._span[1]:
            jax.profiler.start_trace(str(self._directory))
            self._is_on = True

    def after(self, step: int, settle: Callable[[], None], report: Callable[[str], None]) -> None:
        """Ends behind the last step, once `settle` has waited for it, and reports where it is."""
        if self._span is None or not self._is_on or step < self._span[1]:
            return
        settle()
        self.stop()
        report(f"step {step}: the trace is in {self._directory}")

    def stop(self) -> None:
        """Ends a trace that is under way."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
