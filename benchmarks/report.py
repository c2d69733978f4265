"""The flags and the table that benchmarks share."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small case, to see that it runs")
    parser.add_argument("--json", type=Path, help="file to which rows are appended, one per line")
    return parser


def machine() -> dict[str, Any]:
    """The machine and the versions of a measurement."""
    import jax

    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "dlm_jax")}
    return {
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(), **versions,
    }  # fmt: skip


def print_machine() -> dict[str, Any]:
    """Prints the machine and the versions as a line, and returns them."""
    found = machine()
    print("machine: " + ", ".join(f"{k} {v}" for k, v in found.items()) + "\n", flush=True)
    return found


class Table:
    """Prints a Markdown table row by row, and writes the rows to the file of ``--json``."""

    def __init__(self, args: argparse.Namespace, *header: str):
        self._header, self._file = header, getattr(args, "json", None)
        self._machine = print_machine()
        print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}", flush=True)

    def add(self, *cells: Any) -> None:
        """Adds a row; floats are printed with three digits or three decimals."""
        print(f"| {' | '.join(map(_shown, cells))} |", flush=True)
        if self._file:
            row = dict(zip(self._header, cells, strict=True)) | {"machine": self._machine}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, default=float) + "\n")


def _shown(cell: Any) -> str:
    if not hasattr(cell, "dtype") and not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 1000 or cell == round(cell) else f"{cell:.3g}"


def alternate(rounds: int, *calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each call, in alternating runs after one that warms up."""
    import jax

    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in seconds]


def seconds_of(run: Callable[[], Any], least: float = 0.2, groups: int = 3) -> float:
    """Median seconds of a call, in groups of calls that take at least `least` seconds."""
    import jax

    def of(calls: int) -> float:
        begin = time.perf_counter()
        found = None
        for _ in range(calls):
            found = run()
        jax.block_until_ready(found)
        return (time.perf_counter() - begin) / calls

    of(1)
    calls = max(1, math.ceil(least / of(1)))
    return statistics.median(of(calls) for _ in range(groups))


class Worker:
    """An object in a process of its own, so that two frameworks do not share threads or memory."""

    def __init__(self, make: Callable[..., Any], *args: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, make, *args), daemon=True)
        self._process.start()

    def ask(self, method: str, *args: Any) -> tuple[Any, float]:
        """The result of a method, and its seconds.

        A pause follows, because the threads of a framework spin before they release the cores.
        """
        self._pipe.send((method, args))
        answer = self._pipe.recv()
        time.sleep(0.3)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Any, make: Callable[..., Any], *args: Any) -> None:
    served = make(*args)
    while (request := pipe.recv()) is not None:
        method, given = request
        began = time.perf_counter()
        result = getattr(served, method)(*given)
        pipe.send((result, time.perf_counter() - began))
