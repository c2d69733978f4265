"""Exact laws of a causal model and of algorithm 1 of Leviathan et al. 2023, by enumeration.

Written from the formulas, in NumPy float64. `logits_of` maps the new tokens so far, a tuple, to the
logits of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
from scipy.stats import chi2

from . import samplers

Text = tuple[int, ...]
TableOf = Callable[[Text], np.ndarray]


def probabilities(
    logits: np.ndarray,
    *,
    banned: Collection[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
) -> np.ndarray:
    """The law of one token after a row's chain; one-hot at temperature 0."""
    x = samplers.ban(logits, banned)
    if temperature == 0:
        return np.eye(len(x))[samplers.greedy(x)]
    x = samplers.temperature(x, temperature)
    x = samplers.top_p(samplers.top_k(x, top_k) if top_k else x, top_p)
    x = samplers.min_p(x, min_p)
    cut = samplers.distribution(samplers.xtc(x, 1.0, xtc_threshold, 0.0))
    return (1 - xtc_probability) * samplers.distribution(x) + xtc_probability * cut


def texts(logits_of: TableOf, length: int, eos: Collection[int], **chain) -> dict[Text, float]:
    """The probability of every text of `length` new tokens, or fewer where EOS ends it."""
    done, open_ = {}, {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, mass in open_.items():
            p = probabilities(logits_of(text), **chain)
            for token in np.flatnonzero(p).tolist():
                (done if token in eos else longer)[*text, token] = mass * p[token]
        open_ = longer
    return done | open_


def greedy(next_logits: Callable[[list[int]], np.ndarray], canvas: Sequence[int], mask: int,
           eos: Collection[int], banned: Collection[int]) -> list[int]:  # fmt: skip
    """The holes of a canvas, filled from left to right by the most likely token; an EOS that no
    given token follows ends the text.
    """
    holes = [place for place, token in enumerate(canvas) if token == mask]
    last_given = max(place for place, token in enumerate(canvas) if token != mask)
    row = list(canvas)
    for place in holes:
        row[place] = samplers.greedy(samplers.ban(next_logits(row[:place]), banned))
        if row[place] in eos and place > last_given:
            return row[: place + 1]
    return row


def accepted(p_of: TableOf, q_of: TableOf, num_drafts: int) -> np.ndarray:
    """The probabilities that 0, 1, ..., `num_drafts` drafts of a block are accepted, given the
    probabilities of the next token behind the drafts so far.

    Draft x is drawn with probability q(x) and accepted with min(1, p(x) / q(x)), so that both
    happen with probability min(p(x), q(x)).
    """
    at_least, open_ = [1.0], {(): 1.0}
    for _ in range(num_drafts):
        longer = {}
        for drafts, mass in open_.items():
            both = np.minimum(p_of(drafts), q_of(drafts))
            longer |= {(*drafts, x): mass * both[x] for x in np.flatnonzero(both).tolist()}
        open_ = longer
        at_least.append(sum(open_.values()))
    return -np.diff([*at_least, 0.0])


def p_value(law: dict[Text, float], seen: Sequence[Text], least: float = 8.0) -> float:
    """Of Pearson's chi-square of samples under a law, whose cells of few are put together."""
    counts, total = Counter(seen), len(seen)
    assert all(law.get(text, 0.0) > 0 for text in counts), "a text outside the support"
    cells, rest = [], np.zeros(2)
    for key, mass in law.items():
        one = np.array([mass * total, counts[key]])
        if one[0] >= least:
            cells.append(one)
        else:
            rest += one
    if rest[0] > 0:
        cells.append(rest)
    wanted, found = np.transpose(cells)
    assert len(cells) > 1
    return float(chi2.sf(((found - wanted) ** 2 / wanted).sum(), len(cells) - 1))


def of_parts(law: dict[Text, float], part: slice) -> dict[Text, float]:
    """The law of a part of each text."""
    out: dict[Text, float] = {}
    for text, mass in law.items():
        out[text[part]] = out.get(text[part], 0.0) + mass
    return out
