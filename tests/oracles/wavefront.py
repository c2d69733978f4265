"""Plain-Python reference of the wavefront fill of one row.

Written from the rules in docs/: the waves are played one after
the other on a canvas, as the document's loop does, and no distance is ever computed. Float64, one
position at a time; nothing is shared with the library. The networks are functions of one position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from .commit import count_of_ratio, softmax

Head = Callable[[np.ndarray], np.ndarray]
"""Hidden vector [D] to the main head's clean logits [V]."""
SamplerHead = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Left neighbours [C, D], hidden [D], right neighbours [C, D] to logits [V]; nearest come first."""
Draw = Callable[[int, np.ndarray], int]
"""A position and the logits [V] to draw from to a token: the row's chain, a draw of its own."""
Measure = Callable[[np.ndarray, float], float]
"""Clean logits [V] and the token's log-probability to a confidence."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a row is filled; `temperature` divides what is drawn from the sampler head, no score.

    `ratio` is the share of seeds. `top_p` is the mass of the sampler head's tokens that are
    drawn, after the division.
    """

    ratio: float = 0.01
    is_alternating: bool = False
    is_one_sided: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    banned: Collection[int] = ()
    context: int = 1


@dataclasses.dataclass
class Filled:
    """What `fill` did: one entry per open position, and how close its choice of seeds was."""

    canvas: list[int]
    """[L] tokens, the open positions filled."""
    logprob: dict[int, float]
    """Of each token under the clean logits of the head that it was drawn from, in nats."""
    confidence: dict[int, float]
    """What the measure said of the same logits."""
    passes: list[list[int]]
    """Positions that were drawn at once, blind to each other: first the seeds, if any."""
    num_waves: int
    """Waves after the seeds; two sub-waves are one wave."""
    seeds: list[int]
    """Positions drawn from the main head, left to right."""
    gap: float
    """Smallest lead in probability of a seed over a position that it was preferred to, and least
    difference between the mass in front of a token and what the nucleus asks for."""


def islands(is_open: Sequence[bool]) -> list[list[int]]:
    """Maximal runs of open positions, left to right."""
    runs: list[list[int]] = []
    for i in range(len(is_open)):
        if is_open[i]:
            if i == 0 or not is_open[i - 1]:
                runs.append([])
            runs[-1].append(i)
    return runs


def certainty(clean_V: np.ndarray, banned: Collection[int]) -> float:
    """The largest probability of an id that is not banned, among those."""
    allowed_V = np.array(clean_V, np.float64)
    allowed_V[list(banned)] = -math.inf
    return float(softmax(allowed_V).max())


def nucleus(
    logits_V: np.ndarray, top_p: float, banned: Collection[int]
) -> tuple[np.ndarray, float]:
    """The logits with all but the likeliest tokens at -inf, and how clear the cut was.

    From the likeliest on, those of equal logit in the order of their ids, until they have the mass.
    """
    if top_p >= 1:
        return logits_V, math.inf
    allowed_V = np.array(logits_V, np.float64)
    allowed_V[list(banned)] = -math.inf
    prob_V = softmax(allowed_V)
    kept_V, mass, gap = np.full_like(allowed_V, -math.inf), 0.0, math.inf
    for token in sorted(range(len(prob_V)), key=lambda v: (-prob_V[v], v)):
        gap = min(gap, abs(mass - top_p))
        if mass >= top_p:
            break
        kept_V[token] = logits_V[token]
        mass += prob_V[token]
    return kept_V, gap


def choose_seeds(
    is_open: Sequence[bool],
    is_visible: Sequence[bool],
    sureness: Callable[[int], float],
    rule: Rule,
) -> tuple[list[int], float]:
    """Positions to draw from the main head, left to right, and how clear the choice was.

    The surest of all that no visible token reaches (or of each of as many windows of them), and the
    surest of each island that is still without.
    """
    at = dict(enumerate(is_visible))
    unreached = [run for run in islands(is_open) if not (at.get(run[0] - 1) or at.get(run[-1] + 1))]
    members = [i for run in unreached for i in run]
    if not members:
        return [], math.inf
    gaps, seeds = [math.inf], set()
    sure = {i: sureness(i) for i in members}

    def pick(candidates: list[int], n: int) -> None:
        order = sorted(candidates, key=lambda i: (-sure[i], i))
        seeds.update(order[:n])
        if n < len(order):
            gaps.append(sure[order[n - 1]] - sure[order[n]])

    n = max(1, count_of_ratio(rule.ratio, len(members)))
    pick(members, n)
    for run in unreached:
        if not seeds & set(run):
            pick(run, 1)
    return sorted(seeds), min(gaps)


def fill(
    tokens: Sequence[int],
    is_open: Sequence[bool],
    is_visible: Sequence[bool],
    hidden_LD: np.ndarray,
    *,
    embed_VD: np.ndarray,
    head: Head,
    sampler_head: SamplerHead,
    draw: Draw,
    measure: Measure,
    rule: Rule,
) -> Filled:
    """The row with its open positions filled from the visible tokens outwards.

    Neither visible nor open is a hole of another window, or PAD: it blocks. An open position is not
    visible, whatever `is_visible` says of it.
    """
    length = len(tokens)
    is_seen = [bool(is_visible[i]) and not is_open[i] for i in range(length)]
    seeds, gap = choose_seeds(
        is_open, is_seen, lambda i: certainty(head(hidden_LD[i]), rule.banned), rule
    )
    done = Filled([int(t) for t in tokens], {}, {}, [], 0, seeds, gap)

    def commit(
        positions: list[int],
        logits_of: Callable[[int], np.ndarray],
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> None:
        """All at once: none of them sees what another one gets."""
        drawn = {}
        for i in positions:
            clean_V = np.asarray(logits_of(i), np.float64)
            drawable_V, gap = nucleus(clean_V / temperature, top_p, rule.banned)
            done.gap = min(done.gap, gap)
            drawn[i] = draw(i, drawable_V)
            done.logprob[i] = math.log(softmax(clean_V)[drawn[i]])
            done.confidence[i] = measure(clean_V, done.logprob[i])
        for i in positions:
            done.canvas[i], is_seen[i] = drawn[i], True
        if positions:
            done.passes.append(positions)

    def neighbour(i: int) -> np.ndarray:
        is_there = 0 <= i < length and is_seen[i]
        return embed_VD[done.canvas[i]] if is_there else np.zeros_like(embed_VD[0])

    def from_neighbours(i: int) -> np.ndarray:
        near = range(1, rule.context + 1)
        left_CD = np.stack([neighbour(i - k) for k in near])
        right_CD = np.stack([neighbour(i + k) for k in near])
        return sampler_head(left_CD, hidden_LD[i], right_CD)

    commit(seeds, lambda i: head(hidden_LD[i]))
    while waiting := [i for i in range(length) if is_open[i] and not is_seen[i]]:
        wave = [i for i in waiting if any(0 <= j < length and is_seen[j] for j in (i - 1, i + 1))]
        if rule.is_one_sided:
            # The last of a run waits for as long as there is something in front of its first.
            runs = islands([i in waiting for i in range(length)])
            fed = [run for run in runs if run[0] > 0 and is_seen[run[0] - 1]]
            wave = [i for i in wave if not any(i in run and i != run[0] for run in fed)]
        assert wave, "an island without a seed touches nothing visible"
        parts = [[i for i in wave if i % 2 == odd] for odd in (0, 1)]
        for part in parts if rule.is_alternating else [wave]:
            commit(part, from_neighbours, rule.temperature, rule.top_p)
        done.num_waves += 1
    return done
