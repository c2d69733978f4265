"""The engine for asyncio: rows are awaited, canvases are streamed, a caller who goes cancels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from dlm_jax.inference.engine import Engine, EngineFullError
from dlm_jax.inference.report import Step
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import Row, Since
from dlm_jax.inference.waiting import Ticket
from dlm_jax.types import Status

_STEPS_PER_CALL = 2


class AsyncEngine:
    """An `Engine` that runs in a thread of its own, whenever there is something to do.

    Use it as an asynchronous context manager. What its methods raise leaves other requests alone.

    Args:
      engine: which nobody else steps; leaving the context closes it.
      steps_per_call: steps between two looks at what has arrived. A request that finds a free slot
        waits for as many at most.
    """

    def __init__(self, engine: Engine, *, steps_per_call: int = _STEPS_PER_CALL):
        if steps_per_call < 1:
            raise ValueError(f"steps_per_call={steps_per_call} must be at least 1")
        self.engine, self._steps_per_call = engine, steps_per_call
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._told: dict[Ticket, asyncio.Queue[Row | Exception]] = {}
        self._work = asyncio.Event()
        self._room = asyncio.Condition()
        self._wait_for_room = 0
        self._is_closing = False
        self._driver: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether requests are run: it was entered, and has neither been closed nor failed."""
        return self._driver is not None and not self._driver.done()

    async def __aenter__(self) -> AsyncEngine:
        self._driver = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def row(self, request: Request, *, priority: int = 0) -> Row:
        """The row of a request, once it has ended; waits while as many others wait as may.

        If the caller is cancelled, so is the request.

        Raises:
          ValueError: as `Engine.submit`, but for a full line.
        """
        async with self._submitted(request, priority, is_watched=False) as told:
            return _row(await told.get())

    async def watch(
        self, request: Request, *, priority: int = 0, every_block: bool = True
    ) -> AsyncGenerator[Row, None]:
        """The canvases of a request: before its first step, then as they grow, the last when ended.

        If the caller stops reading, the request is cancelled.

        Args:
          request: as of `row`.
          priority: as of `row`.
          every_block: whether a canvas is shown when the row has finished a block, instead of after
            every step.
        """
        async with self._submitted(request, priority, is_watched=True) as told:
            since, block = Since(), -1
            while True:
                row = since.add(_row(await told.get()))
                if not every_block or row.block != block or row.status != Status.RUNNING:
                    block = row.block
                    yield since.shown(row)
                if row.status != Status.RUNNING:
                    return

    async def close(self) -> None:
        """Ends the engine once the turn under way is over; who still waits gets a ValueError.

        Raises:
          Exception: what the engine failed with, if it did; it is closed all the same.
        """
        self._is_closing = True
        try:
            if self._driver is not None:
                self._driver.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._driver
        finally:
            await asyncio.to_thread(self._thread.shutdown)
            self.engine.close()
            await self._fail(ValueError("the engine is closed; make another one"))

    @contextlib.asynccontextmanager
    async def _submitted(
        self, request: Request, priority: int, *, is_watched: bool
    ) -> AsyncIterator[asyncio.Queue[Row | Exception]]:
        """What is told of a request, which is cancelled if the block is left before its end."""
        told: asyncio.Queue[Row | Exception] = asyncio.Queue()
        ticket = await self._submit(request, priority, is_watched, told)
        try:
            yield told
        finally:
            if self._told.pop(ticket, None) is not None:
                with contextlib.suppress(ValueError):
                    self.engine.cancel(ticket)
                self._work.set()

    async def _submit(
        self,
        request: Request,
        priority: int,
        is_watched: bool,
        told: asyncio.Queue[Row | Exception],
    ) -> Ticket:
        while True:
            if self._is_closing:
                raise ValueError("the engine is closed, or has failed; make another one")
            # No other task runs between the two, so that whoever waits for room is woken.
            async with self._room:
                try:
                    ticket = self.engine.submit(request, priority=priority, is_watched=is_watched)
                except EngineFullError:
                    self._wait_for_room += 1
                    try:
                        await self._room.wait()
                    finally:
                        self._wait_for_room -= 1
                    continue
            self._told[ticket] = told
            self._work.set()
            return ticket

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._work.clear()
            if not self.engine.is_busy:
                await self._work.wait()
                continue
            # The turn goes on in its thread even if this task is cancelled; `close` waits for it.
            try:
                turn = loop.run_in_executor(self._thread, self._until_told)
                step = await asyncio.shield(turn)
            except Exception as error:
                self._is_closing = True
                await self._fail(error)
                raise
            for ticket, row in step.progress.items():
                if ticket in self._told:
                    self._told[ticket].put_nowait(row)
            for ticket, row in step.finished.items():
                told = self._told.pop(ticket, None)
                if told is not None:
                    told.put_nowait(row)
            async with self._room:
                self._room.notify_all()

    def _until_told(self) -> Step:
        """Turns until somebody is to be told of one, in the engine's thread.

        What is submitted or called off meanwhile is taken up by the next turn, as ever; only the
        way to the event loop and back is spared.
        """
        while True:
            step = self.engine.step(self._steps_per_call)
            is_told = step.finished or step.progress or self._wait_for_room
            if is_told or self._is_closing or not self.engine.is_busy:
                return step

    async def _fail(self, error: Exception) -> None:
        """Tells everybody who waits, for a row or for room."""
        for told in self._told.values():
            told.put_nowait(error)
        self._told.clear()
        async with self._room:
            self._room.notify_all()


def _row(told: Row | Exception) -> Row:
    if isinstance(told, Exception):
        raise told
    return told
