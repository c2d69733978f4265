"""Text quality as a function of the number of forwards, for every commit rule.

    python benchmarks/quality_forwards.py --judge runs/shakespeare_judge --results quality.jsonl \
        --picture benchmarks/results/quality_forwards.png
    python benchmarks/quality_forwards.py --judge runs/shakespeare_judge --results decoders.jsonl \
        --decoders

Each row of the table is a rule with its setting over three seeds: forwards per text, the judge's
exact bits per character (mean and standard deviation over the seeds), the entropy of the generated
tokens in bits, and the share of distinct 4-grams of characters. Candidates are drawn in parallel,
the temperature changes from 1 to 0.3, and all other settings are the model's defaults. Measurements
in the results file are not repeated, so a stopped run resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib import decoders
from dlm_jax.inference.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from quality import distinct_share, judged_bits  # noqa: E402

BUDGETS = (8, 16, 32, 64, 128)
QUOTAS = ("low_confidence", "entropy", "margin", "random", "left_to_right", "ancestral")
CASES: list[tuple[str, dict[str, Any]]] = [
    *[(order, {"order": order, "steps": steps}) for order in QUOTAS for steps in BUDGETS],
    *[("low_confidence, blocks of 16",
       {"order": "low_confidence", "steps": steps, "block_length": 16}) for steps in BUDGETS],
    *[("threshold", {"order": "threshold", "threshold": x}) for x in (0.2, 0.4, 0.6, 0.8)],
    *[("factor", {"order": "factor", "factor": x}) for x in (1.2, 1.6, 1.9)],
    *[("entropy_bound", {"order": "entropy_bound", "entropy_bound": x}) for x in (1.0, 4.0, 16.0)],
    *[("random, scheduled remasking", {
        "order": "random", "schedule": "all", "steps": steps, "remask": "scheduled",
        "remask_randomness": 1.0, "remask_start": 0.95, "remask_end": 0.02,
    }) for steps in BUDGETS],
    *[("ancestral, remdm_cap", {"order": "ancestral", "steps": steps, "remask": "remdm_cap",
                                "remask_eta": 0.02}) for steps in BUDGETS],
]  # fmt: skip
LONGEST = 128
DECODERS: list[tuple[str, dict[str, Any]]] = [
    *[(order, {"order": order, "steps": steps}) for order in ("random", "margin", "dilated")
      for steps in (8, 16, 32)],
    *[("position_aware", {"order": "position_aware", "steps": x, "position_decay": 0.25})
      for x in (8, 16, 32)],
    *[(order, {"order": order, "steps": LONGEST} | settings) for order, settings in (
        ("threshold", {"threshold": 0.05}), ("threshold", {"threshold": 0.1}),
        ("frechet", {"frechet_margin": -0.9}), ("frechet", {"frechet_margin": -0.95}),
        ("local_leap", {"threshold": 0.1, "leap_threshold": 0.05}),
        ("local_leap", {"threshold": 0.2, "leap_threshold": 0.05}),
        ("hierarchical", {"threshold": 0.1, "hierarchy_floor": 0.05}),
        ("hierarchical", {"threshold": 0.2, "hierarchy_floor": 0.05}),
        ("prophet", {"prophet_gap": 2.0}), ("prophet", {"prophet_gap": 7.5}),
        ("klass", {"threshold": 0.05, "klass_divergence": 0.1, "klass_steps": 1}),
        ("klass", {"threshold": 0.1, "klass_divergence": 0.1, "klass_steps": 1}),
        ("credit", {"threshold": 0.2, "credit_weight": 0.7}),
        ("credit", {"threshold": 0.4, "credit_weight": 0.7}),
        ("slow_fast", {"threshold": 0.1, "slow_threshold": 0.05}),
        ("slow_fast", {"threshold": 0.2, "slow_threshold": 0.1}),
        ("dawn", {"induced_threshold": 0.05, "apart_threshold": 0.05}),
        ("dawn", {"induced_threshold": 0.1, "apart_threshold": 0.1}),
    )],
    *[("wino", {"order": "threshold", "steps": LONGEST, "threshold": x, "remask": "wino",
                "verify_threshold": x}) for x in (0.05, 0.1)],
]  # fmt: skip
"""Published decoders, and simple orders for comparison."""
WAVES: list[tuple[str, dict[str, Any]]] = [
    ("waves", {"order": "random_filled", "steps": x, "fill": "wavefront"}) for x in (4, 8, 16)
]


def measure(
    model: Model, judge: Model, settings: dict[str, Any], *, seed: int, number: int, characters: int
) -> dict[str, float]:
    """Measures `number` texts with consecutive seeds."""
    settings = {"fill": "parallel"} | settings
    made = dlm_jax.generate(
        model,
        num_samples=number,
        seed=seed,
        batch_size=number,
        chain=("temperature", "min_p"),
        temperature_end=0.3,
        rules=decoders,
        **settings,
    )
    texts = [text[:characters] for text in made.texts]
    counts = Counter(made.tokens[made.committed >= 0].tolist())
    share = np.array(list(counts.values())) / counts.total()
    return {
        "forwards": float(made.forwards.mean()),
        "bits": judged_bits(judge, texts)[0],
        "entropy": float(-(share * np.log2(share)).sum()),
        "distinct": distinct_share(texts, 4),
    }


def draw(rows: list[tuple[str, str, dict[str, list[float]]]], path: str) -> None:
    """Draws bits and distinct 4-grams over forwards, with one line per rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    names = list(dict.fromkeys(name for name, _, _ in rows))
    styles = ["o-", "s--", "^:", "d-."]
    for axis, key, label in zip(
        axes, ("bits", "distinct"), ("judged bits per character", "distinct 4-grams"), strict=True
    ):
        for number, name in enumerate(names):
            points = sorted(
                (statistics.mean(figures["forwards"]), statistics.mean(figures[key]))
                for other, _, figures in rows
                if other == name
            )
            axis.plot(
                *zip(*points, strict=True), styles[number % 4], label=name, markersize=4,
                color=plt.get_cmap("tab20")(number),
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xlabel("forwards per text")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--checkpoint", default="runs/shakespeare_bpe_sampler")
    parser.add_argument("--decoders", action="store_true", help="published decoders and waves")
    parser.add_argument("--results", required=True, metavar="FILE", help="file of measurements")
    parser.add_argument("--picture", metavar="FILE")
    parser.add_argument("--num-samples", type=int, default=16, help="texts per seed (16)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--characters", type=int, default=256)
    args = parser.parse_args()
    start_jax()
    model, judge = dlm_jax.load(args.checkpoint), dlm_jax.load(args.judge)
    kept = Path(args.results)
    known = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            record = json.loads(line)
            known[record["key"]] = record["figures"]
    rows = []
    print("| rule | setting | forwards | judged bits/char | token entropy | distinct 4-grams |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, settings in DECODERS + WAVES if args.decoders else CASES:
        figures: dict[str, list[float]] = {}
        for seed in args.seeds:
            key = json.dumps([settings, seed, args.num_samples, args.characters])
            if key not in known:
                known[key] = measure(
                    model, judge, settings, seed=1000 * (seed + 1), number=args.num_samples,
                    characters=args.characters,
                )  # fmt: skip
                with kept.open("a") as file:
                    file.write(json.dumps({"key": key, "figures": known[key]}) + "\n")
            for figure, value in known[key].items():
                figures.setdefault(figure, []).append(value)
        own = [key for key in settings if key not in ("order", "steps", "fill")]
        decides = "steps" not in settings or args.decoders and settings["steps"] == LONGEST
        key = own[0] if decides else "steps"
        setting = f"{key}={settings[key]}"
        rows.append((name, setting, figures))
        mean = {figure: statistics.mean(values) for figure, values in figures.items()}
        spread = statistics.stdev(figures["bits"]) if len(args.seeds) > 1 else 0.0
        print(
            f"| {name} | {setting} | {mean['forwards']:.1f} | {mean['bits']:.3f} ± {spread:.3f} | "
            f"{mean['entropy']:.2f} | {mean['distinct']:.3f} |",
            flush=True,
        )
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
