"""Studies the sampler head and the critic, for benchmarks/results/sampler_head.md.

    python benchmarks/sampler_head.py --corpus bpe --judge runs/shakespeare_judge \
        --head runs/sampler_0 runs/sampler_1 runs/sampler_2 --described runs/described_0 ... \
        --wide runs/bpe_wide --critic runs/heads --csv benchmarks/results/sampler_head.csv

Every measurement is one line of the CSV. Existing lines are skipped, so a stopped study continues.
A line identifies its model only by name; delete the lines of a retrained model. Settings are tuned
on separate seeds (part ``tune``): the best settings have the lowest bits per character under the
judge among those with texts as diverse as the texts of many forwards without a head. All other
parts use other seeds. ``--picture`` draws and ``--table`` prints.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.data.text import join_documents, read_documents, split_text
from dlm_jax.diffusion.likelihood import half_width
from dlm_jax.inference.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from quality import distinct_share, judged_bits, known_share  # noqa: E402

FIELDS: tuple[str, ...] = (
    "corpus", "part", "case", "steps", "settings", "trained", "seed", "forwards", "bits",
    "entropy", "distinct", "words", "broken", "waves", "seeded", "ms_per_step", "tokens_per_second",
)  # fmt: skip
BUDGETS = {
    "bpe": (4, 8, 16, 32, 64), "characters": (8, 16, 32), "python-source": (4, 8, 16, 32, 64),
}  # fmt: skip
FULL = {"bpe": 128, "characters": 64, "python-source": 256}
ORDERS = {"bpe": ("random", "margin"), "characters": ("random",), "python-source": ("random",)}
TUNING_SEED = 70_000
TIMED = 5
TEMPERATURES = ((1.0, 0.3), (1.0, 0.1), (0.8, 0.3), (0.7, 0.1))
RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0)
BASE: dict[str, Any] = {
    "order": "random", "min_p": 0.002, "ignore_eos": True,
    # Models can recommend waves.
    "fill": "parallel",
}  # fmt: skip
REFINED: dict[str, Any] = {
    "schedule": "all", "remask": "scheduled", "remask_start": 0.95, "remask_end": 0.05,
    "temperature": 0.8, "temperature_end": 0.8,
}  # fmt: skip


class Study:
    """The models, the judge, and the existing measurements."""

    def __init__(self, args: argparse.Namespace | SimpleNamespace, base: dict[str, Any] = BASE):
        self.args = args
        self.base = base
        self.corpus: str = args.corpus
        self.path = Path(args.csv)
        self.rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))
        self._models: dict[str, Model] = {}
        self.judge = dlm_jax.load(args.judge)
        self.pairs, self.known = _seen(self.model(args.head[0]))

    def model(self, path: str) -> Model:
        """The model of a run, loaded once."""
        if path not in self._models:
            self._models[path] = dlm_jax.load(path)
        return self._models[path]

    def measure(
        self, part: str, case: str, paths: list[str], seeds: list[int], settings: dict[str, Any]
    ) -> list[dict[str, str]]:
        """The lines of a case, one per seed; the models alternate."""
        lines = []
        for number, seed in enumerate(seeds):
            path = paths[number % len(paths)]
            key = {
                "corpus": self.corpus, "part": part, "case": case, "steps": str(settings["steps"]),
                "settings": json.dumps(settings, sort_keys=True),
                "trained": Path(path).name, "seed": str(seed),
            }  # fmt: skip
            known = [row for row in self.rows if all(row[k] == v for k, v in key.items())]
            lines.append(known[0] if known else self._make(key, path, seed, settings))
        return lines

    def _make(
        self, key: dict[str, str], path: str, seed: int, settings: dict[str, Any]
    ) -> dict[str, str]:
        model, number = self.model(path), self.args.num_samples
        settings = self.base | settings
        chain = ("temperature", "min_p", *(("top_p",) if "sampler_top_p" in settings else ()))

        def write(seed: int) -> dlm_jax.Texts:
            return dlm_jax.generate(
                model, num_samples=number, seed=seed, batch_size=number, chain=chain, **settings
            )

        made = write(seed)
        seconds = []
        for _ in range(TIMED if key["part"] == "speed" else 0):
            start = time.perf_counter()
            write(seed)
            seconds.append(time.perf_counter() - start)
        texts = [text[: self.args.characters] for text in made.texts]
        share = np.array(list(Counter(made.tokens[made.committed >= 0].tolist()).values()))
        share = share / share.sum()
        pairs = [
            pair
            for row, length in zip(made.tokens, made.lengths, strict=True)
            for pair in zip(row[: length - 1].tolist(), row[1:length].tolist(), strict=True)
        ]
        figures = {
            "forwards": made.forwards.mean(),
            "bits": judged_bits(self.judge, texts)[0],
            "entropy": -(share * np.log2(share)).sum(),
            "distinct": distinct_share(texts, 4),
            "words": known_share(texts, self.known),
            "broken": np.mean([pair not in self.pairs for pair in pairs]),
            "waves": made.counters.waves.mean(),
            "seeded": made.counters.bootstrapped.sum() / max(1, made.counters.filled.sum()),
        }
        if seconds:
            middle = statistics.median(seconds)
            figures["ms_per_step"] = 1000 * middle / made.steps.max()
            figures["tokens_per_second"] = (made.committed >= 0).sum() / middle
        line = dict.fromkeys(FIELDS, "")
        line |= key | {name: f"{value:.5g}" for name, value in figures.items()}
        self.rows.append(line)
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if is_new:
                writer.writeheader()
            writer.writerow(line)
        print(" ".join(f"{name}={line[name]}" for name in FIELDS), file=sys.stderr, flush=True)
        return line


def _seen(model: Model) -> tuple[set[tuple[int, int]], set[str]]:
    """The adjacent tokens and the words of the training text."""
    assert model.config is not None
    data = model.config.data
    text, _ = split_text(join_documents(read_documents(data.source)), data.held_out)
    tokens = np.asarray(model.tokenizer.encode(text)).tolist()
    known = {word.lower() for word in re.findall(r"[^\W\d_]+", text)}
    return set(zip(tokens[:-1], tokens[1:], strict=True)), known


def tune(study: Study, kinds: list[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """The settings of each sampler and budget of forwards, selected on tuning seeds."""
    args, seeds = study.args, [TUNING_SEED]
    (full,) = study.measure(
        "tune", "full", args.head[:1], seeds,
        {"steps": FULL[study.corpus], "temperature": 1.0, "temperature_end": 0.3},
    )  # fmt: skip
    floor = float(full["entropy"]) - 0.1, float(full["distinct"]) - 0.03
    chosen = {}
    for kind in kinds:
        for steps in BUDGETS[study.corpus]:
            lines = []
            for order in ORDERS[study.corpus]:
                for first, last in TEMPERATURES:
                    settings: dict[str, Any] = {
                        "steps": steps, "order": order,
                        "temperature": first, "temperature_end": last,
                    } | KINDS[kind]  # fmt: skip
                    lines += study.measure("tune", kind, args.head[:1], seeds, settings)
            diverse = [
                line
                for line in lines
                if float(line["entropy"]) >= floor[0] and float(line["distinct"]) >= floor[1]
            ]
            # With too few forwards, no settings may be diverse enough.
            best = min(diverse or lines, key=lambda line: float(line["bits"]))
            chosen[kind, steps] = json.loads(best["settings"])
    return chosen


KINDS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "wavefront": {"fill": "wavefront"},
    "even/odd": {"fill": "wavefront", "sampler_even_odd": True},
    "all filled": {"fill": "wavefront", "order": "random_filled", "sampler_one_sided": True},
}


def run(study: Study) -> None:
    """Makes all measurements that the given models allow."""
    args = study.args
    seeds = [1000 * (number + 1) for number in range(args.seeds)]
    chosen = tune(study, ["parallel", "wavefront"])
    for steps in BUDGETS[study.corpus]:
        plain, waves = chosen["parallel", steps], chosen["wavefront", steps]
        study.measure("forwards", "parallel", args.head[:1], seeds, plain)
        study.measure("forwards", "wavefront", args.head, seeds, waves)
        study.measure("forwards", "even/odd", args.head, seeds, waves | KINDS["even/odd"])
        study.measure("forwards", "all filled", args.head, seeds, waves | KINDS["all filled"])
        if args.described:
            study.measure("forwards", "as described", args.described, seeds, waves)
        if args.wide:
            study.measure("forwards", "wider trunk", args.wide, seeds, plain)
        for path in args.variant:
            study.measure("variants", Path(path).name, [path], seeds, waves)
    middle = BUDGETS[study.corpus][1]
    study.measure(
        "forwards", "parallel", args.head[:1], seeds, chosen["parallel", BUDGETS[study.corpus][-1]]
        | {"steps": FULL[study.corpus]},
    )  # fmt: skip
    for ratio in args.ratios:
        for spread in (False, True):
            settings = chosen["wavefront", middle] | {
                "sampler_min_neighbors_ratio": ratio, "sampler_spread_seeds": spread,
            }  # fmt: skip
            name = "spread" if spread else "surest"
            study.measure("ratio", name, args.head, seeds, settings)
            whole = settings | REFINED | {"remask_randomness": 1.0}
            study.measure("ratio, filling all", name, args.head, seeds, whole)
    for path in args.critic:
        for steps in BUDGETS[study.corpus][1:3]:
            for fill in ("parallel", "wavefront"):
                _remasking(study, path, seeds, steps, fill)


def speed(study: Study) -> None:
    """Times the fills on an idle machine, five times each in one program."""
    args = study.args
    for steps in BUDGETS[study.corpus][:3]:
        for name, kind in KINDS.items():
            settings: dict[str, Any] = {
                "steps": steps, "temperature": 1.0, "temperature_end": 0.3
            } | kind  # fmt: skip
            study.measure("speed", name, args.head[:1], [1000], settings)


def equal_quality(rows: list[dict[str, str]], corpus: str) -> None:
    """Prints the number of forwards with which a parallel fill has the bits of each other fill."""
    means = [mean for mean in _summaries(rows, corpus) if mean["part"] == "forwards"]
    base = sorted((m["bits"], m["forwards"]) for m in means if m["case"] == "parallel")
    print(f"\n{corpus}, forwards of a parallel fill with the same bits\n")
    for case in dict.fromkeys(mean["case"] for mean in means if mean["case"] != "parallel"):
        found = []
        for mean in sorted((m for m in means if m["case"] == case), key=lambda m: m["steps"]):
            bits, forwards = zip(*base, strict=True)
            needed = 2 ** np.interp(mean["bits"], bits, np.log2(forwards))
            sign = "<" if mean["bits"] > bits[-1] else ">" if mean["bits"] < bits[0] else ""
            found.append(f"{mean['forwards']:.0f}: {sign}{needed:.1f}")
        print(f"- {case}: " + ", ".join(found))


def _remasking(study: Study, path: str, seeds: list[int], steps: int, fill: str) -> None:
    """Compares critic, confidence and random remasking at the same number of forwards."""
    base = {"steps": steps, "fill": fill} | REFINED
    study.measure("remasking", f"confidence, {fill}", [path], seeds, base)
    chance = base | {"remask_randomness": 1.0}
    study.measure("remasking", f"chance, {fill}", [path], seeds, chance)
    for mix in (0.0, 0.5):
        critic = base | {
            # The critic has one forward between two steps: half of the steps, rounded up.
            "steps": steps // 2 + 1, "remask_by": "critic", "remask_randomness": mix,
        }  # fmt: skip
        name = "critic" if mix == 0 else "critic and chance"
        study.measure("remasking", f"{name}, {fill}", [path], seeds, critic)


def _summaries(rows: list[dict[str, str]], corpus: str) -> list[dict[str, Any]]:
    """Mean and 95% interval (Student's t) of every case except tuning."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        if row["corpus"] == corpus and row["part"] != "tune":
            key = (row["part"], row["case"], row["steps"], row["settings"])
            groups.setdefault(key, []).append(row)
    found = []
    for (part, case, steps, settings), lines in groups.items():
        mean: dict[str, Any] = {"part": part, "case": case, "steps": int(steps)}
        mean |= {"settings": settings, "lines": len(lines)}
        for name in FIELDS[FIELDS.index("forwards") :]:
            values = [float(line[name]) for line in lines if line[name]] or [float("nan")]
            mean[name] = statistics.mean(values)
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            mean[f"{name}_interval"] = half_width(error, max(2, len(values)))
        found.append(mean)
    return found


def table(rows: list[dict[str, str]], corpus: str) -> None:
    """Prints the summaries as Markdown."""
    part = None
    for mean in sorted(_summaries(rows, corpus), key=lambda m: (m["part"], m["steps"])):
        if mean["part"] != part:
            part = mean["part"]
            print(f"\n{corpus}, {part}\n")
            print(
                "| case | setting | forwards | bits/char | entropy | distinct | words | broken | "
                "waves | seeded | ms/step | tokens/s |"
            )
            print("| --- " * 12 + "|")
        settings = json.loads(mean["settings"])
        shown = ["temperature", "temperature_end", "order", "sampler_min_neighbors_ratio"]
        said = ", ".join(str(settings[name]) for name in shown if name in settings)
        print(
            f"| {mean['case']} | {said} | {mean['forwards']:.1f} | {mean['bits']:.3f} ± "
            f"{mean['bits_interval']:.3f} | {mean['entropy']:.2f} | {mean['distinct']:.3f} | "
            f"{mean['words']:.3f} | {mean['broken']:.3f} | {mean['waves']:.0f} | "
            f"{mean['seeded']:.3f} | {mean['ms_per_step']:.0f} | "
            f"{mean['tokens_per_second']:.0f} |"
        )


def draw(rows: list[dict[str, str]], path: str) -> None:
    """Draws bits and distinct 4-grams over forwards, with one column of panels per corpus."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    corpora = [name for name in BUDGETS if any(row["corpus"] == name for row in rows)]
    figure, axes = plt.subplots(
        2, len(corpora), figsize=(6 * len(corpora), 7), layout="constrained", squeeze=False
    )
    for column, corpus in enumerate(corpora):
        means = [mean for mean in _summaries(rows, corpus) if mean["part"] == "forwards"]
        for row, key in enumerate(("bits", "distinct")):
            axis = axes[row][column]
            for number, case in enumerate(dict.fromkeys(mean["case"] for mean in means)):
                points = sorted(
                    (mean["forwards"], mean[key], mean[f"{key}_interval"])
                    for mean in means
                    if mean["case"] == case
                )
                xs, ys, errors = zip(*points, strict=True)
                axis.errorbar(xs, ys, errors, marker="os^Dv"[number % 5], capsize=3, label=case)
            axis.set_xscale("log", base=2)
            axis.set_xlabel("forwards per text")
            axis.set_ylabel("judged bits per character" if row == 0 else "distinct 4-grams")
            axis.set_title(corpus)
            axis.grid(alpha=0.3)
        axes[0][column].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Makes the missing measurements, then prints or draws the selected results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", choices=list(BUDGETS), required=True)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--csv", required=True)
    for name in ("head", "described", "wide", "critic", "variant"):
        parser.add_argument(f"--{name}", nargs="*", default=[], metavar="RUN")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--characters", type=int, default=256)
    parser.add_argument("--ratios", nargs="*", type=float, default=RATIOS,
        help="shares of bootstrapped positions to compare")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="only print existing measurements")
    parser.add_argument("--speed", action="store_true", help="measure only the speed")
    parser.add_argument("--picture", metavar="FILE")
    args = parser.parse_args()
    start_jax()
    if not args.table and not args.picture:
        study = Study(args, BASE | {"sampler_even_odd": False})
        (speed if args.speed else run)(study)
    with Path(args.csv).open(newline="") as file:
        rows = list(csv.DictReader(file))
    if args.picture:
        draw(rows, args.picture)
    else:
        table(rows, args.corpus)
        equal_quality(rows, args.corpus)


if __name__ == "__main__":
    main()
