"""Repairs of planted errors by a model of uniform noise, with the critic or in waves.

    python benchmarks/noise_heads.py train --out runs/noise_heads
    python benchmarks/noise_heads.py repairs --out runs/noise_heads
    python benchmarks/noise_heads.py texts --out runs/noise_heads --judge runs/shakespeare_judge

``train`` trains one model with a critic and a sampler head, of the size and text of
`benchmarks.processes`. ``repairs`` plants uniformly random characters in held-out text and samples
from it as a draft, with the same model: without heads, with ``renew_by="critic"``, and with
``fill="wavefront"``. Settings are chosen on the first half of the held-out text, and measured on
the second half. ``texts`` samples texts from noise; the judge is a causal model of the same
characters (``configs/shakespeare_judge.toml``).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

import numpy as np

import dlm_jax
from benchmarks.processes import RESULTS, TRAINED, Counts, told
from benchmarks.quality import distinct_share, judged_bits
from dlm_jax.data import join_documents, read_documents, split_text, text_ids
from dlm_jax.inference.model import Model

FLAGS = (
    "--objective.process", "uniform", "--model.add_critic_head", "true",
    "--model.add_sampler_head", "true", "--heads.sampler_reveal", "0.5",
    "--heads.critic_masked_only", "true",
)  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "none": {"fill": "parallel"},
    "critic": {"fill": "parallel", "renew_by": "critic"},
    "waves": {"fill": "wavefront"},
}
ARMS: list[dict[str, Any]] = [
    {"posterior_start": 0.05, "steps": steps, "temperature": temperature}
    for steps, temperature in itertools.product((1, 16), (1.0, 0.5))
]


def train(out: Path, num_steps: int, source: str) -> None:
    """Trains the model. A stopped run is resumed."""
    flags = (*TRAINED, *FLAGS, "--data.source", source, "--train.steps", str(num_steps))
    command = [sys.executable, "train.py", *flags, "--train.out_dir", str(out)]
    subprocess.run(command, check=True)


def repaired(model: Model, text: str, settings: dict[str, Any], number: int, seed: int) -> Counts:
    """The counts for the last windows of a text with random tokens at 5% of the positions."""
    rng, length = np.random.default_rng(seed), model.max_length
    ids = np.asarray(model.tokenizer.encode(text))[-number * length :]
    true_NL = ids[: len(ids) // length * length].reshape(-1, length)
    is_hit_NL = rng.random(true_NL.shape) < 0.05
    is_hit_NL[:, 0] = False
    shown_NL = np.where(is_hit_NL, rng.choice(text_ids(model.tokenizer), true_NL.shape), true_NL)
    prompts = [
        {"tokens": row[:1].tolist(), "draft": model.tokenizer.decode(row[1:])} for row in shown_NL
    ]
    made = dlm_jax.generate(
        model, prompts, seed=seed, ignore_eos=True, max_length=length, order="posterior", **settings
    )
    found_NL = np.array([model.tokenizer.encode(text) for text in made.texts])
    is_wrong_NL, is_right_NL = shown_NL != true_NL, found_NL == true_NL
    return Counts(
        true_NL[:, 1:].size,
        int(is_wrong_NL.sum()),
        int(is_right_NL[is_wrong_NL].sum()),
        int((~is_right_NL)[~is_wrong_NL].sum()),
    )


def repairs(out: Path, path: Path, number: int, seeds: int) -> None:
    """Prints the table. Measured lines are kept."""
    model, fields = dlm_jax.load(out), ("part", "heads", "settings", "seed", *Counts._fields)
    assert model.config is not None, "a run has a config"
    data = model.config.data
    held_out = split_text(join_documents(read_documents(data.source)), data.held_out)[1]
    parts = {"tune": held_out[: len(held_out) // 2], "test": held_out[len(held_out) // 2 :]}
    done: dict[tuple[str, ...], Counts] = {}
    if path.exists():
        with path.open() as file:
            for row in csv.DictReader(file):
                key = tuple(row[name] for name in fields[:4])
                done[key] = Counts(*(int(row[name]) for name in Counts._fields))

    def measured(part: str, heads: str, arm: dict[str, Any], seed: int) -> Counts:
        key = part, heads, told(arm), str(seed)
        if key not in done:
            done[key] = repaired(model, parts[part], HEADS[heads] | arm, number, seed)
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                lines = csv.writer(file, lineterminator="\n")
                lines.writerows([fields] * is_new + [(*key, *done[key])])
        return done[key]

    print("| heads | chosen by | settings | repaired % | true tokens changed % | wrong % after |")
    print("| --- | --- | --- | --- | --- | --- |")
    for heads in HEADS:
        tuned = [(measured("tune", heads, arm, 0), arm) for arm in ARMS]
        for reason, rank in (("fewest wrong", _wrong), ("most repaired", _missed)):
            arm = min(tuned, key=rank)[1]
            runs = [measured("test", heads, arm, 1 + seed) for seed in range(seeds)]
            print(f"| {heads} | {reason} | {told(arm)} | {shares(runs)} |", flush=True)


def texts(out: Path, judge: Path, number: int) -> None:
    """Prints bits per character under the judge, and the share of distinct 4-grams."""
    model, reader = dlm_jax.load(out), dlm_jax.load(judge)
    print("| heads | steps | judged bits | distinct 4-grams |")
    print("| --- | --- | --- | --- |")
    for heads, steps in itertools.product(HEADS, (4, 16, 64)):
        made = dlm_jax.generate(
            model, [""], num_samples=number, steps=steps, order="posterior", ignore_eos=True,
            max_length=model.max_length, **HEADS[heads],
        )  # fmt: skip
        written = list(made.texts)
        bits, grams = judged_bits(reader, written)[0], distinct_share(written, 4)
        print(f"| {heads} | {steps} | {bits:.3f} | {grams:.3f} |", flush=True)


def _wrong(tuned: tuple[Counts, dict[str, Any]]) -> int:
    return tuned[0].wrong


def _missed(tuned: tuple[Counts, dict[str, Any]]) -> int:
    return -tuned[0].right


def shares(runs: list[Counts]) -> str:
    """Mean and half the range, in percent, of three shares."""
    total, errors, right, changed = np.array(runs, float).T
    parts = (right / errors, changed / (total - errors), (errors - right + changed) / total)
    return " | ".join(f"{100 * x.mean():.1f} ± {50 * np.ptp(x):.1f}" for x in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "repairs", "texts"))
    parser.add_argument("--out", type=Path, default=Path("runs/noise_heads"))
    parser.add_argument("--judge", type=Path, default=Path("runs/shakespeare_judge"))
    parser.add_argument("--source", default="tinyshakespeare")
    parser.add_argument("--num-steps", type=int, default=1500, help="training steps")
    parser.add_argument("--csv", type=Path, default=RESULTS / "noise_heads.csv")
    parser.add_argument("--number", type=int, default=64, help="windows")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "train":
        train(args.out, args.num_steps, args.source)
    elif args.what == "repairs":
        repairs(args.out, args.csv, args.number, args.seeds)
    else:
        texts(args.out, args.judge, args.number)


if __name__ == "__main__":
    main()
