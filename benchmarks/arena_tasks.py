"""All decoders on list operations, each phrased in five wordings.

    python train.py --config configs/arena_tasks.toml
    python -m benchmarks.arena_tasks run
    python -m benchmarks.arena_tasks time
    python -m benchmarks.arena_tasks table
    python -m benchmarks.arena_tasks tau

The decoders and their settings are those of `benchmarks.arena`, for the trained model of
configs/arena_tasks.toml. Rows are greedy, and a canvas contains the answer and one EOS: 5 to 7
holes. Prompts are outside the training corpus. All eight settings of a decoder run on the tuning
prompts; the best setting within a budget then runs on three sets of test prompts.

`time` alternates each decoder with `low_confidence` at four forwards and records the ratio of
their seconds per forward, at batch sizes 32 and 1, for the setting with the nearest number of
forwards. A time budget is the time of a number of forwards of `low_confidence`. A stopped run
continues from the end of the CSV.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
from benchmarks import arena
from benchmarks.arena import Settings, interval, name_of, read
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib.tasks import lists
from dlm_jax.contrib.tasks.lists import OPERATIONS, TEMPLATES, example
from dlm_jax.contrib.tasks.text_task import Draws

RESULTS = "benchmarks/results/arena_tasks.csv"
TIMES = RESULTS.removesuffix(".csv") + "_time.csv"
CHECKPOINT = "runs/arena_tasks"
SEEDS, TUNING_SEED = (0, 1, 2), 1_000
TUNING, TEST = 2, 3
"""Prompts per seed, operation and template; there is one tuning seed and three test seeds."""
BUDGETS, SLACK, TIME_SLACK = (2, 4, 8), 0.05, 0.5
"""Slack of budgets in forwards, and of time budgets: the measured time of `low_confidence` differs
from itself by up to 8%."""
BATCHES, ROUNDS = (32, 1), 5
FIRST_SEED = 10**7
"""First seed of the prompts; the corpus uses lower seeds."""

TRAINED: dict[str, list[Settings]] = {
    "dawn": [
        {
            "fill": "parallel", "confidence": "max", "steps": arena.LIMIT, "order": "dawn",
            "induced_threshold": low, "apart_threshold": low, "dependence": edge, "sink": sink,
        }
        for low, edge, sink in (
            (0.7, 0.07, 0.02), (0.7, 0.07, 0.2), (0.5, 0.07, 0.2), (0.3, 0.07, 0.2),
            (0.1, 0.07, 0.2), (0.5, 0.2, 0.2), (0.3, 0.2, 0.2), (0.1, 0.2, 0.2),
        )
    ],
    "waves": [
        {"fill": "wavefront", "order": "random_filled", "steps": steps} for steps in range(1, 9)
    ],
}  # fmt: skip
"""Decoders that need attention maps or a trained sampler head, which exact networks lack."""
DECODERS = arena.DECODERS | TRAINED
MANY = tuple(
    name for name, operation in OPERATIONS.items() if len(operation.answers("abcde", 2, "f")) > 1
)
"""Operations with several correct answers."""

Prompt = tuple[int, str, str, str]
"""``(template, operation, prompt, answer)``."""


def prompts(seed: int, count: int, seen: set[str]) -> list[Prompt]:
    """`count` new prompts for each template and operation; different for each seed."""
    found: list[Prompt] = []
    number = FIRST_SEED * (1 + seed)
    for template, operation in itertools.product(range(len(TEMPLATES)), OPERATIONS):
        made = 0
        while made < count:
            prompt, answer = example(Draws(number), operation, TEMPLATES[template])
            number += 1
            if prompt not in seen:
                found.append((template, operation, prompt + lists.mark, answer))
                made += 1
    return found


def corpus() -> set[str]:
    """The training prompts, without their marks."""
    return {prompt.removesuffix(lists.mark) for prompt, _ in lists.examples(lists.size)}


def answered(
    model: dlm_jax.Model, grid: Sequence[Settings], asked: Sequence[Prompt], batch_size: int = 128
) -> tuple[np.ndarray, np.ndarray]:
    """Whether each answer is correct, and its forwards, ``[settings, prompts]``."""
    common = {"temperature": 0.0, "chain": ("temperature",), "ignore_eos": False}
    requests = [
        dlm_jax.make_requests(
            model, {"prompt": prompt, "gen_length": len(answer) + 1, **settings}, common
        )[0]
        for settings in grid
        for _, _, prompt, answer in asked
    ]
    sizes, canvases = (batch_size,), (model.max_length,)
    with dlm_jax.Engine(model, sizes=sizes, canvases=canvases) as engine:
        rows = {row.number: row for row in engine.run(requests)}
    texts = [model.tokenizer.decode(rows[place].tokens) for place in range(len(rows))]
    right = np.array([lists.verify(text) == 1.0 for text in texts])
    forwards = np.array([rows[place].counters.forwards for place in range(len(rows))])
    shape = len(grid), len(asked)
    return right.reshape(shape), forwards.reshape(shape)


FIELDS = ("decoder", "setting", "seed", "template", "answers", "prompts", "right", "forwards")


def lines_of(
    decoder: str, setting: str, seed: str, asked: Sequence[Prompt],
    right: np.ndarray, forwards: np.ndarray,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields one line per template and kind of operation."""
    kinds = [(template, op in MANY) for template, op, _, _ in asked]
    for kind in sorted(set(kinds)):
        which = np.array([other == kind for other in kinds])
        yield {
            "decoder": decoder, "setting": setting, "seed": seed, "template": kind[0],
            "answers": "many" if kind[1] else "one", "prompts": int(which.sum()),
            "right": int(right[which].sum()), "forwards": f"{forwards[which].mean():.4f}",
        }  # fmt: skip


