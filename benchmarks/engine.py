"""Overhead and slot occupancy of the engine, compared with `generate` and with the compiled loop.

    python benchmarks/engine.py

The five parts can be run individually with ``--only``:

- occupancy: requests of three kinds that differ in their static settings, with lengths that vary
  tenfold, arrive as a Poisson process at full load (the requested steps equal the capacity of the
  slots). The clock counts the steps of the slots. Occupancy is the share of the slot steps that had
  a row while other rows of the kind waited; the tail begins with the last arrival. The last column
  is the share of all slot steps before the tail.
- idle: a single request to an otherwise idle engine, compared with `generate`.
- host: time of an engine outside the compiled loop, per step of the shipped model in all slots.
- memory: the memory of the process over a large number of requests to a tiny model; some requests
  are cancelled.
- file: the memory of the process over the first rows of files with ``--lines`` lines, to a tiny
  model, and the seconds to the first result. The run stops after ``--rows`` results, and is resumed
  for as many.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax
from dlm_jax.batch import RequestFile, Results, fingerprint
from dlm_jax.batch.runner import run_requests
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
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--rows", type=int, default=2000, help="results of file")
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
            clock = idle + engine.report().slot_steps / slots
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
        assert report.slot_steps, "nothing ran before the last arrival"
        rest = list(engine.run())
    assert len(rest) + report.rows == count
    return report.occupancy, report.steps / report.slot_steps


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
            (row,) = engine.run([request])
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
            before, began = engine.report(), time.perf_counter()
            timed.seconds = 0.0
            while engine.num_waiting:
                engine.step(num_steps)
            seconds = time.perf_counter() - began
            steps = (engine.report().slot_steps - before.slot_steps) / args.slots
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
    cancelled = 0
    with Engine(model, sizes=(64,), canvases=(8,), max_waiting=256) as engine:
        for done, row in enumerate(engine.run(coming()), 1):
            if rng.random() < 0.1 and row.number + 200 < args.many:
                with contextlib.suppress(ValueError):  # it has ended or is cancelled
                    engine.cancel(row.number + 200)
                    cancelled += 1
            if done % max(1, args.many // 10) == 0:
                gc.collect()
                print(f"| {done} | {cancelled} | {_resident():.1f} |", flush=True)


def file(args: argparse.Namespace) -> None:
    """Prints the memory of the process over the first rows of a file of requests."""
    print(
        "| lines | MiB of the file | start, MiB | seconds to a result | MiB at the end | resumed |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for count in args.lines:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.jsonl"
            with source.open("w") as lines:
                for n in range(count):
                    steps = 1 + n % 4
                    line = {"id": f"r{n}", "prompt": "The", "gen_length": steps, "steps": steps}
                    lines.write(json.dumps(line | {"temperature": 0.5 + n % 3}) + "\n")
            size, before = source.stat().st_size / 2**20, _resident()
            first, end = _some_rows(source, args.rows)
            _, again = _some_rows(source, args.rows)
        print(
            f"| {count} | {size:.1f} | {before:.0f} | {first:.1f} | {end:.0f} | {again:.0f} |",
            flush=True,
        )


def _some_rows(source: Path, number: int) -> tuple[float, float]:
    """Seconds to the first of so many results, and the resident memory at the end in MiB."""
    began, seconds = time.perf_counter(), list[float]()

    class Stop(Exception):
        """Ends the run, as a kill does."""

    def note(result: Mapping[str, Any], num_tokens: int) -> None:
        seconds.append(time.perf_counter() - began)
        if len(seconds) == number:
            raise Stop

    mark = fingerprint(source, model={}, settings={})
    lines = RequestFile(source, known=["temperature"])
    common = {"chain": ("temperature",), "ignore_eos": True}
    with contextlib.suppress(Stop), Results(source.with_name("out"), fingerprint=mark) as results:
        run_requests(_tiny(8), lines, results, settings=common, on_result=note)
    return seconds[0], _resident()


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


_PARTS = {"occupancy": occupancy, "idle": idle, "host": host, "memory": memory, "file": file}


if __name__ == "__main__":
    main()
