"""Repairs in a toy language, learnt in minutes: what trying edits is worth beside scoring them.

    python -m benchmarks.edits_toy --csv docs/edits_toy.csv

Texts of 90 invented words, each as likely as any other, so that a damaged word names itself to who
knows them all. A small proofreader is trained on them (or taken from --out, where it is kept), its
arms are tuned on rows of one seed, and reported on three others, as in `benchmarks/edits.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import dlm_jax
import dlm_jax.config as configs
from benchmarks.edits import Task, run, table, tune
from benchmarks.repairs import KINDS, MORE_KINDS
from dlm_jax.cli.common import start_jax
from dlm_jax.config.objective import MISPRINTS

ARMS = ["off", "delete-mask-lead", "both-mask-lead", "likelihood", "likelihood-wide"]
WORDS, TOKENS = 90, 60_000
_ONSETS, _VOWELS = tuple("bdfgklmnprstvz"), tuple("aeiou")


def language(seed: int = 0) -> str:
    """Text of invented words of two to four syllables, seven to a line."""
    rng = np.random.default_rng(seed)
    known: list[str] = []
    while len(known) < WORDS:
        count = int(rng.integers(2, 5))
        word = "".join(str(rng.choice(_ONSETS)) + str(rng.choice(_VOWELS)) for _ in range(count))
        if word not in known:
            known.append(word)
    drawn = rng.choice(known, TOKENS)
    return "\n".join(" ".join(drawn[at : at + 7]) for at in range(0, TOKENS, 7)) + "\n"


def config(source: Path, out_dir: Path, steps: int) -> configs.Config:
    """A proofreader that learns the language in minutes."""
    return configs.from_dict(
        {
            "model": {"depth": 3, "width": 96, "heads": 4},
            "data": {"source": [str(source)], "seq_len": 128},
            "objective": {
                "proofreading_share": 0.75, "misprint_ratio": 0.1, "random_length_share": 0.1,
                "misprint_kinds": list(MISPRINTS),
            },
            "optim": {
                "learning_rate": 0.02, "adam_learning_rate": 0.004, "warmup_steps": 50,
                "ema_decay": 0.99,
            },
            "train": {
                "out_dir": str(out_dir), "steps": steps, "batch_size": 8, "log_every": 100,
                "eval_every": 0, "eval_windows": 64,
            },
        },
        where="edits_toy",
    )  # fmt: skip


def main() -> None:
    """Trains what is missing, tunes and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/edits_toy")
    parser.add_argument("--csv", default="docs/edits_toy.csv")
    parser.add_argument("--steps", type=int, default=2000, help="of training (2000)")
    parser.add_argument("--num-rows", type=int, default=64, help="of each seed (64)")
    args = parser.parse_args()
    start_jax()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    source = out / "language.txt"
    source.write_text(language(), encoding="utf-8")
    dlm_jax.train(config(source, out / "run", args.steps))
    more = args.csv.replace(".csv", "_more.csv")
    for kinds, name in ((KINDS, args.csv), (MORE_KINDS, more)):
        task = Task(str(out / "run"), args.num_rows, kinds)
        tuned = name.replace(".csv", "_tuned.csv")
        for path in (name, tuned):
            Path(path).unlink(missing_ok=True)
        tune(task, tuned, 100, ARMS)
        run(task, tuned, name, [0, 1, 2], ARMS)
        table(name)


if __name__ == "__main__":
    main()
