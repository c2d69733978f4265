"""Requests of one kind: those that wait, in their order, and the slots that run others."""

from __future__ import annotations

import heapq
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dlm_jax.inference.kinds import Kind
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import Row
from dlm_jax.inference.slots import Job, Slots
from dlm_jax.types import Status


@dataclass(frozen=True)
class Ticket:
    """A request that was submitted.

    Attributes:
      number: of the request in its engine, above those of all that were submitted before.
    """

    number: int


@dataclass(eq=False)
class Entry:
    """A request on its way through an engine.

    Attributes:
      ticket: of it.
      request: it.
      priority: those of a higher one go first.
      is_watched: whether its row is shown while it runs.
      submitted: when, of `time.perf_counter`.
      slot: where it runs; None while it waits.
      is_cancelled: whether it has been called off.
    """

    ticket: Ticket
    request: Request
    priority: int = 0
    is_watched: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    slot: int | None = None
    is_cancelled: bool = False

    def job(self) -> Job:
        """What a slot is given."""
        waited = time.perf_counter() - self.submitted
        return Job(self.ticket.number, self.request, waited)

    def __lt__(self, other: Entry) -> bool:
        ours, theirs = (-self.priority, self.ticket.number), (-other.priority, other.ticket.number)
        return ours < theirs


class Counts(NamedTuple):
    """What there is to do in a queue.

    Attributes:
      waiting: requests that wait.
      running: requests that run.
      fills: slots that will take one that waits.
      leaving: slots whose request was called off.
    """

    waiting: int = 0
    running: int = 0
    fills: int = 0
    leaving: int = 0


class Queue:
    """The requests of a kind.

    Attributes:
      kind: of them.
      sizes: how many slots there may be, ascending.
      slots: that run some of them; None when none runs.
      running: those that run, by their slot.
      is_reserved: whether it was made for requests that were to come.
      leaving: slots of requests that were called off, to be cleared in the next turn.
      totals: what there was to do when its turn came, in all processes.
      is_draining: whether none may begin, so that another kind can have the program.
      since: the turn in which it got its slots.
    """

    def __init__(self, kind: Kind, sizes: Sequence[int], *, is_reserved: bool = False):
        self.kind, self.sizes, self.is_reserved = kind, tuple(sizes), is_reserved
        self.since = 0
        self.slots: Slots | None = None
        self.running: dict[int, Entry] = {}
        self.leaving: set[int] = set()
        self.totals = Counts()
        self.is_draining = False
        self._heap: list[Entry] = []
        self._num_waiting = 0

    @property
    def program(self) -> Hashable:
        """What tells the program that it runs in from others; None while it runs nothing."""
        return None if self.slots is None else (self.kind.key, self.slots.num_slots)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._num_waiting

    @property
    def is_busy(self) -> bool:
        """Whether a request runs or waits in this process."""
        return bool(self.running or self._num_waiting)

    def counts(self) -> Counts:
        """What there is to do in this process."""
        free = self.sizes[-1]
        if self.slots is not None:
            free = len(self.slots.free) + len(self.leaving)
        fills = 0 if self.is_draining else min(self._num_waiting, free)
        return Counts(self._num_waiting, len(self.running), fills, len(self.leaving))

    def push(self, entry: Entry) -> None:
        """Lets a request wait."""
        heapq.heappush(self._heap, entry)
        self._num_waiting += 1

    def drop(self, entry: Entry) -> None:
        """Takes one that waits out of the line."""
        assert entry.slot is None
        entry.is_cancelled = True
        self._num_waiting -= 1
        # Those that were called off stay in the heap until it is their turn, or they are many.
        if len(self._heap) > 2 * self._num_waiting + 16:
            self._heap = [other for other in self._heap if not other.is_cancelled]
            heapq.heapify(self._heap)

    def pop(self) -> Iterator[Entry]:
        """Those that wait, taken out one by one, the first in line first."""
        while self._num_waiting:
            entry = heapq.heappop(self._heap)
            if not entry.is_cancelled:
                self._num_waiting -= 1
                yield entry

    def size_wanted(self) -> int:
        """Slots for all that run or wait, as far as there may be."""
        wanted = len(self.running) + self._num_waiting
        return next((size for size in self.sizes if size >= wanted), self.sizes[-1])


def unstarted(entry: Entry, status: Status, *, mask_id: int, error: Exception | None = None) -> Row:
    """The row of a request of which no step is known."""
    request = entry.request
    is_free = request.tokens == mask_id
    if request.is_draft is not None:
        is_free = is_free | request.is_draft
    return Row(
        tokens=request.tokens.astype(np.int32),
        is_frozen=~is_free,
        logprobs=np.zeros(request.tokens.size, np.float32),
        committed=np.full(request.tokens.size, -1, np.int32),
        steps=0,
        block=0,
        status=status,
        error=error,
        is_lost=error is not None,
        waited=time.perf_counter() - entry.submitted,
    )
