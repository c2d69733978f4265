"""Structural edits on a repair task: held-out text with one misprint per row, passed as a draft.

    python -m benchmarks.edits tune --checkpoint runs/shakespeare_proofreader
    python -m benchmarks.edits run --checkpoint runs/shakespeare_proofreader --csv FILE
    python -m benchmarks.edits lengths --checkpoint runs/shakespeare_proofreader
    python -m benchmarks.edits quality --checkpoint runs/shakespeare_proofreader --judge RUN

Every arm takes the same number of forwards per row. `tune` runs the grid of each arm on other seeds
than `run` and writes the best settings to its CSV, which `run` reads.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
from benchmarks.quality import distinct_share, judged_bits, known_share, words
from benchmarks.repairs import KINDS, MORE_KINDS, Repair, make_repairs, score
from dlm_jax.cli.common import start_jax
from dlm_jax.config import SamplingParams
from dlm_jax.contrib.edits import Lead
from dlm_jax.data import join_documents, read_documents, split_text
from dlm_jax.inference.model import Model

FORWARDS = 9
COMMON: dict[str, Any] = {
    "temperature": 0.0, "temperature_end": -1, "order": "threshold", "fill": "parallel",
    "max_length": 192, "batch_size": 64, "ignore_eos": True,
    # Override the model's recommendations.
    "edit": False, "edit_scoring": "uncertainty",
}  # fmt: skip
DOCUMENT = {"edit": True, "resample": True, "order": "random", "schedule": "all"}
"""The source document with its defaults: every token is resampled at every step."""


def grid(arm: str) -> Iterator[dict[str, Any]]:
    """The candidate settings of an arm, named ``what-token-scoring``."""
    thresholds = (0.5, 0.7, 0.9)
    if arm == "off":
        yield {"resample": True, "order": "random", "schedule": "all"}
        for threshold in (*thresholds, 0.98):
            yield {"resample": True, "threshold": threshold}
        for start, threshold in itertools.product((0.02, 0.05, 0.15), thresholds):
            yield {"remask": "scheduled", "remask_start": start, "threshold": threshold}
        return
    if arm in TRIED:
        yield from _tried(TRIED[arm])
        return
    what, token, scoring = arm.split("-")
    base = {"edit": True, "edit_schedule": "linear"}
    base |= {"edit_token": token, "edit_scoring": scoring}
    rates = (0.018,) if scoring == "lead" else (0.018, 0.036)  # one or two of 64 tokens per step
    insert_margins = (0.1, 0.3, 0.5) if scoring == "lead" else (0.0, 0.9)
    deletes = [(0.1, 0.0), (0.3, 0.0), (0.5, 0.0)]
    if scoring != "lead":
        deletes[0] = (0.02, 0.3)
    rewrites: list[dict[str, Any]] = [{"resample": True, "threshold": 0.9}]
    if token == "mask":
        rewrites.append({"threshold": 0.9})
    for rate, rewrite in itertools.product(rates, rewrites):
        pairs = itertools.product(insert_margins, deletes)
        if what == "insert":
            pairs = ((margin, deletes[0]) for margin in insert_margins)
        elif what == "delete":
            pairs = ((insert_margins[0], pair) for pair in deletes)
        for insert_margin, (delete_margin, delete_lambda) in pairs:
            insert, delete = (rate if what in (name, "both") else 0.0
                              for name in ("insert", "delete"))  # fmt: skip
            yield base | rewrite | {
                "insert_ratio_start": insert, "insert_ratio_end": insert,
                "delete_ratio_start": delete, "delete_ratio_end": delete,
                "insert_margin": insert_margin, "delete_margin": delete_margin,
                "delete_lambda": delete_lambda,
            }  # fmt: skip


def _tried(trials: int) -> Iterator[dict[str, Any]]:
    """Candidate settings: a pass over the draft, one edit per row, and a step."""
    gains = (0.0, 0.25, 0.5, 1.0)
    for gain, lead_gain in itertools.product(gains, (0.2, 0.35)):
        yield {
            "edit": True, "edit_scoring": "likelihood", "steps": 1, "edit_trials": trials,
            "edit_gain": gain, "edit_lead_gain": lead_gain,
            "threshold": 0.9, "max_length": 144, "batch_size": 64,
        }  # fmt: skip


CAREFUL = "likelihood-careful"  # tuned for the smallest distance, not for exact rows
TRIED = {"likelihood": 6, CAREFUL: 6}
"""Arms with trials: number of candidates; 9 forwards."""
ARMS = ["off", *TRIED, "shipped"] + [
    f"{what}-{token}-{scoring}"
    for scoring in ("uncertainty", "lead")
    for what in ("insert", "delete", "both")
    for token in ("space", "mask")
]


class Task:
    """The model and its held-out text."""

    def __init__(self, checkpoint: str, number: int, kinds: tuple[str, ...] = KINDS):
        self.model = dlm_jax.load(checkpoint)
        assert self.model.config is not None
        data = self.model.config.data
        text = join_documents(read_documents(data.source))
        self.corpus, self.held_out = split_text(text, data.held_out)
        self.number, self.kinds = number, kinds

    def repairs(self, seed: int) -> list[Repair]:
        """The rows of a seed."""
        return make_repairs(self.held_out, self.corpus, seed, self.number, kinds=self.kinds)

    def recommended(self) -> dict[str, Any]:
        """The sampling settings in the model's config."""
        assert self.model.config is not None
        usual = vars(SamplingParams())
        return {k: v for k, v in vars(self.model.config.sample).items() if v != usual[k]}

    def run(self, repairs: list[Repair], settings: dict[str, Any]) -> dict[str, Any]:
        """Scores and counts of the rows with these settings."""
        # An edited draft has one forward before its first step.
        steps = FORWARDS - bool(settings.get("edit"))
        prompts = [{"prompt": repair.prompt, "draft": repair.damaged} for repair in repairs]
        given: dict[str, Any] = COMMON | {"steps": steps} | settings
        made = dlm_jax.generate(self.model, prompts, rules=[Lead], **given)
        found = score(repairs, made.texts)
        return {
            "exact": found.exact,
            "distance": found.distance,
            **{kind: found.by_kind[kind] for kind in self.kinds},
            "insertions": float(made.counters.insertions.mean()),
            "deletions": float(made.counters.deletions.mean()),
            "forwards": float(made.forwards.mean()),
        }


