"""Overhead and slot occupancy of the engine, compared with `generate` and with the compiled loop.

    python benchmarks/engine.py

The four parts can be run individually with ``--only``:

- occupancy: requests of three kinds that differ in their static settings, with lengths that vary
  tenfold, arrive as a Poisson process at full load (the requested steps equal the capacity of the
  slots). The clock counts the steps of the slots. Occupancy is the share of the slot steps that had
  a row while other rows of the kind waited; the tail begins with the last arrival. The last column
  is the share of all slot steps before the tail.
- idle: a single request to an otherwise idle engine, compared with `generate`.
- host: time of an engine outside the compiled loop, per step of the shipped model in all slots.
- memory: the memory of the process over a large number of requests to a tiny model; some requests
  are cancelled.
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.config import ModelConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, make_requests, only_chains_in_use
from dlm_jax.model.transformer import build
from dlm_jax.sampling.loop import Advance

SHORTEST, LONGEST = 12, 120
KINDS = (
    {"order": "left_to_right"},
    {"order": "low_confidence", "fill": "parallel"},
    {"order": "random", "fill": "parallel", "draw": "gumbel"},
)


def main() -> None:
    """Prints the selected tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(_PARTS), action="append")
    parser.add_argument("--requests", type=int, default=600, help="requests of occupancy")
    parser.add_argument("--slots", type=int, default=64, help="slots of host")
    parser.add_argument("--many", type=int, default=100_000, help="requests of memory")
    args = parser.parse_args()
    start_jax()
    for name in args.only or _PARTS:
        _PARTS[name](args)
        print(flush=True)


def occupancy(args: argparse.Namespace) -> None:
    """Prints the occupancy of the slots at full load and at 120% load."""
    print("| slots of a kind | load | requests | occupancy while others wait | before the tail |")
    print("| --- | --- | --- | --- | --- |")
    for slots in (16, 64):
        for load in (1.0, 1.2):
            count = args.requests * slots // 16
            waiting, always = _at_load(_tiny(LONGEST), count, slots, load)
            print(f"| {slots} | {load} | {count} | {waiting:.3f} | {always:.3f} |", flush=True)


def _at_load(model: Model, count: int, slots: int, load: float) -> tuple[float, float]:
    """Occupancy while other rows of the kind wait, and over all steps before the last arrival."""
    rng = np.random.default_rng(0)
    steps = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), count)).astype(int)
    # At load 1, the requested steps equal the capacity of the slots of the current turn.
    arrivals = np.cumsum(rng.exponential(steps.mean() / slots / load, count))
    requests = [_request(model, int(n), i, KINDS[i % len(KINDS)]) for i, n in enumerate(steps)]
    idle = submitted = 0
    with Engine(model, sizes=(slots,), canvases=(128,), max_waiting=None) as engine:
        while True:
            clock = idle + engine.report().work.slot_steps / slots
            while submitted < count and arrivals[submitted] <= clock:
                engine.submit(requests[submitted])
                submitted += 1
            if submitted == count:
                break
            if engine.is_busy:
                engine.step()
            else:
                idle += arrivals[submitted] - clock
        report = engine.report()
        work = report.work
        assert work.slot_steps, "nothing ran before the last arrival"
        waiting = report.occupancy
        rows = dict(engine)
    assert len(rows) + work.rows == count
    return waiting, work.steps / work.slot_steps


def idle(args: argparse.Namespace) -> None:
    """Prints the time of a single request to an idle engine, compared with `generate`."""
    model = dlm_jax.load()
    settings = {"gen_length": 64, "steps": 64, "chain": ("temperature",), "min_p": 0.0}
    settings |= {"fill": "parallel", "seed": 3}

    def through_generate() -> None:
        dlm_jax.generate(model, ["ROMEO:"], **settings)

    with Engine(model) as engine:

        def through_engine() -> None:
            (request,) = only_chains_in_use(make_requests(model, "ROMEO:", settings))
            engine.submit(request)
            ((_, row),) = engine
            model.tokenizer.decode(row.tokens)

        seconds = _side_by_side([through_generate, through_engine], rounds=31)
    print("| a request of 64 tokens in 64 steps | ms | ratio |")
    print("| --- | --- | --- |")
    print(f"| `generate` | {seconds[0] * 1e3:.1f} | 1 |")
    print(f"| an idle engine | {seconds[1] * 1e3:.1f} | {seconds[1] / seconds[0]:.3f} |")


