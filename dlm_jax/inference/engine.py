"""One engine for all sampling: requests come at any time, and rows go out as they end.

Requests that differ in what is compiled in, in their canvas or in the widths of their lists wait in
queues of their own. Each queue has slots, which take the next request as soon as one has ended, and
the queues are served in turn: a turn is one call of the compiled loop.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence

from dlm_jax.inference.checks import check_canvas
from dlm_jax.inference.model import Model
from dlm_jax.inference.queues import Queues
from dlm_jax.inference.report import Report, Step
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import Row
from dlm_jax.inference.turns import Turns
from dlm_jax.inference.waiting import Entry, Queue, Ticket

_QUEUES_PER_PROGRAM = 4


class EngineFullError(ValueError):
    """As many requests wait as may; try again when some have begun."""


class Engine:
    """Takes requests at any time, runs many at once, and gives each row back when it has ended.

    A row's tokens depend on its request alone: not on when it was submitted, what else was, is or
    is called off, or in which slot it runs. In programs of the same size they are the same bit for
    bit, in others to float tolerance. Every ticket comes out of `step` exactly once.

    `submit` and `cancel` may be called from any thread, `step` from one at a time. If the devices
    of the model belong to several processes, each has an engine and a share of the slots: all
    reserve the same requests, submit any of them, and then call `step` until `is_busy` is false.

    Args:
      model: from `load`, or your own.
      batch_size: rows of one program that run at once at most; rounded up to fill the devices that
        split them.
      sizes: numbers of slots that a program may have, each of which is compiled when it is first
        needed; ``(batch_size,)`` makes every row the same bit for bit. By default `batch_size`, an
        eighth of it, and so on.
      canvases: lengths that programs are compiled for; a request runs in the shortest that holds
        it. By default powers of two from 64.
      max_waiting: requests that may wait; None for any number.
      max_programs: compiled programs that are kept. The one used longest ago goes; where all are
        busy, one stops taking requests until another kind has had its turn.
      max_candidates: how many of a position's candidates host samplers and read-back see at most.

    Raises:
      ValueError: a number is below 1.
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
    ):
        sizes = _eighths(batch_size) if sizes is None else sizes
        for name, values in (
            ("batch_size", [batch_size]), ("sizes", sizes), ("canvases", canvases or []),
            ("max_waiting", [1 if max_waiting is None else max_waiting]),
            ("max_programs", [max_programs]), ("max_candidates", [max_candidates]),
        ):  # fmt: skip
            _check_counts(name, values)
        self._lock = threading.Lock()
        self._queues = Queues(
            model, batch_size=batch_size, sizes=sizes, canvases=canvases,
            limit=_QUEUES_PER_PROGRAM * max_programs,
        )  # fmt: skip
        self._turns = Turns(
            model, self._lock, max_programs=max_programs, max_candidates=max_candidates
        )
        self._max_waiting = max_waiting
        self._alone = functools.partial(
            Engine, model, sizes=(min(sizes),), canvases=canvases, max_candidates=max_candidates
        )
        self._mask_id, self._eos_ids = model.tokenizer.mask_id, model.eos_ids
        self._facts = model.facts
        self._entries: dict[Ticket, tuple[Entry, Queue]] = {}
        self._called_off: list[tuple[Entry, Queue]] = []
        self._next_number = 0
        self._is_closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[Ticket, Row]]:
        """Rows as they end, until nothing runs or waits."""
        while self.is_busy:
            yield from self.step().finished.items()

    @property
    def is_busy(self) -> bool:
        """Whether a request has not come out yet, here or in another process."""
        return bool(self._entries) or self._turns.is_together and self._turns.is_busy

    @property
    def share(self) -> tuple[int, int]:
        """Which part of the slots is this process's, from 0, and of how many."""
        return self._turns.share

    @property
    def has_room(self) -> bool:
        """Whether another request may be submitted now."""
        return self._max_waiting is None or self.num_waiting < self._max_waiting

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(queue.num_waiting for queue in self._queues)

    def results(self, requests: Iterable[Request]) -> Iterator[tuple[int, Row]]:
        """The place of each request and its row, as rows end.

        Requests are taken one by one, and only as many as may wait, so that there may be any
        number of them.
        """
        places: dict[Ticket, int] = {}
        coming = enumerate(requests)
        more = True
        while more or places:
            while more and self.has_room:
                place, request = next(coming, (-1, None))
                more = request is not None
                if request is not None:
                    places[self.submit(request)] = place
            for ticket, row in self.step().finished.items():
                if ticket in places:
                    yield places.pop(ticket), row

    def reserve(self, requests: Sequence[Request], *, on_one_canvas: bool = False) -> None:
        """Makes programs of just as many slots as these requests need, which are still to come.

        A caller that knows all of them has fewer and smaller programs.

        Args:
          requests: as they will be submitted.
          on_one_canvas: whether those that agree in what is static share one that holds the
            longest, instead of each running in the shortest that holds it.
        """
        with self._lock:
            for queue in self._queues.reserve(requests, on_one_canvas=on_one_canvas):
                if self._turns.is_together:
                    self._turns.enter(queue)

    def warm_up(self, request: Request) -> None:
        """Compiles what `request` would run in if it came alone, so that another finds it compiled.

        It may be called from any thread, while rows run, and disturbs none.

        Raises:
          ValueError: as `submit`.
        """
        with self._alone() as engine:
            engine.submit(request)
            engine.step(1)

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        is_watched: bool = False,
        number: int | None = None,
    ) -> Ticket:
        """Lets a request wait for a slot.

        Args:
          request: from `make_requests`.
          priority: those of a higher one are served first among those that wait in their queue.
          is_watched: whether `step` shows its row while it runs.
          number: of the ticket, which host samplers and errors call the row; above those of all
            that were submitted before. By default the next.

        Raises:
          ValueError: the engine is closed, the request has fewer steps than blocks, or no canvas
            holds it, or the number is not above the others; `EngineFullError` if as many wait as
            may. Nothing else is disturbed.
        """
        check_canvas(request, self._facts, mask_id=self._mask_id)
        with self._lock:
            self._check_open()
            if not self.has_room:
                raise EngineFullError(
                    f"max_waiting={self._max_waiting} requests wait already; submit again when "
                    "some have begun"
                )
            number = self._next_number if number is None else number
            if number < self._next_number:
                raise ValueError(f"number={number} is taken; use {self._next_number} or more")
            queue = self._queues.find(request)
            ticket = Ticket(number)
            entry = Entry(ticket, request, priority, is_watched)
            self._next_number = number + 1
            self._entries[ticket] = entry, queue
            queue.push(entry)
            self._turns.enter(queue)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Calls a request off: it comes out of the next `step` as it stands, `Status.CANCELLED`.

        If it ends in a turn that is under way, it comes out as it ended.

        Raises:
          ValueError: it has ended, or was called off before, or is not of this engine.
        """
        with self._lock:
            self._check_open()
            if ticket not in self._entries:
                is_known = 0 <= ticket.number < self._next_number
                raise ValueError(
                    f"request {ticket.number} has ended; only one that waits or runs can be "
                    "cancelled"
                    if is_known
                    else f"{ticket} is not of this engine"
                )
            entry, queue = self._entries[ticket]
            if entry.is_cancelled:
                raise ValueError(f"request {ticket.number} has been cancelled before")
            if entry.slot is None:
                queue.drop(entry)
            entry.is_cancelled = True
            self._called_off.append((entry, queue))

    def step(self, num_steps: int | None = None) -> Step:
        """Gives the next queue its turn, and returns the rows that have ended.

        It returns at once when there is nothing to do.

        Args:
          num_steps: of each row at most, as long as fewer than a sixteenth of the slots end while
            others wait; 0 only fills free slots. By default 8, or 1 if a row is watched.

        Raises:
          ValueError: the engine is closed, or `num_steps` is negative.
        """
        if num_steps is not None and num_steps < 0:
            raise ValueError(f"num_steps={num_steps} must be at least 0")
        with self._lock:
            self._check_open()
            called_off, self._called_off = self._called_off, []
        rows = [
            (entry, self._turns.take_away(entry, queue))
            for entry, queue in called_off
            if entry.ticket in self._entries  # or it has ended in the turn that was under way
        ]
        turn = self._turns.take(num_steps)
        finished = {e.ticket: row.upto_eos(self._eos_ids) for e, row in (*rows, *turn.ended)}
        with self._lock:
            for ticket in finished:
                del self._entries[ticket]
        return Step(finished, {entry.ticket: row for entry, row in turn.shown})

    def report(self) -> Report:
        """What has been done so far, and what runs and waits now."""
        with self._lock:
            queues = list(self._queues)
            return Report(
                work=self._turns.work,
                waiting=sum(queue.num_waiting for queue in queues),
                running=sum(len(queue.running) for queue in queues),
                slots=sum(q.slots.num_slots for q in queues if q.slots is not None),
                programs=self._turns.programs.shapes,
                compiled=tuple(self._turns.compiled),
            )

    def num_committed(self) -> int:
        """Tokens that the running rows have written."""
        return sum(q.slots.num_committed() for q in self._queues if q.slots is not None)

    def close(self) -> None:
        """Ends the engine; what has not come out yet never will. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._turns.clear()
            self._entries.clear()
            self._called_off.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed; make another one")


def _eighths(batch_size: int) -> list[int]:
    """The number, an eighth of it, and so on down to 1."""
    sizes = [batch_size]
    while isinstance(batch_size, int) and sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // 8))
    return sizes


def _check_counts(name: str, values: Sequence[int]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1, a whole number")
