"""Compares two judges of the same texts, a causal model and a sequence scorer.

    python -m benchmarks.second_judge run
    python -m benchmarks.second_judge table
    python -m benchmarks.second_judge show

The causal model (`configs/shakespeare_judge.toml`) gives the bits per character of a text; the
scorer (`configs/shakespeare_scorer.toml`) estimates the share of wrong tokens. Both judge samples
of the shipped model with the settings from `benchmarks/head_rivals.py`
(`benchmarks/results/refined.csv`), pieces of held-out text, corrupted versions of these pieces, and
samples of n-gram models. `run` writes one line per text; `show` judges the texts again and prints
those with the largest disagreement.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import dlm_jax
from benchmarks.quality import NgramSampler, distinct_share, judged, known_share, words
from benchmarks.sampler_head import BASE, REFINED
from dlm_jax.cli.common import start_jax
from dlm_jax.data.text import join_documents, read_documents, split_text
from dlm_jax.diffusion.likelihood import half_width
from dlm_jax.inference.model import Model

SEEDS = (1000, 2000, 3000)
NUM_SAMPLES = 32
CHARACTERS = 256
FIELDS = ("texts", "forwards", "seed", "number", "bits", "share", "distinct", "words")
FEWER = (4, 8)
"""Additional numbers of forwards for fills that commit a fixed number of tokens per step."""
COLD = "0.8 to 0.1"
"""Lower temperatures, at which *all filled* is as repetitive as the texts with a critic."""
SPOILT = (0.1, 0.3)
"""Shares of tokens that are replaced by random tokens."""
FLOOR = 0.05
"""Approximate estimate of the scorer for text without errors."""
CONFIDENCE = "confidence, waves"
"""The kind of benchmarks/results/sampler_head.md, "Remasking", that collapses."""
PAIRS = (
    ("waves", "4", "parallel", "4"),
    ("waves", "8", "parallel", "8"),
    ("waves", "16", "parallel", "16"),
    ("all filled", "16", "parallel", "16"),
    ("all filled", "16", "waves", "16"),
    ("all filled, chance remasks", "16", "all filled", "16"),
    ("all filled, critic remasks", "17", "all filled", "16"),
    ("all filled, critic remasks", "17", f"all filled, {COLD}", "16"),
    (f"all filled, critic remasks, {COLD}", "17", f"all filled, {COLD}", "16"),
    (f"all filled, critic remasks, {COLD}", "17", f"all filled, chance remasks, {COLD}", "16"),
    (f"all filled, {COLD}", "16", "all filled", "16"),
    (f"all filled, critic remasks, {COLD}", "17", "all filled, critic remasks", "17"),
)
"""Pairs of compared kinds, each with its number of forwards."""


class Written(NamedTuple):
    """Texts of one kind and one seed."""

    kind: str
    forwards: float
    seed: int
    texts: list[str]


def _cases(refined: Path) -> dict[str, dict[str, Any]]:
    """Settings of the model's texts, by kind and forwards."""
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
        elif row["part"] == COLD:
            cases[f"{row['case']}, {COLD}"] = settings
    cases[CONFIDENCE] = REFINED | {"steps": 16, "fill": "wavefront"}
    return cases


def _named(share: float) -> str:
    return f"held-out text, {share:.0%} of tokens random"


def _pieces(text: str, seed: int) -> list[str]:
    """Evenly spaced pieces that begin with the space before a word, different for each seed."""
    starts = np.array([match.start() for match in re.finditer(r"\s(?=\w)", text)])
    starts = starts[starts <= len(text) - CHARACTERS]
    share = (np.arange(NUM_SAMPLES) + SEEDS.index(seed) / len(SEEDS)) / NUM_SAMPLES
    return [text[start:][:CHARACTERS] for start in starts[(share * len(starts)).astype(int)]]


def _shuffled(text: str, rng: np.random.Generator) -> str:
    """The words of a text in random order, except the last word, which can be truncated."""
    found = re.findall(r"\w+", text)
    mixed = iter([*rng.permutation(np.array(found[:-1], object)), found[-1]])
    return re.sub(r"\w+", lambda _: next(mixed), text)


def _spoilt(
    model: Model, text: str, share: float, usual: Sequence[int], rng: np.random.Generator
) -> str:
    """The text with this share of its tokens replaced by random tokens from `usual`."""
    ids = np.array(model.tokenizer.encode(text))
    places = rng.choice(len(ids), round(share * len(ids)), replace=False)
    ids[places] = rng.choice(usual, len(places))
    return model.tokenizer.decode(ids)[:CHARACTERS]


