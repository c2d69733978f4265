"""What pairs cost, bit for bit the same in any order and in batches of any size.

A pair runs in a program of a fixed number of rows, whatever runs beside it, on the canvas that its
own length asks for; its masks come from itself and a seed. Draws come in pairs of opposites: the
first hides the first k tokens of a random order, the second all that are not hidden before the last
of these, so that together they show each token behind as many others as they hide it behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dlm_jax.diffusion.likelihood import bound_at, causal_nll
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.harness.pairs import Pair
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.model import cpu
from dlm_jax.types import Network, Params

ROWS = 32
"""Rows of every program."""


class Row(NamedTuple):
    """A row to compute.

    Attributes:
      owner: place of its pair.
      pair: it.
      is_masked: True at hidden tokens, ``[n]``; empty for causal models.
    """

    owner: int
    pair: Pair
    is_masked: np.ndarray


def masks_of(pair: Pair, num_draws: int, seed: int, block_length: int = 0) -> np.ndarray:
    """Masks of a pair, bool ``[draws, n]``; a single one where one token is scored.

    Those of a block-causal model are drawn for each block alone.
    """
    n = pair.ids.size
    places = np.arange(pair.given, n)
    unit = block_length or n
    blocks = [places[places // unit == block] for block in np.unique(places // unit)]
    if all(block.size == 1 for block in blocks):
        return (np.arange(n) >= pair.given)[None]
    rng = np.random.Generator(np.random.Philox(key=pair.seed(seed).view("<u8")))
    masks = np.zeros((num_draws, n), bool)
    for block in blocks:
        # Levels are spread evenly, as many draws as there are pairs of opposites.
        pairs = -(-num_draws // 2)
        levels = (rng.random() + np.arange(pairs) / pairs) % 1.0
        for number, level in enumerate(levels):
            order = rng.permutation(block)
            count = 1 + min(int(level * block.size), block.size - 1)
            masks[2 * number, order[:count]] = True
            if 2 * number + 1 < num_draws:
                masks[2 * number + 1, order[count - 1 :]] = True
    return masks


class Likelihoods:
    """Likelihoods under one model.

    Args:
      model: a diffusion model, of which they are bounds, or a causal one, of which they are exact.
      num_draws: masks of each pair.
      batch_size: rows that a call of a program computes, up to `ROWS`; what it has beyond them is
        padding.
      seed: of the masks.

    Raises:
      ValueError: a number is out of range, or the model is a sequence scorer.
    """

    def __init__(self, model: Model, *, num_draws: int = 32, batch_size: int = ROWS, seed: int = 0):
        if model.network.scorer is not None:
            raise ValueError(
                "the model is a sequence scorer, which has no likelihood; load another"
            )
        if not 1 <= num_draws <= 1 << 16:
            raise ValueError(f"num_draws={num_draws} is outside [1, 65536]; use 32, say")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._model, self._num_draws, self._seed = model, num_draws, seed
        self._batch_size = min(batch_size, ROWS)
        self._mask_id = model.tokenizer.mask_id

    def nats(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Cost of each pair in nats, float64 ``[N]``."""
        unit = self._model.network.block_length
        rows = []
        for owner, pair in enumerate(pairs):
            if self._model.is_causal:
                rows.append(Row(owner, pair, np.zeros(0, bool)))
                continue
            masks = masks_of(pair, self._num_draws, self._seed, unit)
            rows += [Row(owner, pair, mask) for mask in masks]
        costs: list[list[float]] = [[] for _ in pairs]
        run = _costs(self._model.network, self._mask_id, self._model.is_causal)
        found: dict[int, float] = {}
        for places, arrays in self._batches(rows):
            nats = np.asarray(run(self._model.params, *arrays))
            found |= dict(zip(places, nats[: len(places)].tolist(), strict=True))
        for place, row in enumerate(rows):
            costs[row.owner].append(found[place])
        return np.array([float(np.mean(np.array(some))) for some in costs])

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Whether each pair is what the model writes at temperature 0, the surest token first.

        A causal model writes from left to right.
        """
        run = _guesses(self._model.network, self._mask_id)
        masks = [np.arange(pair.ids.size) >= pair.given for pair in pairs]
        is_greedy = [True] * len(pairs)
        open_ = list(range(len(pairs)))
        while open_:
            rows = [Row(owner, pairs[owner], masks[owner]) for owner in open_]
            for places, arrays in self._batches(rows):
                ids_RL, sure_RL = (np.asarray(x) for x in run(self._model.params, *arrays))
                for number, place in enumerate(places):
                    owner, pair, mask = rows[place]
                    holes = np.flatnonzero(mask)
                    first = np.argmax(sure_RL[number, holes]) if not self._model.is_causal else 0
                    at = holes[first]
                    is_greedy[owner] = bool(ids_RL[number, at] == pair.ids[at])
                    mask[at] = False
            open_ = [owner for owner in open_ if is_greedy[owner] and masks[owner].any()]
        return is_greedy

    def _batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], tuple[np.ndarray, ...]]]:
        """Places of rows that run together, and the arrays of their program."""
        sizes: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            size = canvas_size(row.pair.ids.size, is_shared=True)
            sizes.setdefault(size, []).append(place)
        for size, places in sorted(sizes.items()):
            for first in range(0, len(places), self._batch_size):
                some = places[first : first + self._batch_size]
                yield some, self._arrays([rows[place] for place in some], size)

    def _arrays(self, rows: Sequence[Row], size: int) -> tuple[np.ndarray, ...]:
        tokens = np.full((ROWS, size), self._model.tokenizer.pad_id, np.int32)
        length, given = np.ones(ROWS, np.int32), np.zeros(ROWS, np.int32)
        is_masked = np.zeros((ROWS, size), bool)
        for number, row in enumerate(rows):
            n = row.pair.ids.size
            tokens[number, :n], length[number], given[number] = row.pair.ids, n, row.pair.given
            is_masked[number, : row.is_masked.size] = row.is_masked
        return tokens, length, given, is_masked


@functools.cache
def _costs(network: Network, mask_id: int, is_causal: bool) -> Callable[..., jax.Array]:
    def run(
        params: Params, tokens: jax.Array, length: jax.Array, given: jax.Array, masked: jax.Array
    ) -> jax.Array:
        batch = Batch(tokens, length, given)
        if is_causal:
            return causal_nll(network, params, batch, mask_id=mask_id)
        return bound_at(network, params, batch, masked, mask_id=mask_id)

    return jax.jit(run, compiler_options=cpu.compiler_options(is_training=False))


@functools.cache
def _guesses(network: Network, mask_id: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Likeliest id at each position, and how likely it is."""

    def run(
        params: Params, tokens: jax.Array, length: jax.Array, given: jax.Array, masked: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del given
        shown = jax.numpy.where(masked, mask_id, tokens)
        hidden, _ = network.trunk(params, shown, length, None)

        def of_row(hidden_LD: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = network.readout(params, hidden_LD)
            logits = jax.numpy.where(
                jax.numpy.arange(logits.shape[1])[None] == mask_id, -jax.numpy.inf, logits
            )
            best = jax.numpy.max(logits, axis=1)
            sure = best - jax.nn.logsumexp(logits, axis=1)
            return jax.numpy.argmax(logits, axis=1), sure

        return jax.lax.map(of_row, hidden)

    return jax.jit(run, compiler_options=cpu.compiler_options(is_training=False))
