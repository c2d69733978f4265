"""Total variation between the texts of k forwards and the true joint distribution.

    python -m benchmarks laws [--texts 200000] [--quick]

The source is the Markov chain of `benchmarks/markov.py`, for which the model is exact. The texts
are those of the compiled loop; the exact distribution of the process is enumerated.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import markov
from benchmarks.report import Table, parser_of
from dlm_jax.cli.common import start_jax
from dlm_jax.config import SamplingParams
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.positions import chunk_size
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts

FORWARDS = (1, 2, 4, 8)
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


def main() -> None:
    """Prints the total variation of the texts and of the enumerated process, and a p-value."""
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=int, default=200_000, help="texts per row")
    args = parser.parse_args()
    number = ROWS if args.quick else args.texts - args.texts % ROWS
    start_jax()
    table = Table(args, "fill", "forwards", "total variation", "exact", "p", "candidates", "waves")

    def add(arm: str, texts: Texts, law: np.ndarray) -> None:
        far, exact = (markov.total_variation(x, markov.joint()) for x in (texts.shares, law))
        table.add(arm, texts.forwards, far, exact, p_value(texts, law), texts.filled, texts.waves)

    for arm, (settings, fill) in ARMS.items():
        for budget in FORWARDS:
            texts = write({"steps": budget} | settings, number, 0)
            add(arm, texts, markov.text_law(fill, markov.in_random_order(budget)))
    for steps in (16, 64, 256):
        texts = write({"steps": steps, "order": "ancestral"} | PARALLEL, number, 0)
        law = markov.text_law(markov.Fill(is_parallel=True), markov.ancestral(steps))
        add(f"ancestral, {steps} steps", texts, law)


if __name__ == "__main__":
    main()
