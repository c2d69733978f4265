"""The engine under asyncio: rows awaited, canvases streamed, callers that go away."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest
from engine_cases import MODEL, SLOTS, alone, request, same_row

from dlm_jax.inference.engine import AsyncEngine, Engine
from dlm_jax.inference.request import make_requests
from dlm_jax.sampling.commit.orders import LowConfidence
from dlm_jax.sampling.loop import Advance
from dlm_jax.settings import rule
from dlm_jax.types import Status


def _engine(**options):
    return Engine(MODEL, **({"sizes": (SLOTS,)} | options))


def _run(do, **options):
    """What a coroutine function of an asynchronous engine returns, within a minute."""

    async def main():
        async with AsyncEngine(_engine(**options)) as engine:
            return await asyncio.wait_for(do(engine), 60)

    return asyncio.run(main())


def test_rows_are_those_of_the_engine():
    async def many(engine):
        async def one(number):
            return await engine.row(request(number))

        return await asyncio.gather(*map(one, range(25)))

    rows = _run(many)
    assert all(same_row(row, alone(number)) for number, row in enumerate(rows))


def test_canvases_come_call_by_call_and_the_last_is_the_row():
    (asked,) = make_requests(MODEL, "A ", {"gen_length": 6, "steps": 6})

    async def canvases(engine):
        return [row async for row in engine.watch(asked)], await engine.row(asked)

    shown, row = _run(canvases)
    assert [one.steps for one in shown] == [0, 2, 4, 6]
    assert shown[-1].status == Status.DONE and same_row(shown[-1], row)


def _request_of_a_new_program(steps=4):
    """A request whose program no other test of this process has compiled."""

    @rule
    class New(LowConfidence):
        pass

    settings = {"gen_length": steps, "steps": steps, "commit": New()}
    return make_requests(MODEL, "", settings)[0]


class Compilers:
    """Holds up each program before its first call, until it is told to go on."""

    def __init__(self, monkeypatch):
        self.is_in, self.goes_on, self.error = threading.Event(), threading.Event(), None
        run = Advance.__call__

        def call(loop, *arguments):
            if not loop.has_run:
                self.is_in.set()
                assert self.goes_on.wait(20), "the rows of other programs wait for this one"
                if self.error is not None:
                    raise self.error
            return run(loop, *arguments)

        monkeypatch.setattr(Advance, "__call__", call)


@pytest.mark.parametrize("is_idle", [True, False])
def test_rows_go_on_while_the_program_of_another_request_compiles(is_idle, monkeypatch):
    (long,) = make_requests(MODEL, "", {"gen_length": 30, "steps": 30})
    new = _request_of_a_new_program()

    async def both(engine):
        await engine.row(request(4))
        compilers = Compilers(monkeypatch)
        before = [] if is_idle else [asyncio.create_task(engine.row(long))]
        made = [asyncio.create_task(engine.row(new)) for _ in range(2)]
        assert await asyncio.to_thread(compilers.is_in.wait, 20)
        others = await asyncio.gather(engine.row(request(4)), *before)
        assert not any(task.done() for task in made)
        compilers.goes_on.set()
        return others, await asyncio.gather(*made)

    others, made = _run(both)
    assert all(row.status == Status.DONE for row in [*others, *made])
    assert same_row(others[0], alone(4)) and same_row(*made)


def test_a_program_that_cannot_be_compiled_is_told_to_those_who_wait_for_it_alone(monkeypatch):
    new = _request_of_a_new_program()

    async def both(engine):
        await engine.row(request(4))
        compilers = Compilers(monkeypatch)
        compilers.error = MemoryError("too large")
        gone, lost = (asyncio.create_task(engine.row(new)) for _ in range(2))
        assert await asyncio.to_thread(compilers.is_in.wait, 20)
        gone.cancel()
        other = await engine.row(request(4))
        compilers.goes_on.set()
        with pytest.raises(MemoryError, match="too large"):
            await lost
        compilers.error = None
        return other, await engine.row(new)

    other, again = _run(both)
    assert same_row(other, alone(4)) and again.status is Status.DONE


def test_a_caller_who_goes_away_frees_the_slot():
    (long,) = make_requests(MODEL, "", {"gen_length": 30, "steps": 30})

    async def leave(engine):
        tasks = [asyncio.create_task(engine.row(long)) for _ in range(6)]
        watch = engine.watch(long)
        assert (await anext(watch)).steps >= 0
        await watch.aclose()
        for task in tasks:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        row = await engine.row(request(4))
        while engine.engine.is_busy:
            await asyncio.sleep(0.01)
        return row, engine.engine.report()

    row, report = _run(leave)
    assert same_row(row, alone(4))
    assert report.running == report.waiting == 0
    assert report.rows < 7


def test_a_process_ends_whose_loop_has_ended_without_a_close():
    code = """
