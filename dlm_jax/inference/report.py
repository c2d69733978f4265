"""Results of an engine: rows of a turn, and totals of all turns."""

from __future__ import annotations

from typing import NamedTuple

from dlm_jax.inference.results import Row
from dlm_jax.inference.scheduler import Ticket
from dlm_jax.sampling.row import Counters


class Step(NamedTuple):
    """The rows of a turn.

    Attributes:
      finished: rows that have ended, cut behind their first EOS.
      progress: rows that are watched and ran, or came into a slot, in this turn: as they stand.
    """

    finished: dict[Ticket, Row]
    progress: dict[Ticket, Row]


class Work(NamedTuple):
    """Totals of all turns so far; every counter is an attribute too.

    Attributes:
      rows: rows that have ended.
      tokens: tokens that these rows generated.
      steps: steps of rows.
      slot_steps: steps of slots, busy or idle.
      taken: those of `steps` during which other requests of the same kind waited.
      offered: those of `slot_steps`, likewise.
      counters: counters, summed over all rows.
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
    """Totals of an engine, and its current load.

    Attributes:
      work: totals so far.
      waiting: requests in the queues.
      running: rows that run.
      slots: rows that could run now, in all programs that do.
      programs: slots and canvas of each program that is kept.
      compiled: the same of every program that had to be compiled.
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
