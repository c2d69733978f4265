"""Measures one row of each table of the docs again, and reports whether it is within its interval.

    python -m benchmarks.recheck [--only sampler_head]

Measurements that need only the shipped model, its text or the committed data take minutes. A row
for a trained model is recomputed from the data of its table, and is measured if the run exists.
Tables that require a timing or another program are listed with their commands. The exit code is 1
if any row is outside its interval.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dlm_jax
from benchmarks import joint, markov
from benchmarks.edits import Task
from benchmarks.quality import distinct_share, known_share, words
from benchmarks.repairs import make_repairs, score
from dlm_jax.cli.common import start_jax
from dlm_jax.data import join_documents, read_documents, split_text

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
RUNS = Path("runs")
TEXTS = 200_000
"""Number of texts of one line of the table of joint distributions."""


class Table(NamedTuple):
    """A table of the docs: its file, its heading and its cells."""

    file: str
    heading: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def cell(self, row: tuple[str, ...], column: str) -> str:
        """The cell in this column of the row that begins with these cells."""
        (found,) = [cells for cells in self.rows if cells[: len(row)] == row]
        return found[self.header.index(column)]


@dataclass(frozen=True)
class Check:
    """A figure of a table, and its measurement.

    Attributes:
      file: name of the page.
      heading: heading of the table; the first table with this row counts.
      row: the first cells of the row.
      column: column of the figure.
      measure: measures the figure in the unit of the table.
      slack: allowed difference if the cell has no interval: the spread over seeds, or the rounding
        of a figure that is recomputed from the same data.
      how: description of the measurement for the reader.
      needs: a run that the measurement requires.
    """

    file: str
    heading: str
    row: tuple[str, ...]
    column: str
    measure: Callable[[], float]
    slack: float
    how: str
    needs: str = ""


def tables() -> list[Table]:
    """All tables of the docs that contain figures."""
    found = []
    for path in [*sorted(RESULTS.glob("*.md")), *sorted(DOCS.glob("*.md"))]:
        heading, lines = "", path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.startswith("## "):
                heading = line[3:]
            if not line.startswith("| ---"):
                continue
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            header = _cells(lines[number - 1])
            is_measured = not {"default", "exit code"} & set(header)
            if is_measured and any(_is_figure(cell) for cell in sum(rows, ())):
                found.append(Table(path.name, heading, header, tuple(rows)))
    return found


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def _is_figure(cell: str) -> bool:
    return re.match(r"-?\d", cell) is not None


def find(check: Check) -> Table:
    """The table of a check."""
    for table in tables():
        is_there = any(cells[: len(check.row)] == check.row for cells in table.rows)
        is_named = (table.file, table.heading) == (check.file, check.heading)
        if is_named and is_there and check.column in table.header:
            return table
    raise ValueError(f"{check.file} has no row {check.row} under {check.heading!r}")


def documented(check: Check) -> tuple[float, float]:
    """The figure in the docs, and the allowed difference of a new measurement."""
    cell = find(check).cell(check.row, check.column)
    figure, *interval = [float(number) for number in re.findall(r"-?\d+\.?\d*", cell)[:2]]
    return figure, max([check.slack, *(interval if "±" in cell else [])])


@functools.cache
def _shipped() -> dlm_jax.Model:
    return dlm_jax.load()


@functools.cache
def _text() -> tuple[str, str]:
    config = _shipped().config
    assert config is not None
    return split_text(join_documents(read_documents(config.data.source)), config.data.held_out)


@functools.cache
def _written(number: int, seed: int, **settings: Any) -> dlm_jax.Texts:
    return dlm_jax.generate(
        _shipped(), num_samples=number, seed=seed, batch_size=number, **settings
    )


def _known(texts: list[str]) -> float:
    return known_share([text[:256] for text in texts], set(words(_text()[0])))


def _entropy(made: dlm_jax.Texts) -> float:
    counts = Counter(made.tokens[made.committed >= 0].tolist())
    share = np.array(list(counts.values())) / counts.total()
    return float(-(share * np.log2(share)).sum())


def _parallel(steps: int) -> float:
    model = dlm_jax.load(RUNS / "shakespeare_bpe_sampler")
    return float(np.mean([
        _entropy(dlm_jax.generate(
            model, num_samples=16, seed=1000 * seed, batch_size=16, fill="parallel",
            chain=("temperature", "min_p"), order="random", temperature_end=0.3, steps=steps,
        ))
        for seed in (1, 2, 3)
    ]))  # fmt: skip


def _lines(file: str, **wanted: str) -> list[dict[str, str]]:
    with (RESULTS / file).open(encoding="utf-8", newline="") as opened:
        return [row for row in csv.DictReader(opened)
                if all(row[key] == value for key, value in wanted.items())]  # fmt: skip


def _mean(column: str, file: str, **wanted: str) -> float:
    return float(np.mean([float(row[column]) for row in _lines(file, **wanted)]))


def _untouched() -> float:
    held_out, corpus = _text()[1], _text()[0]
    scores = []
    for seed in (0, 1, 2):
        rows = make_repairs(held_out, corpus, seed, 128)
        scores.append(score(rows, [row.prompt + row.damaged for row in rows]).distance)
    return float(np.mean(scores))


def _repaired(arm: str, model: str, data: str) -> float:
    task = Task(model, 128)
    settings = json.loads(_lines(data, arm=arm)[0]["settings"])
    return 100 * task.run(task.repairs(0), settings)["exact"]


def _off(arm: str, steps: int) -> float:
    texts = joint.write({"steps": steps} | joint.ARMS[arm][0], TEXTS, 10**6)
    return markov.total_variation(texts.shares, markov.joint())


_HEAD, _EDITS, _DATA = "sampler_head.md", "edits.md", "from the data of the table"
_BPE = {"corpus": "bpe", "case": "wavefront"}
CHECKS = [
    Check(_HEAD, "The shipped model", ("all filled, critic remasks",), "judged bits/char",
          lambda: _mean("bits", "refined.csv", part="16 forwards",
                        case="all filled, critic remasks"), 0.0006, _DATA),
    Check(_HEAD, "The shipped model", ("as recommended",), "token entropy",
          lambda: float(np.mean([_entropy(_written(32, seed)) for seed in (1000, 2000, 3000)])),
          0.06, "the shipped model, the same 96 texts"),
    Check(_HEAD, "A second judge", ("waves", "8"), "estimated share wrong",
          lambda: _mean("share", "second_judge.csv", texts="waves", forwards="8"), 0.0006, _DATA),
    Check(_HEAD, "Quality against forwards", ("waves", "8"), "token entropy",
          lambda: _mean("entropy", "sampler_head.csv", part="forwards", steps="8", **_BPE), 0.006,
          _DATA),
    Check(_HEAD, "Characters", ("waves", "16"), "judged bits/char",
          lambda: _mean("bits", "sampler_head.csv", part="forwards", steps="16",
                        corpus="characters", case="wavefront"), 0.0006, _DATA),
    Check(_HEAD, "Remasking", ("critic", "waves", "9"), "judged bits/char",
          lambda: _mean("bits", "sampler_head.csv", part="remasking", steps="5",
                        case="critic, wavefront"), 0.0006, _DATA),
    Check(_HEAD, "Cost", ("waves", "8"), "waves",
          lambda: float(_written(32, 1000, steps=8, chain=("temperature", "min_p"), order="random",
                                 temperature=1.0, temperature_end=0.3).counters.waves.mean()), 1.0,
          "the shipped model, 32 texts"),
    Check(_HEAD, "Joint distribution", ("all filled, one-sided", "4"), "total variation",
          lambda: _off("all filled, one-sided", 4), 0.0015, f"{TEXTS} texts of other seeds"),
    Check(_HEAD, "Joint distribution", ("waves", "2"), "total variation",
          lambda: _off("waves", 2), 0.0025, f"{TEXTS} texts of other seeds"),
    Check(_EDITS, "The task", ("untouched",), "distance", _untouched, 0.006,
          "the rows of the task, from the text"),
    Check(_EDITS, "The task", ("both-mask-lead",), "exact %",
          lambda: 100 * _mean("exact", "edits.csv", arm="both-mask-lead"), 0.06, _DATA),
    Check(_EDITS, "The task", ("both-mask-lead",), "exact %",
          lambda: _repaired("both-mask-lead", str(RUNS / "shakespeare_proofreader"), "edits.csv"),
          5.0, "seed 0 of the task, 128 rows", "shakespeare_proofreader"),
    Check(_EDITS, "Likelihood edits", ("likelihood",), "exact %",
          lambda: _repaired("likelihood", "proofreader", "edits_shipped.csv"),
          5.0, "seed 0 of the task, 128 rows"),
    Check("generation.md", "Commit rules", ("random", "steps=8"), "token entropy",
          lambda: _parallel(8), 0.06, "the model, the same 48 texts", "shakespeare_bpe_sampler"),
    Check("training.md", "From a causal model to a diffusion model", ("both ways, same place",),
          "begun with the causal model",
          lambda: float(_lines("causal_to_diffusion.csv", kind="both ways, same place",
                               begins="causal")[-1]["nats"]), 0.0006, _DATA),
    Check("training.md", "Text quality of the shipped model", ("held-out text",), "known words",
          lambda: _known([_text()[1][s : s + 256] for s in
                          np.linspace(0, len(_text()[1]) - 256, 64).astype(int)]), 0.0006,
          "the same pieces of text"),
    Check("training.md", "Text quality of the shipped model",
          ("model, default settings (16 forwards, all filled in waves)",), "known words",
          lambda: _known(list(_written(64, 1000).texts)), 0.02,
          "the shipped model, the same 64 texts"),
    Check("training.md", "Text quality of the shipped model",
          ("model, default settings (16 forwards, all filled in waves)",), "distinct 4-grams",
          lambda: distinct_share([t[:256] for t in _written(64, 1000).texts], 4), 0.02,
          "the shipped model, the same 64 texts"),
]  # fmt: skip

_STUDY = "a study whose program is in commit a7fe1f98"
UNCHECKED = {
    ("sampler_head.md", "The value of neighbours"): _STUDY,
    ("published.md", "Parity with the reference programs"):
        "code of other projects: python -m benchmarks.published_parity --family NAME --code DIR",
    ("published.md", "Memory and loading"): _STUDY,
    ("published.md", "First contact"):
        "a model of the hub: python -m benchmarks.first_contact --full --model DIR",
    ("serving.md", "Routes"): "no figures; a test calls each route",
    ("engine.md", "Cost"): "a clock: python benchmarks/engine.py",
    ("engine.md", "Files"): "a clock: python -m benchmarks.engine --only file",
    ("caches.md", "Savings"): "a clock and PyTorch: python -m benchmarks.caches",
    ("caches.md", "Reuse of prompts"): "a clock: python -m benchmarks.caches --reuse 5",
    ("serving.md", "Cost"): "a clock: python benchmarks/serving.py",
    ("structure.md", "Cost"): "a clock: python benchmarks/structure_masks.py",
    ("structure.md", "The constrained fill"): "a clock: python -m benchmarks.constrained",
    ("structure.md", "Quality"): _STUDY,
    ("structure.md", "Over HTTP"): "a clock: python -m benchmarks.constrained http",
    ("structure.md", "On a TPU"): "the compiler for TPUs: python -m benchmarks.constrained tpu",
    ("structure.md", "Schemas and expressions"):
        "another project's converter: python -m benchmarks.schemas",
    ("scaling.md", "Compiler options"): _STUDY,
    ("scaling.md", "Matrices in 8 bits"): _STUDY,
    ("decisions.md", "Throughput"): _STUDY,
    ("decisions.md", "Calibration"): _STUDY,
    ("arena.md", "Frontiers"): _STUDY,
    ("arena.md", "Claims"): _STUDY,
    ("arena.md", "Operations on lists"): _STUDY,
    ("arena.md", "Wordings"): _STUDY,
    ("policy.md", "Sums of two numbers"): "version 0.2.0, with losses that are gone",
    ("policy.md", "With a sampler head"): _STUDY,
    ("arena.md", "Trained networks"): _STUDY,
    ("arena.md", "Shakespeare"): _STUDY,
    ("replay.md", "Cost and difference"): _STUDY,
    ("processes.md", "Steps"): _STUDY,
    ("processes.md", "Repairs"): _STUDY,
    ("processes.md", "Heads"): _STUDY,
    ("processes.md", "Which process when"): _STUDY,
    ("processes.md", "Distance to the joint"): "a test enumerates the laws: tests/sampling/commit",
    ("distillation.md", "A Markov chain"): _STUDY,
    ("distillation.md", "Shakespeare"): _STUDY,
    ("reinforcement.md", "Settings"): "a toy that tests/contrib/test_policy_losses.py enumerates",
    ("scaling.md", "Figures"): "the compiler for TPUs: python -m benchmarks.pods",
    ("scaling.md", "Very long rows"): "the compiler for TPUs: python -m benchmarks.pods",
    ("scaling.md", "Sampling with a cache"): "the compiler for TPUs: python -m benchmarks.pods",
    ("scaling.md", "Passes of sampling steps"):
        "the compiler for TPUs: python -m benchmarks.sampling_pods",
    ("scaling.md", "What a training step saves"): _STUDY,
    ("scaling.md", "Restarts"): _STUDY,
    ("scaling.md", "Kernels of attention"): _STUDY,
    ("scaling.md", "Measured on a GPU"):
        "a clock and a GPU: python -m benchmarks.accelerator",
    ("scaling.md", "The logit chain"):
        "the compiler for TPUs: python -m benchmarks.logit_chain",
    ("attacks.md", "Attacks"): "minutes of one core: python benchmarks/attack.py",
    ("planted.md", "Runs"): "hours of one core: python -m benchmarks.planted",
    ("planted.md", "Areas without a fault"): "a clock: python -m benchmarks.planted --unchanged",
    ("edits.md", "Lengths"): "python -m benchmarks.edits lengths, with a trained proofreader",
    ("edits.md", "Text from scratch"): "python -m benchmarks.edits quality, with two models",
    ("edits.md", "Cost"): _STUDY,
    ("performance.md", "Training step and forward pass compared with eager PyTorch"):
        "a clock and PyTorch: python benchmarks/step_speed.py",
    ("performance.md", "Recipes for the quickstart"): _STUDY,
    ("performance.md", "Sampling settings of the quickstart"): _STUDY,
    ("performance.md", "Logit transforms compared with PyTorch"):
        "a clock and PyTorch: python benchmarks/samplers.py",
    ("performance.md", "Generation compared with PyTorch"):
        "a clock and PyTorch: python -m benchmarks.generation",
    ("sampler_head.md", "A larger model"): _STUDY,
    ("sampler_head.md", "Comparison with training-free rules"): _STUDY,
    ("training.md", "Recipes at equal time"): _STUDY,
    ("training.md", "Block-causal, bidirectional and causal models"): _STUDY,
}  # fmt: skip
"""Tables that are not checked here, by file and heading, and their commands."""


def main() -> int:
    """Prints one line per check. Exit code: 1 if a figure is outside its interval, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only pages whose names contain this")
    args = parser.parse_args()
    start_jax()
    outside = 0
    print("| table | row | figure | docs | now | may be off by | |")
    print("| --- " * 7 + "|")
    for check in CHECKS:
        if args.only not in check.file:
            continue
        figure, interval = documented(check)
        place = f"| {check.file}, {check.heading} | {', '.join(check.row)} | {check.column} "
        if check.needs and not (RUNS / check.needs).exists():
            remedy = f"python train.py --config configs/{check.needs}.toml"
            print(f"{place}| {figure:g} | - | {interval:g} | not measured: {remedy} |", flush=True)
            continue
        now = check.measure()
        is_within = abs(now - figure) <= interval
        outside += not is_within
        said = "within" if is_within else "OUTSIDE"
        print(f"{place}| {figure:g} | {now:.4g} | {interval:g} | {said}: {check.how} |", flush=True)
    for (file, heading), command in UNCHECKED.items():
        if args.only in file:
            print(f"| {file}, {heading} | | | | | | not checked here: {command} |")
    print(f"{outside} outside", file=sys.stderr)
    return 1 if outside else 0


if __name__ == "__main__":
    raise SystemExit(main())