def tune(task: Task, path: str, seed: int, arms: list[str], near: bool) -> None:
    """Writes the best settings of each arm: the most exact repairs, then the smallest distance."""
    repairs = task.repairs(seed)
    untouched = score(repairs, [repair.prompt + repair.damaged for repair in repairs]).distance

    def worth(arm: str, pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[float, ...]:
        found = pair[0]
        nearest, is_far = arm == CAREFUL, near and found["distance"] > untouched
        return nearest and found["distance"], is_far, -found["exact"], found["distance"]

    for arm in arms:
        some = [task.recommended()] if arm == "shipped" else grid(arm)
        tried = [(task.run(repairs, settings), settings) for settings in some]
        best, settings = min(tried, key=functools.partial(worth, arm))
        print(f"{arm}: {len(tried)} tried, exact {best['exact']:.3f}, distance "
              f"{best['distance']:.2f}: {settings}", flush=True)  # fmt: skip
        _append(path, {"arm": arm, "settings": json.dumps(settings), "seed": seed, **best})


def run(task: Task, tuned: str, path: str, seeds: list[int], arms: list[str]) -> None:
    """Runs every tuned arm, and the defaults of the source document, on the seeds."""
    with open(tuned, encoding="utf-8", newline="") as file:
        best = {row["arm"]: json.loads(row["settings"]) for row in csv.DictReader(file)
                if row["arm"] in arms}  # fmt: skip
    best = {"document": DOCUMENT} | best
    for seed in seeds:
        repairs = task.repairs(seed)
        untouched = score(repairs, [repair.prompt + repair.damaged for repair in repairs])
        _append(path, {"arm": "untouched", "settings": "{}", "seed": seed, "exact": 0.0,
                       "distance": untouched.distance, **untouched.by_kind, "insertions": 0,
                       "deletions": 0, "forwards": 0})  # fmt: skip
        for arm, settings in best.items():
            found = task.run(repairs, settings)
            print(f"seed {seed}, {arm}: exact {found['exact']:.3f}", flush=True)
            _append(path, {"arm": arm, "settings": json.dumps(settings), "seed": seed, **found})


def table(path: str) -> None:
    """Prints means over the seeds, with the standard deviation of exact repairs."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [kind for kind in (*KINDS, *MORE_KINDS) if kind in rows[0]]
    print(
        "| arm | exact % | " + " | ".join(found) + " | distance | inserted | deleted | forwards |"
    )
    print("| --- " * (6 + len(found)) + "|")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]

        def mean(name: str, own: list[dict[str, str]] = own) -> float:
            return float(np.mean([float(row[name]) for row in own]))

        spread = 100 * np.std([float(row["exact"]) for row in own], ddof=1) if len(own) > 1 else 0
        kinds = " | ".join(f"{100 * mean(kind):.1f}" for kind in found)
        print(f"| {arm} | {100 * mean('exact'):.1f} ± {spread:.1f} | {kinds} | "
              f"{mean('distance'):.2f} | {mean('insertions'):.2f} | {mean('deletions'):.2f} | "
              f"{mean('forwards'):.1f} |"
              )  # fmt: skip


def lengths(task: Task, settings: dict[str, Any], seeds: list[int]) -> None:
    """Prints the final lengths of rows under both kinds of target."""
    print("| mode | target | mean | least | most | at the target % |")
    print("| --- " * 6 + "|")
    for mode, target in itertools.product(("to_max_new", "exact"), (48, 56, 64, 72, 80)):
        found = []
        for seed in seeds:
            repairs = [r for r in task.repairs(seed) if len(r.damaged) != target]
            prompts = [{"prompt": r.prompt, "draft": r.damaged} for r in repairs]
            given: dict[str, Any] = COMMON | settings | {
                "steps": 24, "max_new_tokens": target, "length_target_mode": mode
            }  # fmt: skip
            made = dlm_jax.generate(task.model, prompts, rules=[Lead], **given)
            found += (made.lengths - [len(r.prompt) for r in repairs]).tolist()
        print(f"| {mode} | {target} | {np.mean(found):.1f} | {min(found)} | {max(found)} | "
              f"{100 * np.mean(np.array(found) == target):.0f} |", flush=True)  # fmt: skip


def quality(task: Task, settings: dict[str, Any], judge: Model, seeds: list[int]) -> None:
    """Prints the quality of unprompted text with and without edits, for equal steps."""
    known = set(words(task.corpus))
    plain = {"order": "random", "schedule": "linear", "temperature": 0.8, "remask": "scheduled",
             "remask_start": 0.1, "remask_end": 0.02}  # fmt: skip
    arms = {"edits off": plain, "edits on": plain | settings}
    print("| unprompted | forwards | known words | judged bits/char | distinct 4-grams | length |")
    print("| --- " * 6 + "|")
    for name, arm in arms.items():
        texts, forwards = [], []
        for seed in seeds:
            given: dict[str, Any] = (
                COMMON | {"steps": 128, "gen_length": 176, "seed": 1000 * seed} | arm
            )
            made = dlm_jax.generate(task.model, num_samples=32, rules=[Lead], **given)
            texts, forwards = [*texts, *made.texts], [*forwards, *made.forwards.tolist()]
        bits, error = judged_bits(judge, texts)
        print(f"| {name} | {np.mean(forwards):.0f} | {known_share(texts, known):.3f} | "
              f"{bits:.3f} ± {error:.3f} | {distinct_share(texts, 4):.3f} | "
              f"{np.mean([len(t) for t in texts]):.1f} |", flush=True)  # fmt: skip


def _append(path: str, row: dict[str, Any]) -> None:
    is_new = not Path(path).exists()
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})


def main() -> None:
    """Runs a part of the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["tune", "run", "table", "lengths", "quality"])
    parser.add_argument("--checkpoint", default="runs/shakespeare_proofreader")
    parser.add_argument("--judge", help="quality: an autoregressive model")
    parser.add_argument("--csv", default="benchmarks/results/edits.csv")
    parser.add_argument("--tuned", default="benchmarks/results/edits_tuned.csv")
    parser.add_argument("--arms", nargs="*", default=ARMS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--num-rows", type=int, default=128, help="rows per seed (128)")
    parser.add_argument("--more", action="store_true", help="include less common kinds of damage")
    parser.add_argument(
        "--near", action="store_true", help="tune: prefer distances below untouched"
    )
    parser.add_argument("--settings", default="{}", help="lengths, quality: JSON")
    args = parser.parse_args()
    if args.part == "table":
        table(args.csv)
        return
    start_jax()
    kinds = MORE_KINDS if args.more else KINDS
    task, settings = Task(args.checkpoint, args.num_rows, kinds), json.loads(args.settings)
    if args.part == "tune":
        tune(task, args.tuned, 100, args.arms, args.near)
    elif args.part == "run":
        run(task, args.tuned, args.csv, args.seeds, args.arms)
        table(args.csv)
    elif args.part == "lengths":
        lengths(task, settings, args.seeds)
    else:
        if args.judge is None:
            sys.exit("quality needs --judge, an autoregressive model of the same text")
        quality(task, settings, dlm_jax.load(args.judge), args.seeds)


if __name__ == "__main__":
    main()
