"""Slow NumPy float64 references for the stateless samplers of one position.

Everything is written from the formulas (those of llama.cpp, and the rules in docs/) and shares no
code with the library. `x` is a 1-D array of V logits; -inf marks a token that is already removed.
Every function returns new logits, with what it removes at -inf, and leaves its argument alone.
Removed tokens are no candidates: no truncation counts them towards its minimum, none brings them
back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

Logits = np.ndarray

FLOAT32_MAX_LOG = math.log(float(np.finfo(np.float32).max))


def as_logits(x: object) -> Logits:
    """A fresh float64 copy of `x`: 1-D, no NaN, no +inf, at least one finite entry, or an error."""
    copy = np.array(x, dtype=np.float64)
    if copy.ndim != 1 or np.isnan(copy).any() or (copy == np.inf).any():
        raise ValueError("logits must be 1-D without NaN or +inf")
    if not np.isfinite(copy).any():
        raise ValueError("every token is removed; nothing is left to sample")
    return copy


def log_distribution(x: object) -> Logits:
    """Log-probabilities of the softmax, nats; -inf for removed tokens."""
    x = as_logits(x)
    shifted = x - x.max()
    return shifted - math.log(np.exp(shifted).sum())


def distribution(x: object) -> Logits:
    """Probabilities of the softmax; exactly 0 for removed tokens."""
    return np.exp(log_distribution(x))


def ranked(x: object) -> list[int]:
    """Ids of the candidates (finite logits), largest logit first, ties by lower id."""
    x = as_logits(x)
    return sorted(np.flatnonzero(np.isfinite(x)).tolist(), key=lambda token: (-x[token], token))


def greedy(x: object) -> int:
    """The id of the largest logit, the lowest one on ties."""
    return ranked(x)[0]


def keep_only(
    x: object, ids: Iterable[int], order: Sequence[int] = (), min_keep: int = 1
) -> Logits:
    """`x` with everything but `ids` removed; the first `min_keep` of `order` stay in any case."""
    x = as_logits(x)
    out = np.full_like(x, -np.inf)
    for token in [*ids, *order[: max(1, min_keep)]]:
        out[token] = x[token]
    return out


def logit_bias(x: object, bias: dict[int, float] | Sequence[tuple[int, float]]) -> Logits:
    """`x[id] += bias`; duplicates add up, -inf bans, a removed token stays removed."""
    x = as_logits(x)
    pairs: Iterable[tuple[int, float]] = bias.items() if isinstance(bias, dict) else bias
    for token, amount in pairs:
        if np.isfinite(x[token]):
            x[token] += amount
    return as_logits(x)


def ban(x: object, ids: Iterable[int]) -> Logits:
    """`x` with the given ids removed."""
    return logit_bias(x, [(token, -np.inf) for token in ids])


def newest(context: Sequence[int], last_n: int) -> list[int]:
    """The newest `last_n` tokens of a context (oldest first); all for -1, none for 0."""
    if last_n < 0:
        return list(context)
    return list(context[-last_n:]) if last_n > 0 else []


def context_in_commit_order(
    tokens: Sequence[int], is_visible: Sequence[bool], committed_at: Sequence[int]
) -> list[int]:
    """Visible tokens, oldest commit first, ties by position; given tokens carry step -1."""
    visible = [position for position in range(len(tokens)) if is_visible[position]]
    return [int(tokens[at]) for at in sorted(visible, key=lambda at: (committed_at[at], at))]


def run_left_of(tokens: Sequence[int], is_visible: Sequence[bool], position: int) -> list[int]:
    """The unbroken run of visible tokens that ends at `position - 1`, left to right."""
    start = position
    while start > 0 and is_visible[start - 1]:
        start -= 1
    return [int(token) for token in tokens[start:position]]


def penalties(
    x: object,
    context: Sequence[int],
    *,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    last_n: int = 64,
) -> Logits:
    """Repetition, then frequency and presence penalties over the newest `last_n` of `context`."""
    x = as_logits(x)
    recent = newest(context, last_n)
    for token in set(recent):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= recent.count(token) * frequency + presence
    return x


def dry_matches(run: Sequence[int], breakers: Iterable[int] = ()) -> dict[int, int]:
    """For each token that may be penalised: the longest suffix of `run` it followed earlier.

    The earlier occurrence may overlap the suffix. A suffix holds no breaker, and breakers are
    never penalised.
    """
    stop = set(breakers)
    longest: dict[int, int] = {}
    for follower in range(1, len(run)):
        if run[follower] in stop:
            continue
        size = 0
        while (
            size < follower
            and run[follower - 1 - size] == run[-1 - size]
            and run[-1 - size] not in stop
        ):
            size += 1
        longest[run[follower]] = max(size, longest.get(run[follower], 0))
    return longest


def dry(
    x: object,
    run: Sequence[int],
    *,
    multiplier: float,
    base: float = 1.75,
    allowed_length: int = 2,
    breakers: Iterable[int] = (),
) -> Logits:
    """DRY over `run`, the visible tokens that end just left of the hole.

    The exponent is clamped so that `base ** exponent` fits float32.
    """
    x = as_logits(x)
    for token, size in dry_matches(run, breakers).items():
        if multiplier != 0 and size >= allowed_length:
            exponent = float(size - allowed_length)
            if base > 1:
                exponent = min(exponent, FLOAT32_MAX_LOG / math.log(base))
            x[token] -= multiplier * base**exponent
    return x


def temperature(x: object, value: float) -> Logits:
    """`x / value`; at 0 only the greedy token is left."""
    x = as_logits(x)
    return keep_only(x, [greedy(x)]) if value == 0 else x / value


def dynamic_temperature_value(
    x: object, value: float, delta: float, exponent: float = 1.0
) -> float:
    """The temperature that `dynamic_temperature` divides by (1.0 when one candidate is left)."""
    if value == 0 or delta <= 0:
        return value
    log_p = log_distribution(x)
    log_p = log_p[np.isfinite(log_p)]
    if len(log_p) == 1:
        return 1.0
    entropy = max(0.0, -float((np.exp(log_p) * log_p).sum()))
    low, high = max(0.0, value - delta), value + delta
    return low + (high - low) * (entropy / math.log(len(log_p))) ** exponent


def dynamic_temperature(x: object, value: float, delta: float, exponent: float = 1.0) -> Logits:
    """`x / T'` with T' between value - delta and value + delta by normalised entropy."""
    return temperature(x, dynamic_temperature_value(x, value, delta, exponent))


