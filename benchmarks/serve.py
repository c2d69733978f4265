"""The engine and the server compared with the compiled loop: host time, throughput, one request.

    python -m benchmarks serve [host throughput single file] [--quick]

``host``: time of an engine outside the compiled loop per step, with full slots. ``throughput``: one
client per slot, each with consecutive requests, alternating with the same requests in an engine.
``single``: a request over HTTP, in an idle engine, and by `generate`. ``file``: memory of the
process and seconds to the first result, over files of two lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import dlm_jax
from benchmarks.report import Table, alternate, parser_of
from dlm_jax.cli.common import start_jax
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.request import make_requests

COMMON = {"prompt": "ROMEO:\n", "temperature": 0.7, "max_length": 128}


def main() -> None:
    """Prints the selected tables."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 1_000_000])
    args = parser.parse_args()
    if args.quick:
        args.slots, args.requests, args.rounds, args.lines = 4, 8, 1, [100, 1000]
    start_jax()
    for name in args.parts:
        print()
        PARTS[name](args)


def _requests(count: int) -> list[dict[str, Any]]:
    """Requests of 24 to 112 tokens with half as many steps."""
    lengths = (24, 48, 72, 96, 112)
    return [
        COMMON | {"seed": n, "gen_length": lengths[n % 5], "steps": lengths[n % 5] // 2}
        for n in range(count)
    ]


@contextlib.contextmanager
def _server(slots: int) -> Iterator[str]:
    """A server of the shipped model in a process of its own; yields its address."""
    command = [sys.executable, "-m", "dlm_jax.serve", "--port", "0", "--slots", str(slots)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().split()[-1].rstrip("/")
        # The rest of its output must not fill the pipe.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield url
        process.terminate()


def _body(request: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens" if name == "gen_length" else name: x for name, x in request.items()}


def host(args: argparse.Namespace) -> None:
    """The time of a call with 8 steps, and of the same rows with 1 step per call."""
    model = dlm_jax.load()
    rng = np.random.default_rng(0)
    requests = [
        make_requests(model, {"seed": n, "gen_length": int(steps), "steps": int(steps)},
                      {"fill": "parallel", "ignore_eos": True})[0]
        for n, steps in enumerate(rng.integers(12, 40, 4 * args.slots))
    ]  # fmt: skip
    table = Table(args, "steps per call", "ms per step", "added by a call, ms")
    found = {}
    for num_steps in (8, 1):
        seconds = []
        for _ in range(args.rounds + 1):
            with Engine(model, sizes=(args.slots,), max_waiting=None) as engine:
                for request in requests:
                    engine.submit(request)
                engine.step(num_steps)  # compiles and fills the slots
                began, before = time.perf_counter(), engine.report().steps
                while engine.num_waiting:
                    engine.step(num_steps)
                steps = (engine.report().steps - before) / args.slots
                seconds.append((time.perf_counter() - began) / steps)
        found[num_steps] = 1e3 * statistics.median(seconds[1:])
        added = (found[1] - found[8]) * 8 / 7 if num_steps == 1 else ""
        table.add(num_steps, found[num_steps], added)


def throughput(args: argparse.Namespace) -> None:
    """Seconds of the same requests in an engine and over HTTP."""
    model, requests = dlm_jax.load(), _requests(args.requests)

    def in_engine() -> None:
        rows = [row for one in requests for row in make_requests(model, one, {})]
        with Engine(model, sizes=(args.slots,), max_waiting=None) as engine:
            for row in engine.run(rows):
                model.tokenizer.decode(row.tokens)

    async def clients(url: str) -> None:
        waiting = [_body(one) for one in requests]

        async def client(http: httpx.AsyncClient) -> None:
            while waiting:
                answer = await http.post(f"{url}/v1/completions", json=waiting.pop())
                answer.raise_for_status()

        limits = httpx.Limits(max_connections=args.slots)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:
            await asyncio.gather(*(client(http) for _ in range(args.slots)))

    table = Table(args, "requests", "slots", "engine s", "HTTP s", "ratio")
    with _server(args.slots) as url:
        engine, http = alternate(args.rounds, in_engine, lambda: asyncio.run(clients(url)))
    table.add(args.requests, args.slots, engine, http, engine / http)


def single(args: argparse.Namespace) -> None:
    """Milliseconds of one request by `generate`, in an idle engine, and over HTTP."""
    model, (request, *_) = dlm_jax.load(), _requests(1)
    table = Table(args, "one request", "ms")
    with _server(1) as url, httpx.Client(timeout=600) as client, Engine(model) as engine:
        seconds = alternate(
            3 * args.rounds,
            lambda: dlm_jax.generate(model, [request]).texts,
            lambda: list(engine.run(make_requests(model, request, {}))),
            lambda: client.post(f"{url}/v1/completions", json=_body(request)).raise_for_status(),
        )
    for name, one in zip(("generate", "an idle engine", "HTTP"), seconds, strict=True):
        table.add(name, 1e3 * one)


def file(args: argparse.Namespace) -> None:
    """Peak memory and seconds to the first result of ``sample.py --prompts``, ended after that."""
    table = Table(args, "lines", "MiB of the file", "seconds to a result", "peak MiB")
    for count in args.lines:
        with tempfile.TemporaryDirectory() as folder:
            source, results = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
            with source.open("w") as lines:
                for n in range(count):
                    line = {"id": f"r{n}", "prompt": "The", "gen_length": 4, "steps": 1 + n % 4}
                    lines.write(json.dumps(line) + "\n")
            size, began = source.stat().st_size / 2**20, time.perf_counter()
            command = ["sample.py", "--prompts", str(source), "--output", str(results)]
            process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
            while process.poll() is None and not (results.exists() and results.stat().st_size):
                time.sleep(0.01)
            seconds, peak = time.perf_counter() - began, _peak(process.pid)
            process.kill()
            process.wait()
        table.add(count, size, seconds, peak)


def _peak(pid: int) -> float:
    """Peak resident memory of a process in MiB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


PARTS = {"host": host, "throughput": throughput, "single": single, "file": file}


if __name__ == "__main__":
    main()
