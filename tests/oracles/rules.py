"""Plain-Python reference of the commit rules for one row: how many holes a step fills, and which.

Written from the formulas of the papers, in float64. The last
step of a row commits every hole under every rule; that belongs to the loop and is not repeated
here. Nothing is vectorised, and nothing is shared with the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .commit import softmax


class Measures(NamedTuple):
    """How sure a prediction is; higher is surer. Read from clean logits, every id included."""

    sampled: float
    """Probability of the chosen token."""
    maximum: float
    """Probability of the most probable id."""
    negative_entropy: float
    """Minus the entropy, in nats."""
    margin: float
    """Lead in probability of the most probable id over the second."""


def measures(clean_logits_V: Sequence[float] | np.ndarray, token: int) -> Measures:
    """All measures of one position (the rules in docs/: orders; Dream: entropy, topk_margin)."""
    p = softmax(np.asarray(clean_logits_V, np.float64))
    ranked = sorted(p.tolist(), reverse=True)
    return Measures(
        sampled=float(p[token]),
        maximum=ranked[0],
        negative_entropy=sum(q * math.log(q) for q in ranked if q > 0),
        margin=ranked[0] - ranked[1] if len(ranked) > 1 else ranked[0],
    )


def _holes(is_hole: Sequence[bool]) -> list[int]:
    return [i for i in range(len(is_hole)) if is_hole[i]]


def threshold(confidence: Sequence[float], is_hole: Sequence[bool], tau: float) -> set[int]:
    """Holes whose confidence reaches `tau`, at least the best one (ties: the lower position).

    Wu et al. 2025 (Fast-dLLM). Empty without holes.
    """
    holes = _holes(is_hole)
    best = sorted(holes, key=lambda i: (-confidence[i], i))[:1]
    return {i for i in holes if confidence[i] >= tau} | set(best)


def entropy_bound(entropy: Sequence[float], is_hole: Sequence[bool], bound: float) -> set[int]:
    """The least uncertain holes, accepted while `cumulative - own <= bound`; nats.

    Ben-Hamu et al. 2025 (EB-sampler). The first is accepted whatever its entropy, for
    ``bound >= 0``; ties go to the lower position.
    """
    accepted: set[int] = set()
    before = 0.0
    for i in sorted(_holes(is_hole), key=lambda i: (entropy[i], i)):
        if before > bound:
            break
        accepted.add(i)
        before += entropy[i]
    return accepted


def hidden_share(schedule: str, t: float, power: float = 1.0) -> float:
    """`1 - alpha(t)`: linear `t`, cosine `sin(pi t/2)`, polynomial `t**power` (MD4, table 1)."""
    if schedule == "linear":
        return t
    if schedule == "cosine":
        return math.sin(math.pi * t / 2)
    assert schedule == "polynomial"
    return t**power


def alpha(schedule: str, t: float, power: float = 1.0) -> float:
    """The share of tokens that is visible at time `t` of [0, 1]."""
    return 1 - hidden_share(schedule, t, power)


def times(step: int, steps: int) -> tuple[float, float]:
    """Times `(t, s)` before and after step `step` (from 0): `1 - i/S` and `1 - (i+1)/S`."""
    return 1 - step / steps, 1 - (step + 1) / steps


def unmask_probability(alpha_t: float, alpha_s: float, sigma: float = 0.0) -> float:
    """Probability that a hole is filled: `(alpha_s - (1-sigma) alpha_t) / (1 - alpha_t)`.

    Wang et al. 2025 (ReMDM); with `sigma` 0 the ancestral sampler of Sahoo et al. 2024 (MDLM).
    Rounding is clipped to [0, 1]; `alpha_t` 1 leaves no holes and gives 1.
    """
    if alpha_t >= 1:
        return 1.0
    return min(1.0, max(0.0, (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)))


def ancestral_probability(schedule: str, step: int, steps: int, power: float = 1.0) -> float:
    """Probability that MDLM's ancestral sampler fills a hole in step `step` (from 0) of `steps`."""
    t, s = times(step, steps)
    return unmask_probability(alpha(schedule, t, power), alpha(schedule, s, power))


def annealed_temperature(first: float, last: float, step: int, steps: int) -> float:
    """`T + (T_end - T) * s/(S-1)` at step `s` (from 0) of `S`; `T` when there is one step."""
    return first if steps == 1 else first + (last - first) * step / (steps - 1)
