"""Results of an engine: rows of a step, and totals over all steps."""

from __future__ import annotations

from typing import NamedTuple

from dlm_jax.inference.results import Row
from dlm_jax.inference.scheduler import Ticket
from dlm_jax.sampling.row import Counters


class Step(NamedTuple):
    """The rows of one `Engine.step`.

    Attributes:
      finished: ended rows, cut after their first EOS.
      progress: current state of watched rows that ran or entered a slot in this call.
    """

    finished: dict[Ticket, Row]
    progress: dict[Ticket, Row]


class Work(NamedTuple):
    """Totals over all calls so far. Every counter is also an attribute.

    Attributes:
      rows: rows that have ended.
      tokens: tokens that these rows generated.
      steps: steps taken by rows.
      slot_steps: slots times steps, busy or idle.
      taken: the part of `steps` during which requests of the same kind waited.
      offered: the part of `slot_steps` during which requests of the same kind waited.
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
      slots: total slots of the running programs.
      programs: slots and canvas of each cached program.
      compiled: slots and canvas of every program that was compiled.
      prefix_found: positions of prompts whose keys and values were reused.
      prefix_computed: positions of prompts whose keys and values were computed for reuse.
    """

    work: Work
    waiting: int
    running: int
    slots: int
    programs: tuple[str, ...]
    compiled: tuple[str, ...]
    prefix_found: int = 0
    prefix_computed: int = 0

    @property
    def occupancy(self) -> float:
        """Share of slot steps that rows used while requests of the same kind waited; 1 if none
        waited.
        """
        return self.work.taken / self.work.offered if self.work.offered else 1.0
