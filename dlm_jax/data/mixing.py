"""Corpora mixed by weight: which of them each row of the endless stream of rows comes from.

Rows come in blocks of `BLOCK`; in each block every corpus has the same number of rows, in an order
that is drawn for the block. So the row at any place is known without those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dlm_jax.data.shards import TokenShards, joined

BLOCK = 10_000
"""Rows of a block: weights are rounded to parts of it."""

_SALT = 0x6D697865


@dataclass(frozen=True)
class Mixture:
    """Several sharded corpora of one tokenizer, and the share of rows of each.

    Attributes:
      sources: the corpora.
      quotas: rows of each in a block, which add up to `BLOCK`; see `quotas_of`.
    """

    sources: tuple[TokenShards, ...]
    quotas: tuple[int, ...]

    def locate(self, row: int, seed: int) -> tuple[int, int]:
        """(source, number of the row in its own stream) of a row of the mixed stream."""
        block, place = divmod(row, BLOCK)
        source, rank = _order(self.quotas, seed, block)[:, place]
        return int(source), block * self.quotas[source] + int(rank)

    def joined(self) -> TokenShards:
        """All corpora, one behind the other, whatever their weights."""
        return joined(self.sources)


def quotas_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Rows of each corpus in a block, by the largest remainders; those of a weight of 0 are 0.

    Raises:
      ValueError: a weight that is negative or not finite, weights that sum to nothing, or one so
        small that it rounds to no row.
    """
    if not all(np.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"data.weights={list(weights)} must be numbers of at least 0")
    if not sum(weights) > 0:
        raise ValueError(f"data.weights={list(weights)} sum to nothing; raise one of them")
    exact = np.array(weights, np.float64) / sum(weights) * BLOCK
    quotas = np.floor(exact).astype(int)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: BLOCK - quotas.sum()]] += 1
    for weight, quota in zip(weights, quotas, strict=True):
        if weight > 0 and quota == 0:
            raise ValueError(
                f"data.weights: {weight} is less than one row of {BLOCK}; raise it or use 0"
            )
    return tuple(int(quota) for quota in quotas)


@lru_cache(maxsize=4)
def _order(quotas: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """Of each row of a block: its source, and its rank among the block's rows of that source."""
    bits = np.random.Philox(np.random.SeedSequence([_SALT, seed, block])).random_raw(BLOCK)
    places = np.argsort(bits, kind="stable")
    ends = np.cumsum(quotas)
    source = np.searchsorted(ends, places, side="right")
    # Ranks ascend within the block, so that a source's rows are taken in their own order.
    rank = np.empty(BLOCK, np.int64)
    for number in range(len(quotas)):
        mine = np.flatnonzero(source == number)
        rank[mine] = np.arange(len(mine))
    return np.stack([source, rank])