import asyncio
from engine_cases import MODEL, SLOTS, request
from dlm_jax.inference.engine import AsyncEngine, Engine

async def main():
    global engine
    engine = await AsyncEngine(Engine(MODEL, sizes=(SLOTS,))).__aenter__()
    await engine.row(request(4))

asyncio.run(main())
print("over", flush=True)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_nothing_runs_behind_the_context_and_nothing_is_taken_outside_of_it():
    """Whatever waits, runs or is watched when an error leaves the context."""
    (long,) = make_requests(MODEL, "", {"gen_length": 30, "steps": 30})

    async def leave(engine):
        with pytest.raises(ValueError, match="does not run: it was not entered"):
            await engine.row(request(4))
        with pytest.raises(KeyError):  # noqa: PT012
            async with engine:
                watch = engine.watch(long)
                await anext(watch)
                tasks = [asyncio.create_task(engine.row(long)) for _ in range(6)]
                while not engine.engine.report().waiting:
                    await asyncio.sleep(0.01)
                raise KeyError
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all("the engine is closed" in str(one) for one in told)
        await watch.aclose()
        await engine.close()  # again
        with pytest.raises(ValueError, match="does not run"):
            await engine.row(request(4))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    engine = AsyncEngine(_engine())
    asyncio.run(leave(engine))
    report = engine.engine.report()
    assert (report.running, report.waiting, report.slots) == (0, 0, 0)
    assert not engine.is_running and not engine.engine.is_busy
    assert "engine" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_is_told_of_the_end(fails, monkeypatch, caplog):
    """And an engine that has failed is closed all the same."""
    (long,) = make_requests(MODEL, "", {"gen_length": 30, "steps": 30})
    in_turn, let_go = threading.Event(), threading.Event()
    step = Engine.step

    def held(engine, num_steps, **how):
        in_turn.set()
        assert let_go.wait(60)
        if fails:
            raise RuntimeError("device lost")
        return step(engine, num_steps, **how)

    monkeypatch.setattr(Engine, "step", held)

    async def main():
        engine = await AsyncEngine(_engine()).__aenter__()
        tasks = [asyncio.create_task(engine.row(long)) for _ in range(3)]
        await asyncio.to_thread(in_turn.wait, 60)
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, let_go.set)
        if fails:
            told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            with pytest.raises(RuntimeError, match="device lost"):
                await engine.close()
        else:
            await engine.close()
            told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        with pytest.raises(ValueError, match="the engine is closed"):
            step(engine.engine)
        return told

    told = asyncio.run(main())
    assert all(isinstance(one, ValueError | RuntimeError) for one in told)
    assert sum("device lost" in str(one) for one in told) == (3 if fails else 0)
    assert ("device lost" in caplog.text) == fails, "a failed engine is logged"


def test_a_host_sampler_is_called_for_its_own_row_alone_while_its_program_compiles():
    (long,) = make_requests(MODEL, "", {"gen_length": 30, "steps": 30})
    calls = []

    def sampler(candidates):
        calls.append((candidates.row, candidates.index))
        return int(candidates.ids[0])

    settings = {"gen_length": 2, "steps": 2, "order": "left_to_right", "host_sampler": sampler}
    (hosted,) = make_requests(MODEL, "A ", settings)

    async def both(engine):
        running = asyncio.create_task(engine.row(long))
        while not engine.engine.report().running:
            await asyncio.sleep(0.01)
        row = await engine.row(hosted)
        return await running, row

    rows = _run(both)
    assert [row.status for row in rows] == [Status.DONE] * 2
    assert calls == [(1, 2), (1, 3)]
