"""Measures rows of the tables of the docs again, and reports which are within their interval.

    python -m benchmarks recheck [--only sampler_head] [--quick]

A row is measured with a shipped model, or recomputed from the committed data of its table, which is
all that ``--quick`` does. Every other table names the command that prints it. The exit code is 1 if
a row is outside its interval.
"""

from __future__ import annotations

import csv
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
from benchmarks import laws, markov
from benchmarks.report import Table, parser_of
from dlm_jax.cli.common import start_jax
from dlm_jax.data import join_documents, read_documents, split_text

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
RUNS = Path("runs")
TEXTS = 200_000
"""Number of texts of one line of the table of joint distributions."""


@dataclass(frozen=True)
class Check:
    """A figure of a table, and its measurement.

    Attributes:
      file: name of the page, in ``benchmarks/results``.
      heading: heading of the table; the first table with this row counts.
      row: the first cells of the row.
      column: column of the figure.
      measure: measures the figure in the unit of the table.
      slack: allowed difference if the cell has no interval: the spread over seeds, or the rounding
        of a figure that is recomputed from the same data.
      needs_model: True if a shipped model writes the texts.
    """

    file: str
    heading: str
    row: tuple[str, ...]
    column: str
    measure: Callable[[], float]
    slack: float
    needs_model: bool = False

    def documented(self) -> tuple[float, float]:
        """The figure in the docs, and the allowed difference of a new measurement.

        Raises:
          ValueError: the page has no such row.
        """
        heading, header = "", ()
        for line in (RESULTS / self.file).read_text(encoding="utf-8").splitlines():
            cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
            if line.startswith("## "):
                heading, header = line[3:], ()
            elif line.startswith("|") and heading == self.heading:
                header = header or cells
                if cells[: len(self.row)] == self.row and self.column in header:
                    cell = cells[header.index(self.column)]
                    figure, *interval = map(float, re.findall(r"-?\d+\.?\d*", cell)[:2])
                    return figure, max([self.slack, *(interval if "±" in cell else [])])
            else:
                header = ()
        raise ValueError(f"{self.file} has no row {self.row} under {self.heading!r}")


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
    """Share of words that occur in the training text."""
    known = set(_words(_text()[0]))
    found = [word for text in texts for word in _words(text[:256])]
    return sum(word in known for word in found) / len(found)


def _entropy(made: dlm_jax.Texts) -> float:
    counts = Counter(made.tokens[made.committed >= 0].tolist())
    share = np.array(list(counts.values())) / counts.total()
    return float(-(share * np.log2(share)).sum())


def _lines(file: str, **wanted: str) -> list[dict[str, str]]:
    with (RESULTS / file).open(encoding="utf-8", newline="") as opened:
        return [row for row in csv.DictReader(opened)
                if all(row[key] == value for key, value in wanted.items())]  # fmt: skip


def _mean(column: str, file: str, **wanted: str) -> float:
    return float(np.mean([float(row[column]) for row in _lines(file, **wanted)]))


def _words(text: str) -> list[str]:
    """Words in lower case, except the first and last, which the canvas can cut."""
    return [word.lower() for word in re.findall(r"[^\W\d_]+", text)][1:-1]


def _distinct(texts: list[str], n: int = 4) -> float:
    """Share of distinct character n-grams."""
    grams = [text[i : i + n] for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams)


def _off(arm: str, steps: int) -> float:
    texts = laws.write({"steps": steps} | laws.ARMS[arm][0], TEXTS, 10**6)
    return markov.total_variation(texts.shares, markov.joint())


_HEAD, _TEXT = "sampler_head.md", "Text quality of the shipped model"
_OURS = "model, default settings (16 forwards, all filled in waves)"
_BPE = {"corpus": "bpe", "case": "wavefront"}
CHECKS = [
    Check(_HEAD, "The shipped model", ("all filled, critic remasks",), "judged bits/char",
          lambda: _mean("bits", "refined.csv", part="16 forwards",
                        case="all filled, critic remasks"), 0.0006),
    Check(_HEAD, "The shipped model", ("as recommended",), "token entropy",
          lambda: float(np.mean([_entropy(_written(32, seed)) for seed in (1000, 2000, 3000)])),
          0.06, True),
    Check(_HEAD, "A second judge", ("waves", "8"), "estimated share wrong",
          lambda: _mean("share", "second_judge.csv", texts="waves", forwards="8"), 0.0006),
    Check(_HEAD, "Quality against forwards", ("waves", "8"), "token entropy",
          lambda: _mean("entropy", "sampler_head.csv", part="forwards", steps="8", **_BPE), 0.006),
    Check(_HEAD, "Characters", ("waves", "16"), "judged bits/char",
          lambda: _mean("bits", "sampler_head.csv", part="forwards", steps="16",
                        corpus="characters", case="wavefront"), 0.0006),
    Check(_HEAD, "Remasking", ("critic", "waves", "9"), "judged bits/char",
          lambda: _mean("bits", "sampler_head.csv", part="remasking", steps="5",
                        case="critic, wavefront"), 0.0006),
    Check(_HEAD, "Joint distribution", ("all filled, one-sided", "4"), "total variation",
          lambda: _off("all filled, one-sided", 4), 0.0015, True),
    Check(_HEAD, "Joint distribution", ("waves", "2"), "total variation",
          lambda: _off("waves", 2), 0.0025, True),
    Check("edits.md", "The task", ("both-mask-lead",), "exact %",
          lambda: 100 * _mean("exact", "edits.csv", arm="both-mask-lead"), 0.06),
    Check("training.md", "From a causal model to a diffusion model", ("both ways, same place",),
          "begun with the causal model",
          lambda: float(_lines("causal_to_diffusion.csv", kind="both ways, same place",
                               begins="causal")[-1]["nats"]), 0.0006),
    Check("training.md", _TEXT, (_OURS,), "known words",
          lambda: _known(list(_written(64, 1000).texts)), 0.02, True),
    Check("training.md", _TEXT, (_OURS,), "distinct 4-grams",
          lambda: _distinct([t[:256] for t in _written(64, 1000).texts]), 0.02, True),
]  # fmt: skip


def main() -> int:
    """Prints one line per check. Exit code: 1 if a figure is outside its interval, otherwise 0."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="only pages whose names contain this")
    args = parser.parse_args()
    start_jax()
    outside = 0
    table = Table(args, "table", "row", "figure", "docs", "now", "may be off by", "")
    for check in CHECKS:
        if args.only not in check.file or (args.quick and check.needs_model):
            continue
        (figure, interval), now = check.documented(), check.measure()
        is_within = abs(now - figure) <= interval
        outside += not is_within
        table.add(f"{check.file}, {check.heading}", ", ".join(check.row), check.column, figure, now,
                  interval, "within" if is_within else "OUTSIDE")  # fmt: skip
    return 1 if outside else 0


if __name__ == "__main__":
    raise SystemExit(main())
