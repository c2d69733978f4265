"""Kills programs with SIGKILL, restarts them, and compares the results with uninterrupted programs.

``training``: a run with heads, stages, accumulation and asynchronous checkpoints; half of the kills
interrupt the save of a checkpoint or of the best model, as the remaining files prove. Parameters,
best model and metrics must equal those of the uninterrupted run bitwise. ``requests``: ``sample.py
--prompts`` with 300 requests and five kills per run; the results must be equal bytes, except for
the seconds. ``hosts``: one of two processes is killed, and the run continues with one or three
processes; parameters must equal those of an uninterrupted run with two, within 2e-4.

Finished runs are recorded in ``kills.jsonl`` in the folder, from which the same command resumes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.attacks.report import Tally, finish, flags, start
from dlm_jax.store import load_params
from dlm_jax.store.files import without_crc
from dlm_jax.training.metrics import CLOCK, read_records

_KILLS, _KILLS_A_RUN = 50, 6
_REQUESTS, _REQUEST_RUNS, _REQUEST_KILLS = 300, 3, 5
_PATIENCE = 600.0


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """Runs all three: `count` kills of training, a request run per 15 kills, up to four hosts."""
    kills = count or _KILLS
    request_runs = min(_REQUEST_RUNS, -(-kills // 15))
    return [
        *_trainings(folder, kills, random.Random(seed)),
        _requests(folder, request_runs, random.Random(seed)),
        _hosts(folder, min(4, kills // 2), random.Random(seed)),
    ]


class _Ledger:
    """A record of the finished runs, one line each."""

    def __init__(self, folder: Path, attack: str):
        self._path, self._attack = folder / "kills.jsonl", attack
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.done = [one for line in lines if (one := json.loads(line))["attack"] == attack]

    def note(self, **facts: Any) -> None:
        """Adds a run."""
        self.done.append({"attack": self._attack, "run": len(self.done) + 1} | facts)
        with self._path.open("a") as file:
            file.write(json.dumps(self.done[-1]) + "\n")
        print(f"    {json.dumps(self.done[-1])}", file=sys.stderr, flush=True)

    def total(self, name: str) -> int:
        """The sum of a count over all runs."""
        return sum(one[name] for one in self.done)


def _once(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Makes the folder `name` unless it is complete already."""
    mark = folder / f"{name}.done"
    if not mark.exists():
        make(folder / name)
        mark.touch()
    return folder / name


# Trainings.


def _trainings(folder: Path, count: int, rng: random.Random) -> list[Tally]:
    """Kills `count` times, half of them during a save; every run must end with the exact result."""
    steps: dict[str, Any] = {"train__steps": 120, "train__checkpoint_every": 7,
                             "heads__start_sampler_iteration": 30,
                             "heads__start_critic_iteration": 60}  # fmt: skip

    def made(out_dir: Path) -> None:
        finish(folder, "train.py", *flags(folder, out_dir, **steps))

    whole, ledger = _once(folder, "whole", made), _Ledger(folder, "training")
    seconds = 8.0
    while (left := count - ledger.total("kills")) > 0:
        out_dir, kills, saving = folder / f"run{len(ledger.done) + 1}", 0, 0
        while kills < min(left, _KILLS_A_RUN):
            wants_save = ledger.total("saving") + saving < (ledger.total("kills") + kills + 1) / 2
            began, left_before = time.perf_counter(), _unfinished(out_dir)
            child = start(folder, "train.py", *flags(folder, out_dir, **steps))
            if wants_save:
                _wait_for_save(child, out_dir, rng)
            else:
                _wait(child, rng.uniform(0.3, seconds))
            was_running = child.poll() is None
            child.kill()
            child.communicate()
            if not was_running:
                seconds = time.perf_counter() - began
                break
            kills += 1
            saving += bool(_unfinished(out_dir) - left_before)
        made(out_dir)
        ledger.note(kills=kills, saving=saving, why=difference(whole, out_dir))
    kinds = {"SIGKILL of a training, then on to its end": "kills",
             "of these during a checkpoint or best": "saving"}  # fmt: skip
    tallies = [Tally(name) for name in kinds]
    for tally, kind in zip(tallies, kinds.values(), strict=True):
        for one in ledger.done:
            for _ in range(one[kind]):
                tally.note(not one["why"], f"run {one['run']}: {one['why']}")
    return tallies


