"""The sampling engine: it accepts requests at any time and yields rows as they end.

`dlm_jax.inference.scheduler` assigns requests to slots and programs, and `dlm_jax.inference.slots`
runs the rows. The engine uses both and coordinates threads and processes. `Engine.step` runs the
compiled loop of one queue once. `Engine.run` repeats it until all requests have ended, and
`AsyncEngine` repeats it in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from dlm_jax.distributed.partitions import OwnRows, num_shares, spans_processes, split_rows
from dlm_jax.distributed.processes import totals
from dlm_jax.inference.candidates import Candidates
from dlm_jax.inference.model import Model
from dlm_jax.inference.prefixes import Prefixes
from dlm_jax.inference.request import Request, Static, check_canvas, group, static_of
from dlm_jax.inference.results import Row, canvas_size, given_row, since_shown
from dlm_jax.inference.scheduler import Entry, Queue, Scheduler
from dlm_jax.inference.slots import (
    Bucket,
    CompiledLoop,
    Slots,
    Weights,
    compiled_loop,
    slot_count,
)
from dlm_jax.sampling.row import Counters
from dlm_jax.settings import SettingError
from dlm_jax.types import Status

_LOGGER = logging.getLogger(__name__)

STEPS_PER_CALL = 8
_IDLE_SHARE = 16
_QUEUES_PER_PROGRAM = 4
_SECONDS_PER_CHECK = 0.5
"""How often an idle `AsyncEngine` checks whether its event loop has ended."""


class EngineFullError(ValueError):
    """Raised when the queue is full; retry after some requests have started."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Totals over all calls of an engine, and its current load.

    Attributes:
      rows: number of rows that have ended.
      tokens: number of tokens that these rows generated.
      steps: number of steps taken, summed over all rows.
      slot_steps: number of slots times number of steps, including idle slots.
      taken: the part of `steps` taken while requests waited in the same queue.
      offered: number of slot steps that passed while requests waited in the same queue.
      counters: counters, summed over all rows.
      waiting: number of requests in the queues.
      running: number of running rows.
      slots: total number of slots in the running programs.
      programs: number of slots and canvas length of each cached program.
      compiled: number of slots and canvas length of every program that was compiled.
      prefix_found: number of prompt positions whose keys and values were reused.
      prefix_computed: number of prompt positions whose keys and values were computed for reuse.
    """

    rows: int = 0
    tokens: int = 0
    steps: int = 0
    slot_steps: int = 0
    taken: int = 0
    offered: int = 0
    counters: Counters = Counters()
    waiting: int = 0
    running: int = 0
    slots: int = 0
    programs: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    prefix_found: int = 0
    prefix_computed: int = 0

    @property
    def occupancy(self) -> float:
        """Fraction of the offered slot steps that rows used; 1 if no request waited."""
        return self.taken / self.offered if self.offered else 1.0


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
      canvases: canvas lengths of programs. A request runs on the shortest canvas that fits it.
        Default: powers of two from 64.
      max_waiting: maximum number of waiting requests. None sets no limit.
      max_programs: maximum number of compiled programs. The least recently used program is evicted.
        If all programs are busy, one is drained so that requests of another program can run.
      max_candidates: maximum number of candidates per position for host samplers and read-back.
      prefix_mib: memory of each device, in MiB, for keys and values of prompts. Later requests with
        ``cache="exact"`` and the same prefix reuse them. Rows are bitwise identical with and
        without the cache. The model must be causal or block-causal and in one process. 0 disables
        the cache.

    Attributes:
      model: the model.
      share: (index of this process's part of the rows, number of parts).
      sizes: the allowed slot counts, in ascending order.
      compiling: name of the program that is being compiled; empty if there is none.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int = 64,
        sizes: Sequence[int] | None = None,
        canvases: Sequence[int] | None = None,
        max_waiting: int | None = 1024,
        max_programs: int = 32,
        max_candidates: int = 64,
        prefix_mib: int = 0,
    ):
        for name, values in {
            "batch_size": [batch_size],
            "sizes": sizes or [],
            "canvases": canvases or [],
            "max_waiting": [1 if max_waiting is None else max_waiting],
            "max_programs": [max_programs],
            "max_candidates": [max_candidates],
        }.items():
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise SettingError(name, value, "must be an integer of at least 1")
        if sizes is None:
            powers = range(batch_size.bit_length())
            sizes = sorted({max(1, batch_size // 8**power) for power in powers})
        self.model, self._rows = model, split_rows(model.params)
        self.share = OwnRows(self._rows, num_shares(self._rows)).share
        self._is_together = spans_processes(self._rows)
        self._weights = Weights(model.params)
        self._prefix_mib = prefix_mib
        self._prefixes = _prefixes(model, prefix_mib, self._rows)
        self._scheduler = Scheduler(
            self._loop,
            max_programs=max_programs,
            num_processes=self.share[1],
            keeps_reserved=self._is_together,
        )
        self._lock = threading.RLock()
        self._queues: dict[Static, list[Queue]] = {}
        self._max_queues = _QUEUES_PER_PROGRAM * max_programs
        self._batch_size, self.sizes = batch_size, sorted(sizes)
        self._canvases = None if canvases is None else sorted(canvases)
        self._max_waiting, self._max_candidates = max_waiting, max_candidates
        self._report = Report()
        self._compiled: list[str] = []
        self.compiling = ""
        self._warm: dict[Hashable, CompiledLoop] = {}
        self._missing: dict[Hashable, tuple[Queue, int, CompiledLoop]] = {}
        self._errors: dict[Hashable, Exception] = {}
        self._entries: dict[int, Entry] = {}
        self._cancelled: list[Entry] = []
        self._next_number = 0
        self._is_closed = False

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
        request: by default, requests are numbered in the order in which they are read.

        Args:
          requests: the requests. With several processes, all iterables have the same length, and
            None stands for a request that another process runs.
          num_steps: as in `step`.
          is_watched: whether the rows of `requests` are also yielded while they run.
        """
        for rows in self.turns(requests, num_steps=num_steps, is_watched=is_watched):
            yield from rows

    def turns(
        self,
        requests: Iterable[Request | None] = (),
        *,
        num_steps: int | None = None,
        is_watched: bool = False,
        every_block: bool = False,
    ) -> Iterator[list[Row]]:
        """Yields the rows of each call of `step`, as `run` does one by one.

        Args:
          requests: as in `run`.
          num_steps: as in `step`.
          is_watched: as in `run`.
          every_block: whether a watched row is only yielded after each finished block.
        """
        coming, has_more = iter(requests), True
        while True:
            if has_more:
                has_more = self._read(coming, is_watched=is_watched, every_block=every_block)
            if not (has_more or self.is_busy):
                return
            yield self.step(num_steps)

    def _read(
        self, coming: Iterator[Request | None], *, is_watched: bool, every_block: bool
    ) -> bool:
        """Submits requests until the queue is full. Returns whether more may come.

        All processes read the same number of requests, and all are busy then.
        """
        room = None if self._max_waiting is None else max(0, self._max_waiting - self.num_waiting)
        count = 0
        for request in itertools.islice(coming, room):
            count += 1
            self._scheduler.is_busy = True
            if request is None:
                self._next_number += 1
            else:
                self._submit(request, is_watched=is_watched, every_block=every_block)
        return count == room

    @property
    def is_busy(self) -> bool:
        """True if any process has an unfinished request."""
        return bool(self._entries) or self._scheduler.is_busy

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests; with several processes, that before the last step."""
        if self._is_together:
            return self._scheduler.num_waiting
        return sum(queue.num_waiting for queue in self.queues)

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
            for static, members in group(requests).items():
                canvases: dict[int, list[Request]] = {}
                for request in (requests[index] for index in members):
                    canvas = 0 if on_one_canvas else self._canvas(request)
                    canvases.setdefault(canvas, []).append(request)
                queues = self._queues.get(static, ())
                for canvas, some in canvases.items():
                    if is_part:
                        near = [q.bucket for q in queues if q.bucket.canvas == canvas]
                        some = [r for r in some if not any(b.holds(r) for b in near)]
                    if not some:
                        continue
                    sizes = self.sizes if is_part else [slot_count(len(some), self._batch_size)]
                    fitted = canvas or canvas_size(max(request.room for request in some))
                    self._scheduler.enter(self._add(some, fitted, sizes, is_reserved=True))

    def warm_up(self, request: Request, *, num_rows: int = 1) -> None:
        """Compiles the program in which `num_rows` requests like `request` would run.

        This method can be called from any thread while rows run. Host samplers are not called.
        The program is not evicted from memory.
        """
        with self._lock:
            queue = self._queue_of(request)
            size = next((size for size in queue.sizes if size >= num_rows), queue.sizes[-1])
            loop = self._loop(queue.bucket, size)
        self._compile(queue, size, loop)
        self._warm[queue.bucket.key, size] = loop

    @property
    def needs_program(self) -> bool:
        """True if requests wait for `compile`, according to the last call of `step`."""
        return bool(self._missing)

    @property
    def is_waiting(self) -> bool:
        """True if nothing can run before `compile` has returned."""
        with self._lock:
            return bool(self._missing) and all(queue.size is None for queue in self.queues)

    def compile(self) -> None:
        """Compiles a program for which requests wait after ``step(compiles=False)``.

        This method can be called from another thread while rows run. If it fails, requests that can
        run in no other program end with `Status.FAILED`.
        """
        with self._lock:
            key, (queue, size, loop) = next(iter(self._missing.items()))
        known = len(loop.compiled)
        try:
            self._compile(queue, size, loop)
        except Exception as error:
            self._errors[key] = error
        self._compiled += loop.compiled[known:]
        with self._lock:
            del self._missing[key]

    def _loop(self, bucket: Bucket, size: int) -> CompiledLoop:
        return self._warm.get((bucket.key, size)) or compiled_loop(self.model, bucket, size)

    def _compile(self, queue: Queue, size: int, loop: CompiledLoop) -> None:
        """Compiles the functions of a loop by running an example request."""
        with loop.lock:
            if loop.steps.has_run:
                return
            slots = self._slots(queue.bucket, size, loop, is_example=True)
            request = queue.bucket.example
            if request.host_sampler is not None:
                request = dataclasses.replace(request, host_sampler=_first)
            running = {0: Entry(number=0, request=request, slot=0)}
            slots.put(running)
            slots.advance(running, 1)
            slots.put(running)
            for other in queue.sizes:
                if other != size:
                    slots.resized(self._loop(queue.bucket, other), other, [0])

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        is_watched: bool = False,
        every_block: bool = False,
    ) -> int:
        """Queues a request for a slot and returns its number. An error does not affect other
        requests.

        Args:
          request: a request from `make_requests`.
          priority: within a queue, requests with higher priority start first.
          is_watched: whether the row is also returned while it runs.
          every_block: whether a watched row is only returned after each finished block.

        Raises:
          ValueError: the engine is closed, the request has fewer steps than blocks, no canvas fits
            it, or its number is too small.
          EngineFullError: the queue is full.
        """
        return self._submit(
            request,
            is_limited=True,
            priority=priority,
            is_watched=is_watched,
            every_block=every_block,
        )

    def _submit(
        self,
        request: Request,
        *,
        is_watched: bool,
        every_block: bool,
        priority: int = 0,
        is_limited: bool = False,
    ) -> int:
        """Queues a request, also in a full queue unless `is_limited`."""
        check_canvas(request, self.model.facts, mask_id=self.model.tokenizer.mask_id)
        with self._lock:
            self._check_open()
            is_full = self._max_waiting is not None and self.num_waiting >= self._max_waiting
            if is_limited and is_full:
                raise EngineFullError(
                    f"max_waiting={self._max_waiting} requests are waiting; retry when some have "
                    "started"
                )
            number = self._next_number if request.number is None else request.number
            if number < self._next_number:
                raise SettingError(
                    "number", number, "is already used", f"use at least {self._next_number}"
                )
            queue = self._queue_of(request)
            self._entries[number] = entry = Entry(
                number=number,
                request=request,
                priority=priority,
                is_watched=is_watched,
                every_block=every_block,
            )
            self._next_number = number + 1
            queue.push(entry)
            self._scheduler.enter(queue)
        return number

    def cancel(self, number: int) -> None:
        """Cancels a request: the next `step` returns its current state with `Status.CANCELLED`.

        A request that ends during a running call to `step` is returned as finished.
        """
        with self._lock:
            self._check_open()
            if number not in self._entries:
                raise ValueError(
                    f"request {number} has ended; only waiting or running requests can be cancelled"
                    if 0 <= number < self._next_number
                    else f"request {number} was not submitted to this engine"
                )
            entry = self._entries[number]
            if entry.is_cancelled:
                raise ValueError(f"request {number} is already cancelled")
            entry.queue.cancel(entry)
            self._cancelled.append(entry)

    def step(self, num_steps: int | None = None, *, compiles: bool = True) -> list[Row]:
        """Runs the next queue that has a program. Returns the rows that have ended, truncated after
        their first EOS, and the watched rows that ran or entered a slot, with `Status.RUNNING`.

        The call returns immediately if there is no work.

        Args:
          num_steps: maximum number of steps per row. The call returns early when a sixteenth of the
            rows have ended while other requests wait. With 0, the call only fills free slots.
            Default: 8, or 1 if a row is watched.
          compiles: whether programs are compiled in this call. Otherwise requests run in programs
            of other sizes or wait until `compile` is called.
        """
        if num_steps is not None and num_steps < 0:
            raise SettingError("num_steps", num_steps, "must be at least 0")
        ended = self._evict_cancelled()
        queue, changes = self._schedule(ended, compiles=compiles)
        shown = [] if queue is None else self._forward(queue, changes, num_steps, ended)
        return self._finish(ended) + shown

    def _evict_cancelled(self) -> list[Row]:
        """Frees the slots of cancelled requests and returns their rows."""
        with self._lock:
            self._check_open()
            cancelled, self._cancelled = self._cancelled, []
        rows = []
        for entry in cancelled:
            if entry.number not in self._entries:
                continue  # its row ended in the running call
            if entry.slot is None:
                rows.append(self._unstarted(entry, Status.CANCELLED))
                continue
            try:
                (row,) = entry.queue.slots.rows([entry])
                row = dataclasses.replace(row, status=Status.CANCELLED)
                rows.append(_relative(entry, row))
            except Exception as error:  # all rows in the slots of the queue are lost
                rows.append(self._unstarted(entry, Status.FAILED, error))
            entry.queue.evict(entry)
        return rows

    def _schedule(
        self, ended: list[Row], *, compiles: bool
    ) -> tuple[Queue | None, dict[int, Entry | None]]:
        """Returns the next queue that has a program, with its changed slots (`Queue.admit`).

        Notes which programs are missing. The rows of requests that wait for a program that cannot
        be compiled are added to `ended`.
        """
        with self._lock:
            self._agree()
            queue = self._scheduler.next(lambda loop: compiles or loop.is_ready)
            for other, size, loop in self._scheduler.missing:
                key = (other.bucket.key, size)
                if key not in self._errors:
                    self._missing.setdefault(key, (other, size, loop))
                elif other.size is None:
                    error = self._errors.pop(key)
                    ended += [self._unstarted(e, Status.FAILED, error) for e in other.drop()]
            return queue, {} if queue is None else queue.admit()

    def _forward(
        self,
        queue: Queue,
        changes: Mapping[int, Entry | None],
        num_steps: int | None,
        ended: list[Row],
    ) -> list[Row]:
        """Runs one call of the loop and returns the watched rows. Rows that end are added to
        `ended`, even if other rows fail.
        """
        before = len(ended)
        try:
            if queue.slots is None:
                queue.slots = self._slots(queue.bucket, queue.size or 0, queue.program)
            elif queue.moves is not None:
                queue.slots = queue.slots.resized(queue.program, queue.size, queue.moves)
            queue.moves = None
            if queue.num_fills or queue.totals.evicted:
                queue.slots.put(changes)
            # A watched row is shown before its first step.
            if not any(entry and entry.is_watched for entry in changes.values()):
                self._advance(queue, num_steps, ended)
            watched = queue.watched()
            rows = [
                _shown(entry, dataclasses.replace(row, status=Status.RUNNING))
                for entry, row in zip(watched, queue.slots.rows(watched), strict=True)
            ]
        except Exception as error:
            if not queue.running and len(ended) == before:
                raise
            entries, rows = list(queue.running.values()), []
            queue.running.clear()
            ended += [self._unstarted(entry, Status.FAILED, error) for entry in entries]
        return [row for row in rows if row is not None]

    def _advance(self, queue: Queue, num_steps: int | None, ended: list[Row]) -> None:
        """Advances the rows and refills the slots of ended rows."""
        slots, fills, report = queue.slots, queue.num_fills, self._report
        if num_steps == 0 or not queue.totals.running + fills:
            return
        if num_steps is None:
            num_steps = 1 if queue.watched() else STEPS_PER_CALL
        waits = queue.totals.waiting > fills and not queue.is_draining
        loop, num_ends = slots.loop, max(1, slots.num_slots // _IDLE_SHARE) if waits else None
        known = len(loop.compiled)
        self.compiling = "" if loop.steps.has_run else _label(slots.num_slots, queue.bucket)
        entries, taken_B, counted = slots.advance(queue.running, num_steps, num_ends)
        for entry in queue.running.values():
            entry.has_run = True
        self.compiling = ""
        self._compiled += loop.compiled[known:]
        rows = slots.rows(entries)
        steps, slot_steps = int(taken_B.sum()), taken_B.size * int(taken_B.max())
        self._report = dataclasses.replace(
            report,
            rows=report.rows + len(rows),
            tokens=report.tokens + sum(row.num_generated for row in rows),
            steps=report.steps + steps,
            slot_steps=report.slot_steps + slot_steps,
            taken=report.taken + steps * waits,
            offered=report.offered + slot_steps * waits,
            counters=report.counters.plus(counted),
        )
        for entry, row in zip(entries, rows, strict=True):
            del queue.running[entry.slot]
            ended.append(since_shown(row, entry.origin))
        if not self._is_together:
            with self._lock:
                changes = queue.admit()
            if changes:
                slots.put(changes)

    def _finish(self, ended: Sequence[Row]) -> list[Row]:
        """Returns rows truncated after their first EOS and removes their requests."""
        rows = [row.upto_eos(self.model.eos_ids) for row in ended]
        with self._lock:
            for row in rows:
                del self._entries[row.number]
            if not self._is_together:
                self._agree()
        return rows

    def report(self) -> Report:
        with self._lock:
            queues = self.queues
            return dataclasses.replace(
                self._report,
                waiting=sum(queue.num_waiting for queue in queues),
                running=sum(len(queue.running) for queue in queues),
                slots=sum(queue.size for queue in queues if queue.size is not None),
                programs=tuple(_label(size, bucket) for bucket, size in self._scheduler.programs),
                compiled=tuple(self._compiled),
                prefix_found=0 if self._prefixes is None else self._prefixes.found,
                prefix_computed=0 if self._prefixes is None else self._prefixes.computed,
            )

    def num_committed(self) -> int:
        """Returns the number of tokens that the running rows have written."""
        queues = [queue for queue in self.queues if queue.slots is not None]
        return sum(queue.slots.num_committed(list(queue.running)) for queue in queues)

    def close(self) -> None:
        """Closes the engine and drops unfinished requests. A second call has no effect."""
        with self._lock:
            self._is_closed = True
            self._scheduler.clear()
            self._entries.clear()
            self._cancelled.clear()

    @property
    def queues(self) -> list[Queue]:
        """All queues, including those without work."""
        with self._lock:
            return [queue for queues in self._queues.values() for queue in queues]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed; create a new one")

    def _queue_of(self, request: Request) -> Queue:
        """Returns the queue of a request and creates it if no bucket fits."""
        canvas = self._canvas(request)
        for queue in self._queues.get(static_of(request), ()):
            is_near = queue.is_reserved or queue.bucket.canvas == canvas
            if is_near and queue.bucket.holds(request):
                return queue
        if self._is_together:
            raise ValueError(
                "an engine on the devices of several processes only runs requests that all "
                "processes have reserved; call `reserve` first with the same requests in every "
                "process"
            )
        if sum(map(len, self._queues.values())) >= self._max_queues:
            for key, queues in list(self._queues.items()):
                self._queues[key] = [q for q in queues if q.is_busy or q.is_reserved]
                if not self._queues[key]:
                    del self._queues[key]
        return self._add([request], canvas, self.sizes)

    def _add(
        self,
        requests: Sequence[Request],
        canvas: int,
        sizes: Sequence[int],
        *,
        is_reserved: bool = False,
    ) -> Queue:
        """Returns the queue of a bucket, which is created if there is none. The queues of one
        static are sorted by canvas. Sizes are rounded up to multiples of the number of shards.
        """
        bucket = Bucket(requests, self.model.facts, canvas)
        if bucket.static.needs_host and self._is_together:
            raise ValueError(
                "host samplers and read-back need whole rows in one process; remove them or use "
                "a single process"
            )
        shares = 1 if bucket.static.needs_host else num_shares(self._rows)
        rounded = {-(-size // shares) * shares for size in sizes}
        queues = self._queues.setdefault(bucket.static, [])
        for queue in queues:
            if queue.bucket.key == bucket.key:
                queue.sizes = tuple(sorted({*queue.sizes, *rounded}))
                return queue
        queues.append(Queue(bucket, sorted(rounded), is_reserved=is_reserved))
        queues.sort(key=lambda queue: queue.bucket.canvas)
        return next(queue for queue in queues if queue.bucket is bucket)

    def _canvas(self, request: Request) -> int:
        if self._canvases is None:
            return canvas_size(request.room, is_shared=True)
        for canvas in self._canvases:
            if canvas >= request.room:
                return canvas
        raise ValueError(
            f"the request can fill {request.room} positions, but the longest canvas is "
            f"{self._canvases[-1]}; request fewer tokens or create the engine with a longer canvas"
        )

    def _agree(self) -> None:
        """Passes the work in each queue, summed over all processes, to the scheduler. The totals
        are the same in each process.
        """
        counts = np.array(self._scheduler.counts(), np.int32)
        if self._is_together:
            counts = totals(counts.reshape(-1), self.share).reshape(counts.shape)
        self._scheduler.agree(counts.tolist())

    def _slots(
        self, bucket: Bucket, size: int, loop: CompiledLoop, *, is_example: bool = False
    ) -> Slots:
        prefixes = self._prefixes
        if is_example:
            prefixes = _prefixes(self.model, self._prefix_mib, self._rows)
        limit = self._max_candidates
        return Slots(loop, self._weights, bucket, size, max_candidates=limit, prefixes=prefixes)

    def _unstarted(self, entry: Entry, status: Status, error: Exception | None = None) -> Row:
        """Returns the row of a request before its first step."""
        return dataclasses.replace(
            given_row(entry.request.tokens.astype(np.int32)),
            number=entry.number,
            is_frozen=~entry.request.is_open(self.model.tokenizer.mask_id),
            status=status,
            error=error,
            is_lost=error is not None,
            waited=entry.waited,
        )


def _label(num_slots: int, bucket: Bucket) -> str:
    """The name of a program for messages."""
    return f"rows={num_slots} canvas={bucket.canvas}{' host' * bucket.static.needs_host}"


def _relative(entry: Entry, row: Row) -> Row:
    """Returns a running row with `origin` relative to the canvas shown last."""
    if row.origin is not None and not entry.has_run:
        # The loop has not been called since, so that `entry.origin` includes its last call.
        row = dataclasses.replace(row, origin=np.arange(row.origin.size, dtype=row.origin.dtype))
    return since_shown(row, entry.origin)


def _shown(entry: Entry, row: Row) -> Row | None:
    """Returns a row with `origin` relative to the canvas shown last; None if it is not shown."""
    row = _relative(entry, row)
    entry.has_run = False
    is_due = not entry.every_block or row.block != entry.block
    entry.origin, entry.block = None if is_due else row.origin, row.block
    return row if is_due else None


def _has_ended(loop: asyncio.AbstractEventLoop, owner: threading.Thread) -> bool:
    """True if an event loop is closed, or ends with the process, which waits for other threads."""
    is_alive = threading.main_thread().is_alive() or (loop.is_running() and not owner.daemon)
    return loop.is_closed() or not is_alive


def _first(candidates: Candidates) -> int:
    """A host sampler that selects the most likely candidate."""
    return int(candidates.ids[0])


def _prefixes(model: Model, mib: int, rows: NamedSharding | None) -> Prefixes | None:
    if isinstance(mib, bool) or not isinstance(mib, int) or mib < 0:
        raise SettingError("prefix_mib", mib, "must be an integer of at least 0")
    if mib == 0:
        return None
    cached = model.network.cached
    if cached is None or not cached.block_length:
        raise SettingError(
            "prefix_mib", mib, "needs a causal or block-causal model with a cache", "use 0"
        )
    if spans_processes(rows):
        raise SettingError("prefix_mib", mib, "needs a model in one process", "use 0")
    return Prefixes(cached, mib << 20, rows)


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
        if steps_per_call < 1:
            raise SettingError("steps_per_call", steps_per_call, "must be at least 1")
        self.engine, self._steps_per_call = engine, steps_per_call
        self._is_compiling = self._is_closing = False
        self._callers: dict[int, asyncio.Queue[Row | Exception]] = {}
        self._work, self._room = threading.Event(), asyncio.Event()
        # Not daemons, which JAX would abort at the end of the process, nor of a pool, which would
        # keep the process while the engine is open.
        self._driver: threading.Thread | None = None
        self._compiler: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """True while requests can run: the context is entered, and the engine is not closed and has
        not failed.
        """
        return self._driver is not None and self._driver.is_alive()

    async def __aenter__(self) -> AsyncEngine:
        self._room.set()
        arguments = asyncio.get_running_loop(), threading.current_thread()
        self._driver = threading.Thread(target=self._run, args=arguments, name="engine")
        self._driver.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def row(self, request: Request, *, priority: int = 0) -> Row:
        """Returns the finished row of a request; waits while the queue is full.

        Cancelling the caller cancels the request.

        Raises:
          ValueError: as for `Engine.submit`, except for a full queue.
        """
        async with contextlib.aclosing(self._rows(request, priority=priority)) as rows:
            return await anext(rows)

    def watch(
        self, request: Request, *, priority: int = 0, every_block: bool = True
    ) -> AsyncGenerator[Row, None]:
        """Yields the canvas of a request before its first step, after later steps, and at its end.

        The request is cancelled if the caller stops iterating.

        Args:
          request: the request.
          priority: as in `Engine.submit`.
          every_block: whether a canvas is yielded after every finished block instead of every step.
        """
        return self._rows(request, priority=priority, is_watched=True, every_block=every_block)

    async def close(self) -> None:
        """Closes the engine after the current call to `Engine.step`. Waiting callers receive a
        ValueError.
        """
        self._is_closing = True
        self._work.set()
        try:
            await asyncio.to_thread(self._join)
        finally:
            await asyncio.to_thread(self._join)  # also if the caller is cancelled
            self.engine.close()
            self._fail(ValueError("the engine is closed; create a new one"))
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        """Waits for the threads. Only the first one starts the second one."""
        if self._driver is not None:
            self._driver.join()
        if self._compiler is not None:
            self._compiler.join()

    async def _rows(self, request: Request, **how: Any) -> AsyncGenerator[Row, None]:
        """Yields the rows of a request. The request is cancelled if the caller stops before it
        ends.
        """
        rows: asyncio.Queue[Row | Exception] = asyncio.Queue()
        number: int | None = None
        while number is None:
            if self._is_closing:
                raise ValueError("the engine is closed or has failed; create a new one")
            try:
                number = self.engine.submit(request, **how)
            except EngineFullError:
                # Requests wait, so that a later turn starts one of them and sets the event.
                self._room.clear()
                await self._room.wait()
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
                    self.engine.cancel(number)
                self._work.set()

    def _run(self, loop: asyncio.AbstractEventLoop, owner: threading.Thread) -> None:
        """Runs the engine and passes rows to their callers, until the engine is closed or the event
        loop has ended, which runs in the thread `owner`.

        Programs are compiled in another thread, unless all processes must compile together.
        """
        engine, compiles = self.engine, self.engine.share[1] > 1
        try:
            while True:
                if _has_ended(loop, owner):
                    self._is_closing = True
                if engine.needs_program and not self._is_compiling and not self._is_closing:
                    self._is_compiling = True
                    self._compiler = threading.Thread(target=self._compile, name="compiler")
                    self._compiler.start()
                is_idle = not engine.is_busy or engine.is_waiting
                if is_idle and not self._is_closing and not self._work.wait(_SECONDS_PER_CHECK):
                    continue
                # What was submitted before the event was set is seen by the next step, and an event
                # that is set from here on ends the next wait.
                self._work.clear()
                if self._is_closing:
                    return
                rows = engine.step(self._steps_per_call, compiles=compiles)
                if rows or not self._room.is_set():
                    loop.call_soon_threadsafe(self._deliver, rows)
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
        self._room.set()

    def _compile(self) -> None:
        """Compiles the programs for which requests wait."""
        while self.engine.needs_program and not self._is_closing:
            self.engine.compile()
            self._work.set()
        self._is_compiling = False
        self._work.set()

    def _fail(self, error: Exception) -> None:
        """Notifies all callers that wait for a row or for space in the queue."""
        for caller in self._callers.values():
            caller.put_nowait(error)
        self._callers.clear()
        self._room.set()
