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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(eq=False, kw_only=True)
class Entry:
    """A submitted request, which waits, or runs in `slot`.

    Attributes:
      number: number of the request in its engine, greater than all earlier numbers.
      request: the request.
      priority: within a queue, requests with higher priority start first.
      is_watched: whether the row is returned while it runs.
      submitted: time of submission.
      started: time at which the row entered a slot.
      slot: slot of the row; None while it waits.
      is_cancelled: whether the request has been cancelled.
    """

    number: int
    request: Any
    priority: int = 0
    is_watched: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    slot: int | None = None
    is_cancelled: bool = False

    @property
    def waited(self) -> float:
        """Seconds in the queue."""
        return (time.perf_counter() if self.started is None else self.started) - self.submitted

    def __lt__(self, other: Entry) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


class Counts(NamedTuple):
    """The work of a queue: numbers of waiting and of running requests, of slots that waiting
    requests will fill, and of slots whose request was cancelled.
    """

    waiting: int = 0
    running: int = 0
    fills: int = 0
    evicted: int = 0


class Queue:
    """The requests of one bucket.

    Attributes:
      bucket: bucket of the requests, with a unique ``key``.
      sizes: possible numbers of slots, in ascending order.
      is_reserved: whether `Engine.reserve` created the queue.
      size: number of slots of the queue's program; None if it has no program.
      program: program of the queue.
      num_own: number of slots of the program in this process.
      slots: `Slots` object that runs the program.
      running: running requests by slot.
      evicted: slots of cancelled requests. The slots are cleared when the queue is next served.
      totals: total work of all processes at the last call.
      is_draining: whether new requests wait so that another queue can use the program.
      since: index of the call in which the queue received its program, counted over all queues.
    """

    def __init__(self, bucket: Any, sizes: Sequence[int], *, is_reserved: bool = False):
        self.bucket, self.sizes, self.is_reserved = bucket, tuple(sizes), is_reserved
        self.running: dict[int, Entry] = {}
        self.evicted: set[int] = set()
        self.totals = Counts()
        self.since = self.num_waiting = 0
        self._heap: list[Entry] = []
        self.release()

    def release(self) -> None:
        """Releases the program and the slots of the queue."""
        self.size: int | None = None
        self.program: Any = None
        self.slots: Any = None
        self.num_own, self.is_draining = 0, False
        self.evicted.clear()

    @property
    def is_busy(self) -> bool:
        """True if a request runs or waits in this process."""
        return bool(self.running or self.num_waiting)

    def size_for(self, more: int = 0) -> int:
        """The smallest size with slots for all running and waiting rows and `more` others, or else
        the largest.
        """
        wanted = len(self.running) + self.num_waiting + more
        return next((size for size in self.sizes if size >= wanted), self.sizes[-1])

    def counts(self) -> Counts:
        """Returns the work of this process."""
        free = self.sizes[-1] if self.size is None else self.num_own - len(self.running)
        fills = 0 if self.is_draining else min(self.num_waiting, free)
        return Counts(self.num_waiting, len(self.running), fills, len(self.evicted))

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        self.num_waiting += 1

    def cancel(self, entry: Entry) -> None:
        """Marks a request as cancelled; a waiting request is removed from the queue."""
        entry.is_cancelled = True
        if entry.slot is not None:
            return
        self.num_waiting -= 1
        # Cancelled requests stay in the heap until they reach the front or their number is large.
        if len(self._heap) > 2 * self.num_waiting + 16:
            self._heap = [other for other in self._heap if not other.is_cancelled]
            heapq.heapify(self._heap)

    def drop(self) -> list[Entry]:
        """Removes and returns all waiting requests."""
        return list(self._pop())

    def evict(self, entry: Entry) -> None:
        """Removes a cancelled request from its slot. The slot is cleared later."""
        assert entry.slot is not None
        del self.running[entry.slot]
        self.evicted.add(entry.slot)

    def admit(self) -> dict[int, Entry | None]:
        """Assigns waiting requests to free slots. Returns the changed slots with their new
        requests; None marks a slot that becomes free.
        """
        free = [slot for slot in range(self.num_own) if slot not in self.running]
        new = dict(zip([] if self.is_draining else free, self._pop(), strict=False))
        for slot, entry in new.items():
            entry.slot = slot
        self.running |= new
        changes = dict.fromkeys(self.evicted) | new
        self.evicted.clear()
        return changes

    def compact(self) -> None:
        """Renumbers the slots of the running requests from 0, without changing their order."""
        entries = [entry for _, entry in sorted(self.running.items())]
        self.running = dict(enumerate(entries))
        for slot, entry in self.running.items():
            entry.slot = slot

    def watched(self) -> list[int]:
        return [slot for slot, entry in self.running.items() if entry.is_watched]

    def _pop(self) -> Iterator[Entry]:
        while self.num_waiting:
            entry = heapq.heappop(self._heap)
            if not entry.is_cancelled:
                self.num_waiting -= 1
                yield entry


