"""Compares the server with the engine: throughput, first event, a single request.

``python benchmarks/serving.py``

- throughput: one client per slot, each with consecutive requests, alternating with a file of the
  same requests (`dlm_jax.batch`);
- first: number of steps before the first event of a stream in a free slot;
- single: a single request over HTTP, compared with `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.serving.app import Options, make_app
from dlm_jax.serving.http import Server, listening
from dlm_jax.serving.protocol import Limits

# New tokens per request, on a canvas of 128, and on canvases of 64 and 128.
LENGTHS = {"one canvas": (72, 96, 112), "two canvases": (24, 48, 96)}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--steps-per-call", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["throughput", "first", "single"], action="append")
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load()
    engine = Engine(model, batch_size=args.slots, max_waiting=None)
    with served(model, engine, args) as url:
        parts: dict[str, Callable[[], None]] = {
            "throughput": lambda: throughput(model, url, args),
            "first": lambda: first(url),
            "single": lambda: single(model, url),
        }
        for name in args.only or parts:
            parts[name]()


@contextlib.contextmanager
def served(
    model: Model,
    engine: Engine,
    args: argparse.Namespace,
    defaults: dict[str, Any] | None = None,
) -> Iterator[str]:
    """Runs a server of the model; the context returns its address."""
    app = make_app(
        model, engine, Options("shakespeare", Limits(waiting=4096), defaults=defaults),
        slots=args.slots, steps_per_call=args.steps_per_call,
    )  # fmt: skip
    sock, ready = listening("127.0.0.1", 0), threading.Event()
    server = Server(app, sock, drain=5, listens=ready.set)
    thread = threading.Thread(target=server.answer, daemon=True)
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def _asked(name: str, count: int) -> list[dict[str, object]]:
    lengths = LENGTHS[name]
    return [
        {"prompt": "ROMEO:\n", "seed": place, "steps": (n := lengths[place % len(lengths)]) // 2,
         "max_tokens": n, "temperature": 0.7, "max_length": 128}
        for place in range(count)
    ]  # fmt: skip


def throughput(model: Model, url: str, args: argparse.Namespace) -> None:
    """Prints the seconds of both runs, and the throughput of the server relative to the file."""
    print(f"| {args.requests} requests, {args.slots} slots | a file, s | over HTTP, s | ratio |")
    print("| --- | --- | --- | --- |")
    for name in LENGTHS:
        _throughput(name, model, url, args)


def _throughput(name: str, model: Model, url: str, args: argparse.Namespace) -> None:
    asked = _asked(name, args.requests)
    _by_clients(url, asked[: args.slots], args.slots)
    _by_file(model, asked, args.slots)
    times: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        times.append((_by_file(model, asked, args.slots), _by_clients(url, asked, args.slots)))
    file, clients = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"| {name} | {file:.2f} | {clients:.2f} | {file / clients:.3f} |", flush=True)


def _by_clients(url: str, asked: list[dict[str, object]], clients: int) -> float:
    waiting = list(asked)

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            answer = await http.post(f"{url}/v1/completions", json=waiting.pop())
            answer.raise_for_status()

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:
            await asyncio.gather(*(client(http) for _ in range(clients)))

    began = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - began


def _by_file(model: Model, asked: list[dict[str, object]], slots: int) -> float:
    """Runs a file like ``sample.py --prompts``: reads, makes rows, runs them and writes results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        lines = [
            json.dumps({"gen_length" if k == "max_tokens" else k: v for k, v in one.items()})
            for one in asked
        ]
        path.write_text("\n".join(lines))
        began = time.perf_counter()
        requests = [
            request
            for line in path.read_text().splitlines()
            for request in make_requests(model, json.loads(line), {})
        ]
        with Engine(model, sizes=(slots,), max_waiting=None) as engine:
            engine.reserve(requests)
            rows = engine.run(requests)
            texts = {row.number: model.tokenizer.decode(row.tokens) for row in rows}
        (Path(folder) / "out.jsonl").write_text(json.dumps(texts))
        return time.perf_counter() - began


def first(url: str) -> None:
    """Prints the number of steps before the first event of a stream in a free slot."""
    found = []
    # Every step writes one token, which is a separate block.
    body = {"prompt": "ROMEO:\n", "max_tokens": 64, "steps": 64, "block_length": 1,
            "order": "left_to_right", "stream": True, "logprobs": 0}  # fmt: skip
    for seed in range(6):
        asked = body | {"seed": seed}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=600) as answer:
            event = json.loads(next(answer.iter_lines()).removeprefix("data: "))
            found.append(len(event["choices"][0]["logprobs"]["tokens"]))
    print(f"\nfirst event after {found[1:]} steps", flush=True)


def single(model: Model, url: str) -> None:
    """Prints the time of a single request over HTTP and in the engine."""
    (asked,) = _asked("two canvases", 1)
    settings = {"gen_length" if k == "max_tokens" else k: v for k, v in asked.items()}
    times: list[tuple[float, float]] = []
    with httpx.Client(timeout=600) as http, Engine(model, sizes=(1,)) as engine:
        for _ in range(12):
            began = time.perf_counter()
            list(engine.run(make_requests(model, settings, {})[:1]))
            middle = time.perf_counter()
            http.post(f"{url}/v1/completions", json=asked).raise_for_status()
            times.append((middle - began, time.perf_counter() - middle))
    alone, over = (statistics.median(column) for column in zip(*times[2:], strict=True))
    print("\n| a request alone | ms |")
    print("| --- | --- |")
    print(f"| the engine | {alone * 1e3:.1f} |")
    print(f"| over HTTP | {over * 1e3:.1f} |")
    print(f"| added | {(over - alone) * 1e3:.1f} |")


if __name__ == "__main__":
    main()
