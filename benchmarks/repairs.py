"""Repairs of misprints in held-out text, with structural edits and without.

    python -m benchmarks repairs [--checkpoint proofreader] [--rows 128] [--seeds 0 1 2] [--quick]

Each row has one misprint and is passed as a draft: a letter is missing or doubled, or a word is
replaced by a longer or shorter one. A repair counts if it equals the original. Every arm takes 9
forwards per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import dlm_jax
from benchmarks.report import Table, parser_of
from dlm_jax.data import join_documents, read_documents, split_text

KINDS = ("missing", "doubled", "longer", "shorter")
FORWARDS = 9
COMMON: dict[str, Any] = {
    "temperature": 0.0, "order": "threshold", "fill": "parallel", "max_length": 192,
    "batch_size": 64, "ignore_eos": True, "edit": False, "edit_scoring": "uncertainty",
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "resampled, no edits": {"resample": True, "threshold": 0.9, "steps": FORWARDS},
    "the document": {"edit": True, "resample": True, "order": "random", "schedule": "all",
                     "steps": FORWARDS - 1},
    "likelihood": {"edit": True, "edit_scoring": "likelihood", "steps": 1, "edit_trials": 6,
                   "edit_gain": 0.25, "edit_lead_gain": 0.35, "threshold": 0.9,
                   "max_length": 144},
}  # fmt: skip


class Repair(NamedTuple):
    """A prompt, the damaged text after it, the text before the damage, and the kind of damage."""

    prompt: str
    damaged: str
    original: str
    kind: str


def make_repairs(held_out: str, corpus: str, seed: int, number: int) -> list[Repair]:
    """Makes `number` rows of 64 given and 64 damaged characters, with alternating kinds."""
    rng = np.random.default_rng(seed)
    vocabulary: dict[int, list[str]] = {}
    for word in corpus.split():
        if word.isalpha() and word.islower():
            vocabulary.setdefault(len(word), []).append(word)
    found: list[Repair] = []
    while len(found) < number:
        start = int(rng.integers(0, len(held_out) - 128))
        prompt, text = held_out[start : start + 64], held_out[start + 64 : start + 128]
        kind = KINDS[len(found) % len(KINDS)]
        damaged = _damage(text, kind, vocabulary, rng)
        if damaged is not None:
            found.append(Repair(prompt, damaged, text, kind))
    return found


def _damage(
    text: str, kind: str, vocabulary: dict[int, list[str]], rng: np.random.Generator
) -> str | None:
    """The text with one misprint, not near its ends; None if no misprint fits."""
    places = [i for i in range(8, len(text) - 8) if text[i].isalpha()]
    if not places:
        return None
    place = int(rng.choice(places))
    if kind == "missing":
        return text[:place] + text[place + 1 :]
    if kind == "doubled":
        return text[:place] + text[place] + text[place:]
    begin, end = place, place
    while text[begin - 1].isalpha() and begin > 1:
        begin -= 1
    while end < len(text) and text[end].isalpha():
        end += 1
    size = end - begin + int(rng.integers(1, 4)) * (1 if kind == "longer" else -1)
    if begin < 4 or end > len(text) - 4 or size not in vocabulary:
        return None
    return text[:begin] + str(rng.choice(vocabulary[size])) + text[end:]


def distance(a: str, b: str) -> int:
    """Levenshtein distance: the least number of inserted, deleted and replaced characters."""
    row = np.arange(len(b) + 1)
    other = np.array([ord(sign) for sign in b])
    for number, sign in enumerate(a, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (other != ord(sign)))
        best = np.concatenate([[number], best]) - np.arange(len(b) + 1)
        row = np.minimum.accumulate(best) + np.arange(len(b) + 1)
    return int(row[-1])


def score(repairs: Sequence[Repair], ends: Sequence[str]) -> list[float]:
    """Percent of exact rows, the same for each of `KINDS`, and the mean distance."""
    exact = np.array([end == row.original for row, end in zip(repairs, ends, strict=True)])
    far = [distance(end, row.original) for row, end in zip(repairs, ends, strict=True)]
    kinds = np.array([row.kind for row in repairs])
    shares = [float(exact[kinds == kind].mean()) for kind in KINDS]
    return [100 * float(exact.mean()), *(100 * share for share in shares), float(np.mean(far))]


def main() -> None:
    """Prints means over the seeds."""
    parser = parser_of(__doc__)
    parser.add_argument("--checkpoint", default="proofreader")
    parser.add_argument("--text", help="the text of the model; by default the source of its run")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    if args.quick:
        args.rows, args.seeds = 16, [0]
    model = dlm_jax.load(args.checkpoint)
    assert model.config is not None
    text = join_documents(read_documents(args.text or model.config.data.source))
    corpus, held_out = split_text(text, model.config.data.held_out)
    tasks = [make_repairs(held_out, corpus, seed, args.rows) for seed in args.seeds]
    table = Table(args, "arm", "exact %", *KINDS, "distance", "forwards")
    untouched = [score(rows, [row.damaged for row in rows]) for rows in tasks]
    table.add("untouched", *np.mean(untouched, axis=0), 0)
    for arm, settings in ARMS.items():
        figures = [_run(model, rows, settings) for rows in tasks]
        table.add(arm, *np.mean(figures, axis=0))


def _run(model: dlm_jax.Model, rows: list[Repair], settings: dict[str, Any]) -> list[float]:
    prompts = [{"prompt": row.prompt, "draft": row.damaged} for row in rows]
    texts = dlm_jax.generate(model, prompts, **COMMON | settings)
    ends = [text[len(row.prompt) :] for row, text in zip(rows, texts.texts, strict=True)]
    return [*score(rows, ends), float(texts.forwards.mean())]


if __name__ == "__main__":
    main()
