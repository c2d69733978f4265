"""Goodput: the share of the wall time of a run that its kept training steps take."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax.monitoring

STEPS, LOST, DOWN = "steps", "lost", "down"
PARTS = (
    STEPS, "import", "devices", "data", "restore", "compile", "evaluation", "sample", "checkpoint",
    "other", LOST, DOWN,
)  # fmt: skip
"""Parts of the wall time of a run."""


def wall_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part in a record of the metrics or the metadata of a checkpoint."""
    return {part: record[f"wall_{part}"] for part in PARTS if f"wall_{part}" in record}


def _without_down(wall: Mapping[str, float]) -> float:
    return sum(seconds for part, seconds in wall.items() if part != DOWN)


class WallClock:
    """Divides the wall time of a run since its first start among its activities.

    `charge` assigns the time since the previous call, so the parts add up to the wall time. The
    parts are saved in checkpoints. A restart restores the parts of its checkpoint: the steps after
    this checkpoint, which are repeated, are ``lost``, and the time between the last line of the
    metrics and the restart is ``down``. Only the parts of process 0 are saved and logged.

    Args:
      start: time at which the program started; by default now.
    """

    def __init__(self, start: float | None = None):
        self._start = self._mark = time.time() if start is None else start
        self._seconds: dict[str, float] = {}
        self._earlier: dict[str, float] = {}
        self._compiled_before = collections.Counter(_compilations())

    def charge(self, part: str) -> None:
        """Assigns the time since the previous call to one of `PARTS`."""
        now = max(time.time(), self._mark)
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def resume(self, saved: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Adds the time of the earlier processes of the run.

        Args:
          saved: metadata of the restored checkpoint; empty without a checkpoint.
          last: last record of the metrics, including the records of lost steps; empty if none.
        """
        kept = wall_of(saved)
        records = [one for one in (saved, last) if wall_of(one)]
        if records:
            newest = max(records, key=lambda one: one["time"])
            seen = wall_of(newest)
            lost = max(0.0, _without_down(seen) - _without_down(kept))
            kept[LOST] = kept.get(LOST, 0.0) + lost
            kept[DOWN] = seen.get(DOWN, 0.0) + max(0.0, self._start - newest["time"])
        self._earlier = kept

    def figures(self) -> dict[str, Any]:
        """``goodput``, a fraction, and ``wall_PART``, seconds up to ``time``, the last `charge`."""
        wall = collections.Counter(self._earlier)
        wall.update(self._seconds)
        share = wall[STEPS] / max(sum(wall.values()), 1e-9)
        parts = {f"wall_{part}": round(seconds, 3) for part, seconds in wall.items()}
        return {"goodput": share, "time": round(self._mark, 3), **parts}

    def first_step(self) -> str:
        """A line with the parts of the time from the start of this process to its first step."""
        made = _compilations() - self._compiled_before
        cached = f" ({made[_HIT]} of {made[_ASKED]} programs cached)" if made[_ASKED] else ""
        names = {STEPS: "step", "compile": f"compile{cached}"}
        parts = ", ".join(f"{names.get(p, p)} {s:.1f} s" for p, s in self._seconds.items())
        return f"first step after {sum(self._seconds.values()):.1f} s: {parts}"


_HIT = "/jax/compilation_cache/cache_hits"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"


@functools.cache
def _compilations() -> collections.Counter[str]:
    """Counts of JAX's events in this process since the first call."""
    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    return counts
