"""Plain-Python reference of the published decoders for one row: what a step commits or remasks.

Written from the formulas of the papers, in float64, with whole distributions where the library
keeps summaries. The last step of a block commits every hole under every rule; that belongs to the
loop. Nothing is vectorised, and nothing is shared with the library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from oracles.commit import most_confident, quota


def _surest(confidence: Sequence[float], places: Sequence[int], count: int = 1) -> set[int]:
    return set(most_confident({i: confidence[i] for i in places}, count))


def frechet(confidence: Sequence[float], holes: Sequence[int], margin: float) -> set[int]:
    """The longest prefix, surest first, with `max(0, sum c - (n-1)) - (1 - c_n) > margin`."""
    ranked = most_confident({i: confidence[i] for i in holes}, len(holes))
    count = 0
    for n in range(1, len(ranked) + 1):
        chosen = [confidence[i] for i in ranked[:n]]
        lower = max(0.0, sum(chosen) - (n - 1))
        if lower - (1 - chosen[-1]) <= margin:
            break
        count = n
    return set(ranked[: max(count, 1)])


def local_leap(
    confidence: Sequence[float], holes: Sequence[int], tau: float, relaxed: float, radius: int
) -> set[int]:
    """Anchors of `tau`, and holes of `relaxed` at most `radius` positions away from one."""
    anchors = {i for i in holes if confidence[i] >= tau}
    near = {
        i for i in holes
        if confidence[i] >= relaxed and any(abs(i - anchor) <= radius for anchor in anchors)
    }  # fmt: skip
    return anchors | near | _surest(confidence, holes)


def hierarchical(
    confidence: Sequence[float], holes: Sequence[int], tau: float, floor: float
) -> set[int]:
    """The surest hole of each run of neighbours if it reaches `floor`, and all that reach `tau`."""
    runs: list[list[int]] = []
    for i in sorted(holes):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    best = set().union(*(_surest(confidence, run) for run in runs))
    chosen = {i for i in best if confidence[i] >= floor}
    chosen |= {i for i in holes if confidence[i] >= tau}
    return chosen | _surest(confidence, holes)


def dilated(holes: Sequence[int], first_holes: int, step: int, base: int) -> set[int]:
    """Multiples of `base ** (R - t)` in round t from 1, with R the least of `base**R >= holes`."""
    rounds = 0
    while base**rounds < first_holes:
        rounds += 1
    spacing = base ** max(rounds - (step + 1), 0)
    return {i for i in holes if i % spacing == 0}


def position_aware(
    probability: Sequence[float],
    tokens: Sequence[int],
    holes: Sequence[int],
    decay: float,
    limit: float,
    shares: Mapping[int, float],
    vocab_size: int,
    count: int,
) -> set[int]:
    """The `count` holes of highest `exp(-decay i) min(-p ln f, limit)`, i from the first hole."""
    rest = (1 - sum(shares.values())) / (vocab_size - len(shares))
    scores = {}
    for i in holes:
        rare = -math.log(shares.get(tokens[i], rest))
        scores[i] = math.exp(-decay * (i - min(holes))) * min(probability[i] * rare, limit)
    return set(most_confident(scores, count))


def prophet(
    confidence: Sequence[float],
    gaps: Sequence[float],
    holes: Sequence[int],
    bound: float,
    step: int,
    steps: int,
) -> set[int]:
    """All holes if their mean gap reaches the bound of the stage, else an even quota of them."""
    if not holes:
        return set()
    progress = step / steps
    tau = bound * (1 if progress < 1 / 3 else 2 / 3 if progress < 2 / 3 else 1 / 3)
    if sum(gaps[i] for i in holes) / len(holes) >= tau:
        return set(holes)
    return _surest(confidence, holes, quota(len(holes), steps - step))


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """`sum p ln(p / q)` in nats."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def klass(
    history: Sequence[Sequence[Sequence[float]]],
    holes: Sequence[int],
    tau: float,
    epsilon: float,
    steps: int,
) -> set[int]:
    """Holes sure and stable for `steps` steps, or the surest; `history[step][place]` is p."""
    now = [max(p) for p in history[-1]]
    ready = set()
    for i in holes:
        pairs = list(zip(history[1:], history, strict=False))[-steps:] if steps else []
        is_stable = len(pairs) == steps and all(
            divergence(after[i], before[i]) < epsilon for after, before in pairs
        )
        if is_stable and now[i] > tau:
            ready.add(i)
    return ready or _surest(now, holes)


