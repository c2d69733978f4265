"""What an engine gives back: rows of a turn, and figures of all that it has done."""

from __future__ import annotations

from typing import NamedTuple

from dlm_jax.inference.results import Row
from dlm_jax.inference.scheduler import Ticket
from dlm_jax.sampling.row import Counters


class Step(NamedTuple):
    """What a turn brought.

    Attributes:
      finished: rows that have ended, cut behind their first EOS.
      progress: rows that are watched and ran, or came into a slot, in this turn: as they stand.
    """

    finished: dict[Ticket, Row]
    progress: dict[Ticket, Row]


class Work(NamedTuple):
    """What has been done, in all turns so far; every counter is an attribute too.

    Attributes:
      rows: that have ended.
      tokens: that those have generated.
      steps: of rows.
      slot_steps: of all slots, whether a row took them or not.
      taken: of `steps`, those while others of their kind waited.
      offered: of `slot_steps`, likewise.
      counters: what all rows have counted.
    """

    rows: int = 0
    tokens: int = 0
    steps: int = 0
    slot_steps: int = 0
    taken: int = 0
    offered: int = 0
    counters: Counters = Counters()

    def __getattr__(self, name: str) -> int:
        return getattr(self.counters, name)

    def plus(self, counters: Counters, **more: int) -> Work:
        added = {name: getattr(self, name) + n for name, n in more.items()}
        return self._replace(**added, counters=self.counters.plus(counters))


class Report(NamedTuple):
    """What an engine has done so far, and what it is at.

    Attributes:
      work: what has been done.
      waiting: requests that wait.
      running: rows that run.
      slots: rows that could run now, in all programs that do.
      programs: slots and canvas of each program that is kept.
      compiled: of those that had to be compiled.
    """

    work: Work
    waiting: int
    running: int
    slots: int
    programs: tuple[str, ...]
    compiled: tuple[str, ...]

    @property
    def occupancy(self) -> float:
        """Share of the slots' steps that rows took while others of their kind waited; else 1."""
        return self.work.taken / self.work.offered if self.work.offered else 1.0