class Scheduler:
    """The queues with work and their programs.

    Args:
      load: function that creates the program for a bucket with the given number of slots.
      max_programs: maximum number of cached programs.
      num_processes: number of processes that share the slots of each program equally. `agree` keeps
        the order of queues identical in all processes.
      is_together: whether several processes share the programs.

    Attributes:
      missing: queues that need a program that is not ready, with its number of slots, as found by
        the last call of `next`.
    """

    def __init__(
        self,
        load: Callable[[Any, int], Any],
        *,
        max_programs: int,
        num_processes: int = 1,
        is_together: bool = False,
    ):
        self._load, self._limit = load, max_programs
        self._num_processes, self.is_together = num_processes, is_together
        self._order: deque[Queue] = deque()
        self._programs: OrderedDict[Hashable, tuple[Any, Any, int]] = OrderedDict()
        self._served, self.is_busy = 0, False
        self.missing: list[tuple[Queue, int]] = []

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
        if queue not in self._order:
            self._order.append(queue)
            self.is_busy = True

    def clear(self) -> None:
        self._order.clear()
        self._programs.clear()

    def counts(self) -> list[Counts]:
        """Returns the work of this process in each queue."""
        return [queue.counts() for queue in self._order]

    def agree(self, everywhere: Iterable[Iterable[int]]) -> None:
        """Sets the total work of all processes in each queue."""
        for queue, counts in zip(self._order, everywhere, strict=True):
            queue.totals = Counts(*counts)
            if not queue.totals.running:
                queue.release()
        self.is_busy = any(any(queue.totals) for queue in self._order)

    def next(self, is_ready: Callable[[Any], bool] = lambda program: True) -> Queue | None:
        """Returns the next queue with work and a program. The program's size may have changed.

        A queue whose program is not ready runs in a ready program of another size, or waits.
        """
        self.missing = []
        for _ in range(len(self._order)):
            queue = self._order[0]
            self._order.rotate(-1)
            has_work = not self.is_together or any(queue.totals)
            if has_work and self._has_program(queue, is_ready):
                self._served += 1
                return queue
        return None

    def leave(self, queue: Queue) -> None:
        """Releases the program of a queue without running requests and removes a queue without
        work.

        With several processes, this method has no effect, because `agree` releases a program when
        no process runs a request in it.
        """
        if self.is_together:
            return
        if not queue.running:
            queue.release()
        if not queue.is_busy and queue in self._order:
            self._order.remove(queue)

    def _has_program(self, queue: Queue, is_ready: Callable[[Any], bool]) -> bool:
        now, wanted = queue.size, queue.size_for()
        if now is not None and (queue.is_draining or wanted == now):
            return True
        if now is not None and wanted < now and (queue.bucket.key, wanted) not in self._programs:
            return True
        program = self._program(queue, wanted)
        if program is None:
            if now is None and not any(other.is_draining for other in self._order):
                # The queue with the oldest program is drained.
                busy = [other for other in self._order if other.size is not None]
                min(busy, key=lambda other: other.since).is_draining = True
            return now is not None
        if not is_ready(program):
            self.missing.append((queue, wanted))
            loaded = {size: self._load(queue.bucket, size) for size in queue.sizes}
            ready = [size for size in queue.sizes if is_ready(loaded[size])]
            if not ready:
                return False
            wanted = next((size for size in ready if size >= wanted), ready[-1])
            program = self._program(queue, wanted)
            if wanted == now or program is None:
                return now is not None
        queue.since = self._served + 1 if now is None else queue.since
        queue.program, queue.size = program, wanted
        queue.num_own = wanted // self._num_processes
        return True

    def _program(self, queue: Queue, size: int) -> Any:
        """Returns the program of a queue; None if the limit is reached and all programs are in
        use.
        """
        key = (queue.bucket.key, size)
        if key not in self._programs:
            in_use = {(q.bucket.key, q.size) for q in self._order if q is not queue}
            while len(self._programs) >= self._limit:
                idle = next((held for held in self._programs if held not in in_use), None)
                if idle is None:
                    return None
                del self._programs[idle]
            self._programs[key] = self._load(queue.bucket, size), queue.bucket, size
        self._programs.move_to_end(key)
        return self._programs[key][0]
