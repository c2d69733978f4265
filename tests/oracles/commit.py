"""Plain-Python reference of the diffusion generation loop for one row at temperature 0.

Written from the rules in docs/: quotas, blocks, commit orders and a whole denoising loop. Nothing
here is vectorised, and nothing is shared with the library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

LogitsFn = Callable[[np.ndarray], np.ndarray]
"""Tokens [L] to logits [L, V], row i predicting position i."""


def quota(holes: int, steps_left: int) -> int:
    """Positions to commit in this step: `ceil(holes / steps_left)`, all of them in the last."""
    return -(-holes // steps_left)


def cosine_remaining(block_holes: int, step: int, steps: int) -> int:
    """Holes of a block that remain after its step `step` (1-based) of `steps`.

    `ceil(h * cos(pi/2 * step/steps))`; 1e-3 is taken off first, so that products that are whole
    numbers on paper (`2 * cos(pi/3)`) do not round up, and the last step leaves none.
    """
    if step >= steps:
        return 0
    return max(0, math.ceil(block_holes * math.cos(math.pi / 2 * step / steps) - 1e-3))


def cosine_quota(block_holes: int, holes: int, step: int, steps: int) -> int:
    """Positions to commit in step `step` (1-based) when the block still has `holes`; may be 0."""
    return max(0, holes - cosine_remaining(block_holes, step, steps))


def timestep_quota(holes: int, step: int, steps: int) -> int:
    """Positions to commit in step `step` (1-based): `int(holes * (1 - s / t))`, the last takes all.

    Times fall evenly from 1 to 1e-3 over the steps; in float32, as Dream computes them.
    """
    if step == steps:
        return holes
    one, last = np.float32(1), np.float32(1e-3)
    width = (last - one) / np.float32(steps)
    early = [one + width * np.float32(i) for i in range(steps + 1)]
    late = [last - width * np.float32(steps - i) for i in range(steps + 1)]
    times = [early[i] if i < (steps + 1) // 2 else late[i] for i in range(steps + 1)]
    return int(np.float32(holes) * (one - times[step] / times[step - 1]))


def count_of_ratio(ratio: float, n: int) -> int:
    """`floor(ratio * n + 1e-3)`."""
    return math.floor(ratio * n + 1e-3)


def most_confident(scores: dict[int, float], k: int) -> list[int]:
    """The k positions with the highest score, best first, ties to the lower position."""
    return sorted(scores, key=lambda position: (-scores[position], position))[:k]


def softmax(logits_V: np.ndarray) -> np.ndarray:
    """Probabilities in float64."""
    x = np.asarray(logits_V, np.float64)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def score(clean_logits_V: np.ndarray, token: int, order: str, confidence: str = "sampled") -> float:
    """How early a position wants to be committed to `token`; higher is earlier.

    All orders read the clean logits, every id included: `low_confidence` is the probability of the
    token ("sampled") or the largest one ("max"), `entropy` minus the entropy in nats, `margin` the
    lead of the most probable id over the second.
    """
    p = softmax(clean_logits_V)
    if order == "low_confidence":
        return float(p[token] if confidence == "sampled" else p.max())
    if order == "entropy":
        return float(sum(q * math.log(q) for q in p if q > 0))
    assert order == "margin"
    ranked = sorted(p.tolist(), reverse=True)
    return ranked[0] - ranked[1] if len(ranked) > 1 else ranked[0]


def greedy_token(logits_V: np.ndarray, banned: set[int]) -> int:
    """The largest logit among the ids that are not banned, the lowest id on ties."""
    allowed = [token for token in range(len(logits_V)) if token not in banned]
    return min(allowed, key=lambda token: (-float(logits_V[token]), token))


def blocks(frozen: Sequence[bool], length: int, block_length: int | None) -> list[range]:
    """Windows of `block_length` (None: one window), first unfrozen position to `length`."""
    start = next((i for i in range(length) if not frozen[i]), length)
    size = block_length or max(1, length - start)
    return [range(at, min(at + size, length)) for at in range(start, length, size)]


def split_steps(steps: int, parts: int) -> list[int]:
    """`steps` over `parts` blocks, the remainder on the first ones; at least one step each."""
    assert steps >= parts
    return [steps // parts + (i < steps % parts) for i in range(parts)]


@dataclasses.dataclass
class Trace:
    """What `denoise` did: final tokens, positions per step, and how close its choices were."""

    tokens: np.ndarray
    """[L] final canvas."""
    commits: list[list[int]]
    """Positions committed in each step, best first; one forward per entry."""
    blocks: list[int]
    """Index of the block that each step worked on, among all blocks."""
    score_gap: float
    """Smallest lead of a committed score over an uncommitted one; inf if there was no choice."""
    token_gap: float
    """Smallest lead in logits of a committed token over the next allowed one."""


def denoise(
    logits_fn: LogitsFn,
    tokens: Sequence[int],
    *,
    steps: int,
    mask_id: int,
    banned: set[int],
    length: int | None = None,
    frozen: Sequence[bool] | None = None,
    block_length: int | None = None,
    schedule: str = "linear",
    order: str = "low_confidence",
    confidence: str = "sampled",
) -> Trace:
    """The row after temperature-0 unmasking, most confident holes first.

    Holes are the live, unfrozen positions that hold MASK (`frozen=None`: whatever is not MASK is
    frozen). A block is finished before the next one starts; steps that it does not use are dropped.
    Scores that differ by less than float32 resolution may order differently elsewhere: look at the
    gaps of the result before comparing.
    """
    canvas = np.array(tokens)
    length = len(canvas) if length is None else length
    frozen = [int(t) != mask_id for t in canvas] if frozen is None else list(frozen)

    def holes_of(window: range) -> list[int]:
        return [i for i in window if not frozen[i] and canvas[i] == mask_id]

    windows = blocks(frozen, length, block_length)
    busy = [index for index, window in enumerate(windows) if holes_of(window)]
    trace = Trace(canvas, [], [], math.inf, math.inf)
    for index, budget in zip(busy, split_steps(steps, len(busy)) if busy else [], strict=True):
        total = len(holes_of(windows[index]))
        for step in range(1, budget + 1):
            holes = holes_of(windows[index])
            if not holes:
                break
            if schedule == "linear":
                k = quota(len(holes), budget - step + 1)
            else:
                k = cosine_quota(total, len(holes), step, budget)
            _commit_step(logits_fn, trace, holes, k, banned, order, confidence)
            trace.blocks.append(index)
    return trace


def _commit_step(
    logits_fn: LogitsFn,
    trace: Trace,
    holes: list[int],
    k: int,
    banned: set[int],
    order: str,
    confidence: str,
) -> None:
    logits_LV = np.asarray(logits_fn(trace.tokens.copy()), np.float64)
    chosen = {i: greedy_token(logits_LV[i], banned) for i in holes}
    scores = {i: score(logits_LV[i], chosen[i], order, confidence) for i in holes}
    winners = most_confident(scores, k)
    losers = [scores[i] for i in holes if i not in winners]
    if winners and losers:
        trace.score_gap = min(trace.score_gap, scores[winners[-1]] - max(losers))
    for i in winners:
        rest = greedy_rest(logits_LV[i], banned | {chosen[i]})
        trace.token_gap = min(trace.token_gap, logits_LV[i][chosen[i]] - rest)
        trace.tokens[i] = chosen[i]
    trace.commits.append(winners)


def greedy_rest(logits_V: np.ndarray, banned: set[int]) -> float:
    """The largest logit outside `banned`; -inf when nothing is left."""
    rest = [float(logits_V[t]) for t in range(len(logits_V)) if t not in banned]
    return max(rest, default=-math.inf)
