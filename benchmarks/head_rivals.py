"""Compares the trained sampler head with training-free rules and with other settings of the head.

    python -m benchmarks.head_rivals run --judge runs/shakespeare_judge
    python -m benchmarks.head_rivals table
    python -m benchmarks.head_rivals refine --checkpoint shakespeare --csv FILE
    python -m benchmarks.head_rivals temperatures --checkpoint shakespeare --csv FILE

One model writes the texts, which are judged as in `benchmarks/sampler_head.py`. A rule that commits
all sufficiently confident tokens needs a variable number of forwards. A grid of settings is
therefore tried on a separate seed. For each budget, the candidates need no more forwards and write
texts as diverse as 128 forwards with one draw each; the candidate with the lowest bits under the
judge is selected. Every line of the CSV is measured once; a stopped run resumes. `refine` compares
16 forwards that commit with 17 forwards of which 8 are the critic's. `temperatures` makes the same
comparison at every temperature, to compare texts of equal diversity.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.sampler_head import RATIOS, TEMPERATURES, TUNING_SEED, Study
from dlm_jax.cli.common import start_jax
from dlm_jax.diffusion.likelihood import half_width

BUDGETS = (4, 8, 16)
SEEDS = (1000, 2000, 3000)
NUM_SAMPLES = 32
CHARACTERS = 256
LIMIT = 128
FORWARDS_SLACK = 1.05
WAVES: dict[str, Any] = {"fill": "wavefront"}
FILLED: dict[str, Any] = WAVES | {"order": "random_filled"}
QUOTAS: dict[str, dict[str, Any]] = {
    "parallel": {"fill": "parallel"},
    "waves": WAVES,
    "waves, one-sided": WAVES | {"sampler_one_sided": True},
    "waves, even then odd": WAVES | {"sampler_even_odd": True},
    "all filled": FILLED,
    "all filled, one-sided": FILLED | {"sampler_one_sided": True},
}
"""Samplers that commit a fixed number of tokens per step."""
BOUNDS: dict[str, tuple[float, ...]] = {
    "entropy_bound": (0.3, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0),
    "factor": (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
}
"""Rules that commit sufficiently confident tokens, and the candidate bounds of each rule."""
OWN: dict[str, dict[str, Any]] = {
    **{f"top-p {p}": {"sampler_top_p": p} for p in (0.99, 0.95, 0.9, 0.8)},
    **{f"ratio {ratio}": {"sampler_min_neighbors_ratio": ratio} for ratio in RATIOS[2:4]},
}  # fmt: skip
"""Settings of the head, combined with those of *waves*."""
REFINED: dict[str, Any] = FILLED | {"schedule": "linear", "remask": "scheduled"}
SHARES = ((0.0, 0.06), (0.0, 0.1), (0.05, 0.05), (0.08, 0.04))
"""First and last remasked share of the row; the share changes linearly over the steps except the
last."""
RECOMMENDED = (
    "steps", "order", "fill", "sampler_even_odd", "temperature", "temperature_end", "min_p",
)  # fmt: skip
WARM = ((1.1, 0.3), (1.0, 0.3), (0.9, 0.3), (0.8, 0.3), (1.0, 0.1), (0.8, 0.1))


def _quota_grid(kind: str, budget: int) -> list[dict[str, Any]]:
    return [
        QUOTAS[kind] | {"steps": budget, "temperature": first, "temperature_end": last}
        for first, last in TEMPERATURES
    ]


def _bound_grid(order: str, fill: str) -> list[dict[str, Any]]:
    return [
        {"fill": fill, "order": order, order: bound, "steps": LIMIT, "temperature": temperature,
         "temperature_end": -1.0}
        for bound, temperature in itertools.product(BOUNDS[order], (1.0, 0.8, 0.6))
    ]  # fmt: skip


def _best(
    lines: list[dict[str, str]], budget: int, floor: tuple[float, float]
) -> dict[str, Any] | None:
    """The diverse settings with the lowest bits within the budget; None if there are none."""
    found = [
        line
        for line in lines
        if float(line["forwards"]) <= FORWARDS_SLACK * budget
        and float(line["entropy"]) >= floor[0]
        and float(line["distinct"]) >= floor[1]
    ]
    if not found:
        return None
    return json.loads(min(found, key=lambda line: float(line["bits"]))["settings"])


def _floor(study: Study, name: str) -> tuple[float, float]:
    """The minimum token entropy and distinct 4-grams of diverse texts."""
    (full,) = study.measure(
        "tune", "full", [name], [TUNING_SEED],
        {"steps": LIMIT, "fill": "parallel", "temperature": 1.0, "temperature_end": 0.3},
    )  # fmt: skip
    return float(full["entropy"]) - 0.1, float(full["distinct"]) - 0.03


def _tuned(
    study: Study, name: str, kind: str, grid: list[dict[str, Any]], budget: int,
    floor: tuple[float, float],
) -> dict[str, Any] | None:  # fmt: skip
    lines = [study.measure("tune", kind, [name], [TUNING_SEED], row)[0] for row in grid]
    return _best(lines, budget, floor)


def refine(study: Study, name: str) -> None:
    """Compares 16 forwards that commit with 9 steps between which the critic remasks."""
    floor = _floor(study, name)
    alone: dict[str, Any] = {"steps": 16}
    half: dict[str, Any] = {"steps": 9}
    doubts: dict[str, dict[str, Any]] = {
        "chance": {"remask_randomness": 1.0},
        "critic": {"remask_by": "critic"},
    }
    grids: dict[str, list[dict[str, Any]]] = {
        "parallel": [QUOTAS["parallel"] | alone],
        "waves": [WAVES | alone],
        "all filled": [FILLED | alone],
        **{
            f"all filled, {doubt} remasks": [
                REFINED | own | (half if doubt == "critic" else alone)
                | {"remask_start": start, "remask_end": end}
                for start, end in SHARES
            ]
            for doubt, own in doubts.items()
        },
    }  # fmt: skip
    for kind, grid in grids.items():
        warm = [
            row | {"temperature": first, "temperature_end": last}
            for row, (first, last) in itertools.product(grid, WARM)
        ]
        settings = _tuned(study, name, kind, warm, 17, floor)
        assert settings is not None, f"{kind}: nothing diverse"
        study.measure("16 forwards", kind, [name], list(SEEDS), settings)
    recommended = study.model(name).config
    assert recommended is not None
    usual = {key: getattr(recommended.sample, key) for key in RECOMMENDED}
    study.measure("16 forwards", "as recommended", [name], list(SEEDS), usual)
    twice = WAVES | {"steps": 32, "temperature": 1.0, "temperature_end": 0.1}
    study.measure("32 forwards", "waves", [name], list(SEEDS), twice)


def temperatures(study: Study, name: str) -> None:
    """Measures the settings that `refine` selected for full fills, at every temperature."""
    chosen = {row["case"]: row["settings"] for row in study.rows if row["part"] == "16 forwards"}
    for kind, (first, last) in itertools.product(chosen, WARM):
        if kind.startswith("all filled"):
            warm = {"temperature": first, "temperature_end": last}
            settings = json.loads(chosen[kind]) | warm
            study.measure(f"{first:g} to {last:g}", kind, [name], list(SEEDS), settings)


def run(study: Study, name: str) -> None:
    """Makes the missing measurements."""
    floor = _floor(study, name)
    for budget in BUDGETS:
        kinds = {kind: _quota_grid(kind, budget) for kind in QUOTAS}
        for order, fill in itertools.product(BOUNDS, ("parallel", "wavefront")):
            kinds[f"{order}, {'waves' if fill == 'wavefront' else fill}"] = _bound_grid(order, fill)
        for kind, grid in kinds.items():
            settings = _tuned(study, name, kind, grid, budget, floor)
            if settings is None:
                print(f"{kind}: nothing diverse within {budget} forwards", flush=True)
                continue
            study.measure(f"{budget} forwards", kind, [name], list(SEEDS), settings)
            for case, own in OWN.items() if kind == "waves" else ():
                study.measure(f"{budget} forwards", case, [name], list(SEEDS), settings | own)


def table(rows: list[dict[str, str]]) -> None:
    """Prints the means over the seeds with their intervals, as Markdown."""
    parts = {row["part"] for row in rows}
    budgets = {part for part in parts if part.endswith(" forwards")}
    _table([row for row in rows if row["part"] in budgets], "budget")
    warm = [row for row in rows if " to " in row["part"]]
    if warm:
        print()
        _table(warm, "temperature")


def _table(rows: list[dict[str, str]], column: str) -> None:
    print(f"| sampling | {column} | forwards | judged bits/char | token entropy | "
          "distinct 4-grams | broken pairs |")  # fmt: skip
    print("| --- " * 7 + "|")
    cases = dict.fromkeys((row["part"], row["case"]) for row in rows)
    if column == "budget":
        cases = sorted(cases, key=lambda key: int(key[0].split()[0]))
    for part, case in cases:
        lines = [row for row in rows if (row["part"], row["case"]) == (part, case)]

        def mean(column: str, lines: list[dict[str, str]] = lines) -> float:
            return statistics.mean(float(line[column]) for line in lines)

        spread = statistics.stdev(float(line["bits"]) for line in lines)
        interval = half_width(spread / len(lines) ** 0.5, len(lines))
        kind = f"| {case} | {part.removesuffix(' forwards')} | "
        print(
            f"{kind}{mean('forwards'):.1f} | {mean('bits'):.3f} ± {interval:.3f} | "
            f"{mean('entropy'):.2f} | {mean('distinct'):.3f} | {mean('broken'):.3f} |"
        )


def main() -> None:
    """Measures or prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "refine", "temperatures", "table"])
    parser.add_argument("--judge", default="runs/shakespeare_judge")
    parser.add_argument("--checkpoint", default="runs/shakespeare_bpe_sampler")
    parser.add_argument("--csv", default="benchmarks/results/head_rivals.csv")
    args = parser.parse_args()
    start_jax()
    if args.what == "table":
        with Path(args.csv).open(newline="") as file:
            table(list(csv.DictReader(file)))
        return
    study = Study(SimpleNamespace(
        corpus="bpe", csv=args.csv, judge=args.judge, head=[args.checkpoint],
        num_samples=NUM_SAMPLES, characters=CHARACTERS,
    ))  # fmt: skip
    parts = {"run": run, "refine": refine, "temperatures": temperatures}
    parts[args.what](study, args.checkpoint)
    table(study.rows)


if __name__ == "__main__":
    main()
