"""The rows that a step of an engine returns, and the engine's totals over all steps."""

from __future__ import annotations

from typing import NamedTuple

from dlm_jax.inference.results import Row
from dlm_jax.inference.scheduler import Ticket
from dlm_jax.sampling.row import Counters


class Step(NamedTuple):
    """The rows returned by one call to `Engine.step`.

    Attributes:
      finished: rows that have ended, truncated after their first EOS.
      progress: current state of watched rows that ran or entered a slot in this call.
    """

    finished: dict[Ticket, Row]
    progress: dict[Ticket, Row]


class Work(NamedTuple):
    """Totals over all calls so far. The fields of `counters` are also available as attributes.

    Attributes:
      rows: number of rows that have ended.
      tokens: number of tokens that these rows generated.
      steps: number of steps taken, summed over all rows.
      slot_steps: number of slots times number of steps, including idle slots.
      taken: the part of `steps` taken while requests waited in the same queue.
      offered: number of slot steps that passed while requests waited in the same queue.
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
      waiting: number of requests in the queues.
      running: number of running rows.
      slots: total number of slots in the running programs.
      programs: number of slots and canvas length of each cached program.
      compiled: number of slots and canvas length of every program that was compiled.
      prefix_found: number of prompt positions whose keys and values were reused.
      prefix_computed: number of prompt positions whose keys and values were computed for reuse.
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
        """Fraction of the offered slot steps that rows used; 1 if no request waited."""
        return self.work.taken / self.work.offered if self.work.offered else 1.0
