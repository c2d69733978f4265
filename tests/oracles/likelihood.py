"""Exact likelihoods of a masked diffusion model on a tiny vocabulary and length, by enumeration.

All values are in nats, in float64, and sum over the masked positions of one row (docs/design.md,
law 7). Cost: 2**L forwards and L! products, so L <= 7. MASK is never predicted: its logit counts as
-inf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

LogitsFn = Callable[[np.ndarray], np.ndarray]
"""Tokens [L], MASK at hidden positions, to logits [L, V]."""


class Conditionals:
    """Log-probability of each true token given any set of revealed positions."""

    def __init__(self, logits_fn: LogitsFn, tokens: Sequence[int], mask_id: int):
        """Of the row `tokens` [L], which must not hold MASK itself."""
        self._logits_fn, self._tokens, self._mask_id = logits_fn, np.array(tokens), mask_id
        self._cache: dict[frozenset[int], np.ndarray] = {}

    def log_prob(self, position: int, revealed: Collection[int]) -> float:
        """`log p(x_position | x_revealed)`, all other positions masked."""
        key = frozenset(revealed)
        if key not in self._cache:
            is_revealed = [i in key for i in range(len(self._tokens))]
            seen = np.where(is_revealed, self._tokens, self._mask_id)
            logits = np.array(self._logits_fn(seen), np.float64)
            logits[:, self._mask_id] = -np.inf
            top = logits.max(axis=-1, keepdims=True)
            log_p = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
            self._cache[key] = log_p[np.arange(len(seen)), self._tokens]
        return float(self._cache[key][position])


def order_log_probs(
    logits_fn: LogitsFn, tokens: Sequence[int], *, mask_id: int, given: Collection[int] = ()
) -> list[float]:
    """`log` of the product of conditionals, for each order of revealing the positions not given."""
    conditionals = Conditionals(logits_fn, tokens, mask_id)
    hidden = [i for i in range(len(tokens)) if i not in given]
    totals = []
    for order in itertools.permutations(hidden):
        total, revealed = 0.0, set(given)
        for position in order:
            total += conditionals.log_prob(position, revealed)
            revealed.add(position)
        totals.append(total)
    return totals


def elbo_by_orders(
    logits_fn: LogitsFn, tokens: Sequence[int], *, mask_id: int, given: Collection[int] = ()
) -> float:
    """The bound: mean over all orders of the sum of `-log p(x_i | revealed so far)`."""
    totals = order_log_probs(logits_fn, tokens, mask_id=mask_id, given=given)
    return -math.fsum(totals) / len(totals)


def true_nll(
    logits_fn: LogitsFn, tokens: Sequence[int], *, mask_id: int, given: Collection[int] = ()
) -> float:
    """`-log` of the probability that revealing one token at a time in random order writes the row.

    The mean over all orders of the product of conditionals; never above the bound, and over all
    rows the probabilities sum to 1.
    """
    totals = order_log_probs(logits_fn, tokens, mask_id=mask_id, given=given)
    top = max(totals)
    return -(top + math.log(math.fsum(math.exp(t - top) for t in totals) / len(totals)))
