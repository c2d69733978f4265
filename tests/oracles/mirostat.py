"""Slow float64 references of mirostat v1 and v2, whose one state is `mu` per row, in bits.

Written from Basu et al. 2021 and the rules in docs/; truncations return new logits like `samplers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from . import samplers
from .samplers import Logits


def v1_k(x: object, mu: float, *, m: int = 100, slope_shift: float = 0.0) -> float:
    """The real-valued k of mirostat v1, in [0, inf]; V counts the whole vocabulary.

    Limits are taken where the formula is 0/0: `eps -> 0` gives `2**mu / ln V`. `slope_shift`
    is added to the estimated Zipf slope, to see how far k moves when the slope is a little off.
    """
    x = samplers.as_logits(x)
    top = [x[token] for token in samplers.ranked(x)[:m]]
    if len(top) < 2:
        return 1.0
    t = [math.log((i + 2) / (i + 1)) for i in range(len(top) - 1)]
    b = [top[i] - top[i + 1] for i in range(len(top) - 1)]
    slope = sum(u * v for u, v in zip(t, b, strict=True)) / sum(u * u for u in t)
    slope = max(0.0, slope + slope_shift)
    eps, log_v = slope - 1.0, math.log(len(x))
    ratio = eps / -math.expm1(-eps * log_v) if eps != 0 else 1 / log_v
    log_power = mu * math.log(2) + math.log(ratio)
    if slope == 0:
        return math.inf if log_power > 0 else (1.0 if log_power == 0 else 0.0)
    log_k = log_power / slope
    return math.exp(log_k) if log_k < 700 else math.inf


def v1(x: object, mu: float, *, m: int = 100, min_keep: int = 1) -> Logits:
    """Top-k with the k of mirostat v1, floored, at least one."""
    k = min(v1_k(x, mu, m=m), float(len(samplers.as_logits(x))))
    return samplers.top_k(x, max(1, math.floor(k)), min_keep=min_keep)


def v2(x: object, mu: float, *, min_keep: int = 1) -> Logits:
    """Drops the tokens whose surprise `-log2 p` exceeds mu; the most likely one stays."""
    surprise = -samplers.log_distribution(x) / math.log(2)
    return samplers.keep_only(x, np.flatnonzero(surprise <= mu), samplers.ranked(x), min_keep)


def start(tau: float = 5.0) -> float:
    """The first mu of a row: `2 * tau`."""
    return 2.0 * tau


def update(
    mu: float, committed: Sequence[tuple[object, int]], *, tau: float = 5.0, eta: float = 0.1
) -> float:
    """The next mu, from one (truncated logits, token) per position committed in the step.

    The surprise in bits is read after truncation and renormalisation and averaged over the
    positions. A step that commits nothing leaves mu alone.
    """
    if not committed:
        return mu
    bits = [-samplers.log_distribution(logits)[token] / math.log(2) for logits, token in committed]
    return mu - eta * (sum(bits) / len(bits) - tau)