def _unfinished(out_dir: Path) -> set[tuple[str, int]]:
    """Names and inodes of checkpoints that are being written or were interrupted."""
    found: set[tuple[str, int]] = set()
    for part in ("checkpoints", "best"):
        with contextlib.suppress(OSError), os.scandir(out_dir / part) as entries:
            found |= {
                (one.name, one.inode()) for one in entries if ".orbax-checkpoint-tmp" in one.name
            }
    return found


def _wait_for_save(child: subprocess.Popen[str], out_dir: Path, rng: random.Random) -> None:
    """Waits until one of the next saves has begun."""
    seen = _unfinished(out_dir)
    for _ in range(rng.randint(1, 4)):
        while child.poll() is None and _unfinished(out_dir) <= seen:
            time.sleep(0.001)
        seen |= _unfinished(out_dir)
    time.sleep(rng.uniform(0, 0.02))


def _wait(child: subprocess.Popen[str], seconds: float) -> None:
    until = time.perf_counter() + seconds
    while child.poll() is None and time.perf_counter() < until:
        time.sleep(0.01)


def difference(whole: Path, other: Path) -> str:
    """The first difference between two finished runs; empty if they are equal."""
    for part in ("", "best"):
        ours, theirs = (load_params(path / part)[0] for path in (whole, other))
        equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), ours, theirs)
        if not all(jax.tree.leaves(equal)):
            return f"parameters of {part or 'the run'} differ"
    records = [
        [{k: v for k, v in r.items() if k not in CLOCK} for r in read_records(p / "metrics.jsonl")]
        for p in (whole, other)
    ]
    return "" if records[0] == records[1] else "metrics differ"


# Requests.


def _requests(folder: Path, runs: int, rng: random.Random) -> Tally:
    """Runs the same requests several times, with five kills per run, spread over the results."""
    model = _once(
        folder, "model", lambda out: finish(folder, "train.py", *flags(folder, out))
    )  # fmt: skip
    prompts = folder / "in.jsonl"
    lines = [
        {"prompt": "The quick "[: 1 + number % 9], "gen_length": 3 + number % 5,
         "steps": 1 + number % 3, "seed": number}
        for number in range(_REQUESTS)
    ]  # fmt: skip
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(output: Path) -> list[str]:
        return ["--checkpoint", str(model), "--prompts", str(prompts), "--output", str(output),
                "--batch-size", "4"]  # fmt: skip

    def made(output: Path) -> None:
        finish(folder, "sample.py", *command(output))

    whole, ledger = _once(folder, "whole.jsonl", made), _Ledger(folder, "requests")
    while len(ledger.done) < runs:
        output, kills = folder / f"out{len(ledger.done) + 1}.jsonl", 0
        for number in range(_REQUEST_KILLS):
            target = rng.randint(number * 55 + 1, number * 55 + 50)
            child = start(folder, "sample.py", *command(output))
            while child.poll() is None and _lines_in(output) < target:
                time.sleep(0.001)
            kills += child.poll() is None
            child.kill()
            child.communicate()
        made(output)
        why = "" if _texts_in(output) == _texts_in(whole) else "results differ"
        left = [path.name for path in folder.glob(f"{output.name}.*") if path.suffix != ".run"]
        ledger.note(kills=kills, why=why or ", ".join(left))
    tally = Tally(f"SIGKILL of {_REQUESTS} requests, then on to their end")
    for one in ledger.done:
        for _ in range(one["kills"]):
            tally.note(not one["why"], f"run {one['run']}: {one['why']}")
    return tally


