"""Total variation between the texts of k forwards and the true joint distribution.

    python -m benchmarks.joint run
    python -m benchmarks.joint table
    python -m benchmarks.joint cost

The source is the Markov chain of `benchmarks/markov.py`, for which the model is exact. `run`
samples with the compiled loop and computes the exact distribution of the process where enumeration
is possible; `cost` times a full wavefront fill on the shipped model.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks import markov
from dlm_jax.cli.common import start_jax
from dlm_jax.config import SamplingParams
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.positions import chunk_size
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts

FORWARDS = (1, 2, 4, 8)
TUNING_SEED, SEED = 1_000_000_000, 0
ROWS = 25_000
"""Texts of one call."""

WAVES, PARALLEL = {"fill": "wavefront"}, {"fill": "parallel"}
ARMS: dict[str, tuple[dict[str, Any], markov.Fill]] = {
    "parallel": (PARALLEL, markov.Fill(is_parallel=True)),
    "waves": (WAVES, markov.Fill()),
    "waves, even then odd": (WAVES | {"sampler_even_odd": True}, markov.Fill(is_alternating=True)),
    "waves, one-sided": (WAVES | {"sampler_one_sided": True}, markov.Fill(is_one_sided=True)),
    "all filled": (WAVES | {"order": "random_filled"}, markov.Fill(fills_all=True)),
    "all filled, even then odd": (
        WAVES | {"order": "random_filled", "sampler_even_odd": True},
        markov.Fill(fills_all=True, is_alternating=True),
    ),
    "all filled, one-sided": (
        WAVES | {"order": "random_filled", "sampler_one_sided": True},
        markov.Fill(fills_all=True, is_one_sided=True),
    ),
}
"""Samplers with a random order, and the distribution of their texts."""

TUNED: dict[str, tuple[dict[str, Any], str, tuple[float, ...]]] = {
    f"{order}, {how}": ({"order": order} | fill, order, values)
    for how, fill in {
        "parallel": PARALLEL, "one-sided waves": WAVES | {"sampler_one_sided": True}
    }.items()
    for order, values in {
        "entropy_bound": (0.0, 0.3, 0.6, 0.8, 0.9, 1.0, 1.2, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 9.0),
        "factor": (0.0, 0.6, 0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.5, 9.0),
    }.items()
}  # fmt: skip
"""Samplers with a variable number of commits per step: settings, name and values of the tuned
setting."""

FIELDS = ("arm", "setting", "budget", "forwards", "filled", "waves", "texts", "total_variation",
          "noise", "exact", "p_value")  # fmt: skip


class Texts(NamedTuple):
    """What was written.

    Attributes:
      counts: number of each text, with axes as in `markov.joint`.
      forwards: mean forwards per text.
      filled: mean candidates per text.
      waves: mean waves per text.
    """

    counts: np.ndarray
    forwards: float
    filled: float
    waves: float

    @property
    def shares(self) -> np.ndarray:
        """Frequencies of the texts."""
        return self.counts / self.counts.sum()


@functools.cache
def advance() -> Advance:
    """The loop for the chain's model."""
    network = markov.network()
    return Advance(Program(
        network=network, mask_id=markov.MASK, chunk=chunk_size(network.vocab_size),
        banned_ids=(markov.MASK,), pad_id=markov.MASK,
    ))  # fmt: skip


def write(settings: dict[str, Any], number: int, seed: int, *, rows: int = ROWS) -> Texts:
    """Writes `number` texts, a multiple of `rows`, with consecutive seeds from `seed` on."""
    sample = SamplingParams(chain=("temperature",), **settings)
    facts = ModelFacts(
        vocab_size=markov.MASK + 1, banned_ids=(markov.MASK,), noise=LINEAR, heads=("sampler",)
    )
    packed = RowParams.pack([sample], facts), BUILT_IN.pack([sample], facts)
    row, rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), packed)
    params = markov.network().init(jax.random.key(0))
    counts, counted = np.zeros(markov.MASK**markov.LENGTH), []
    for first in range(seed, seed + number, rows):
        state = start(
            jnp.full((rows, markov.LENGTH), markov.MASK), jnp.full(rows, markov.LENGTH),
            dataclasses.replace(row, seed_B=jnp.arange(first, first + rows, dtype=jnp.uint32)),
            rules, mask_id=markov.MASK,
        )  # fmt: skip
        state = advance()(params, state, markov.LENGTH + sample.steps)
        places = np.asarray(state.canvas.tokens_BL) @ markov.MASK ** np.arange(markov.LENGTH)[::-1]
        counts += np.bincount(places, minlength=counts.size)
        counters = state.counters
        counted.append([np.mean(x) for x in (counters.forwards, counters.filled, counters.waves)])
    return Texts(counts.reshape(markov.joint().shape), *np.mean(counted, axis=0).tolist())