def top_n_sigma(x: object, n: float, *, min_keep: int = 1) -> Logits:
    """Keeps `x >= max - n * std`, the population std of the finite logits; n <= 0 is off."""
    x = as_logits(x)
    if n <= 0:
        return x
    cut = x.max() - n * x[np.isfinite(x)].std()
    return keep_only(x, np.flatnonzero(x >= cut), ranked(x), min_keep)


def top_k(x: object, k: int, *, min_keep: int = 1) -> Logits:
    """Keeps the `max(k, min_keep)` largest; ties keep lower ids; k <= 0 is off."""
    return as_logits(x) if k <= 0 else keep_only(x, ranked(x)[: max(k, min_keep)])


def typical_order(x: object) -> list[int]:
    """Candidates by `abs(-ln p - H)` ascending, ties by lower id."""
    log_p = log_distribution(x)
    finite = np.flatnonzero(np.isfinite(log_p)).tolist()
    entropy = -sum(math.exp(log_p[token]) * log_p[token] for token in finite)
    return sorted(finite, key=lambda token: (abs(-log_p[token] - entropy), token))


def typical_p(x: object, q: float, *, min_keep: int = 1) -> Logits:
    """Keeps the most typical tokens up to the one whose cumulative mass exceeds q; 1.0 is off."""
    x = as_logits(x)
    if q >= 1:
        return x
    p, order, kept, before = distribution(x), typical_order(x), [], 0.0
    for token in order:
        if before > q:
            break
        kept.append(token)
        before += p[token]
    return keep_only(x, kept, order, min_keep)


def top_p(x: object, q: float, *, min_keep: int = 1) -> Logits:
    """Keeps the smallest most probable set of mass >= q: removes where `cumulative - own >= q`."""
    x = as_logits(x)
    if q >= 1:
        return x
    p, order, kept, before = distribution(x), ranked(x), [], 0.0
    for token in order:
        if before >= q:
            break
        kept.append(token)
        before += p[token]
    return keep_only(x, kept, order, min_keep)


def min_p(x: object, m: float, *, min_keep: int = 1) -> Logits:
    """Keeps `p >= m * max(p)`, that is `x >= max(x) + ln m`; m <= 0 is off."""
    x = as_logits(x)
    if m <= 0:
        return x
    return keep_only(x, np.flatnonzero(x >= x.max() + math.log(m)), ranked(x), min_keep)


def xtc(
    x: object, probability: float, threshold: float, uniform: float, *, min_keep: int = 1
) -> Logits:
    """Drops all but the least likely of the tokens with `p >= threshold`.

    Acts if `uniform < probability` and there are two such tokens. Of equally unlikely ones the
    lowest id stays. When fewer than `min_keep` candidates would be left, nothing is dropped.
    `threshold > 0.5` is off.
    """
    x = as_logits(x)
    if threshold > 0.5 or not uniform < probability:
        return x
    p, candidates = distribution(x), ranked(x)
    choices = [token for token in candidates if p[token] >= threshold]
    if len(choices) < 2 or len(candidates) - (len(choices) - 1) < min_keep:
        return x
    stays = min(choices, key=lambda token: (x[token], token))
    return keep_only(x, [token for token in candidates if token not in choices or token == stays])
