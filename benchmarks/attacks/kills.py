"""A training killed at random moments and started again, against one that ran through."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.attacks.report import Tally, finish, flags, start
from dlm_jax.checkpoint import load_params
from dlm_jax.metrics import CLOCK, read_records

_KILLS = 50


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """Kills until `count` is reached, finishing a run from time to time, which must be exact."""
    rng = random.Random(seed)
    tally, left = Tally("SIGKILL of a training, then on to its end"), count or _KILLS
    steps: dict[str, Any] = {"train__steps": 120, "train__checkpoint_every": 7,
                             "heads__start_sampler_iteration": 30,
                             "heads__start_critic_iteration": 60}  # fmt: skip
    began = time.perf_counter()
    finish(folder, "train.py", *flags(folder, folder / "whole", **steps))
    seconds = time.perf_counter() - began
    number = 0
    while left > 0:
        number += 1
        out_dir, kills = folder / f"run{number}", 0
        while left > 0 and kills < 6:
            child = start(folder, "train.py", *flags(folder, out_dir, **steps))
            time.sleep(rng.uniform(0.3, seconds))
            if child.poll() is None:
                child.kill()
                kills, left = kills + 1, left - 1
            child.communicate()
            if child.returncode == 0:
                break
        finish(folder, "train.py", *flags(folder, out_dir, **steps))
        why = difference(folder / "whole", out_dir)
        print(f"    run {number}, {kills} kills: {why or 'exact'}", file=sys.stderr, flush=True)
        for _ in range(kills):
            tally.note(not why, f"run {number} after {kills} kills: {why}")
    return [tally]


def difference(whole: Path, other: Path) -> str:
    """The first thing in which two finished runs differ; empty if they are the same."""
    ours, theirs = (load_params(path)[0] for path in (whole, other))
    equal = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), ours, theirs)
    if not all(jax.tree.leaves(equal)):
        return "parameters differ"
    records = [
        [{k: v for k, v in r.items() if k not in CLOCK} for r in read_records(p / "metrics.jsonl")]
        for p in (whole, other)
    ]
    return "" if records[0] == records[1] else "metrics differ"
