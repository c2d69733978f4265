"""Calls of changing shapes, and engines opened and closed: the resources of the process must not
grow.

Every answer is compared with the first answer to the same request. Resources are measured after
each tenth of the attempts. The numbers of threads, open files and device arrays must not exceed
those after the second tenth, and the peak memory of the second half must be within `_GROWTH` of
that of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax
from benchmarks.attacks.report import ROOT, Tally, environment
from dlm_jax.config import ModelConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.engine import AsyncEngine, Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests
from dlm_jax.model.transformer import build

CALLS, ENGINES = 2000, 200
_GROWTH = 0.03
"""Share by which the memory of a process may grow in the second half of the attempts."""

Case = dict[str, Any]


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """Runs both parts in processes with one malloc arena; `count` is the number of calls."""
    calls = count or CALLS
    tallies = []
    for part, tries in (("calls", calls), ("engines", max(10, calls * ENGINES // CALLS))):
        command = [sys.executable, "-m", "benchmarks.attacks.leaks", part, str(tries), str(seed)]
        own = environment(folder) | {"MALLOC_ARENA_MAX": "1"}
        told = []
        with subprocess.Popen(
            command, env=own, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as child:
            for line in child.stdout or ():
                told.append(json.loads(line))
                print(f"    {part}: {line.strip()}", file=sys.stderr, flush=True)
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {child.returncode}")
        *lines, bad = told
        same = Tally(f"{part}: rows that are the same again")
        for number in range(tries):
            same.note(number not in bad, f"{part} {number}: other tokens than at first")
        tallies += [same, _flat(part, lines)]
    return tallies


def _flat(part: str, held: list[dict[str, float]]) -> Tally:
    """Compares the resources after each tenth of the attempts with the bounds."""
    tally, half = Tally(f"{part}: figures that stay flat"), len(held) // 2
    for name in ("threads", "files", "arrays"):
        found = [line[name] for line in held[1:]]
        tally.note(max(found) <= found[0], f"{part}: {name} {found}")
    found = [line["MiB"] for line in held]
    tally.note(max(found[half:]) <= max(found[:half]) * (1 + _GROWTH), f"{part}: MiB {found}")
    return tally


def main(part: str, tries: int, seed: int) -> None:
    """Prints the resources after each tenth of the attempts, and the failed attempts."""
    warnings.simplefilter("ignore")
    model, rng = _model(), random.Random(seed)
    work = {"calls": _calls, "engines": _engines}[part](model, rng)
    first: dict[str, bytes] = {}
    bad = []
    for number in range(tries):
        key, answer = next(work)
        if first.setdefault(key, answer) != answer:
            bad.append(number)
        if (number + 1) % max(1, tries // 10) == 0:
            print(json.dumps({"tries": number + 1} | held()), flush=True)
    print(json.dumps(bad))


def held() -> dict[str, float]:
    """Memory in MiB, threads, open files, device arrays and objects of this process.

    Free memory is first returned to the system.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # exists only in glibc
        ctypes.CDLL(None).malloc_trim(0)
    told = Path("/proc/self/status").read_text()
    rss, threads = (int(re.findall(rf"^{name}:\s+(\d+)", told, re.M)[0])
                    for name in ("VmRSS", "Threads"))  # fmt: skip
    return {
        "MiB": round(rss / 1024, 1), "threads": threads, "files": len(os.listdir("/proc/self/fd")),
        "arrays": len(jax.live_arrays()), "objects": len(gc.get_objects()),
    }  # fmt: skip


