"""Scaling of rotary frequencies for rows that are longer than those of the training."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from dlm_jax.settings import SettingError

KINDS = {
    "linear": ("factor",),
    "llama3": ("factor", "original", "low", "high"),
    "yarn": ("factor", "original", "low", "high", "scale"),
}
"""The kinds of scaling, with their numbers."""


class RopeScaling(NamedTuple):
    """A scaling of rotary frequencies.

    Attributes:
      kind: ``linear``, ``llama3`` (Llama 3.1) or ``yarn`` (Peng et al. 2023).
      factor: divisor of the low frequencies; with ``linear``, of all frequencies.
      original: row length of the training. A pair makes ``original * frequency / 2 pi`` turns over
        such a row.
      low: number of turns up to which a frequency is divided by `factor`.
      high: number of turns from which a frequency is unchanged. In between, ``llama3``
        interpolates in the number of turns, and ``yarn`` in the index of the pair.
      scale: factor of queries and keys after the rotation.
    """

    kind: str
    factor: float
    original: float = 1.0
    low: float = 1.0
    high: float = 2.0
    scale: float = 1.0

    def __str__(self) -> str:
        said = ",".join(f"{name}={getattr(self, name)!r}" for name in KINDS[self.kind])
        return f"{self.kind}:{said}"

    def multipliers(self, head_size: int, theta: float) -> np.ndarray:
        """The factor of the frequency of each pair, float64 ``[K/2]``."""
        pair_K = np.arange(head_size // 2)
        if self.kind == "linear":
            kept_K = np.zeros(pair_K.size)
        elif self.kind == "llama3":
            turns_K = self.original * theta ** (-2 * pair_K / head_size) / (2 * math.pi)
            kept_K = np.clip((turns_K - self.low) / (self.high - self.low), 0, 1)
        else:
            first = max(math.floor(self._pair_with(self.high, head_size, theta)), 0)
            last = min(math.ceil(self._pair_with(self.low, head_size, theta)), head_size - 1)
            kept_K = 1 - np.clip((pair_K - first) / (last - first or 0.001), 0, 1)
        return kept_K + (1 - kept_K) / self.factor

    def _pair_with(self, turns: float, head_size: int, theta: float) -> float:
        """The index of the pair that makes this number of turns."""
        return head_size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def read_scaling(text: Any) -> RopeScaling | None:
    """The scaling of a text such as ``llama3:factor=8,original=8192,low=1,high=4``; None for ''."""
    if text == "":
        return None
    kind, _, said = str(text).partition(":")
    pairs = [pair.partition("=") for pair in said.split(",")]
    try:
        if kind not in KINDS or [name for name, _, _ in pairs] != list(KINDS[kind]):
            raise ValueError
        made = RopeScaling(kind, **{name: float(value) for name, _, value in pairs})
        if not (all(0 < value < math.inf for value in made[1:]) and made.low < made.high):
            raise ValueError
    except ValueError:
        known = " or ".join(
            f"{kind}:{','.join(f'{name}=NUMBER' for name in names)}"
            for kind, names in KINDS.items()
        )
        raise SettingError(
            "model.rope_scaling",
            text,
            "is not a scaling of positive numbers with low < high",
            f"write {known}",
        ) from None
    return made