def texts(model: Model, refined: Path) -> Iterator[Written]:
    """All judged texts, kind by kind."""
    assert model.config is not None
    data = model.config.data
    corpus, held_out = split_text(join_documents(read_documents(data.source)), data.held_out)
    grams = {n: NgramSampler(corpus, n) for n in (3, 6)}
    pieces_of = [model.tokenizer.decode([token]) for token in range(model.tokenizer.vocab_size)]
    usual = [i for i, piece in enumerate(pieces_of) if piece and set(piece) <= set(corpus)]
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        pieces = _pieces(held_out, seed)
        yield Written("held-out text", 0, seed, pieces)
        yield Written("held-out words, shuffled", 0, seed, [_shuffled(t, rng) for t in pieces])
        for share in SPOILT:
            spoilt = [_spoilt(model, text, share, usual, rng) for text in pieces]
            yield Written(_named(share), 0, seed, spoilt)
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


class Kind(NamedTuple):
    """The figures of the texts of one kind, float64 ``[N]``."""

    name: str
    forwards: str
    bits: np.ndarray
    share: np.ndarray
    distinct: np.ndarray
    words: np.ndarray


def judge_all(
    model: Model, judge: Model, scorer: Model, refined: Path
) -> Iterator[tuple[Written, Kind]]:
    """All texts with their figures; prints one line per kind and seed."""
    assert model.config is not None
    data = model.config.data
    corpus, _ = split_text(join_documents(read_documents(data.source)), data.held_out)
    known = set(words(corpus))
    for written in texts(model, refined):
        score = judged(judge, written.texts)
        kind = Kind(
            written.kind, f"{written.forwards:g}",
            score.nats / score.characters / math.log(2.0),
            dlm_jax.corrupted_share(scorer, written.texts),
            np.array([distinct_share([text], 4) for text in written.texts]),
            np.array([known_share([text], known) for text in written.texts]),
        )  # fmt: skip
        print(
            f"{kind.name}, {kind.forwards} forwards, seed {written.seed}: "
            f"{kind.bits.mean():.3f} bits, {kind.share.mean():.3f} wrong", flush=True,
        )  # fmt: skip
        yield written, kind