def _calls(model: Model, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Calls of `generate`: yields the requests and the resulting rows."""
    while True:
        case = _case(rng)
        prompts = [_TEXT[: rng.choice((0, 3, 9))] for _ in range(rng.choice((1, 4)))]
        key = json.dumps([case, prompts])
        made = dlm_jax.generate(model, prompts, **_with_sampler(case))
        yield key, _bytes([row[:n] for row, n in zip(made.tokens, made.lengths, strict=True)])


def _engines(model: Model, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Engines that are closed after their rows, while rows run, or before the first row.

    Cases are repeated in a fixed order, so that all programs are compiled in the first tenth.
    """
    for case in itertools.cycle([_case(rng, kinds=12) for _ in range(20)]):
        requests = make_requests(model, "The ", _with_sampler(case), num_samples=rng.choice((1, 3)))
        key = json.dumps([case, len(requests)])
        run: Callable[..., list[np.ndarray]] = rng.choice((_to_its_end, _asynchronous, _left))
        rows = run(model, requests)
        yield key + ("left" if run is _left else ""), _bytes(rows)


def _to_its_end(model: Model, requests: list[Any]) -> list[np.ndarray]:
    with Engine(model, sizes=(4,)) as engine:
        rows = {row.number: row for row in engine.run(requests)}
    return [rows[place].tokens for place in sorted(rows)]


def _left(model: Model, requests: list[Any]) -> list[np.ndarray]:
    """Cancels one row and closes the engine while the other rows run."""
    engine = Engine(model, sizes=(4,))
    numbers = [engine.submit(request, is_watched=True) for request in requests]
    engine.step(1)
    engine.cancel(numbers[0])
    engine.step(1)
    engine.close()
    return []


def _asynchronous(model: Model, requests: list[Any]) -> list[np.ndarray]:
    """Awaits the rows, and watches one row only until its first canvas."""

    async def rows() -> list[np.ndarray]:
        async with AsyncEngine(Engine(model, sizes=(4,))) as engine:
            awaited = [asyncio.create_task(engine.row(request)) for request in requests]
            watched = engine.watch(requests[0])
            await anext(watched)
            await watched.aclose()
            return [row.tokens for row in await asyncio.gather(*awaited)]

    return asyncio.run(rows())


_TEXT = "The cat sat. A rat ran. "


def _case(rng: random.Random, kinds: int = 48) -> Case:
    """Settings of one of `kinds` compiled variants, with random per-row settings."""
    kind = rng.randrange(rng.choice((kinds // 4, kinds)))  # some kinds are more frequent
    case: Case = {
        "order": ("low_confidence", "random", "left_to_right", "entropy")[kind % 4],
        "gen_length": (8, 70)[kind // 4 % 2], "max_length": (32, 128)[kind // 4 % 2],
    }  # fmt: skip
    case |= (
        {}, {"temperature": 0.5, "top_k": 5}, {"read_back": True}, {"host_sampler": True},
        {"remask": "scheduled", "top_p": 0.9}, {"edit": True, "resample": True, "schedule": "all"},
    )[kind // 8]  # fmt: skip
    case |= {"steps": rng.choice((2, 4)), "seed": rng.randrange(4)}
    if kind // 8 == 1:
        case["logit_bias"] = {id_: -1.0 for id_ in range(rng.choice((1, 3, 9)))}
    return case


def _with_sampler(case: Case) -> Case:
    return case | ({"host_sampler": _first} if "host_sampler" in case else {})


def _first(candidates: Any) -> int:
    """The likeliest candidate."""
    return int(candidates.ids[0])


def _bytes(rows: list[np.ndarray]) -> bytes:
    return b"|".join(np.asarray(row, np.int32).tobytes() for row in rows)


def _model() -> Model:
    """A tiny model with nonzero parameters."""
    tokenizer = CharacterTokenizer.of(_TEXT)
    network = build(ModelConfig(depth=1, width=16, heads=2, vocab_size=tokenizer.vocab_size))
    leaves, tree = jax.tree.flatten(jax.jit(network.init)(jax.random.key(0)))
    rng = np.random.default_rng(0)
    noisy = [jax.numpy.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype) for leaf in leaves]
    return Model(network, jax.tree.unflatten(tree, noisy), tokenizer, max_length=128)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
