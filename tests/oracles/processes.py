"""Forward processes on a tiny vocabulary by enumeration, in NumPy and float64.

Everything follows from ``q_v(. | x) = alpha_v x + c_v`` and the jump rates of the chain that has
these marginals; the reverse rates and posteriors are written out state by state.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np


def masked(v: float) -> tuple[float, float, float]:
    return 1 - v, v, 0.0


def uniform(v: float) -> tuple[float, float, float]:
    return 1 - v, 0.0, v


def mixed(v: float, share: float = 0.1) -> tuple[float, float, float]:
    c = 2 * share / (1 - share) * math.sqrt(v * (1 - v))
    return (1 - v) / (1 + c), v / (1 + c), c / (1 + c)


def rates(name: str, v: float, share: float = 0.1) -> tuple[float, float]:
    """Rates of jumps into MASK and into any noise id, from the derivatives by hand."""
    if name == "masked":
        return 1 / (1 - v), 0.0
    if name == "uniform":
        return 0.0, 1 / (1 - v)
    c = 2 * share / (1 - share) * math.sqrt(v * (1 - v))
    return 1 / ((1 + c) * (1 - v)), c / (1 + c) * (0.5 / v + 0.5 / (1 - v))


class Enumerated:
    """A network given by a table of logits, under a process.

    Args:
      table: ``[V^L, L, V]`` logits of each canvas.
      name: of the process.
      mask_id: the id of MASK.
      noise_ids: the noise ids.
    """

    def __init__(self, table: np.ndarray, name: str, mask_id: int, noise_ids: Sequence[int]):
        self.num_positions, self.vocab_size = table.shape[1:]
        self.name, self.mask_id, self.noise_ids = name, mask_id, list(noise_ids)
        self.states = list(itertools.product(range(self.vocab_size), repeat=self.num_positions))
        logits = table.astype(np.float64).copy()
        logits[..., mask_id] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        self.p = p / p.sum(-1, keepdims=True)

    def noise(self, mask: float, text: float) -> np.ndarray:
        c = np.zeros(self.vocab_size)
        c[self.noise_ids] = text / len(self.noise_ids)
        c[self.mask_id] += mask
        return c

    def at(self, v: float) -> tuple[float, np.ndarray]:
        """``alpha`` and ``c`` at a level."""
        alpha, mask, text = {"masked": masked, "uniform": uniform, "mixed": mixed}[self.name](v)
        return alpha, self.noise(mask, text)

    def marginal(self, x: np.ndarray, v: float) -> np.ndarray:
        """``q_v(. | x)`` of a distribution of the clean token."""
        alpha, c = self.at(v)
        return alpha * x + c

    def one_hot(self, token: int) -> np.ndarray:
        return np.eye(self.vocab_size)[token]

    def shown(self, text: Sequence[int], v: float) -> np.ndarray:
        """``[V^L]``: probability of each canvas."""
        own = [self.marginal(self.one_hot(token), v) for token in text]
        return np.array([math.prod(own[i][k] for i, k in enumerate(z)) for z in self.states])

    def term(self, text: Sequence[int], number: int, v: float) -> float:
        """The path divergence per level at one canvas: a sum over all other states."""
        mask, noise = rates(self.name, v)
        into = self.noise(mask, noise)
        total = 0.0
        for i, z in enumerate(self.states[number]):
            true = self.marginal(self.one_hot(text[i]), v)
            model = self.marginal(self.p[number, i], v)
            for k in range(self.vocab_size):
                if k == z or into[z] == 0:
                    continue
                r, r_model = into[z] * true[k] / true[z], into[z] * model[k] / model[z]
                total += r_model - r + (r * math.log(r / r_model) if r > 0 else 0.0)
        return total

    def posterior(self, x: np.ndarray, z: int, v: float, to: float) -> np.ndarray:
        """``q(z_to | z_v, x)`` of a distribution of the clean token, by Bayes' rule."""
        (alpha, c), (alpha_to, c_to) = self.at(v), self.at(to)
        ratio = alpha / alpha_to
        forward = ratio * self.one_hot(z) + (c - ratio * c_to)[z]
        joint = forward * self.marginal(x, to)
        return joint / joint.sum()

    def last(self, text: Sequence[int], v: float) -> float:
        """Mean of ``-ln p(x | z_v)`` of one step to level 0."""
        weight, total = self.shown(text, v), 0.0
        for number, z in enumerate(self.states):
            if weight[number] > 0:
                for i, token in enumerate(text):
                    own = self.posterior(self.p[number, i], z[i], v, 0.0)[token]
                    total -= weight[number] * math.log(own)
        return total

    def bound(self, text: Sequence[int], levels: np.ndarray, weights: np.ndarray) -> float:
        """The integral over those levels."""
        total = 0.0
        for v, weight in zip(levels, weights, strict=True):
            shown = self.shown(text, v)
            total += weight * sum(
                q * self.term(text, number, v) for number, q in enumerate(shown) if q > 0
            )
        return total

    def discrete_bound(self, text: Sequence[int], levels: Sequence[float] | np.ndarray) -> float:
        """Negative ELBO of the chain that stands at falling levels, from 1 to 0."""
        total = self.last(text, levels[-2])
        for v, to in zip(levels[:-2], levels[1:-1], strict=True):
            shown = self.shown(text, v)
            for number, z in enumerate(self.states):
                if shown[number] == 0:
                    continue
                for i, token in enumerate(text):
                    true = self.posterior(self.one_hot(token), z[i], v, to)
                    model = self.posterior(self.p[number, i], z[i], v, to)
                    is_in = true > 0
                    total += shown[number] * float(
                        np.sum(true[is_in] * np.log(true[is_in] / model[is_in]))
                    )
        return total

    def step(self, now: np.ndarray, v: float, to: float) -> np.ndarray:
        """The law of the canvas after a reverse step, ``[V^L]``."""
        after = np.zeros_like(now)
        for number, z in enumerate(self.states):
            if now[number] == 0:
                continue
            own = [self.posterior(self.p[number, i], k, v, to) for i, k in enumerate(z)]
            after += now[number] * functools.reduce(np.multiply.outer, own).reshape(-1)
        return after

    def start(self) -> np.ndarray:
        """The law of a canvas of noise of level 1, ``[V^L]``."""
        _, c = self.at(1.0)
        return np.array([math.prod(c[k] for k in z) for z in self.states])

    def law(
        self, levels: Sequence[float] | np.ndarray, start: np.ndarray | None = None
    ) -> np.ndarray:
        """``[V^L]``: probability that the reverse chain ends at each canvas."""
        now = self.start() if start is None else start
        for v, to in itertools.pairwise(levels):
            now = self.step(now, v, to)
        return now