def _side_by_side(calls: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each call, in alternating runs."""
    found: list[list[float]] = [[] for _ in calls]
    for round_ in range(-2, rounds):
        for place, call in enumerate(calls):
            began = time.perf_counter()
            call()
            if round_ >= 0:
                found[place].append(time.perf_counter() - began)
    return [statistics.median(times) for times in found]


def host(args: argparse.Namespace) -> None:
    """Prints the time of the engine outside the compiled loop while requests arrive and end."""
    model = dlm_jax.load()
    settings = {"chain": ("temperature",), "min_p": 0.0, "fill": "parallel", "ignore_eos": True}
    rng = np.random.default_rng(0)
    requests = [
        _request(model, int(n), i, settings)
        for i, n in enumerate(rng.integers(SHORTEST, 40, 6 * args.slots))
    ]
    print(f"| steps a call, {args.slots} slots | step ms | host ms a step | share |")
    print("| --- | --- | --- | --- |")
    for num_steps in (8, 1):
        with Engine(model, sizes=(args.slots,), max_waiting=None) as engine, _Timed() as timed:
            # Before the clock starts, everything is compiled and the slots are full.
            for request in requests[: 2 * args.slots]:
                engine.submit(request)
            while engine.num_waiting:
                engine.step(num_steps)
            for request in requests[2 * args.slots :]:
                engine.submit(request)
            before, began = engine.report().work, time.perf_counter()
            timed.seconds = 0.0
            while engine.num_waiting:
                engine.step(num_steps)
            seconds = time.perf_counter() - began
            steps = (engine.report().work.slot_steps - before.slot_steps) / args.slots
        spent = seconds - timed.seconds
        print(
            f"| {num_steps} | {timed.seconds / steps * 1e3:.1f} | {spent / steps * 1e3:.2f} | "
            f"{spent / timed.seconds:.2%} |", flush=True,
        )  # fmt: skip


class _Timed:
    """Sums the seconds of calls of the compiled loop, until the device is done."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._call = Advance.__call__

    def __enter__(self) -> _Timed:
        call = self._call

        def timed(loop: Advance, *arguments: Any) -> Any:
            began = time.perf_counter()
            state = jax.block_until_ready(call(loop, *arguments))
            self.seconds += time.perf_counter() - began
            return state

        setattr(Advance, "__call__", timed)  # noqa: B010
        return self

    def __exit__(self, *exception: object) -> None:
        setattr(Advance, "__call__", self._call)  # noqa: B010


def memory(args: argparse.Namespace) -> None:
    """Prints the memory of the process over a large number of requests of several kinds."""
    model = _tiny(8)
    rng = np.random.default_rng(0)

    def coming() -> Iterator[Request]:
        for number in range(args.many):
            steps = int(rng.integers(1, 9))
            yield _request(model, steps, number, KINDS[number % len(KINDS)])

    print("| requests | called off | memory of the process, MiB |")
    print("| --- | --- | --- |")
    done = cancelled = 0
    source = coming()
    with Engine(model, sizes=(64,), canvases=(8,), max_waiting=256) as engine:
        is_over = False
        while not is_over or engine.is_busy:
            while engine.has_room and not is_over:
                request = next(source, None)
                is_over = request is None
                if request is not None:
                    ticket = engine.submit(request)
                    if rng.random() < 0.1:
                        engine.cancel(ticket)
                        cancelled += 1
            before = done
            done += len(engine.step().finished)
            if done * 10 // args.many > before * 10 // args.many:
                gc.collect()
                print(f"| {done} | {cancelled} | {_resident():.1f} |", flush=True)


def _resident() -> float:
    """Resident memory of the process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _request(model: Model, steps: int, seed: int, settings: dict[str, Any]) -> Request:
    """A request with equally many tokens and steps."""
    common = {"chain": ("temperature",), "ignore_eos": True, "gen_length": steps, "steps": steps}
    (request,) = make_requests(model, "", {**common, "seed": seed % 2**32, **settings})
    return request


@functools.cache
def _tiny(max_length: int) -> Model:
    """A tiny model, so that the engine dominates the time."""
    tokenizer = CharacterTokenizer.of("The cat sat. A rat ran.")
    config = ModelConfig(depth=1, width=8, heads=1, vocab_size=tokenizer.vocab_size)
    network = build(config)
    params = jax.jit(network.init)(jax.random.key(0))
    return Model(network, params, tokenizer, max_length=max_length)


_PARTS = {"occupancy": occupancy, "idle": idle, "host": host, "memory": memory}


if __name__ == "__main__":
    main()
