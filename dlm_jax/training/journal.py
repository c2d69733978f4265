"""What a run tells of itself while it trains: lines of metrics, trackers and the picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.metrics import LossPicture, MetricsLog
from dlm_jax.training.run import Run
from dlm_jax.training.trackers import open_trackers


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
        if self._is_on:
            self._log = MetricsLog(run.out_dir / "metrics.jsonl", step=step)
            self._picture = LossPicture(run.out_dir, run.task.figure, run.task.unit, report=report)
            names, config = run.config.train.trackers, configs.to_dict(run.config)
            self._trackers = open_trackers(names, run.out_dir, config, step=step)

    def write(self, **record: Any) -> None:
        """Writes a record, which has a ``kind`` and a ``step``."""
        if self._is_on:
            record["time"] = round(time.time(), 3)
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
        """Lets a tracker act; one that fails is told of and left out from then on."""
        try:
            act()
        except Exception as error:  # whatever a tracker's library may raise
            self._trackers.remove(tracker)
            why = " ".join(str(error).split())[:200] or type(error).__name__
            self._report(f"warning: {type(tracker).__name__} fails ({why}); the training goes on")
