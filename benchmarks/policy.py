"""Reward of the arithmetic task before and after policy optimisation.

``python -m benchmarks.policy --base runs/arithmetic --losses trace`` trains from the base with each
loss and the settings of configs/rl_arithmetic.toml, up to a time limit. It appends one JSON line
per evaluation to ``benchmarks/results/policy.jsonl``: loss, seed, step, wall time in seconds
(including compilation, sampling and evaluation), and the reward of one sample for each of 400
held-out prompts. A stopped run resumes, including its seconds. ``--table`` prints the table of the
stored evaluations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dlm_jax
import dlm_jax.config
from dlm_jax.config import POLICY_LOSSES
from dlm_jax.diffusion.likelihood import half_width
from dlm_jax.tasks import arithmetic
from dlm_jax.training import run as runs
from dlm_jax.training import train_loop

RECORD = Path(__file__).parent / "results" / "policy.jsonl"
HELD_OUT = 400


class _OutOfTime(Exception):
    pass


def reward_of(model: dlm_jax.Model, **settings: Any) -> float:
    """The mean reward of one sample per held-out prompt."""
    prompts = [prompt for prompt, _ in arithmetic.examples(arithmetic.size)[-HELD_OUT:]]
    made = dlm_jax.generate(model, prompts, batch_size=HELD_OUT, seed=1, **settings)
    return sum(map(arithmetic.verify, made.texts)) / HELD_OUT


def measure(base: str, loss: str, seed: int, seconds: float, out: Path, flags: dict[str, str]):
    """Trains until the time limit; yields one record per evaluation."""
    directory = out / f"{loss}-{seed}"
    config = dlm_jax.config.load(
        "rl_arithmetic",
        {"train.init_from": base, "train.out_dir": str(directory), "train.seed": str(seed),
         "rl.loss": loss} | flags,
    )  # fmt: skip
    clock = directory / "seconds.json"
    before = json.loads(clock.read_text()) if clock.exists() else 0.0
    begun = time.monotonic()

    def spent() -> float:
        return before + time.monotonic() - begun

    def note(run: Any, state: Any, record: dict[str, Any]) -> None:
        clock.write_text(json.dumps(spent()))
        if record["kind"] == "evaluation":
            line = {"loss": loss, "seed": seed, "step": record["step"],
                    "samples": record["step"] * run.config.train.batch_size,
                    "seconds": round(spent(), 1), "reward": record["reward"],
                    "standard_error": record["standard_error"]}  # fmt: skip
            _append(line)
        if spent() > seconds:
            raise _OutOfTime

    run = runs.prepare(config, report=train_loop.say)
    with run.checkpoints:
        if run.first_step == 0:
            model = dlm_jax.load(base)
            for kind, settings in (("sampled", {}), ("greedy", {"temperature": 0.0})):
                reward = reward_of(model, **settings)
                _append({"loss": "base", "seed": seed, "how": kind, "reward": reward})
        try:
            train_loop.run_loop(run, callbacks=[note])
        except _OutOfTime:
            train_loop.say(f"{loss}: stopped after {spent():.0f} s")


def _append(record: dict[str, Any]) -> None:
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def table() -> Iterator[str]:
    records = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    yield "| loss | seed | step | samples | seconds | reward |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for record in records:
        if record["loss"] == "base":
            yield f"| none ({record['how']}) | {record['seed']} | 0 | | | {record['reward']:.3f} |"
        else:
            half = half_width(record["standard_error"], HELD_OUT)
            yield (
                f"| {record['loss']} | {record['seed']} | {record['step']} | "
                f"{record['samples']:,} | {record['seconds']:.0f} | {record['reward']:.3f} +- "
                f"{half:.3f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="runs/arithmetic")
    parser.add_argument("--losses", nargs="+", choices=POLICY_LOSSES, default=["trace"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, default=Path("runs/policy"))
    parser.add_argument("--flags", nargs="*", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table()))
        return
    flags = dict(flag.split("=", 1) for flag in args.flags)
    for loss in args.losses:
        for seed in args.seeds:
            measure(args.base, loss, seed, args.seconds, args.out, flags)


if __name__ == "__main__":
    main()
