"""Plain-Python reference of the remask rules for one row: which tokens become holes again.

Written from Wang et al. 2025 (ReMDM) and the rules in docs/ (scheduled ratio), in float64.
Tokens that may be remasked are committed, live and unfrozen. Nothing is vectorised, and nothing is
shared with the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .commit import count_of_ratio
from .rules import unmask_probability


def sigma_max(alpha_t: float, alpha_s: float) -> float:
    """The largest remask probability, `min(1, (1 - alpha_s) / alpha_t)` (Wang et al. 2025).

    With `alpha_t` 0 (the first step) the quotient is unbounded, so 1. The process has no committed
    token then: only a draft can notice, and every value keeps the marginals.
    """
    return 1.0 if alpha_t <= 0 else min(1.0, (1 - alpha_s) / alpha_t)


def remdm_cap(alpha_t: float, alpha_s: float, eta: float) -> float:
    """Remask probability of every committed token: `min(eta, sigma_max)`."""
    return min(eta, sigma_max(alpha_t, alpha_s))


def remdm_confidence(
    alpha_t: float, alpha_s: float, confidence: Sequence[float], may_remask: Sequence[bool]
) -> dict[int, float]:
    """Remask probability of each committed token: `softmax(-confidence) * sigma_max`.

    The softmax runs over the tokens that may be remasked.
    Confidence is the probability that each had when it was committed.
    """
    members = [i for i in range(len(may_remask)) if may_remask[i]]
    weights = {i: math.exp(-confidence[i]) for i in members}
    total = sum(weights.values())
    return {i: sigma_max(alpha_t, alpha_s) * weights[i] / total for i in members}


def remdm_unmask_probability(kind: str, alpha_t: float, alpha_s: float, eta: float = 0.0) -> float:
    """Probability that a hole is filled under ReMDM `kind` cap or confidence.

    Under `confidence` a hole counts as infinitely confident (Wang et al. 2025): its own sigma is
    0, and the probability is that of the ancestral sampler.
    """
    if kind == "confidence":
        return unmask_probability(alpha_t, alpha_s)
    sigma = remdm_cap(alpha_t, alpha_s, eta)
    return unmask_probability(alpha_t, alpha_s, sigma)


def scheduled_ratio(iteration: int, iterations: int, start: float, end: float) -> float:
    """`start - (start-end) * i/(N-1)` before iteration `i` (from 0) of `N`; `end` when N is 1."""
    return end if iterations == 1 else start - (start - end) * iteration / (iterations - 1)


def worst(wrong: Sequence[float], may_remask: Sequence[bool], ratio: float) -> set[int]:
    """Tokens to remask: the `floor(ratio * n + 1e-3)` worst of the `n` that may be remasked.

    Ties go to the lower position. When every live unfrozen token is committed, as before each
    iteration of the refinement loop, `n` is the number of live unfrozen positions.
    """
    members = [i for i in range(len(may_remask)) if may_remask[i]]
    ranked = sorted(members, key=lambda i: (-wrong[i], i))
    return set(ranked[: count_of_ratio(ratio, len(members))])
