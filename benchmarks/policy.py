"""Reward of the arithmetic task before and after policy optimisation.

``python -m benchmarks.policy --base runs/arithmetic --losses trace`` trains from the base with each
loss and the settings of configs/rl_arithmetic.toml, up to a time limit. It appends one JSON line
per evaluation to ``benchmarks/results/policy.jsonl``: loss, seed, step, wall time in seconds
(including compilation, sampling and evaluation), and the reward of one sample for each of 400
held-out prompts. A stopped run resumes, including its seconds. ``--table`` prints the rewards of
each loss at each step, means and 95% intervals over the seeds. ``--waves`` then trains a sampler
head on the base model and on each policy of the loss ``trace``, and records the rewards of parallel
and wavefront filling. ``--clock`` prints the share of the time that compiled functions take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import dlm_jax
import dlm_jax.config
from dlm_jax.config import POLICY_LOSSES
from dlm_jax.diffusion.likelihood import half_width
from dlm_jax.inference.slots import Slots
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
    settings = {"seed": 1} | settings
    made = dlm_jax.generate(model, prompts, batch_size=HELD_OUT, **settings)
    return sum(map(arithmetic.verify, made.texts)) / HELD_OUT


def measure(
    base: str, loss: str, seed: int, seconds: float, out: Path, flags: dict[str, str], path: Path
):
    """Trains until the time limit and records every evaluation."""
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
            _append(line, path)
        if spent() > seconds:
            raise _OutOfTime

    run = runs.prepare(config, report=train_loop.say)
    with run.checkpoints:
        if run.first_step == 0:
            model = dlm_jax.load(base)
            for kind, settings in (("sampled", {}), ("greedy", {"temperature": 0.0})):
                reward = reward_of(model, **settings)
                _append({"loss": "base", "seed": seed, "how": kind, "reward": reward}, path)
        try:
            train_loop.run_loop(run, callbacks=[note])
        except _OutOfTime:
            train_loop.say(f"{loss}: stopped after {spent():.0f} s")


def waves(base: str, out: Path, seeds: Sequence[int], path: Path) -> None:
    """Trains a sampler head on the base model and on each trained policy, and notes the rewards
    of both fills.
    """
    models = {"base": base} | {f"trace-{seed}": str(out / f"trace-{seed}") for seed in seeds}
    for name, directory in models.items():
        flags = {
            "train.init_from": directory, "train.out_dir": str(out / f"head-{name}"),
            "model.add_sampler_head": "true", "model.sampler_residual": "true",
            "heads.train_main": "false", "heads.start_sampler_iteration": "0",
            "heads.learning_rate": "0.003",
        }  # fmt: skip
        dlm_jax.train(dlm_jax.config.load("arithmetic", flags), report=train_loop.say)
        model = dlm_jax.load(flags["train.out_dir"])
        for fill, steps in itertools.product(("parallel", "wavefront"), (1, 2, 4)):
            rewards = [reward_of(model, seed=seed, fill=fill, steps=steps) for seed in range(4)]
            record = {"loss": name, "fill": fill, "steps": steps, "reward": sum(rewards) / 4}
            _append(record, path)


def clock(base: str, loss: str, out: Path, steps: int = 60, warm: int = 20) -> None:
    """Prints the shares of the time that the compiled functions of the sampler and the trainer
    take, after `warm` steps.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    begun = 0.0

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            found = jax.block_until_ready(function(*args))
            spent[name] += time.perf_counter() - start
            return found

        return call

    def note(run: Any, state: Any, record: dict[str, Any]) -> None:
        nonlocal begun
        if record["step"] == warm:
            spent.clear()
            begun = time.perf_counter()

    loop_class: Any = train_loop._Loop
    compiled, advance = loop_class._compile_train_step, Slots.advance

    def compile_step(loop: Any, batch: Any) -> None:
        compiled(loop, batch)
        loop._train_step = timed("trainer", loop._train_step)

    loop_class._compile_train_step = compile_step
    Slots.advance = timed("sampler", advance)
    flags = {
        "train.init_from": base, "train.out_dir": str(out / f"clock-{loss}"), "rl.loss": loss,
        "train.steps": str(steps), "train.log_every": str(warm), "train.eval_every": "0",
        "train.checkpoint_every": "0",
    }  # fmt: skip
    config = dlm_jax.config.load("rl_arithmetic", flags)
    dlm_jax.train(config, report=lambda line: None, callbacks=[note])
    total = time.perf_counter() - begun
    print(f"{loss}: {total / (steps - warm):.3f} s per step, " + ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in sorted(spent.items())
    ))  # fmt: skip


def _append(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def table(path: Path) -> Iterator[str]:
    """Markdown rows: the rewards of each loss, means over the seeds and 95% intervals."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rewards: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if record["loss"] != "base":
            steps = rewards.setdefault(record["loss"], {})
            steps.setdefault(record["step"], []).append(record["reward"])
    shown = range(40, 201, 40)
    yield "| loss | seeds | " + " | ".join(f"step {step}" for step in shown) + " |"
    yield "| --- " * (len(shown) + 2) + "|"
    for loss, steps in rewards.items():
        cells = [_with_interval(steps[step]) for step in shown]
        yield f"| `{loss}` | {len(steps[shown[-1]])} | {' | '.join(cells)} |"


def _with_interval(rewards: Sequence[float]) -> str:
    half = half_width(statistics.stdev(rewards) / len(rewards) ** 0.5, len(rewards))
    return f"{statistics.mean(rewards):.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="runs/arithmetic")
    parser.add_argument("--losses", nargs="+", choices=POLICY_LOSSES, default=["trace"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, default=Path("runs/policy"))
    parser.add_argument("--flags", nargs="*", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--waves", action="store_true")
    args = parser.parse_args()
    if args.clock:
        for loss in args.losses:
            clock(args.base, loss, args.out)
        return
    if args.waves:
        waves(args.base, args.out, args.seeds, args.record)
        return
    if args.table:
        print("\n".join(table(args.record)))
        return
    flags = dict(flag.split("=", 1) for flag in args.flags)
    for loss in args.losses:
        for seed in args.seeds:
            measure(args.base, loss, seed, args.seconds, args.out, flags, args.record)


if __name__ == "__main__":
    main()
