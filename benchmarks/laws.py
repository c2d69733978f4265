"""Total variation between the texts of k forwards and the true joint distribution.

    python -m benchmarks laws [--texts 200000] [--quick]

The source is a Markov chain whose model is exact, so the sampler causes all errors. The texts are
those of the compiled loop. The distributions are enumerated in float64 from the chain,
independently of the loop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import Table, parser_of
from dlm_jax.cli.common import start_jax
from dlm_jax.config import SamplingParams
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.sampling.loop import Advance, start
from dlm_jax.sampling.positions import chunk_size
from dlm_jax.sampling.program import Program, RowParams
from dlm_jax.sampling.propose import SamplerReadout
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts
from dlm_jax.types import Network, Params

LENGTH = 5
START = (0.5, 0.3, 0.2)
STEP = ((0.6, 0.25, 0.15), (0.15, 0.6, 0.25), (0.3, 0.12, 0.58))
MASK = len(START)

Blocks = tuple[tuple[int, ...], ...]
"""Positions that are committed together, in step order."""


def network() -> Network:
    """The chain as a model with an exact LM head and an exact sampler head with one neighbour per
    side.

    The parameters are ``{"start": [V], "step": [V, V]}``. The hidden vector of a position,
    ``[2V]``, has the messages from the visible tokens on the left and on the right.
    """

    def trunk(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None
    ) -> tuple[jax.Array, None]:
        step_VV = params["step"]
        each_1V = jnp.arange(MASK)[None]
        seen_LBV = [
            (tokens_B[:, None] == each_1V) | (tokens_B[:, None] >= MASK) for tokens_B in tokens_BL.T
        ]
        ones_BV = jnp.ones((tokens_BL.shape[0], MASK))
        left, right = [ones_BV * params["start"][None]], [ones_BV]
        for place in range(LENGTH - 1):
            left.append((left[-1] * seen_LBV[place]) @ step_VV)
            right.append((right[-1] * seen_LBV[LENGTH - 1 - place]) @ step_VV.T)
        pairs = [jnp.concatenate(pair, axis=1) for pair in zip(left, right[::-1], strict=True)]
        return jnp.stack(pairs, axis=1), None

    def logits(left_NV: jax.Array, right_NV: jax.Array) -> jax.Array:
        return jnp.pad(jnp.log(left_NV * right_NV), ((0, 0), (0, 1)), constant_values=-jnp.inf)

    def readout(params: Params, hidden_ND: jax.Array) -> jax.Array:
        return logits(hidden_ND[:, :MASK], hidden_ND[:, MASK:])

    def beside(
        params: Params, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array
    ) -> jax.Array:
        known = [x[:, 0] @ step for x, step in (
            (left_NCD, params["step"]), (right_NCD, params["step"].T)
        )]  # fmt: skip
        messages = hidden_ND[:, :MASK], hidden_ND[:, MASK:]
        return logits(*(
            jnp.where(told_NV.sum(1, keepdims=True) > 0, told_NV, message_NV)
            for told_NV, message_NV in zip(known, messages, strict=True)
        ))  # fmt: skip

    return Network(
        init=lambda key: {"start": jnp.array(START), "step": jnp.array(STEP)},
        trunk=trunk,
        embed=lambda params, ids: jax.nn.one_hot(ids, MASK),
        readout=readout,
        vocab_size=MASK + 1,
        heads={"sampler": SamplerReadout(beside)},
    )


@functools.cache
def joint() -> np.ndarray:
    """The probability of each text, with an axis of `MASK` values per position."""
    found = np.array(START)
    for _ in range(LENGTH - 1):
        found = found[..., None] * np.array(STEP)
    return found


@functools.cache
def given(place: int, seen: frozenset[int]) -> np.ndarray:
    """The probability of the token at `place` given the tokens at `seen`; axes as in `joint`."""

    def of(places: frozenset[int]) -> np.ndarray:
        rest = tuple(axis for axis in range(LENGTH) if axis not in places)
        return joint().sum(axis=rest, keepdims=True)

    return of(seen | {place}) / of(seen)


@dataclass(frozen=True)
class Fill:
    """The distribution of the candidates of a step.

    Attributes:
      is_parallel: whether candidates are independent; otherwise, they are drawn in waves from one
        seed in each run of holes without a visible neighbour.
      is_alternating: whether even positions of a wave are filled before the odd ones.
      is_one_sided: whether a run between two filled tokens is filled only from the left.
      fills_all: whether all holes are filled, including holes that are not committed.
    """

    is_parallel: bool = False
    is_alternating: bool = False
    is_one_sided: bool = False
    fills_all: bool = False

    def law(self, holes: frozenset[int], seen: frozenset[int]) -> np.ndarray:
        """The probability of the tokens at the holes, given the tokens at `seen`."""
        if self.is_parallel:
            return _product(given(place, seen) for place in holes)
        far = [run for run in _runs(holes) if not {run[0] - 1, run[-1] + 1} & seen]
        found = np.zeros([1] * LENGTH)
        for seeds in itertools.product(*far):
            is_chosen = _product(
                _is_surest(seed, run, seen) for seed, run in zip(seeds, far, strict=True)
            )
            found = found + is_chosen * self._grown(frozenset(seeds), holes, seen)
        return found

    def _grown(
        self, seeds: frozenset[int], holes: frozenset[int], seen: frozenset[int]
    ) -> np.ndarray:
        found = _product(given(seed, seen) for seed in seeds)
        filled, left = seen | seeds, holes - seeds
        while left:
            wave = {place for place in left if {place - 1, place + 1} & filled}
            if self.is_one_sided:
                fed = [run for run in _runs(left) if run[0] - 1 in filled]
                wave -= {place for run in fed for place in run[1:]}
            parts = [{p for p in wave if p % 2 == odd} for odd in (0, 1)]
            for part in parts if self.is_alternating else [wave]:
                found = found * _product(
                    given(place, seen | ({place - 1, place + 1} & filled)) for place in part
                )
                filled, left = filled | part, left - part
        return found


@functools.cache
def step_law(fill: Fill, chosen: frozenset[int], holes: frozenset[int]) -> np.ndarray:
    """The probability of the tokens committed at the chosen holes, given the other positions."""
    seen = frozenset(range(LENGTH)) - holes
    if not fill.fills_all:
        return fill.law(chosen, seen)
    rest = tuple(holes - chosen)
    return fill.law(holes, seen).sum(axis=rest, keepdims=True) if rest else fill.law(holes, seen)


def text_law(fill: Fill, weights: Iterable[tuple[Blocks, float]]) -> np.ndarray:
    """The probability of each text for weighted sequences of committed blocks."""
    found = np.zeros_like(joint())
    for blocks, weight in weights:
        holes, law = frozenset(range(LENGTH)), np.array(weight)
        for block in map(frozenset, blocks):
            law = law * step_law(fill, block, holes)
            holes -= block
        found = found + law
    return found


def in_random_order(steps: int) -> Iterator[tuple[Blocks, float]]:
    """Blocks of random order: each step commits ``ceil(holes / steps left)`` random positions."""
    sizes, holes = [], LENGTH
    for left in range(steps, 0, -1):
        sizes.append(-(-holes // left))
        holes -= sizes[-1]
    sizes = [size for size in sizes if size]
    found = [blocks for blocks in _ordered_blocks() if [len(b) for b in blocks] == sizes]
    return ((blocks, 1 / len(found)) for blocks in found)


def ancestral(steps: int) -> Iterator[tuple[Blocks, float]]:
    """Blocks of ancestral steps with a linear schedule: the step of each position is uniform.

    If ``m`` steps commit something, there are ``C(steps, m)`` equally likely choices.
    """
    return ((blocks, math.comb(steps, len(blocks)) / steps**LENGTH) for blocks in _ordered_blocks())


def total_variation(law: np.ndarray, other: np.ndarray) -> float:
    """Half the sum of the absolute differences, in [0, 1]."""
    return float(0.5 * np.abs(law - other).sum())


@functools.cache
def _ordered_blocks() -> tuple[Blocks, ...]:
    found = []
    for steps in itertools.product(range(LENGTH), repeat=LENGTH):
        used = sorted(set(steps))
        if used == list(range(len(used))):
            found.append(tuple(
                tuple(p for p, step in enumerate(steps) if step == number) for number in used
            ))  # fmt: skip
    return tuple(found)


def _runs(places: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in sorted(places):
        if not runs or place != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(place)
    return runs


def _is_surest(seed: int, run: list[int], seen: frozenset[int]) -> np.ndarray:
    """The texts for which the LM head is most confident at `seed`; the lower position wins ties."""
    sure = {place: given(place, seen).max(axis=place, keepdims=True) for place in run}
    return _product(
        sure[seed] > sure[place] + 1e-12 if place < seed else sure[seed] >= sure[place] - 1e-12
        for place in run
        if place != seed
    )


def _product(factors: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.multiply, factors, np.ones([1] * LENGTH))


WAVES, PARALLEL = {"fill": "wavefront"}, {"fill": "parallel"}
ARMS: dict[str, tuple[dict[str, Any], Fill]] = {
    "parallel": (PARALLEL, Fill(is_parallel=True)),
    "waves": (WAVES, Fill()),
    "waves, even then odd": (WAVES | {"sampler_even_odd": True}, Fill(is_alternating=True)),
    "waves, one-sided": (WAVES | {"sampler_one_sided": True}, Fill(is_one_sided=True)),
    "all filled": (WAVES | {"order": "random_filled"}, Fill(fills_all=True)),
    "all filled, even then odd": (
        WAVES | {"order": "random_filled", "sampler_even_odd": True},
        Fill(fills_all=True, is_alternating=True),
    ),
    "all filled, one-sided": (
        WAVES | {"order": "random_filled", "sampler_one_sided": True},
        Fill(fills_all=True, is_one_sided=True),
    ),
}
"""Samplers with a random order, and the distribution of their texts."""


@functools.cache
def advance() -> Advance:
    """The loop for the chain's model."""
    return Advance(Program(
        network=network(), mask_id=MASK, chunk=chunk_size(MASK + 1),
        banned_ids=(MASK,), pad_id=MASK,
    ))  # fmt: skip