def append(path: str, fields: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    """Appends lines to a CSV, with a header if the file is new."""
    is_new = not Path(path).exists()
    with Path(path).open("a", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, fields)
        if is_new:
            writer.writeheader()
        writer.writerows(lines)


def run(path: str, checkpoint: str, only: Sequence[str]) -> None:
    """Measures the decoders that are missing in the CSV."""
    done = {line["decoder"] for line in read(path)} if Path(path).exists() else set()
    model, seen = dlm_jax.load(checkpoint), corpus()
    tuning = prompts(TUNING_SEED, TUNING, seen)
    for decoder, grid in DECODERS.items():
        if decoder in done or (only and decoder not in only):
            continue
        names = [name_of(settings, grid) for settings in grid]
        found = answered(model, grid, tuning)
        lines = [
            line
            for name, *each in zip(names, *found, strict=True)
            for line in lines_of(decoder, name, "tuning", tuning, *each)
        ]
        tried = tried_of(lines)
        chosen = {name for budget in BUDGETS if (name := best(tried, budget))}
        few = [settings for settings, name in zip(grid, names, strict=True) if name in chosen]
        for seed in SEEDS:
            test = prompts(seed, TEST, seen)
            for settings, *each in zip(few, *answered(model, few, test), strict=True):
                lines += lines_of(decoder, name_of(settings, grid), str(seed), test, *each)
        append(path, FIELDS, lines)
        print(f"{decoder}: {', '.join(sorted(chosen))}", flush=True)


Tried = dict[str, tuple[float, float]]


def tried_of(lines: Sequence[dict[str, Any]]) -> Tried:
    """Share of correct answers and mean forwards of each setting on the tuning prompts."""
    own: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["seed"] == "tuning":
            own.setdefault(line["setting"], []).append(line)
    return {name: (share(some), forwards_of(some)) for name, some in own.items()}


def share(lines: Sequence[dict[str, Any]]) -> float:
    """Share of correct answers."""
    return sum(int(x["right"]) for x in lines) / sum(int(x["prompts"]) for x in lines)


def forwards_of(lines: Sequence[dict[str, Any]]) -> float:
    """Mean forwards per answer."""
    total = sum(float(x["forwards"]) * int(x["prompts"]) for x in lines)
    return total / sum(int(x["prompts"]) for x in lines)


def best(tried: Tried, budget: float, ratio: float | None = None) -> str | None:
    """The most accurate setting within a budget of forwards, or of time if `ratio` is the time of a
    forward.
    """
    cost, slack = (1.0, SLACK) if ratio is None else (ratio, TIME_SLACK)
    fits = [
        (-right, forwards, name)
        for name, (right, forwards) in tried.items()
        if forwards * cost <= budget + slack
    ]
    return min(fits)[2] if fits else None


def seconds(
    model: dlm_jax.Model, settings: Settings, asked: Sequence[Prompt], batch: int
) -> tuple[float, float]:
    """Seconds per forward and number of forwards of the slowest row, means over batches of these
    prompts.
    """
    total = steps = 0.0
    for first in range(0, len(asked), batch):
        begun = time.perf_counter()
        _, forwards = answered(model, [settings], asked[first : first + batch], batch_size=batch)
        total += time.perf_counter() - begun
        steps += forwards.max()
    return total / steps, steps * batch / len(asked)


def timed(path: str, checkpoint: str) -> None:
    """Measures the ratios that are missing in the CSV."""
    fields = "decoder", "batch", "rounds", "ratio", "spread"
    done = {(x["decoder"], x["batch"]) for x in read(path)} if Path(path).exists() else set()
    model, base = dlm_jax.load(checkpoint), DECODERS["low_confidence"][4]
    tuning = prompts(TUNING_SEED, 1, corpus())
    for batch, (decoder, grid) in itertools.product(BATCHES, DECODERS.items()):
        if (decoder, str(batch)) in done:
            continue
        asked = tuning[:batch] if batch > 1 else tuning[::6]
        wanted = seconds(model, base, asked, batch)[1]
        gaps = [abs(seconds(model, one, asked, batch)[1] - wanted) for one in grid]
        own = grid[gaps.index(min(gaps))]
        ratios = []
        for _ in range(ROUNDS):
            mine, theirs = (seconds(model, which, asked, batch)[0] for which in (own, base))
            ratios.append(mine / theirs)
        spread = (max(ratios) - min(ratios)) / 2
        append(path, fields, [{
            "decoder": decoder, "batch": batch, "rounds": ROUNDS,
            "ratio": f"{statistics.median(ratios):.3f}", "spread": f"{spread:.3f}",
        }])  # fmt: skip


def of_setting(lines: Sequence[dict[str, str]], decoder: str, setting: str) -> list[dict[str, str]]:
    """The test lines of a setting."""
    return [
        x for x in lines
        if (x["decoder"], x["setting"]) == (decoder, setting) and x["seed"] != "tuning"
    ]  # fmt: skip


def cell(own: Sequence[dict[str, str]]) -> str:
    """Share of correct answers over all test seeds, and the interval over seeds."""
    if not own:
        return "-"
    by_seed = [share([x for x in own if x["seed"] == str(seed)]) for seed in SEEDS]
    return f"{share(own):.3f} ± {interval(by_seed):.3f}"


def within(
    lines: Sequence[dict[str, str]], decoder: str, budget: float, ratio: float | None = None
) -> list[dict[str, str]]:
    """The test lines of the best setting within a budget; empty if no setting fits."""
    own = [x for x in lines if x["decoder"] == decoder]
    tested = {x["setting"] for x in own if x["seed"] != "tuning"}
    tried = {name: found for name, found in tried_of(own).items() if name in tested}
    name = best(tried, budget, ratio)
    return of_setting(own, decoder, name) if name else []


def table(lines: Sequence[dict[str, str]], times: Sequence[dict[str, str]]) -> None:
    """Prints the share of correct answers within budgets of forwards and time, as Markdown."""
    budget = BUDGETS[1]
    ratios = {(x["decoder"], int(x["batch"])): float(x["ratio"]) for x in times}
    heads = [f"{budget} forwards" for budget in BUDGETS]
    heads += [f"one answer, {budget}", f"many answers, {budget}"]
    heads += [f"time of {budget}, batch {batch}" for batch in BATCHES if times]
    print("| decoder | " + " | ".join(heads) + " |")
    print("| --- " * (len(heads) + 1) + "|")
    for decoder in DECODERS:
        found = [within(lines, decoder, budget) for budget in BUDGETS]
        kinds = [[x for x in found[1] if x["answers"] == kind] for kind in ("one", "many")]
        timed_ones = [
            within(lines, decoder, budget, ratios[decoder, batch])
            for batch in BATCHES
            if (decoder, batch) in ratios
        ]
        cells = [cell(own) for own in (*found, *kinds, *timed_ones)]
        print(f"| `{decoder}` | {' | '.join(cells)} |")


def agreement(shares_TD: np.ndarray) -> tuple[float, float]:
    """Mean and minimum Kendall tau-b between the rankings of decoders by two templates.

    Args:
      shares_TD: share of correct answers of each decoder for each template.
    """
    from scipy.stats import kendalltau

    pairs = itertools.combinations(shares_TD, 2)
    found: list[float] = [
        kendalltau(first, second).statistic  # pyright: ignore[reportAttributeAccessIssue]
        for first, second in pairs
    ]
    return statistics.mean(found), min(found)


def tau(lines: Sequence[dict[str, str]]) -> None:
    """Prints the agreement between templates, and between two halves of a template, as Markdown."""
    print("| budget | decoders | tau, mean | least | halves of a template | best by template |")
    print("| --- " * 6 + "|")
    for budget in BUDGETS:
        found = {decoder: within(lines, decoder, budget) for decoder in DECODERS}
        kept = {decoder: own for decoder, own in found.items() if own}

        def shares(
            fits: Callable[[dict[str, str]], bool],
            kept: dict[str, list[dict[str, str]]] = kept,
        ) -> list[float]:
            return [share([x for x in own if fits(x)]) for own in kept.values()]

        places = [str(place) for place in range(len(TEMPLATES))]
        shares_TD = np.array([
            shares(lambda x, place=place: x["template"] == place) for place in places
        ])  # fmt: skip
        halves = [
            agreement(np.array([
                shares(lambda x, p=place, s=seed: x["template"] == p and x["seed"] == s)
                for seed in "01"
            ]))[0]
            for place in places
        ]  # fmt: skip
        mean, least = agreement(shares_TD)
        firsts = dict.fromkeys(list(kept)[row.argmax()] for row in shares_TD)
        print(
            f"| {budget} | {len(kept)} | {mean:.2f} | {least:.2f} | "
            f"{statistics.mean(halves):.2f} | {', '.join(f'`{x}`' for x in firsts)} |"
        )


def main() -> None:
    """Runs a part of the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["run", "time", "table", "tau"])
    parser.add_argument("--csv", default=RESULTS)
    parser.add_argument("--times", default=TIMES)
    parser.add_argument("--checkpoint", default=CHECKPOINT)
    parser.add_argument("--only", nargs="*", default=[], help="decoders of this run")
    args = parser.parse_args()
    if args.part in ("run", "time"):
        start_jax()
        if args.part == "run":
            run(args.csv, args.checkpoint, args.only)
        else:
            timed(args.times, args.checkpoint)
        return
    lines = read(args.csv)
    if args.part == "tau":
        tau(lines)
        return
    table(lines, read(args.times) if Path(args.times).exists() else [])


if __name__ == "__main__":
    main()