def credited(
    history: Sequence[Sequence[float]], weight: float, decay: float, power: float
) -> float:
    """Largest probability of one position under `softmax(ln p + weight ln(1 + credit))`."""
    credit = [0.0] * len(history[0])
    for p in history:
        credit = [decay * c for c in credit]
        credit[max(range(len(p)), key=lambda v: p[v])] += max(p) ** power
    raised = [p * (1 + c) ** weight for p, c in zip(history[-1], credit, strict=True)]
    return max(raised) / sum(raised)


class SlowFast:
    """One row's cycles; `step` gives what a step commits and moves on."""

    def __init__(self, first: int, tau: float, reach: float, slow_steps: int, spread: float):
        self.begin, self.end = first, 0
        self.seen: list[int] = []
        self.tau, self.reach, self.slow_steps, self.spread = tau, reach, slow_steps, spread

    def step(self, confidence: Sequence[float], holes: Sequence[int]) -> set[int]:
        """The holes that are committed."""
        is_slow = self.end == 0
        scope = [i for i in holes if i >= self.begin and (is_slow or i < self.end)]
        scope = scope or list(holes)
        chosen = {i for i in scope if confidence[i] >= self.tau} | _surest(confidence, scope)
        if is_slow:
            far = [i for i in scope if confidence[i] >= self.reach]
            self.seen.append(max([i + 1 for i in far] + [self.begin + 1]))
            last = self.seen[-2:]
            mean = sum(last) / len(last)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in last) / len(last))
            if len(last) == 2 and deviation < self.spread:
                self.end = last[-1]
            elif len(self.seen) >= self.slow_steps:
                self.end = int(mean)
        left = [i for i in holes if i not in chosen and self.begin <= i < self.end]
        if self.end and not left:
            self.begin, self.end, self.seen = self.end, 0, []
        return chosen


def wino(probability: Sequence[float], old: Sequence[int], num_fresh: int, tau: float) -> set[int]:
    """Old tokens below `tau`, the least likely first, fewer than the step has committed."""
    doubted = {i: -probability[i] for i in old if probability[i] < tau}
    return set(most_confident(doubted, max(num_fresh - 1, 0)))


def dawn(
    confidence: Sequence[float], attention: Sequence[Sequence[float]], holes: Sequence[int],
    anchors: Sequence[int], *, high: float, induced: float, low: float, edge: float, sink: float,
) -> set[int]:  # fmt: skip
    """Holes of `high`, of `induced` next to an anchor, and a greedy independent set of `low`.

    A position depends on those that it attends to with at least `edge`, unless their mean attention
    of all positions is above `sink`.
    """
    places = range(len(attention))
    sinks = {j for j in places if sum(row[j] for row in attention) / len(attention) > sink}
    needs = {
        (i, j) for i in places for j in places
        if i != j and j not in sinks and attention[i][j] >= edge
    }  # fmt: skip
    chosen = {i for i in holes if confidence[i] >= high}
    chosen |= {
        i for i in holes if confidence[i] >= induced and any((i, j) in needs for j in anchors)
    }

    def conflicts(i: int) -> bool:
        return any((i, j) in needs or (j, i) in needs for j in chosen)

    rest = [i for i in holes if confidence[i] >= low and i not in chosen and not conflicts(i)]
    for i in most_confident({i: confidence[i] for i in rest}, len(rest)):
        if not conflicts(i):
            chosen.add(i)
    return chosen | _surest(confidence, holes)
