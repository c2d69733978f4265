"""Known words and diversity of a model's texts for several sampling settings.

    python benchmarks/sampling_settings.py --checkpoint runs/quickstart

Known words are words of the training text. The first row is held-out text. All rows have the same
number of texts from the same seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.data import join_documents, read_documents, split_text
from dlm_jax.store import load_params

sys.path.insert(0, str(Path(__file__).parent))
from quality import distinct_share, known_share, words  # noqa: E402

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "order": "random"},
    {"temperature": 0.7, "order": "random"},
    {"temperature": 0.5, "order": "random"},
    {"temperature": 1.0, "order": "left_to_right"},
    {"temperature": 0.7, "order": "left_to_right"},
    {"temperature": 0.6, "order": "left_to_right"},
    {"temperature": 0.5, "order": "left_to_right"},
    {"temperature": 1.0, "order": "low_confidence"},
    {"temperature": 0.7, "order": "low_confidence"},
    {"temperature": 0.7, "order": "random", "steps": 32},
]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="runs/quickstart")
    parser.add_argument("--num-samples", type=int, default=32)
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load(args.checkpoint)
    _, meta = load_params(args.checkpoint)
    data = meta["config"]["data"]
    train_text, held_out = split_text(
        join_documents(read_documents(data["source"])), data["held_out"]
    )
    known = set(words(train_text))
    pieces = [held_out[i : i + model.max_length] for i in range(0, 20000, model.max_length)]
    print("| settings | known words | distinct 4-grams |")
    print("| --- | --- | --- |")
    print(f"| held-out text | {known_share(pieces, known):.3f} | {distinct_share(pieces, 4):.3f} |")
    for settings in SETTINGS:
        texts = list(
            dlm_jax.generate(model, num_samples=args.num_samples, seed=1000, **settings).texts
        )
        name = ", ".join(f"{key} {value}" for key, value in settings.items())
        print(
            f"| {name} | {known_share(texts, known):.3f} | {distinct_share(texts, 4):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
