"""Two judges of the same texts: the causal model, and a sequence scorer; and where they disagree.

    python -m benchmarks.second_judge run
    python -m benchmarks.second_judge table
    python -m benchmarks.second_judge show

The causal model (`configs/shakespeare_judge.toml`) says what a text costs, in bits per character;
the scorer (`configs/shakespeare_scorer.toml`) says which share of its tokens is wrong. Judged are
texts of the model that ships, by the settings that `benchmarks/head_rivals.py` found
(`docs/refined.csv`), pieces of held-out text, the same pieces spoilt in known ways, and texts of
n-gram samplers. `run` writes a line for each text; `show` prints the texts that the judges place
furthest apart.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import dlm_jax
from benchmarks.quality import NgramSampler, distinct_share, judged
from benchmarks.sampler_head import BASE, REFINED
from dlm_jax.cli.common import start_jax
from dlm_jax.data.corpora import join_documents, read_documents, split_text
from dlm_jax.inference.model import Model

SEEDS = (1000, 2000, 3000)
NUM_SAMPLES = 32
CHARACTERS = 256
FIELDS = ("texts", "forwards", "seed", "number", "bits", "share", "distinct")
FEWER = (4, 8)
"""Forwards at which the fills that commit a set number of tokens a step are judged too."""
COLD = "0.8 to 0.1"
"""Temperatures at which the fills of everything are as repetitive as with the critic."""
SPOILT = (0.1, 0.3)
"""Shares of tokens that are replaced by random ones."""


class Written(NamedTuple):
    """Texts of one kind and one seed."""

    kind: str
    forwards: float
    seed: int
    texts: list[str]


def _cases(refined: Path) -> dict[str, dict[str, Any]]:
    """Settings of the texts of the model, by kind and forwards."""
    with refined.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cases: dict[str, dict[str, Any]] = {}
    for row in rows:
        settings = json.loads(row["settings"])
        if row["part"] == "16 forwards":
            cases[row["case"]] = settings
            if row["case"] in ("parallel", "waves", "all filled"):
                for steps in FEWER:
                    cases[f"{row['case']}; {steps}"] = settings | {"steps": steps}
        elif row["part"] == COLD and row["case"] != "all filled, chance remasks":
            cases[f"{row['case']}, {COLD}"] = settings
    cases["all remasked but what is sure"] = REFINED | {"steps": 16, "fill": "wavefront"}
    return cases


def _pieces(text: str, seed: int) -> list[str]:
    """Pieces of a text that begin where a word does, spread over it, others for each seed."""
    starts = np.array([match.start() for match in re.finditer(r"(?<=\s)\w", text)])
    starts = starts[starts <= len(text) - CHARACTERS]
    share = (np.arange(NUM_SAMPLES) + SEEDS.index(seed) / len(SEEDS)) / NUM_SAMPLES
    return [text[start:][:CHARACTERS] for start in starts[(share * len(starts)).astype(int)]]


def _shuffled(text: str, rng: np.random.Generator) -> str:
    """The words of a text in another order, with what stands between them as it was."""
    words = re.findall(r"\w+", text)
    mixed = iter(rng.permutation(np.array(words, object)))
    return re.sub(r"\w+", lambda _: next(mixed), text)


def _spoilt(model: Model, text: str, share: float, rng: np.random.Generator) -> str:
    """The text with this share of its tokens replaced by random ones that decode alone."""
    ids = np.array(model.tokenizer.encode(text))
    usual = [i for i in range(model.tokenizer.vocab_size) if model.tokenizer.decode([i]).isascii()]
    places = rng.choice(len(ids), round(share * len(ids)), replace=False)
    ids[places] = rng.choice(usual, len(places))
    return model.tokenizer.decode(ids)


def texts(model: Model, refined: Path) -> Iterator[Written]:
    """All texts that are judged, kind by kind."""
    assert model.config is not None
    data = model.config.data
    corpus, held_out = split_text(join_documents(read_documents(data.source)), data.held_out)
    grams = {n: NgramSampler(corpus, n) for n in (3, 6)}
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        pieces = _pieces(held_out, seed)
        yield Written("held-out text", 0, seed, pieces)
        yield Written("held-out words, shuffled", 0, seed, [_shuffled(t, rng) for t in pieces])
        for share in SPOILT:
            spoilt = [_spoilt(model, text, share, rng) for text in pieces]
            yield Written(f"held-out text, {share:.0%} of tokens random", 0, seed, spoilt)
        for n, sampler in grams.items():
            made = [sampler.text(CHARACTERS, rng) for _ in range(NUM_SAMPLES)]
            yield Written(f"{n}-gram of characters", 0, seed, made)
    for kind, settings in _cases(refined).items():
        for seed in SEEDS:
            made = dlm_jax.generate(
                model, num_samples=NUM_SAMPLES, seed=seed, batch_size=NUM_SAMPLES,
                chain=("temperature", "min_p"), **(BASE | settings),
            )  # fmt: skip
            cut = [text[:CHARACTERS] for text in made.texts]
            yield Written(kind.split(";")[0], float(made.forwards.mean()), seed, cut)


def run(model: Model, judge: Model, scorer: Model, refined: Path, path: Path) -> None:
    """Writes and judges all texts; the file is replaced when it ends."""
    lines = []
    for written in texts(model, refined):
        score = judged(judge, written.texts)
        bits = score.nats / score.characters / math.log(2.0)
        share = dlm_jax.corrupted_share(scorer, written.texts)
        for number, text in enumerate(written.texts):
            figures = (bits[number], share[number], distinct_share([text], 4))
            key = (written.kind, f"{written.forwards:g}", str(written.seed), str(number))
            lines.append(key + tuple(f"{figure:.4f}" for figure in figures))
        print(
            f"{written.kind}, {written.forwards:g} forwards, seed {written.seed}: "
            f"{bits.mean():.3f} bits, {share.mean():.3f} wrong", flush=True,
        )  # fmt: skip
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(lines)


class Kind(NamedTuple):
    """The figures of the texts of one kind, float64 ``[N]``."""

    name: str
    forwards: str
    seed: np.ndarray
    bits: np.ndarray
    share: np.ndarray
    distinct: np.ndarray


def kinds(path: Path) -> list[Kind]:
    """What the file says, kind by kind."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for name, forwards in dict.fromkeys((row["texts"], row["forwards"]) for row in rows):
        mine = [row for row in rows if (row["texts"], row["forwards"]) == (name, forwards)]
        columns = [np.array([float(row[c]) for row in mine]) for c in ("seed", *FIELDS[4:])]
        found.append(Kind(name, forwards, *columns))
    return found


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation."""
    ranks = stats.rankdata(first), stats.rankdata(second)
    return float(np.corrcoef(*ranks)[0, 1])


def _is_model(kind: Kind) -> bool:
    return kind.forwards != "0"


def within(found: list[Kind]) -> tuple[float, float]:
    """Mean rank correlation of the judges inside the kinds, and its standard error over them."""
    each = [agreement(kind.bits, kind.share) for kind in found]
    return float(np.mean(each)), float(np.std(each, ddof=1) / len(each) ** 0.5)


def _interval(values: np.ndarray, seed: np.ndarray) -> str:
    means = [values[seed == one].mean() for one in np.unique(seed)]
    # Student's t of three seeds.
    return f"{values.mean():.3f} ± {4.303 * np.std(means, ddof=1) / len(means) ** 0.5:.3f}"


def table(found: list[Kind]) -> None:
    """Prints the means with their intervals, and how far the judges agree, as Markdown."""
    print("| texts | forwards | judged bits/char | place | share wrong | place | "
          "distinct 4-grams of a text | agreement |")  # fmt: skip
    print("| --- " * 8 + "|")
    bits = np.array([kind.bits.mean() for kind in found])
    share = np.array([kind.share.mean() for kind in found])
    places = stats.rankdata(bits), stats.rankdata(share)
    for number in np.argsort(bits):
        kind = found[number]
        forwards = kind.forwards if _is_model(kind) else ""
        print(
            f"| {kind.name} | {forwards} | {_interval(kind.bits, kind.seed)} | "
            f"{places[0][number]:.0f} | {_interval(kind.share, kind.seed)} | "
            f"{places[1][number]:.0f} | {kind.distinct.mean():.3f} | "
            f"{agreement(kind.bits, kind.share):.2f} |"
        )
    groups = {"all": found, "the model's": [kind for kind in found if _is_model(kind)]}
    print("\n| kinds | number | agreement of their means | inside a kind | "
          "bits with distinct 4-grams | share with distinct 4-grams |")  # fmt: skip
    print("| --- " * 6 + "|")
    for name, group in groups.items():
        means = [np.array([getattr(k, c).mean() for k in group]) for c in FIELDS[4:]]
        inside, error = within(group)
        print(
            f"| {name} | {len(group)} | {agreement(means[0], means[1]):.2f} | "
            f"{inside:.2f} ± {1.96 * error:.2f} | {agreement(means[0], means[2]):.2f} | "
            f"{agreement(means[1], means[2]):.2f} |"
        )


def show(model: Model, refined: Path, found: list[Kind], number: int) -> None:
    """Prints the model's texts that one judge finds good and the other bad."""
    mine = [kind for kind in found if _is_model(kind)]
    bits, share = (np.concatenate([getattr(k, c) for k in mine]) for c in ("bits", "share"))
    apart = (stats.rankdata(bits) - stats.rankdata(share)) / len(bits)
    said = [text for made in texts(model, refined) if made.forwards for text in made.texts]
    names = [f"{k.name}, {k.forwards} forwards" for k in mine for _ in k.bits]
    order = np.argsort(apart)
    for title, chosen in (("likely, yet wrong", order[:number]),
                          ("unlikely, yet right", order[::-1][:number])):  # fmt: skip
        for one in chosen:
            print(f"--- {title}: {names[one]}; {bits[one]:.3f} bits, {share[one]:.3f} wrong")
            print(said[one])


def main() -> None:
    """Measures, or prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table", "show"])
    parser.add_argument("--checkpoint", default="shakespeare")
    parser.add_argument("--judge", default="runs/shakespeare_judge")
    parser.add_argument("--scorer", default="runs/shakespeare_scorer")
    parser.add_argument("--settings", type=Path, default=Path("docs/refined.csv"))
    parser.add_argument("--csv", type=Path, default=Path("docs/second_judge.csv"))
    parser.add_argument("--number", type=int, default=3, help="texts that show prints of each")
    args = parser.parse_args()
    start_jax()
    if args.what == "run":
        judge, scorer = dlm_jax.load(args.judge), dlm_jax.load(args.scorer)
        run(dlm_jax.load(args.checkpoint), judge, scorer, args.settings, args.csv)
    elif args.what == "show":
        model = dlm_jax.load(args.checkpoint)
        show(model, args.settings, kinds(args.csv), args.number)
    if args.what != "show":
        table(kinds(args.csv))


if __name__ == "__main__":
    main()
