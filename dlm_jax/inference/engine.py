"""The sampling engine: it accepts requests at any time and yields rows as they end.

Requests that can run in the same program wait in one queue, and queues take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_jax.distributed.partitions import OwnRows, num_shares, spans_processes, split_rows
from dlm_jax.distributed.processes import totals
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, require_count
from dlm_jax.inference.results import Row, canvas_size
from dlm_jax.inference.slots import Bucket, Entry, Slots, compiled_loop, slot_count
from dlm_jax.sampling.program import Counters
from dlm_jax.settings import SettingError
from dlm_jax.types import Status

_LOGGER = logging.getLogger(__name__)

STEPS_PER_CALL = 8
_IDLE_SHARE = 16
_MOST_IDLE_QUEUES = 128
_SECONDS_PER_CHECK = 0.5
"""How often an idle `AsyncEngine` checks whether the process ends."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Totals over all calls of an engine, and its current load.

    The tokens are those of the ended rows, and steps and counters are summed over all rows.
    `programs` names the slots and canvas length of each program that has run.
    """

    rows: int = 0
    tokens: int = 0
    steps: int = 0
    counters: Counters = Counters()
    waiting: int = 0
    running: int = 0
    slots: int = 0
    programs: tuple[str, ...] = ()


class Queue:
    """The requests of one bucket, and the slots in which they run; None without running rows.

    If `is_reserved`, requests that fit a shorter canvas run here, too. The slots in `evicted` are
    those of cancelled requests, which the next call clears. `num_waiting` and `num_running` count
    the requests of all processes at the beginning of the last call.
    """

    def __init__(self, bucket: Bucket, sizes: Iterable[int], *, is_reserved: bool):
        self.bucket, self.sizes, self.is_reserved = bucket, sorted(sizes), is_reserved
        self.waiting: deque[Entry] = deque()
        self.running: dict[int, Entry] = {}
        self.evicted: set[int] = set()
        self.num_waiting = self.num_running = 0
        self.slots: Slots | None = None

    def admit(self, num_slots: int) -> dict[int, Entry | None]:
        """Moves waiting requests to free slots. Returns the changed slots, with None if free."""
        changes: dict[int, Entry | None] = dict.fromkeys(self.evicted)
        self.evicted.clear()
        for slot in range(num_slots):
            if self.waiting and slot not in self.running:
                entry = self.waiting.popleft()
                entry.slot = slot
                self.running[slot] = changes[slot] = entry
        return changes


class Engine:
    """Accepts requests at any time, runs them in batches, and yields each row when it ends.

    The tokens of a row depend only on its request, not on the time of submission, other requests,
    cancellations or slots. Programs of the same size produce identical tokens; other programs agree
    within floating-point tolerance. Every request is returned exactly once.

    `run` is the loop: it reads requests from an iterable and yields rows. `submit` and `cancel` are
    thread-safe and can be called while `run` runs. Only one thread at a time may run the engine. If
    the devices of the model belong to several processes, each process has an engine and an equal
    share of the slots. All processes must reserve the same requests. Each process can then submit
    any of these requests, and all must call `run` together.

    Args:
      model: a model from `load`, or a custom one.
      batch_size: maximum number of rows per program, rounded up to a multiple of the number of
        devices over which the rows are sharded.
      sizes: allowed slot counts of programs. Each size is compiled on first use. With
        ``(batch_size,)``, every row is bitwise reproducible. Default: `batch_size` divided by
        powers of 8.
      canvases: canvas lengths of programs. A request runs on the shortest canvas that fits it, or
        on one whose length is a power of two from 64.
      max_waiting: maximum number of waiting requests that `run` reads ahead. None sets no limit.
      max_candidates: maximum number of candidates per position for host samplers and read-back.

    Attributes:
      model: the model.
      share: (index of this process's part of the rows, number of parts).
      sizes: the allowed slot counts, in ascending order.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int = 64,
        sizes: Sequence[int] | None = None,
        canvases: Sequence[int] = (),
        max_waiting: int | None = 1024,
        max_candidates: int = 64,
    ):
        for name, value in (
            ("batch_size", batch_size),
            ("sizes", min(sizes or [1])),
            ("canvases", min(canvases, default=1)),
            ("max_waiting", 1 if max_waiting is None else max_waiting),
            ("max_candidates", max_candidates),
        ):
            require_count(name, value)
        if sizes is None:
            powers = range(batch_size.bit_length())
            sizes = [*{max(1, batch_size // 8**power) for power in powers}]
        self.model, self._rows = model, split_rows(model.params)
        self.share = OwnRows(self._rows, num_shares(self._rows)).share
        self._is_together = spans_processes(self._rows)
        self._batch_size, self.sizes = batch_size, sorted(sizes)
        self._canvases, self._max_waiting = tuple(canvases), max_waiting
        self._max_candidates = max_candidates
        self._lock = threading.RLock()
        self._report = Report()
        self._programs: dict[str, None] = {}
        self._queues: list[Queue] = []  # the next to be served is the first
        self._entries: dict[int, Entry] = {}
        self._cancelled: list[Entry] = []
        self._next_number, self._is_busy, self._is_closed = 0, False, False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        requests: Iterable[Request | None] = (),
        *,
        num_steps: int | None = None,
        is_watched: bool = False,
    ) -> Iterator[Row]:
        """Yields rows as they end, until all requests have ended.

        Requests are read lazily, as many as may wait, so the iterable can be arbitrarily long.
        Requests that are submitted in the meantime run as well. ``Row.number`` is the number of the
        request, in the order in which they are read or submitted, from 0.

        Args:
          requests: the requests. With several processes, all iterables have the same length, and
            None stands for a request that another process runs.
          num_steps: as in `step`.
          is_watched: whether the rows of `requests` are also yielded while they run.
        """
        turns = self.turns(requests, num_steps=num_steps, is_watched=is_watched)
        return itertools.chain.from_iterable(turns)

    def turns(
        self,
        requests: Iterable[Request | None] = (),
        *,
        num_steps: int | None = None,
        is_watched: bool = False,
    ) -> Iterator[list[Row]]:
        """Yields the rows of each call of `step`, as `run` does one by one."""
        coming, has_more = iter(requests), True
        while True:
            if has_more:
                limit = self._max_waiting
                room = None if limit is None else max(0, limit - self.num_waiting)
                count = 0
                for request in itertools.islice(coming, room):
                    # All processes read the same number of requests, and all are busy then.
                    count, self._is_busy = count + 1, True
                    if request is None:
                        self._next_number += 1
                    else:
                        self.submit(request, is_watched=is_watched)
                has_more = count == room
            if not (has_more or self.is_busy):
                return
            yield self.step(num_steps)

    @property
    def is_busy(self) -> bool:
        """True if any process has an unfinished request."""
        return bool(self._entries) or self._is_busy

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests; with several processes, that before the last step."""
        with self._lock:
            if self._is_together:
                return sum(queue.num_waiting for queue in self._queues)
            return sum(len(queue.waiting) for queue in self._queues)

    def reserve(
        self,
        requests: Sequence[Request],
        *,
        on_one_canvas: bool = False,
        is_part: bool = False,
    ) -> None:
        """Chooses programs for requests that will be submitted later.

        Reserving all requests in advance results in fewer and smaller programs.

        Args:
          requests: the requests that will be submitted.
          on_one_canvas: whether requests with the same static settings share the canvas of the
            longest request. Otherwise each request uses the shortest canvas that fits it.
          is_part: whether more requests will follow, so that programs have the sizes of the engine
            instead of the smallest that holds these requests.
        """
        with self._lock:
            groups: dict[Any, list[Request]] = {}
            for request in requests:
                canvas = 0 if on_one_canvas else self._canvas(request)
                groups.setdefault((request.static, canvas), []).append(request)
            for (static, canvas), some in groups.items():
                sizes = [slot_count(len(some), self._batch_size)]
                if is_part:
                    near = [queue.bucket for queue in self._queues]
                    near = [b for b in near if b.static == static and b.canvas == canvas]
                    some = [r for r in some if not any(bucket.holds(r) for bucket in near)]
                    sizes = self.sizes
                if some:
                    longest = max(request.room for request in some)
                    self._add(some, canvas or canvas_size(longest), sizes, is_reserved=True)

    def warm_up(self, request: Request, *, num_rows: int = 1) -> None:
        """Compiles the program in which `num_rows` requests like `request` would run.

        This method can be called from any thread while rows run. Host samplers are not called.
        """
        with self._lock:
            queue = self._queue_of(request)
        size = next((size for size in queue.sizes if size >= num_rows), queue.sizes[-1])
        loop = compiled_loop(self.model, queue.bucket, size)
        with loop.lock:
            if loop.steps.has_run:
                return
            example = queue.bucket.example
            if example.host_sampler is not None:
                example = dataclasses.replace(example, host_sampler=lambda seen: int(seen.ids[0]))
            running = {0: Entry(number=0, request=example, slot=0)}
            slots = Slots(self.model, queue.bucket, size, max_candidates=self._max_candidates)
            slots.put(running)
            slots.advance(running, 1)
            slots.put(running)
            for other in queue.sizes:
                if other != size:
                    slots.resized(other, [0])

    def is_compiled(self, request: Request) -> bool:
        """Returns whether a program in which the request can run has been compiled."""
        with self._lock:
            queue = self._queue_of(request)
        model, bucket = self.model, queue.bucket
        return any(compiled_loop(model, bucket, size).steps.has_run for size in queue.sizes)

    def submit(self, request: Request, *, is_watched: bool = False) -> int:
        """Queues a request for a slot and returns its number. An error does not affect other
        requests.

        Args:
          request: a request from `make_requests`.
          is_watched: whether the row is also returned while it runs.

        Raises:
          ValueError: the engine is closed.
        """
        with self._lock:
            self._check_open()
            number, queue = self._next_number, self._queue_of(request)
            entry = Entry(number=number, request=request, queue=queue, is_watched=is_watched)
            self._entries[number], self._next_number = entry, number + 1
            if not (queue.waiting or queue.running or self._is_together):
                self._queues.remove(queue)
                self._queues.append(queue)
            queue.waiting.append(entry)
        return number

    def cancel(self, number: int) -> None:
        """Cancels a request: the next `step` returns its current state with `Status.CANCELLED`.

        A request that ends during a running call to `step` is returned as finished. Engines of
        several processes cancel no requests.
        """
        if self._is_together:
            raise ValueError("engines of several processes cannot cancel requests; use one process")
        with self._lock:
            self._check_open()
            entry = self._entries.get(number)
            if entry is None or entry in self._cancelled:
                raise ValueError(f"request {number} neither waits nor runs; cancel it only once")
            if entry.slot is None:
                entry.queue.waiting.remove(entry)
            self._cancelled.append(entry)

    def step(self, num_steps: int | None = None) -> list[Row]:
        """Runs the next queue that has work. Returns the rows that have ended, truncated after
        their first EOS, and the watched rows that ran or entered a slot, with `Status.RUNNING`.

        The call returns immediately if there is no work.

        Args:
          num_steps: maximum number of steps per row. The call returns early when a sixteenth of the
            rows have ended while other requests wait. With 0, the call only fills free slots.
            Default: 8, or 1 if a row is watched.
        """
        if num_steps is not None and num_steps < 0:
            raise SettingError("num_steps", num_steps, "must be at least 0")
        with self._lock:
            self._check_open()
            cancelled, self._cancelled = self._cancelled, []
        # A row may have ended in the call during which it was cancelled.
        ended = [self._evict(entry) for entry in cancelled if entry.number in self._entries]
        with self._lock:
            self._agree()
            queue = next((q for q in self._queues if q.num_waiting or q.num_running), None)
            if queue is not None:
                place = self._queues.index(queue) + 1
                self._queues = self._queues[place:] + self._queues[:place]
        shown: list[Row] = []
        if queue is not None:
            try:
                rows, shown = self._run_queue(queue, num_steps)
            except Exception as error:
                if not queue.running:
                    raise
                rows = [self._unstarted(e, Status.FAILED, error) for e in queue.running.values()]
                queue.running.clear()
            ended += rows
        with self._lock:
            for row in ended:
                del self._entries[row.number]
            if not self._is_together:
                self._agree()
        return [row.upto_eos(self.model.eos_ids) for row in ended] + shown

    def _evict(self, entry: Entry) -> Row:
        """Frees the slot of a cancelled request and returns its row."""
        if entry.slot is None:
            return self._unstarted(entry, Status.CANCELLED)
        (row,) = entry.queue.slots.rows([entry])
        del entry.queue.running[entry.slot]
        entry.queue.evicted.add(entry.slot)
        # The loop has not run since the canvas was shown.
        origin = None if row.origin is None else np.arange(row.tokens.size, dtype=np.int32)
        return dataclasses.replace(row, status=Status.CANCELLED, origin=origin)

    def _agree(self) -> None:
        """Counts the requests of each queue in all processes, and releases slots without rows."""
        counts = [(len(queue.waiting), len(queue.running)) for queue in self._queues]
        if self._is_together:
            flat = np.array(counts, np.int32).reshape(-1)
            counts = totals(flat, self.share).reshape(-1, 2).tolist()
        for queue, (queue.num_waiting, queue.num_running) in zip(self._queues, counts, strict=True):
            if not queue.num_running:
                queue.slots = None
                queue.evicted.clear()
        self._is_busy = any(map(any, counts))

    def _run_queue(self, queue: Queue, num_steps: int | None) -> tuple[list[Row], list[Row]]:
        """Fills the slots of a queue and runs one call of its loop. Returns the rows that have
        ended and the watched rows.
        """
        slots = queue.slots = self._fitting(queue)
        with self._lock:
            changes = queue.admit(slots.num_slots // self.share[1])
        fills = min(queue.num_waiting, slots.num_slots - queue.num_running)
        if changes or fills:
            slots.put(changes)
        # A watched row is shown before its first step.
        watched = [entry for entry in changes.values() if entry and entry.is_watched]
        ended, taken, counted = list[Entry](), 0, Counters()
        if num_steps != 0 and not watched:
            if num_steps is None:
                is_watched = any(entry.is_watched for entry in queue.running.values())
                num_steps = 1 if is_watched else STEPS_PER_CALL
            steps, bucket = slots.loop.steps, queue.bucket
            label = f"rows={slots.num_slots} canvas={bucket.canvas}"
            label += " host" * bucket.static.needs_host
            if not steps.has_run:
                with slots.loop.lock:  # `warm_up` may be compiling it
                    pass
            waits = queue.num_waiting > fills
            num_ends = max(1, slots.num_slots // _IDLE_SHARE) if waits else None
            ended, taken_B, counted = slots.advance(queue.running, num_steps, num_ends)
            taken = int(taken_B.sum())
            self._programs[label] = None
            watched = [e for e in queue.running.values() if e.is_watched and e not in ended]
        rows = slots.rows([*ended, *watched])
        rows, shown = rows[: len(ended)], rows[len(ended) :]
        queue.running = {slot: e for slot, e in queue.running.items() if e not in ended}
        report = self._report
        self._report = dataclasses.replace(
            report,
            rows=report.rows + len(rows),
            tokens=report.tokens + sum(row.num_generated for row in rows),
            steps=report.steps + taken,
            counters=report.counters.plus(counted),
        )
        return rows, [dataclasses.replace(row, status=Status.RUNNING) for row in shown]

    def _fitting(self, queue: Queue) -> Slots:
        """Returns the slots of a queue, moved to the smallest size that holds its rows. They move
        to a smaller size only if it is compiled.
        """
        work = queue.num_waiting + queue.num_running
        size = next((size for size in queue.sizes if size >= work), queue.sizes[-1])
        slots = queue.slots
        if slots is None:
            return Slots(self.model, queue.bucket, size, max_candidates=self._max_candidates)
        loop = compiled_loop(self.model, queue.bucket, size)
        if size == slots.num_slots or (size < slots.num_slots and not loop.steps.has_run):
            return slots
        moves = sorted(queue.running)
        queue.running = {new: queue.running[old] for new, old in enumerate(moves)}
        for slot, entry in queue.running.items():
            entry.slot = slot
        queue.evicted.clear()
        return slots.resized(size, moves)

    def report(self) -> Report:
        with self._lock:
            return dataclasses.replace(
                self._report,
                waiting=sum(len(queue.waiting) for queue in self._queues),
                running=sum(len(queue.running) for queue in self._queues),
                slots=sum(queue.slots.num_slots for queue in self._queues if queue.slots),
                programs=tuple(self._programs),
            )

    def close(self) -> None:
        """Closes the engine and drops unfinished requests. A second call has no effect."""
        with self._lock:
            self._is_closed, self._is_busy, self._queues = True, False, []
            self._entries.clear()
            self._cancelled.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed; create a new one")

    def _queue_of(self, request: Request) -> Queue:
        """Returns the queue of a request and creates it if no bucket fits."""
        static, canvas = request.static, self._canvas(request)
        for queue in sorted(self._queues, key=lambda queue: queue.bucket.canvas):
            is_near = queue.is_reserved or queue.bucket.canvas == canvas
            if is_near and queue.bucket.static == static and queue.bucket.holds(request):
                return queue
        if self._is_together:
            raise ValueError(
                "engines of several processes only run requests that all processes have reserved; "
                "call `reserve` first with the same requests in every process"
            )
        if len(self._queues) >= _MOST_IDLE_QUEUES:
            self._queues = [q for q in self._queues if q.is_reserved or q.waiting or q.running]
        return self._add([request], canvas, self.sizes)

    def _add(
        self,
        requests: Sequence[Request],
        canvas: int,
        sizes: Iterable[int],
        *,
        is_reserved: bool = False,
    ) -> Queue:
        """Returns the queue of a bucket, which is created if there is none. Sizes are rounded up to
        multiples of the number of shards.
        """
        bucket = Bucket(requests, self.model.facts, canvas)
        if bucket.static.needs_host and self._is_together:
            raise ValueError(
                "host samplers and read-back need whole rows in one process; remove them"
            )
        shares = 1 if bucket.static.needs_host else num_shares(self._rows)
        rounded = {-(-size // shares) * shares for size in sizes}
        for queue in self._queues:
            if queue.bucket.key == bucket.key:
                queue.sizes = sorted({*queue.sizes, *rounded})
                return queue
        self._queues.append(Queue(bucket, rounded, is_reserved=is_reserved))
        return self._queues[-1]

    def _canvas(self, request: Request) -> int:
        fitting = [canvas for canvas in self._canvases if canvas >= request.room]
        return min(fitting, default=canvas_size(request.room, is_shared=True))

    def _unstarted(self, entry: Entry, status: Status, error: Exception | None = None) -> Row:
        """Returns the row of a request before its first step."""
        tokens = entry.request.tokens.astype(np.int32)
        return Row(
            number=entry.number,
            tokens=tokens,
            is_frozen=~entry.request.is_open(self.model.tokenizer.mask_id),
            logprobs=np.zeros(tokens.size, np.float32),
            committed=np.full(tokens.size, -1, np.int32),
            steps=0,
            block=0,
            status=status,
            error=error,
            waited=entry.waited,
        )


class AsyncEngine:
    """An `Engine` that runs in its own thread while requests are unfinished.

    Use it as an asynchronous context manager. An exception in a method does not affect other
    requests.

    Args:
      engine: the engine. Only this object may run it. Leaving the context closes the engine.
      steps_per_call: number of steps between checks for new requests. It bounds the waiting time of
        a new request if a slot is free.
    """

    def __init__(self, engine: Engine, *, steps_per_call: int = 2):
        require_count("steps_per_call", steps_per_call)
        self.engine, self._steps_per_call = engine, steps_per_call
        self._is_closing = False
        self._callers: dict[int, asyncio.Queue[Row | Exception]] = {}
        self._work = threading.Event()
        # A daemon would be aborted by JAX at the end of the process.
        self._driver: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """True if the context is entered, and the engine is not closed and has not failed."""
        return self._driver is not None and self._driver.is_alive()

    async def __aenter__(self) -> AsyncEngine:
        loop = asyncio.get_running_loop()
        self._driver = threading.Thread(target=self._run, args=[loop], name="engine")
        self._driver.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def row(self, request: Request) -> Row:
        """Returns the finished row of a request. Cancelling the caller cancels the request."""
        async with contextlib.aclosing(self.watch(request, is_watched=False)) as rows:
            return await anext(rows)

    def _require_running(self) -> None:
        if not self.is_running or self._is_closing:
            raise ValueError(
                "the engine does not run: it was not entered, is closed or has failed; create one "
                "and enter it by `async with`"
            )

    async def watch(
        self, request: Request, *, is_watched: bool = True
    ) -> AsyncGenerator[Row, None]:
        """Yields the canvas of a request at its end and, if `is_watched`, before its first step and
        after later steps. The request is cancelled if the caller stops iterating.
        """
        engine, rows = self.engine, asyncio.Queue[Row | Exception]()
        self._require_running()
        if engine.share[1] == 1 and not engine.is_compiled(request):
            # Rows of other programs go on; all processes compile together.
            await asyncio.to_thread(engine.warm_up, request)
        self._require_running()
        number = engine.submit(request, is_watched=is_watched)
        self._callers[number] = rows
        self._work.set()
        try:
            while number in self._callers or not rows.empty():
                row = await rows.get()
                if isinstance(row, Exception):
                    raise row
                yield row
        finally:
            if self._callers.pop(number, None) is not None:
                with contextlib.suppress(ValueError):
                    engine.cancel(number)
                self._work.set()

    async def close(self) -> None:
        """Closes the engine after the current step. Waiting callers receive a ValueError."""
        self._is_closing = True
        self._work.set()
        try:
            while self.is_running:
                await asyncio.sleep(0.01)
        finally:
            if self._driver is not None:
                self._driver.join()  # also if the caller is cancelled
            self.engine.close()
            self._fail(ValueError("the engine is closed; create a new one"))
        if self._error is not None:
            raise self._error

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the engine and passes rows to their callers, until the engine is closed or the
        process ends.
        """
        try:
            while not self._is_closing:
                if self.engine.is_busy:
                    if rows := self.engine.step(self._steps_per_call):
                        loop.call_soon_threadsafe(self._deliver, rows)
                elif self._work.wait(_SECONDS_PER_CHECK):
                    # What is submitted from here on sets the event again.
                    self._work.clear()
                elif not (threading.main_thread().is_alive() or loop.is_running()):
                    return
        except Exception as error:
            self._is_closing = True
            if not loop.is_closed():
                _LOGGER.exception("the engine has failed")
                self._error = error
                loop.call_soon_threadsafe(self._fail, error)

    def _deliver(self, rows: Sequence[Row]) -> None:
        for row in rows:
            is_running = row.status is Status.RUNNING
            callers = self._callers
            caller = callers.get(row.number) if is_running else callers.pop(row.number, None)
            if caller is not None:
                caller.put_nowait(row)

    def _fail(self, error: Exception) -> None:
        """Notifies all callers that wait for a row."""
        for caller in self._callers.values():
            caller.put_nowait(error)
        self._callers.clear()
