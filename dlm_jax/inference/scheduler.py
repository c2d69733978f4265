"""Assigns requests to slots of programs. This module uses no devices or arrays.

Requests that can run in the same programs share a bucket and wait in its queue, ordered by priority
and then by number. A queue runs in a program with enough slots for its requests. When a row ends,
the next request fills its slot. Queues are served round robin. The number of programs is limited.
When the limit is reached, the least recently used program is evicted; if all programs are busy, one
queue is drained.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(eq=False, kw_only=True)
class Entry:
    """A submitted request, which waits, or runs in `slot`."""

    number: int
    request: Any
    queue: Any = None
    priority: int = 0
    is_watched: bool = False
    every_block: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    slot: int | None = None
    is_cancelled: bool = False
    read_back: list[Any] = field(default_factory=list)
    error: Exception | None = None
    # `Row.origin` since the canvas that was shown last (None if that was now), its block, and
    # whether the loop has been called since.
    origin: Any = None
    block: int = -1
    has_run: bool = False

    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        return (time.perf_counter() if self.started is None else self.started) - self.submitted

    def __lt__(self, other: Entry) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


class Counts(NamedTuple):
    """The numbers of waiting and running requests of a queue, and of its slots to be cleared."""

    waiting: int = 0
    running: int = 0
    evicted: int = 0


class Queue:
    """The requests of one bucket, and the program and the slots in which they run.

    Attributes:
      sizes: possible numbers of slots, in ascending order.
      size: number of slots of the queue's program; None if it has no program.
      num_own: number of slots of the program in this process.
      slots: `Slots` object that runs the program.
      moves: earlier slots of the running rows if the size has changed since `slots` ran; or None.
      running: running requests by slot.
      evicted: slots of cancelled requests, which `admit` clears.
      totals: work of all processes at the last call of `Scheduler.agree`.
      is_draining: whether new requests wait so that another queue can use the program.
      since: index of the call in which the queue received its program, counted over all queues.
    """

    def __init__(self, bucket: Any, sizes: Sequence[int], *, is_reserved: bool = False):
        self.bucket, self.sizes, self.is_reserved = bucket, tuple(sizes), is_reserved
        self.running: dict[int, Entry] = {}
        self.totals, self.since = Counts(), 0
        self._waiting: list[Entry] = []
        self.release()

    def release(self) -> None:
        """Releases the program and the slots of the queue."""
        self.size: int | None = None
        self.program: Any = None
        self.slots: Any = None
        self.moves: list[int] | None = None
        self.evicted: set[int] = set()
        self.num_own, self.is_draining = 0, False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """True if a request runs or waits in this process."""
        return bool(self.running or self._waiting)

    @property
    def num_fills(self) -> int:
        """Number of free slots that waiting requests can fill, in all processes."""
        free = 0 if self.size is None or self.is_draining else self.size - self.totals.running
        return min(self.totals.waiting, free)

    def counts(self) -> Counts:
        """Returns the work of this process."""
        return Counts(len(self._waiting), len(self.running), len(self.evicted))

    def push(self, entry: Entry) -> None:
        entry.queue = self
        heapq.heappush(self._waiting, entry)

    def cancel(self, entry: Entry) -> None:
        """Marks a request as cancelled; a waiting request is removed from the queue."""
        entry.is_cancelled = True
        if entry.slot is None and entry in self._waiting:  # else it runs or was dropped
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)

    def drop(self) -> list[Entry]:
        """Removes and returns all waiting requests."""
        dropped, self._waiting = self._waiting, []
        return dropped

    def evict(self, entry: Entry) -> None:
        """Removes a cancelled request from its slot. The slot is cleared later."""
        assert entry.slot is not None
        del self.running[entry.slot]
        self.evicted.add(entry.slot)

    def admit(self) -> dict[int, Entry | None]:
        """Assigns waiting requests to free slots. Returns the changed slots with their new
        requests; None marks a slot that becomes free.
        """
        changes: dict[int, Entry | None] = dict.fromkeys(self.evicted)
        self.evicted.clear()
        for slot in range(0 if self.is_draining else self.num_own):
            if self._waiting and slot not in self.running:
                entry = heapq.heappop(self._waiting)
                entry.slot = slot
                self.running[slot] = changes[slot] = entry
        return changes

    def load(self, program: Any, size: int, num_own: int) -> None:
        """Gives the queue a program. The running rows move to its first slots, in their order."""
        if self.size is not None:
            self.moves = sorted(self.running)
            self.running = {new: self.running[old] for new, old in enumerate(self.moves)}
            for slot, entry in self.running.items():
                entry.slot = slot
            self.evicted.clear()
        self.program, self.size, self.num_own = program, size, num_own

    def watched(self) -> list[Entry]:
        return [entry for entry in self.running.values() if entry.is_watched]


class Scheduler:
    """The queues with work and their programs.

    With several processes, all must create and serve the same queues in the same order: `agree`
    passes the same totals to each of them, and queues that are reserved are not removed.

    Args:
      load: function that creates the program for a bucket with the given number of slots.
      max_programs: maximum number of cached programs.
      num_processes: number of processes that share the slots of each program equally.
      keeps_reserved: whether reserved queues without work stay, as several processes require.

    Attributes:
      is_busy: whether any queue has work in any process.
      missing: (queue, number of slots, program) of the programs that are needed but not ready, as
        found by the last call of `next`.
    """

    def __init__(
        self,
        load: Callable[[Any, int], Any],
        *,
        max_programs: int,
        num_processes: int = 1,
        keeps_reserved: bool = False,
    ):
        self._load, self._limit, self._num_processes = load, max_programs, num_processes
        self._keeps_reserved = keeps_reserved
        self._order: deque[Queue] = deque()
        self._programs: OrderedDict[Hashable, tuple[Any, Any, int]] = OrderedDict()
        self._served, self.is_busy = 0, False
        self.missing: list[tuple[Queue, int, Any]] = []

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests in all processes, as of the last call of `agree`."""
        return sum(queue.totals.waiting for queue in self._order)

    @property
    def programs(self) -> list[tuple[Any, int]]:
        """Bucket and number of slots of each cached program, most recently used last."""
        return [(bucket, size) for _, bucket, size in self._programs.values()]

    def enter(self, queue: Queue) -> None:
        """Adds a queue, which is served until it has no work."""
        self.is_busy = True
        if queue not in self._order:
            self._order.append(queue)

    def clear(self) -> None:
        self._order.clear()
        self._programs.clear()

    def counts(self) -> list[Counts]:
        """Returns the work of this process in each queue."""
        return [queue.counts() for queue in self._order]

    def agree(self, everywhere: Iterable[Iterable[int]]) -> None:
        """Sets the total work of all processes in each queue. Releases the programs of queues
        without running requests, and removes queues without work.
        """
        for queue, counts in zip(list(self._order), everywhere, strict=True):
            queue.totals = Counts(*counts)
            if not queue.totals.running:
                queue.release()
                queue.totals = queue.totals._replace(evicted=0)
            if not any(queue.totals) and not (queue.is_reserved and self._keeps_reserved):
                self._order.remove(queue)
        self.is_busy = any(any(queue.totals) for queue in self._order)

    def next(self, is_ready: Callable[[Any], bool] = lambda program: True) -> Queue | None:
        """Returns the next queue with work and a program. The program's size may have changed.

        A queue whose program is not ready runs in a ready program of another size, or waits.
        """
        self.missing = []
        for _ in range(len(self._order)):
            queue = self._order[0]
            self._order.rotate(-1)
            if any(queue.totals) and self._assign_program(queue, is_ready):
                self._served += 1
                return queue
        return None

    def _assign_program(self, queue: Queue, is_ready: Callable[[Any], bool]) -> bool:
        """Gives a queue the smallest program that holds its rows, or the largest. Returns whether
        it has any program.
        """
        now, work = queue.size, queue.totals.waiting + queue.totals.running
        size = next((size for size in queue.sizes if size >= work), queue.sizes[-1])
        if now is not None:
            is_cached = (queue.bucket.key, size) in self._programs
            if queue.is_draining or size == now or size < now and not is_cached:
                return True
        program = self._program(queue, size)
        if program is None:
            if now is None and not any(other.is_draining for other in self._order):
                # The queue with the oldest program is drained.
                busy = [other for other in self._order if other.size is not None]
                min(busy, key=lambda other: other.since).is_draining = True
            return now is not None
        if not is_ready(program):
            self.missing.append((queue, size, program))
            ready = [one for one in queue.sizes if is_ready(self._load(queue.bucket, one))]
            if not ready:
                return now is not None
            size = next((one for one in ready if one >= size), ready[-1])
            program = None if size == now else self._program(queue, size)
            if program is None:
                return now is not None
        queue.since = self._served + 1 if now is None else queue.since
        queue.load(program, size, size // self._num_processes)
        return True

    def _program(self, queue: Queue, size: int) -> Any:
        """Returns the program of a queue; None if the limit is reached and all programs are in
        use.
        """
        key = (queue.bucket.key, size)
        if key not in self._programs:
            in_use = {(q.bucket.key, q.size) for q in self._order if q is not queue}
            while len(self._programs) >= self._limit:
                idle = next((cached for cached in self._programs if cached not in in_use), None)
                if idle is None:
                    return None
                del self._programs[idle]
            self._programs[key] = self._load(queue.bucket, size), queue.bucket, size
        self._programs.move_to_end(key)
        return self._programs[key][0]
