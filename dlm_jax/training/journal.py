"""What a run tells of itself while it trains: lines of metrics, trackers and the picture."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.metrics import METRICS, LossPicture, MetricsLog
from dlm_jax.training.run import Run
from dlm_jax.training.trackers import open_tracker


class Journal:
    """Records of a run, in ``metrics.jsonl`` and wherever else; on the first process alone.

    Args:
      run: whose records they are.
      step: the last step that is saved; what was recorded beyond it is dropped.
      report: takes a line about a tracker or a picture that fails, once: neither ends a run.
    """

    def __init__(self, run: Run, *, step: int, report: Callable[[str], None]):
        self._report = report
        self._is_on = jax.process_index() == 0
        self._identity = run.identity
        if self._is_on:
            self._log = MetricsLog(run.out_dir / METRICS, step=step)
            self._picture = LossPicture(run.out_dir, run.task.figure, run.task.unit, report=report)
            names, config = run.config.train.trackers, configs.to_dict(run.config)
            self._trackers: list[Any] = []
            for name in names:
                with self._reporting(name):
                    self._trackers.append(
                        open_tracker(name, run.out_dir, config, identity=run.identity, step=step)
                    )

    def write(self, **record: Any) -> None:
        """Writes a record, which has a ``kind`` and a ``step``."""
        if self._is_on:
            record |= {"time": round(time.time(), 3), "run": self._identity}
            self._log.write(**record)
            for tracker in list(self._trackers):
                self._guarded(tracker, lambda tracker=tracker: tracker.write(record))

    def draw(self) -> None:
        """Draws ``loss.png``."""
        if self._is_on:
            self._picture.draw()

    def close(self) -> None:
        """Closes the files."""
        if self._is_on:
            self._log.close()
            for tracker in list(self._trackers):
                self._guarded(tracker, tracker.close)

    def _guarded(self, tracker: Any, act: Callable[[], Any]) -> None:
        """Lets a tracker act; one that fails is reported and left out from then on."""
        self._trackers.remove(tracker)
        with self._reporting(type(tracker).__name__):
            act()
            self._trackers.append(tracker)

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Reports what the library of a tracker raises inside; it ends no run."""
        try:
            yield
        except Exception as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            self._report(f"warning: {name} fails ({why}); the training goes on")
