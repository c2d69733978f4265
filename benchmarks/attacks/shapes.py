"""Requests run individually, in a batch, in a file and on a loaded server: all texts must be equal.

    python -m benchmarks.attacks.shapes --count 10000 --record shapes.jsonl

``--record`` stores finished requests, so that the same command resumes after a stop. A differing
text is explained by the first step in which two runs differ. In a *draw*, another token was written
at the same position; in a *threshold*, another number of positions was written. Both happen if a
number is within float tolerance of a boundary. Other positions in the same number are an *order*,
which must not depend on rounding; an order or an unexplained difference counts as a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
from benchmarks.attacks.report import ROOT, Tally, environment, finish

Asked = dict[str, Any]

KINDS: tuple[Asked, ...] = (
    {},
    {"order": "random", "fill": "parallel"},
    {"order": "low_confidence", "fill": "parallel"},
    {"order": "low_confidence", "fill": "wavefront", "sampler_spread_seeds": True,
     "sampler_min_neighbors_ratio": 0.2},
    {"order": "entropy", "fill": "parallel", "block_length": 8},
    {"order": "margin", "fill": "parallel", "schedule": "cosine"},
    {"order": "threshold", "fill": "parallel", "threshold": 0.3, "threshold_least": 2},
    {"order": "factor", "fill": "parallel", "factor": 1.5},
    {"order": "entropy_bound", "fill": "wavefront", "entropy_bound": 2.0},
    {"order": "joint_threshold", "fill": "parallel", "threshold": 0.3, "rewrite_threshold": 0.6},
    {"remask": "scheduled", "remask_by": "critic", "remask_start": 0.3},
    {"order": "low_confidence", "fill": "parallel", "remask": "scheduled_threshold"},
    {"order": "ancestral", "fill": "parallel", "remask": "remdm_conf"},
    {"order": "random", "fill": "parallel", "schedule": "all", "resample": True, "edit": True,
     "edit_token": "mask", "renoise": "random", "renoise_start": 0.2},
)  # fmt: skip
"""Settings of requests; each entry runs in separate programs."""

PROMPTS = ("", "", "", "ROMEO:\n", "The king", "Good morrow, " * 14)
_THRESHOLDS = ("threshold", "factor", "entropy_bound", "joint_threshold")
_COUNT = 250
_SLOTS = 24
_CLIENTS = 32


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """One tally for each way of running the requests, compared with individual runs."""
    return list(attack(folder, count or _COUNT, seed, folder / "record.jsonl").values())


def attack(folder: Path, count: int, seed: int, record: Path) -> dict[str, Tally]:
    """The tallies of the requests in `record` and of the remaining requests."""
    model = dlm_jax.load()
    ways = ("batch", "file", "server")
    tallies = {way: Tally(f"{way} of requests, beside each alone") for way in ways}
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for chunk in done:
        _note(tallies, chunk)
    first = sum(chunk["tried"] for chunk in done)
    if first >= count:
        return tallies
    with _server(folder) as url:
        while first < count:
            # The kinds run one after the other, because not all programs stay loaded.
            kind = first * len(KINDS) // count
            last = -(-(kind + 1) * count // len(KINDS))
            asked = [request(seed, n, KINDS[kind]) for n in range(first, last)]
            alone = [_texts(model, [one], 1)[0] for one in asked]
            found = {
                "batch": _texts(model, asked, _SLOTS),
                "file": _of_file(folder, asked, first),
                "server": _of_server(url, asked),
            }
            bad = {
                way: [_why(model, asked, n) for n in range(len(asked)) if texts[n] != alone[n]]
                for way, texts in found.items()
            }
            chunk = {"tried": len(asked), "bad": bad}
            with record.open("a") as file:
                file.write(json.dumps(chunk) + "\n")
            _note(tallies, chunk)
            first += len(asked)
            counts = ", ".join(f"{way} {len(lines)}" for way, lines in bad.items())
            print(f"    {first} requests; differ now: {counts}", file=sys.stderr, flush=True)
    return tallies


def request(seed: int, number: int, kind: Asked) -> Asked:
    """The request with this number and these settings."""
    rng = random.Random(f"{seed} {number}")
    return {
        **kind,
        "prompt": rng.choice(PROMPTS),
        "seed": rng.randrange(2**32),
        "gen_length": rng.randint(6, 24),
        "steps": rng.randint(4, 8),
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
    }


def _note(tallies: dict[str, Tally], chunk: dict[str, Any]) -> None:
    for way, lines in chunk["bad"].items():
        tallies[way].tried += chunk["tried"] - len(lines)
        for line in lines:
            tallies[way].note(line.startswith(("draw", "threshold")), line)


def _compiler() -> str:
    """Compiler flags of this process; here, fast code matters more than fast compilation."""
    return os.environ.get("XLA_FLAGS", "")


def _texts(model: dlm_jax.Model, asked: list[Asked], slots: int) -> list[str]:
    return list(dlm_jax.generate(model, asked, batch_size=slots).texts)


def _of_file(folder: Path, asked: list[Asked], number: int) -> list[str]:
    requests, results = folder / f"in{number}.jsonl", folder / f"out{number}.jsonl"
    requests.write_text("".join(json.dumps(one) + "\n" for one in asked))
    files = ("--prompts", str(requests), "--output", str(results), "--batch-size", str(_SLOTS))
    finish(folder, "sample.py", *files, compiler=_compiler())
    rows = map(json.loads, results.read_text().splitlines())
    texts = {row["id"]: row["text"] for row in rows if "text" in row}
    return [texts.get(f"line {n + 1}", "no result") for n in range(len(asked))]


class _server:
    """Starts a server in a separate process; the context returns its address."""

    def __init__(self, folder: Path):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dlm_jax.serve", "--port", "0", "--slots", str(_SLOTS),
             "--max-seconds", "3600"],
            env=environment(folder, _compiler()), cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip().split()[-1].rstrip("/")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _of_server(url: str, asked: list[Asked]) -> list[str]:
    def one(request: Asked) -> str:
        body = {k: v for k, v in request.items() if k != "gen_length"}
        body["max_tokens"] = request["gen_length"]
        call = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=3600) as answer:
            return request["prompt"] + json.load(answer)["choices"][0]["text"]

    with ThreadPoolExecutor(_CLIENTS) as pool:
        return list(pool.map(one, asked))


def _why(model: dlm_jax.Model, asked: list[Asked], number: int) -> str:
    """The cause of a difference, if programs of other shapes reproduce it."""
    one = asked[number]
    told = {k: v for k, v in one.items() if k != "prompt"} | {"prompt": one["prompt"][:12]}
    alone = dlm_jax.generate(model, [one], batch_size=1)
    for slots in (_SLOTS, 7, 2):
        crowd = [{**one, "seed": seed} for seed in range(slots - 1)]
        rows = dlm_jax.generate(model, [one, *crowd], batch_size=slots)
        if rows.texts[0] != alone.texts[0]:
            return f"{_parting(one, alone, rows)}: {told}"
    return f"not seen again: {told}"


def _parting(one: Asked, ours: dlm_jax.Texts, theirs: dlm_jax.Texts) -> str:
    """``draw``, ``threshold`` or ``order``, with the first step in which the rows differ."""
    length = min(ours.tokens.shape[1], theirs.tokens.shape[1])
    (a, ours_L), (b, theirs_L) = (
        (np.asarray(x.tokens)[0, :length], np.asarray(x.committed)[0, :length])
        for x in (ours, theirs)
    )
    parts = (a != b) | (ours_L != theirs_L)
    steps = np.r_[ours_L[parts], theirs_L[parts]]
    step = int(steps[steps >= 0].min(initial=0))
    now, then = ours_L == step, theirs_L == step
    if np.array_equal(now, then):
        return f"draw at step {step}"
    is_other_number = one.get("order") in _THRESHOLDS and now.sum() != then.sum()
    return f"{'threshold' if is_other_number else 'order'} at step {step}"


def main() -> int:
    """Exit code: 1 if any text differs without a numerical cause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=_COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path("shapes.jsonl"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tallies = attack(Path(folder), args.count, args.seed, args.record)
    for tally in tallies.values():
        print(f"{tally.name}: {tally.tried} tried, {len(tally.bad)} let through")
    return 1 if any(tally.bad for tally in tallies.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