def run(found: Iterator[tuple[Written, Kind]], path: Path) -> None:
    """Writes one line per text; the file is replaced when all texts are judged."""
    lines = [
        [kind.name, kind.forwards, str(written.seed), str(number)]
        + [f"{column[number]:.4f}" for column in kind[2:]]
        for written, kind in found
        for number in range(len(written.texts))
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows(lines)


def kinds(path: Path) -> list[Kind]:
    """The content of the file, kind by kind."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for name, forwards in dict.fromkeys((row["texts"], row["forwards"]) for row in rows):
        mine = [row for row in rows if (row["texts"], row["forwards"]) == (name, forwards)]
        columns = [np.array([float(row[column]) for row in mine]) for column in FIELDS[4:]]
        found.append(Kind(name, forwards, *columns))
    return found


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation."""
    ranks = stats.rankdata(first), stats.rankdata(second)
    return float(np.corrcoef(*ranks)[0, 1])


def groups(found: list[Kind]) -> dict[str, list[Kind]]:
    """Groups of compared kinds, with and without the collapsed kind."""
    mine = [kind for kind in found if _is_model(kind)]
    return {
        "all kinds": found,
        f"without *{CONFIDENCE}*": [kind for kind in found if kind.name != CONFIDENCE],
        "the model's": mine,
        f"the model's, without *{CONFIDENCE}*": [k for k in mine if k.name != CONFIDENCE],
    }


def means(group: list[Kind]) -> dict[str, np.ndarray]:
    """The means of each figure, float64 ``[number of kinds]``."""
    return {c: np.array([getattr(kind, c).mean() for kind in group]) for c in FIELDS[4:]}


def _is_model(kind: Kind) -> bool:
    return kind.forwards != "0"


def _interval(values: np.ndarray) -> str:
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    return f"{values.mean():.3f} ± {half_width(error, len(values)):.3f}"


def table(found: list[Kind]) -> None:
    """Prints means, differences and the agreement of the judges, as Markdown."""
    print("| texts | forwards | judged bits/char | rank | estimated share wrong | rank | "
          "distinct 4-grams in a text | known words | correlation of the judges |")  # fmt: skip
    print("| --- " * 9 + "|")
    mean = means(found)
    places = stats.rankdata(mean["bits"]), stats.rankdata(mean["share"])
    for number in np.argsort(mean["bits"]):
        kind = found[number]
        forwards = kind.forwards if _is_model(kind) else ""
        print(
            f"| {kind.name} | {forwards} | {_interval(kind.bits)} | {places[0][number]:.0f} | "
            f"{_interval(kind.share)} | {places[1][number]:.0f} | {kind.distinct.mean():.3f} | "
            f"{kind.words.mean():.3f} | {agreement(kind.bits, kind.share):.2f} |"
        )
    print("\n| of | against | judged bits/char | estimated share wrong |")
    print("| --- " * 4 + "|")
    named = {(kind.name, kind.forwards): kind for kind in found}
    for first, forwards, second, others in PAIRS:
        one, other = named[first, forwards], named[second, others]
        cells = [_difference(one.bits, other.bits), _difference(one.share, other.share)]
        print(f"| {first}; {forwards} | {second}; {others} | " + " | ".join(cells) + " |")
    pairs = (("bits", "share"), ("bits", "distinct"), ("share", "distinct"),
             ("bits", "words"), ("share", "words"))  # fmt: skip
    print("\n| means of | number | " + " | ".join(" and ".join(pair) for pair in pairs) + " |")
    print("| --- " * (2 + len(pairs)) + "|")
    for name, group in groups(found).items():
        mean = means(group)
        cells = [f"{agreement(mean[one], mean[other]):.2f}" for one, other in pairs]
        print(f"| {name} | {len(group)} | " + " | ".join(cells) + " |")


def inside(found: list[Kind]) -> None:
    """Prints correlations of the judges with other figures within the kinds, as a list."""
    mine = groups(found)[f"the model's, without *{CONFIDENCE}*"]
    for judge in ("bits", "share"):
        each = [agreement(getattr(kind, judge), kind.words) for kind in mine]
        print(f"- {judge} and known words inside a kind of the model's: {np.mean(each):.2f} on "
              f"average, {min(each):.2f} to {max(each):.2f}")  # fmt: skip
    for name, few in (("below", True), ("from", False)):
        each = [agreement(k.bits, k.share) for k in found if (k.share.mean() < FLOOR) == few]
        print(f"- the judges inside kinds with an estimate {name} {FLOOR}: {np.mean(each):.2f}")
    named = {kind.name: kind for kind in found}
    flat = named[CONFIDENCE]
    quarters = np.array_split(flat.share[np.argsort(flat.distinct)], 4)
    print(f"- {CONFIDENCE}: share and distinct 4-grams {agreement(flat.share, flat.distinct):.2f}; "
          f"{quarters[0].mean():.2f} wrong in the most repetitive quarter, "
          f"{quarters[-1].mean():.2f} in the least")  # fmt: skip
    whole, spoilt = (named[name] for name in ("held-out text", _named(SPOILT[0])))
    for judge in ("bits", "share"):
        pairs = getattr(whole, judge)[:, None] < getattr(spoilt, judge)
        print(f"- {judge}: {pairs.mean():.2f} of the pairs of a held-out and a spoilt text told")


def _difference(first: np.ndarray, second: np.ndarray) -> str:
    error = (first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)) ** 0.5
    return f"{first.mean() - second.mean():+.3f} ± {1.973 * error:.3f}"


def show(found: Iterator[tuple[Written, Kind]], number: int) -> None:
    """Prints the model's texts that one judge rates as good and the other as bad."""
    mine = [pair for pair in found if _is_model(pair[1])]
    bits, share = (np.concatenate([getattr(k, c) for _, k in mine]) for c in ("bits", "share"))
    apart = (stats.rankdata(bits) - stats.rankdata(share)) / len(bits)
    said = [(kind, text) for written, kind in mine for text in written.texts]
    order = np.argsort(apart)
    for title, chosen in (("likely, yet wrong", order[:number]),
                          ("unlikely, yet right", order[::-1][:number])):  # fmt: skip
        for one in chosen:
            kind, text = said[one]
            print(f"--- {title}: {kind.name}, {kind.forwards} forwards; "
                  f"{bits[one]:.3f} bits, {share[one]:.3f} wrong")  # fmt: skip
            print(text)


def main() -> None:
    """Measures, or prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "table", "show"])
    parser.add_argument("--checkpoint", default="shakespeare")
    parser.add_argument("--judge", default="runs/shakespeare_judge")
    parser.add_argument("--scorer", default="runs/shakespeare_scorer")
    parser.add_argument("--settings", type=Path, default=Path("benchmarks/results/refined.csv"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/second_judge.csv"))
    parser.add_argument("--number", type=int, default=3, help="texts per kind for show")
    args = parser.parse_args()
    start_jax()
    if args.what != "table":
        judge, scorer = dlm_jax.load(args.judge), dlm_jax.load(args.scorer)
        texts_judged = judge_all(dlm_jax.load(args.checkpoint), judge, scorer, args.settings)
        if args.what == "show":
            show(texts_judged, args.number)
            return
        run(texts_judged, args.csv)
    found = kinds(args.csv)
    table(found)
    print()
    inside(found)


if __name__ == "__main__":
    main()
