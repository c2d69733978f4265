"""Quality of a model's unprompted texts, compared with held-out text and n-gram samplers.

    python benchmarks/text_quality.py --judge runs/shakespeare_judge [--checkpoint PATH]
        [--set temperature=0.7,temperature_end=-1 order=left_to_right ...]

All rows have the same number of texts, truncated to the same number of characters. Known words are
words of the training text. Copied is the share of runs of four words that occur in the training
text. The judge is an autoregressive model trained on the same text with another seed; the table has
its exact bits per character of each text, with the standard error over texts. Low bits alone are
not good, because repeated and copied text also has low bits; compare the other columns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.config import add_sample_flags, sample_settings
from dlm_jax.data import join_documents, read_documents, split_text

sys.path.insert(0, str(Path(__file__).parent))
from quality import (  # noqa: E402
    NgramSampler,
    copied_share,
    distinct_share,
    judged_bits,
    known_share,
    words,
)


def parser_of_settings() -> argparse.ArgumentParser:
    """The flags of `sample.py` for settings."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_sample_flags(parser)
    return parser


def _flag(item: str) -> tuple[str, str]:
    name, value = item.split("=", 1)
    return f"--{name.replace('_', '-')}", value


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="default: the shipped model")
    parser.add_argument("--judge", required=True)
    parser.add_argument("--source", help="path of the corpus, if it differs from the config")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--characters", type=int, default=256, help="characters per text (256)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE,...",
        help="additional settings, one row of the table each")  # fmt: skip
    args = parser.parse_args()
    start_jax()
    model, judge = dlm_jax.load(args.checkpoint), dlm_jax.load(args.judge)
    assert model.config is not None
    data = model.config.data
    source = args.source or data.source
    corpus, held_out = split_text(join_documents(read_documents(source)), data.held_out)
    known = set(words(corpus))
    length, number = args.characters, args.num_samples
    starts = np.linspace(0, len(held_out) - length, number).astype(int)
    sources = {"held-out text": [held_out[start : start + length] for start in starts]}
    for order in (3, 4, 5, 6):
        sampler, rng = NgramSampler(corpus, order), np.random.default_rng(args.seed)
        sources[f"{order}-gram sampler"] = [sampler.text(length, rng) for _ in range(number)]
    for given in ["", *args.set]:
        flags = [word for item in given.split(",") if item for word in _flag(item)]
        settings = sample_settings(vars(parser_of_settings().parse_args(flags)))
        texts = dlm_jax.generate(model, num_samples=number, seed=args.seed, **settings).texts
        sources[f"model, {given or 'default settings'}"] = [text[:length] for text in texts]
    print("| texts | known words | judged bits/char | distinct 4-grams | copied word 4-grams |")
    print("| --- | --- | --- | --- | --- |")
    for name, texts in sources.items():
        bits, error = judged_bits(judge, texts)
        print(
            f"| {name} | {known_share(texts, known):.3f} | {bits:.3f} ± {error:.3f} | "
            f"{distinct_share(texts, 4):.3f} | {copied_share(texts, corpus):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