def _texts_in(path: Path) -> list[bytes]:
    """The result lines without seconds and checksum."""
    lines = [without_crc(line) for line in path.read_bytes().splitlines()]
    return [re.sub(rb'"seconds": [^,}]+', b"", line) for line in lines]


def _lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# Hosts.


def _hosts(folder: Path, cases: int, rng: random.Random) -> Tally:
    """Kills one of two processes and continues the run with one and with three."""
    steps: dict[str, Any] = {
        "train__steps": 120, "train__checkpoint_every": 5, "train__eval_every": 20,
        "train__batch_size": 12, "model__add_sampler_head": "false",
        "model__add_critic_head": "false",
    }  # fmt: skip

    def made(out_dir: Path) -> None:
        children = _processes(folder, 2, flags(folder, out_dir, **steps, mesh__data=2))
        errors = _ended(children)
        if any(child.returncode for child in children):
            raise RuntimeError("\n".join(errors))

    whole, ledger = _once(folder, "pair", made), _Ledger(folder, "hosts")
    ways = list(itertools.product((1, 0), (3, 1)))
    while len(ledger.done) < cases:
        lost, then = ways[len(ledger.done)]
        out_dir = folder / f"hosts{len(ledger.done) + 1}"
        children = _processes(folder, 2, flags(folder, out_dir, **steps, mesh__data=2))
        at = rng.choice(range(10, 60, 5))
        deadline = time.monotonic() + _PATIENCE
        while not any(step >= at for step in _steps_in(out_dir)):
            if time.monotonic() > deadline or any(child.poll() is not None for child in children):
                break
            time.sleep(0.002)
        children[lost].kill()
        _ended(children)
        codes = [child.returncode for child in children]
        is_refused = codes[lost] == -9 and codes[1 - lost] != 0
        reached = max(_steps_in(out_dir), default=0)
        children = _processes(folder, then, flags(folder, out_dir, **steps, mesh__data=then))
        errors = _ended(children)
        why = "" if is_refused and reached < 120 else f"nothing was lost: {codes}, step {reached}"
        if any(child.returncode for child in children):
            why = f"did not go on: {errors[0][-500:]}"
        farthest, difference = (0.0, "") if why else _distance(whole, out_dir)
        why = why or difference
        ledger.note(
            kills=1, lost=lost, step=reached, codes=codes, then=then, farthest=farthest, why=why
        )
    tally = Tally("one of two processes killed, then on as one or as three")
    for one in ledger.done:
        tally.note(not one["why"], f"process {one['lost']}, then {one['then']}: {one['why']}")
    return tally


def _steps_in(out_dir: Path) -> list[int]:
    found = (out_dir / "checkpoints").glob("step_????????/manifest/metadata")
    return [int(path.parent.parent.name.removeprefix("step_")) for path in found]


def _processes(folder: Path, count: int, given: list[str]) -> list[subprocess.Popen[str]]:
    """Starts the processes of one run on loopback; a single process is not distributed."""
    if count == 1:
        return [start(folder, "train.py", *given)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
    return [
        start(folder, "train.py", *shared, "--process-id", str(index), *given)
        for index in range(count)
    ]


def _ended(children: list[subprocess.Popen[str]]) -> list[str]:
    """Standard error of each process, after all have ended; hanging processes are killed."""
    errors = []
    for child in children:
        try:
            errors.append(child.communicate(timeout=_PATIENCE)[1])
        except subprocess.TimeoutExpired:
            child.kill()
            errors.append(child.communicate()[1])
    return errors


def _distance(whole: Path, other: Path) -> tuple[float, str]:
    """The largest difference between the parameters of two runs, and any other difference."""
    (ours, _), (theirs, _) = (load_params(path) for path in (whole, other))
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ours, theirs)
    farthest = max(jax.tree.leaves(apart))
    if farthest > 2e-4:
        return farthest, "parameters differ"
    lines = [[(r["kind"], r["step"]) for r in read_records(p / "metrics.jsonl")]
             for p in (whole, other)]  # fmt: skip
    return farthest, "" if lines[0] == lines[1] else "metrics have other steps"