def write(settings: dict[str, Any], number: int, seed: int, *, rows: int) -> np.ndarray:
    """The number of each text among `number`, a multiple of `rows`; axes as in `joint`.

    Seeds are consecutive from `seed` on.
    """
    sample = SamplingParams(chain=("temperature",), **settings)
    facts = ModelFacts(vocab_size=MASK + 1, banned_ids=(MASK,), noise=LINEAR, heads=("sampler",))
    packed = RowParams.pack([sample], facts), BUILT_IN.pack([sample], facts)
    row, rules = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), packed)
    params = network().init(jax.random.key(0))
    counts = np.zeros(MASK**LENGTH)
    for first in range(seed, seed + number, rows):
        state = start(
            jnp.full((rows, LENGTH), MASK), jnp.full(rows, LENGTH),
            dataclasses.replace(row, seed_B=jnp.arange(first, first + rows, dtype=jnp.uint32)),
            rules, mask_id=MASK,
        )  # fmt: skip
        state = advance()(params, state, LENGTH + sample.steps)
        places = np.asarray(state.canvas.tokens_BL) @ MASK ** np.arange(LENGTH)[::-1]
        counts += np.bincount(places, minlength=counts.size)
    return counts.reshape(joint().shape)


def p_value(counts: np.ndarray, law: np.ndarray, *, draws: int) -> float:
    """The share of equally large samples of a distribution that are at least as far from it."""
    number = int(counts.sum())
    distance = total_variation(counts / number, law)
    drawn = np.random.default_rng(0).multinomial(number, law.ravel() / law.sum(), size=draws)
    far = 0.5 * np.abs(drawn / number - law.ravel()).sum(axis=1)
    return float((1 + (far >= distance).sum()) / (1 + draws))


def main() -> None:
    """Prints the total variation of the texts and of the enumerated process, and a p-value."""
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=int, default=200_000, help="texts per row")
    args = parser.parse_args()
    rows = 25_000
    number = rows if args.quick else args.texts - args.texts % rows
    start_jax()
    table = Table(args, "fill", "forwards", "total variation", "exact", "p")

    def add(name: str, settings: dict[str, Any], law: np.ndarray, forwards: int) -> None:
        counts = write({"steps": forwards} | settings, number, 0, rows=rows)
        off, exact = (total_variation(x, joint()) for x in (counts / counts.sum(), law))
        table.add(name, forwards, off, exact, p_value(counts, law, draws=2000))

    for name, (settings, fill) in ARMS.items():
        for forwards in (1, 2, 4, 8):
            add(name, settings, text_law(fill, in_random_order(forwards)), forwards)
    for steps in (16, 64, 256):
        law = text_law(Fill(is_parallel=True), ancestral(steps))
        add("ancestral", PARALLEL | {"order": "ancestral"}, law, steps)


if __name__ == "__main__":
    main()