def p_value(texts: Texts, law: np.ndarray, *, draws: int = 2000) -> float:
    """The share of equally large samples of a distribution that are at least as far from it."""
    number, found = int(texts.counts.sum()), markov.total_variation(texts.shares, law)
    drawn = np.random.default_rng(0).multinomial(number, law.ravel() / law.sum(), size=draws)
    far = 0.5 * np.abs(drawn / number - law.ravel()).sum(axis=1)
    return float((1 + (far >= found).sum()) / (1 + draws))


def noise(number: int, *, draws: int = 200) -> float:
    """The mean total variation of `number` texts that are drawn from the joint distribution."""
    law = markov.joint().ravel()
    drawn = np.random.default_rng(0).multinomial(number, law, size=draws)
    return float((0.5 * np.abs(drawn / number - law).sum(axis=1)).mean())


def measured(number: int) -> Iterator[dict[str, Any]]:
    """Yields one line per arm and budget."""
    level = noise(number)

    def line(arm: str, setting: str, budget: Any, texts: Texts, law: np.ndarray | None):
        found = {
            "arm": arm, "setting": setting, "budget": budget, "forwards": f"{texts.forwards:.3f}",
            "filled": f"{texts.filled:.2f}", "waves": f"{texts.waves:.2f}", "texts": number,
            "total_variation": f"{markov.total_variation(texts.shares, markov.joint()):.4f}",
            "noise": f"{level:.4f}", "exact": "", "p_value": "",
        }  # fmt: skip
        if law is not None:
            found["exact"] = f"{markov.total_variation(law, markov.joint()):.4f}"
            found["p_value"] = f"{p_value(texts, law):.4f}"
        return found

    for arm, (settings, fill) in ARMS.items():
        for budget in FORWARDS:
            texts = write({"steps": budget} | settings, number, SEED)
            law = markov.text_law(fill, markov.in_random_order(budget))
            yield line(arm, "", budget, texts, law)
    for steps in (16, 64, 256):
        law = markov.text_law(markov.Fill(is_parallel=True), markov.ancestral(steps))
        texts = write({"steps": steps, "order": "ancestral"} | PARALLEL, number, SEED)
        yield line("ancestral", f"steps={steps}", "", texts, law)
    for arm, (settings, name, values) in TUNED.items():
        given = {"steps": markov.LENGTH, "confidence": "max"} | settings
        tried = [
            (value, write(given | {name: value}, number // 2, TUNING_SEED)) for value in values
        ]
        for budget in FORWARDS[:-1]:
            fits = [(markov.total_variation(texts.shares, markov.joint()), value)
                    for value, texts in tried if texts.forwards <= budget + 0.005]  # fmt: skip
            if fits:
                value = min(fits)[1]
                texts = write(given | {name: value}, number, SEED)
                yield line(arm, f"{name}={value}", budget, texts, None)


def table(path: str) -> None:
    """Prints the measurements as Markdown."""
    print("| fill | forwards | total variation | exact | made by | candidates | waves |")
    print("| --- " * 7 + "|")
    with Path(path).open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            name = ", ".join(filter(None, (line["arm"], line["setting"])))
            cells = name, line["budget"] or line["forwards"], line["total_variation"]
            made = line["forwards"], line["filled"], line["waves"]
            print(f"| {' | '.join(cells)} | {line['exact'] or '-'} | {' | '.join(made)} |")


def cost(repeats: int) -> None:
    """Prints the cost of a step that fills its quota, or all holes, on the shipped model.

    The time is processor time, which other programs on the machine affect the least.
    """
    model = dlm_jax.load()
    print("| order | steps | filled of a text | waves | processor ms per step |")
    print("| --- " * 5 + "|")
    for steps in (4, 8, 16):
        for name in ("parallel", "waves", "all filled", "all filled, one-sided"):
            given = {"order": "random", "fill": "parallel"} | ARMS[name][0]

            def made(given: dict[str, Any] = given, steps: int = steps) -> dlm_jax.Texts:
                return dlm_jax.generate(
                    model, num_samples=32, batch_size=32, steps=steps, seed=0, **given
                )

            counters, times = made().counters, []
            for _ in range(repeats):
                begin = time.process_time()
                made()
                times.append(time.process_time() - begin)
            print(f"| {name} | {steps} | {counters.filled.mean():.0f} | "
                  f"{counters.waves.mean():.0f} | {1000 * statistics.median(times) / steps:.0f} |",
                  flush=True)  # fmt: skip


def main() -> None:
    """Runs a part of the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["run", "table", "cost"])
    parser.add_argument("--csv", default="benchmarks/results/joint.csv")
    parser.add_argument("--texts", type=int, default=200_000, help="texts per line (200000)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of cost (5)")
    args = parser.parse_args()
    if args.texts < 2 * ROWS or args.texts % (2 * ROWS):
        parser.error(f"--texts={args.texts} is not a multiple of {2 * ROWS}; use 200000")
    if args.part == "table":
        table(args.csv)
        return
    start_jax()
    if args.part == "cost":
        cost(args.repeats)
        return
    found = []
    for line in measured(args.texts):
        print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)
        found.append(line)
    with Path(args.csv).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
