"""Measures decisions: ``python -m benchmarks.decide speed``, or ``fit``.

The task is to choose the next word of the shipped model's held-out text from four words. The other
three words are drawn from all words of that text by frequency.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

import dlm_jax
from dlm_jax.cli.common import start_jax
from dlm_jax.contrib import decide as decisions
from dlm_jax.data import join_documents, read_documents, split_text
from dlm_jax.inference import scoring

CHARACTERS = 120
"""Of a prompt."""


class Line(NamedTuple):
    """A prompt, its four labels, and the index of the word that follows it."""

    prompt: str
    labels: list[str]
    right: int


def make_lines(model: dlm_jax.Model, count: int, *, is_short: bool, seed: int = 0) -> list[Line]:
    """Lines of the task; with `is_short`, the words are single tokens."""
    config = model.config
    assert config is not None
    text = join_documents(read_documents(config.data.source))
    held_out = split_text(text, config.data.held_out)[1]
    found = [match for match in re.finditer(r" [A-Za-z']+", held_out)
             if match.start() >= CHARACTERS
             and (not is_short or model.tokenizer.encode(match[0]).size == 1)]  # fmt: skip
    words = [match[0] for match in found]
    rng = np.random.default_rng(seed)
    lines = []
    for at in rng.choice(len(found), count, replace=False):
        labels = [words[at]]
        while len(labels) < 4:
            other = words[rng.integers(len(words))]
            labels += [other] if other not in labels else []
        order = rng.permutation(4).tolist()
        start = found[at].start()
        prompt = held_out[start - CHARACTERS : start]
        lines.append(Line(prompt, [labels[k] for k in order], order.index(0)))
    return lines


def speed(model: dlm_jax.Model, args: argparse.Namespace) -> None:
    """Prints the seconds of decisions and of likelihoods of the same texts, in alternating runs."""
    print("| labels | tokens of a label | decide s | likelihood s | throughput |")
    print("| --- | --- | --- | --- | --- |")
    for is_short in (True, False):
        lines = make_lines(model, args.lines, is_short=is_short)
        prompts, labels = [one.prompt for one in lines], [one.labels for one in lines]
        flat = [label for own in labels for label in own]
        repeated = [prompt for prompt in prompts for _ in range(4)]

        def decide(count: int, prompts: list[str] = prompts, labels: Any = labels) -> None:
            decisions.decide(model, prompts[:count], labels[:count], batch_size=args.batch_size)

        def likelihood(count: int, flat: list[str] = flat, given: list[str] = repeated) -> None:
            scoring.score(
                model, flat[: 4 * count], prompts=given[: 4 * count], batch_size=args.batch_size
            )

        took: dict[str, list[float]] = {"decide": [], "likelihood": []}
        for number in range(args.rounds + 1):
            for run in (decide, likelihood):
                began = time.perf_counter()
                run(len(lines) if number else args.batch_size)
                if number:  # the first round compiles
                    took[run.__name__].append(time.perf_counter() - began)
        ours, theirs = (statistics.median(seconds) for seconds in took.values())
        tokens = np.mean([model.tokenizer.encode(label).size for label in flat])
        name = "words of one token" if is_short else "words"
        print(f"| {name} | {tokens:.2f} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |",
              flush=True)  # fmt: skip


def fit(model: dlm_jax.Model, args: argparse.Namespace) -> None:
    """Prints the calibration on the half of the lines that was not used for fitting."""
    print("| labels | fitted | temperature | length penalty | lines | accuracy | nats | ECE |")
    print("| --- " * 8 + "|")
    for is_short in (True, False):
        lines = make_lines(model, args.lines, is_short=is_short)
        made = decisions.decide(
            model, [one.prompt for one in lines], [one.labels for one in lines],
            batch_size=args.batch_size,
        )  # fmt: skip
        right, half = [one.right for one in lines], len(lines) // 2
        scores, sizes = [one.logprobs for one in made], [one.num_tokens for one in made]
        scales = {
            "nothing": decisions.Scale(),
            "temperature": decisions.Scale(decisions.calibrate(scores[:half], right[:half])),
            "both": decisions.calibrate_lengths(scores[:half], sizes[:half], right[:half]),
        }
        name = "words of one token" if is_short else "words"
        for fitted, scale in scales.items():
            shares = [scale.shares(*own) for own in zip(scores[half:], sizes[half:], strict=True)]
            hits = [own.argmax() == k for own, k in zip(shares, right[half:], strict=True)]
            nats = decisions.nll(shares, right[half:])
            error = decisions.expected_calibration_error(shares, right[half:])
            print(f"| {name} | {fitted} | {scale.temperature:.3f} | {scale.length_penalty:.3f} | "
                  f"{len(shares)} | {np.mean(hits):.4f} | {nats:.4f} | {error:.4f} |",
                  flush=True)  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "fit"))
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    start_jax()
    model = dlm_jax.load()
    {"speed": speed, "fit": fit}[args.what](model, args)


if __name__ == "__main__":
    main()
