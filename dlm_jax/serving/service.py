"""Plans run by the engine: rows are followed, stopped and told of as they grow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from dlm_jax.inference.async_engine import AsyncEngine
from dlm_jax.inference.model import Model
from dlm_jax.inference.reader import Piece, Reader
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import Row
from dlm_jax.inference.structure import is_broken
from dlm_jax.serving.answers import Answer, Done
from dlm_jax.serving.errors import ApiError
from dlm_jax.serving.plan import Plan
from dlm_jax.serving.planner import Planner
from dlm_jax.types import Status

Emit = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends an event, and waits while the one who reads them is slow."""

_REMEDIES = {
    Status.NON_FINITE: "the model's logits are not finite",
    Status.CANCELLED: "the server stops",
}


class Service:
    """One model, and the engine that runs it.

    Args:
      planner: of the model.
      engine: that runs it.
      capacity: rows that may run or wait.

    Attributes:
      planner: as given.
      engine: as given.
      num_rows: rows that run or wait.
      capacity: as given.
    """

    def __init__(self, planner: Planner, engine: AsyncEngine, capacity: int):
        self.planner, self.engine, self.capacity = planner, engine, capacity
        self.num_rows = 0

    @property
    def model(self) -> Model:
        """The model."""
        return self.planner.model

    @contextlib.contextmanager
    def admitted(self, plan: Plan):
        """Room for the rows of a plan.

        Raises:
          ApiError: there is none.
        """
        count = len(plan.requests)
        if self.num_rows + count > self.capacity:
            raise ApiError(
                429,
                f"{self.num_rows} rows run or wait, and {self.capacity} may; ask again later",
                code="overloaded",
            )
        self.num_rows += count
        try:
            yield
        finally:
            self.num_rows -= count

    async def whole(self, plan: Plan) -> list[Done]:
        """All choices of a plan, once they are written."""
        async with _Group() as group:
            tasks = [group.create_task(self._done(plan, request)) for request in plan.requests]
        return [task.result() for task in tasks]

    async def stream(self, plan: Plan, answer: Answer, emit: Emit) -> list[Done]:
        """All choices of a plan, each of which is told of as it grows."""
        outbox = Outbox()

        async def run(index: int, request: Request) -> Done:
            try:
                return await self._told(plan, answer, outbox, index, request)
            finally:
                outbox.leave()

        async with _Group() as group:
            tasks = []
            for index, request in enumerate(plan.requests):
                outbox.enter()
                tasks.append(group.create_task(run(index, request)))
            if plan.kind == "chat":
                for index in range(len(tasks)):
                    await emit(answer.first(index))
            async for event in outbox.events():
                await emit(event)
        done = [task.result() for task in tasks]
        if plan.has_usage:
            await emit(answer.last(done))
        return done

    async def _told(
        self, plan: Plan, answer: Answer, outbox: Outbox, index: int, request: Request
    ) -> Done:
        reader = Reader(self.model, request, plan.stops)
        rows = self.engine.watch(request, every_block=False)
        echo = plan.echoes[index] if plan.echoes and not plan.is_diffusing else ""
        async with contextlib.aclosing(rows):
            async for row in rows:
                _check(row)
                if echo:
                    outbox.put(answer.piece(index, echo, row, range(0), None))
                    echo = ""
                pieces = reader.pieces(row)
                is_over = bool(pieces) and pieces[-1].is_last
                done = self._of(request, reader, row) if is_over else None
                if plan.is_diffusing:
                    reason = None if done is None else done.finish_reason
                    text = reader.shown(row) if done is None else done.text
                    outbox.put(answer.canvas(index, row, text, reason), index)
                else:
                    for piece in _spread(pieces):
                        reason = done.finish_reason if done and piece.is_last else None
                        outbox.put(answer.piece(index, piece.text, row, piece.places, reason))
                if done is not None:
                    return done
        raise AssertionError("a row that has ended is shown once more")

    async def _done(self, plan: Plan, request: Request) -> Done:
        reader = Reader(self.model, request, plan.stops)
        if not plan.stops:
            row = await self.engine.row(request)
            _check(row)
            return self._of(request, reader, row)
        rows = self.engine.watch(request, every_block=False)
        async with contextlib.aclosing(rows):
            async for row in rows:
                _check(row)
                pieces = reader.pieces(row)
                if pieces and pieces[-1].is_last:
                    return self._of(request, reader, row)
        raise AssertionError("a row that has ended is shown once more")

    def _of(self, request: Request, reader: Reader, row: Row) -> Done:
        """A choice that has come to its end, though its row may still run behind that."""
        text, places, is_stopped = reader.whole(row)
        if is_broken(request, row.tokens[reader.start : places.stop]):
            raise ApiError(500, "the text broke its structure", code="structure")
        if not reader.is_infill:
            return Done(text, row, places, is_stopped, prompt_tokens=reader.start)
        filled = tuple(reader.filled(row))
        infilled = self.model.tokenizer.decode(row.tokens)
        written = sum(not row.is_frozen[place] for place in places)
        return Done(
            text, row, places, True, filled, infilled, prompt_tokens=row.tokens.size - written
        )


class Outbox:
    """Events between those who write them and the one who sends them.

    An event that replaces the one before it of the same choice takes its place, so that a slow
    reader costs no more than what is to be read.
    """

    def __init__(self) -> None:
        self._events: list[tuple[int | None, dict[str, Any]]] = []
        self._news = asyncio.Event()
        self._writers = 0

    def enter(self) -> None:
        """Another one writes."""
        self._writers += 1

    def leave(self) -> None:
        """One writes no more."""
        self._writers -= 1
        self._news.set()

    def put(self, event: dict[str, Any], replaces: int | None = None) -> None:
        """Lets an event wait; it takes the place of one that `replaces` the same choice."""
        if replaces is not None:
            self._events = [entry for entry in self._events if entry[0] != replaces]
        self._events.append((replaces, event))
        self._news.set()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events, until nobody writes any more."""
        while True:
            while self._events:
                yield self._events.pop(0)[1]
            if not self._writers:
                return
            self._news.clear()
            await self._news.wait()


class _Group(asyncio.TaskGroup):
    """Tasks of which the first error is raised as it is."""

    async def __aexit__(self, *exception: Any) -> bool | None:
        try:
            return await super().__aexit__(*exception)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


def _spread(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces without those that hold nothing, but for the last of all."""
    return [piece for piece in pieces if piece.text or piece.is_last]


def _check(row: Row) -> None:
    """Raises ApiError for a row that failed."""
    if row.status is Status.FAILED:
        raise ApiError(500, f"the row failed: {row.error}", code="failed")
    if row.status in _REMEDIES:
        status = 503 if row.status is Status.CANCELLED else 500
        raise ApiError(status, _REMEDIES[row.status], code=row.status.name.lower())
