"""Whose turn it is, and what happens in a turn: slots are filled, and the loop is called once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import NamedTuple

import numpy as np

from dlm_jax.distributed.processes import totals
from dlm_jax.distributed.rows import OwnRows, num_shares, spans_processes, split_rows
from dlm_jax.inference.model import Model
from dlm_jax.inference.programs import Loop, Programs
from dlm_jax.inference.report import Work
from dlm_jax.inference.results import Row
from dlm_jax.inference.slots import Slots
from dlm_jax.inference.waiting import Counts, Entry, Queue, unstarted
from dlm_jax.types import Status

STEPS_PER_CALL = 8
_IDLE_SHARE = 16


class Turn(NamedTuple):
    """What a turn brought.

    Attributes:
      ended: rows that have ended.
      shown: rows that are watched and run.
    """

    ended: list[tuple[Entry, Row]]
    shown: list[tuple[Entry, Row]]


class Turns:
    """The queues that have work, which are served in turn.

    Args:
      model: whose programs they run in.
      lock: held while requests leave a queue, which others may fill meanwhile.
      max_programs: programs that are kept.
      max_candidates: as of `Slots`.

    Attributes:
      programs: that are kept.
      work: what has been done.
      compiled: shapes of the programs that had to be compiled.
      is_together: whether several processes take every turn together.
      share: which part of the rows this process feeds and reads, and of how many.
    """

    def __init__(
        self,
        model: Model,
        lock: contextlib.AbstractContextManager[object],
        *,
        max_programs: int,
        max_candidates: int,
    ):
        self.programs, self.work = Programs(model, max_programs), Work()
        self.compiled: list[str] = []
        self._params, self._max_candidates, self._lock = model.params, max_candidates, lock
        self._mask_id = model.tokenizer.mask_id
        rows = split_rows(model.params)
        self.is_together = spans_processes(rows)
        self.share = OwnRows(rows, num_shares(rows)).share
        self._order: deque[Queue] = deque()
        self._next: dict[Queue, tuple[Loop, int]] = {}
        self._count, self._is_busy = 0, False

    @property
    def is_busy(self) -> bool:
        """Whether any process had work when they last told each other."""
        return self._is_busy

    def enter(self, queue: Queue) -> None:
        """Lets a queue have turns from now on, until it has no work."""
        if queue not in self._order:
            self._order.append(queue)
            self._is_busy = True

    def clear(self) -> None:
        """Forgets all queues and programs."""
        self._order.clear()
        self._next.clear()
        self.programs.clear()

    def take(self, num_steps: int | None) -> Turn:
        """Gives the next queue that has a program its turn; nothing if there is no work.

        Args:
          num_steps: as of `Engine.step`.
        """
        with self._lock:
            queue = self._choose()
        if queue is None:
            return Turn([], [])
        ended: list[tuple[Entry, Row]] = []
        try:
            slots = self._slots(queue)
            self._run(queue, slots, num_steps, ended)
            shown = self._shown(queue, slots)
        except Exception as error:
            if not queue.running and not ended:
                raise
            ended, shown = [*ended, *self._failed(queue, error)], []
        with self._lock:
            self._leave(queue)
        return Turn(ended, shown)

    def take_away(self, entry: Entry, queue: Queue) -> Row:
        """The row of a request that was called off; it leaves its slot."""
        if entry.slot is None:
            row = unstarted(entry, Status.CANCELLED, mask_id=self._mask_id)
        else:
            assert queue.slots is not None
            try:
                row = queue.slots.rows([entry.slot])[entry.slot]
                row = dataclasses.replace(row, status=Status.CANCELLED)
            except Exception as error:  # what its slots hold is lost; the others will be told
                row = unstarted(entry, Status.FAILED, mask_id=self._mask_id, error=error)
            queue.leaving.add(entry.slot)
            del queue.running[entry.slot]
        with self._lock:
            self._leave(queue)
        return row

    def _exchange(self) -> None:
        """Adds up what there is to do in each queue over all processes, the same on each."""
        own = np.array([queue.counts() for queue in self._order], np.int32)
        everywhere = totals(own.reshape(-1), self.share).reshape(own.shape)
        for queue, counts in zip(self._order, everywhere.tolist(), strict=True):
            queue.totals = Counts(*counts)
            if not queue.totals.running:
                queue.slots, queue.is_draining = None, False
                queue.leaving.clear()
        self._is_busy = bool(everywhere.any())

    def _choose(self) -> Queue | None:
        if self.is_together:
            self._exchange()
        for _ in range(len(self._order)):
            queue = self._order[0]
            self._order.rotate(-1)
            has_work = not self.is_together or any(queue.totals)
            if has_work and self._has_program(queue):
                return queue
        return None

    def _has_program(self, queue: Queue) -> bool:
        """Whether the queue can have a turn; finds the loop if it is to have another size."""
        now = None if queue.slots is None else queue.slots.num_slots
        wanted = queue.size_wanted()
        if now is not None and (queue.is_draining or wanted == now):
            return True
        if now is not None and wanted < now and not self.programs.has(queue.kind, wanted):
            return True
        in_use = {other.program for other in self._order if other is not queue}
        loop = self.programs.get(queue.kind, wanted, in_use)
        if loop is not None:
            self._next[queue] = loop, wanted
        elif now is None and not any(other.is_draining for other in self._order):
            # The one that has had its program for longest makes way.
            busy = [other for other in self._order if other.slots is not None]
            min(busy, key=lambda other: other.since).is_draining = True
        return loop is not None or now is not None

    def _slots(self, queue: Queue) -> Slots:
        """The slots of the queue whose turn it is: new ones, or of another number, if need be."""
        self._count += 1
        loop, size = self._next.pop(queue, (None, 0))
        if loop is not None and queue.slots is None:
            queue.since = self._count
            queue.slots = Slots(
                loop, self._params, queue.kind, size, max_candidates=self._max_candidates
            )
        elif loop is not None and queue.slots is not None:
            queue.slots.put(dict.fromkeys(queue.leaving))
            queue.leaving.clear()
            places = {slot: place for place, slot in enumerate(queue.slots.held)}
            queue.slots = queue.slots.resized(loop, size)
            queue.running = {places[slot]: entry for slot, entry in queue.running.items()}
            for slot, entry in queue.running.items():
                entry.slot = slot
        assert queue.slots is not None
        return queue.slots

    def _fill(self, queue: Queue, slots: Slots) -> bool:
        """Puts waiting requests into the free slots; whether one of them is watched."""
        free = sorted({*slots.free, *queue.leaving})
        with self._lock:
            new = dict(zip(() if queue.is_draining else free, queue.pop(), strict=False))
            for slot, entry in new.items():
                entry.slot = slot
            queue.running |= new
        changes = dict.fromkeys(queue.leaving) | {slot: e.job() for slot, e in new.items()}
        queue.leaving.clear()
        if changes or self.is_together:
            slots.put(changes)
        return any(entry.is_watched for entry in new.values())

    def _run(
        self, queue: Queue, slots: Slots, num_steps: int | None, ended: list[tuple[Entry, Row]]
    ) -> None:
        """Adds the rows that end in a turn, before their slots go to others, which may fail."""
        if not self.is_together:
            queue.totals = queue.counts()
        todo = queue.totals
        # A row that is watched is shown before its first step.
        is_shown_first = todo.fills + todo.leaving > 0 and self._fill(queue, slots)
        if num_steps == 0 or not todo.running + todo.fills or is_shown_first:
            return
        waits = todo.waiting > todo.fills and not queue.is_draining
        if num_steps is None:
            is_watched = any(entry.is_watched for entry in queue.running.values())
            num_steps = 1 if is_watched else STEPS_PER_CALL
        known = len(slots.loop.compiled)
        taken = slots.advance(num_steps, max(1, slots.num_slots // _IDLE_SHARE) if waits else None)
        self.compiled += slots.loop.compiled[known:]
        rows = slots.rows(taken.ended)
        steps, slot_steps = int(taken.steps.sum()), taken.steps.size * int(taken.steps.max())
        self.work = self.work.plus(
            rows=len(rows),
            tokens=sum(row.num_generated for row in rows.values()),
            **taken.counted,
            steps=steps,
            slot_steps=slot_steps,
            taken=steps if waits else 0,
            offered=slot_steps if waits else 0,
        )
        ended += [(queue.running.pop(slot), row) for slot, row in rows.items()]
        slots.take_out(taken.ended)
        if not self.is_together:
            self._fill(queue, slots)

    def _shown(self, queue: Queue, slots: Slots) -> list[tuple[Entry, Row]]:
        watched = [slot for slot, entry in queue.running.items() if entry.is_watched]
        return [(queue.running[slot], row) for slot, row in slots.rows(watched).items()]

    def _failed(self, queue: Queue, error: Exception) -> list[tuple[Entry, Row]]:
        """The rows of a program that failed, whose state is lost."""
        entries = list(queue.running.values())
        queue.running.clear()
        return [
            (entry, unstarted(entry, Status.FAILED, mask_id=self._mask_id, error=error))
            for entry in entries
        ]

    def _leave(self, queue: Queue) -> None:
        """After a turn: a queue that runs nothing gives its program and its state free."""
        if self.is_together:
            return  # when all processes know that nothing runs
        if not queue.running:
            queue.slots, queue.is_draining = None, False
            queue.leaving.clear()
        if not queue.is_busy and queue in self._order:
            self._order.remove(queue)
