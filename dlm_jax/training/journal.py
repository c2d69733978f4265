"""What a run tells of itself while it trains: lines of metrics, trackers and the picture."""

from __future__ import annotations

import time
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.metrics import MetricsLog, plot_losses, read_records
from dlm_jax.training.run import Run
from dlm_jax.training.trackers import open_trackers


class Journal:
    """Records of a run, in ``metrics.jsonl`` and wherever else; on the first process alone.

    Args:
      run: whose records they are.
      step: the last step that is saved; what was recorded beyond it is dropped.
    """

    def __init__(self, run: Run, *, step: int):
        self._run = run
        self._is_on = jax.process_index() == 0
        if self._is_on:
            self._path = run.out_dir / "metrics.jsonl"
            self._log = MetricsLog(self._path, step=step)
            names, config = run.config.train.trackers, configs.to_dict(run.config)
            self._trackers = open_trackers(names, run.out_dir, config, step=step)

    def write(self, **record: Any) -> None:
        """Writes a record, which has a ``kind`` and a ``step``."""
        if self._is_on:
            record["time"] = round(time.time(), 3)
            self._log.write(**record)
            for tracker in self._trackers:
                tracker.write(record)

    def draw(self) -> None:
        """Draws ``loss.png``."""
        if self._is_on:
            task = self._run.task
            plot_losses(
                read_records(self._path), self._run.out_dir / "loss.png",
                held_out=task.figure, unit=task.unit,
            )  # fmt: skip

    def close(self) -> None:
        """Closes the files."""
        if self._is_on:
            self._log.close()
            for tracker in self._trackers:
                tracker.close()
