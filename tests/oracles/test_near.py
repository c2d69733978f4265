"""Which decisions the helper calls too close, by hand and under float32-sized noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from . import chain, near, samplers
from .test_oracles import FIVE, kept, logits_of


def test_near_names_only_the_tokens_at_a_threshold():
    x = logits_of(0.5, 0.25, 0.125, 0.125)
    assert near.undecided("top_p", x, {"top_p": 0.75}) == {2}
    assert near.undecided("top_p", x, {"top_p": 0.7}) == set()
    assert near.undecided("top_p", x, {"top_p": 0.7}, is_exact=False) == set()
    assert near.undecided("top_p", [0.0] * 100, {"top_p": 0.01 + 5e-7}) == {1}, "absolute 1e-6"
    assert near.undecided("min_p", x, {"min_p": 0.25}) == {2, 3}
    assert near.undecided("min_p", x, {"min_p": 0.3}) == set()
    assert near.undecided("top_k", x, {"top_k": 3}) == set()
    assert near.undecided("top_k", [1.0, 1.0 + 1e-7, 0.0], {"top_k": 1}, is_exact=False) == {0, 1}
    assert near.undecided("mirostat", x, {"mirostat": 2}, mu=2.0) == {1}
    assert near.undecided("mirostat", x, {"mirostat": 2}, mu=-4.0) == set()
    slope_two = -2 * np.log(np.arange(1, 11))
    at_two = math.log2(4 * 0.9)
    assert near.undecided("mirostat", slope_two, {"mirostat": 1}, mu=at_two) == {1}
    assert near.undecided("mirostat", slope_two, {"mirostat": 1}, mu=3.0) == set()
    # With p >= 0.125 the least of three stays; just above, the least of two.
    cold = {"xtc_probability": 1.0, "xtc_threshold": 0.125}
    assert near.undecided("xtc", logits_of(0.5, 0.25, 0.125, 0.0625, 0.0625), cold) == {1}
    assert near.undecided("xtc", FIVE, cold) == set()
    sigma = {"top_n_sigma": 2 / math.sqrt(8 / 3)}
    assert near.undecided("top_n_sigma", [0.0, 2.0, 4.0], sigma) == {1}
    assert near.undecided("typical_p", logits_of(0.6, 0.15, 0.15, 0.1), {"typical_p": 0.6}) == {1}


def test_near_in_chain_follows_an_early_doubt_to_a_later_stage():
    # Whether id 2 passes top-p decides the mass that min-p's neighbour, mirostat or XTC sees.
    x = logits_of(0.5, 0.25, 0.125, 0.125)
    assert near.undecided_in_chain(x, {"top_p": 0.75}) == {2}
    assert near.undecided_in_chain(x, {"top_p": 0.7, "top_k": 3}) == set()
    xtc_after = {"top_p": 0.75, "xtc_probability": 1.0, "xtc_threshold": 0.3}
    # Without id 2: 0.67, 0.33, both choices, so 0 goes. With it: 0.57, 0.29, one choice.
    assert near.undecided_in_chain(x, xtc_after) == {0, 2}
    assert near.undecided_in_chain([1.0, 1.0 + 1e-7], {"temperature": 0.0}) == {0, 1}
    assert near.undecided_in_chain([1.0, 1.1], {"temperature": 0.0}) == set()


def settings_at_a_threshold(stage: str, x: np.ndarray, rank: int) -> dict[str, float]:
    """Settings of one stage that put the candidate of this rank (0 is best) exactly on its cut."""
    p = samplers.distribution(x)
    by_logit, by_typical = samplers.ranked(x), samplers.typical_order(x)
    token = by_logit[rank]
    return {
        "top_k": {"top_k": rank},
        "top_p": {"top_p": p[by_logit[:rank]].sum()},
        "typical_p": {"typical_p": p[by_typical[:rank]].sum()},
        "min_p": {"min_p": p[token] / p.max()},
        "top_n_sigma": {"top_n_sigma": (x.max() - x[token]) / x.std()},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": p[token]},
        "mirostat": {"mirostat": 2, "mirostat_tau": -math.log2(p[token]) / 2},
    }[stage]


@pytest.mark.parametrize("stage", [*chain.TRUNCATIONS, "xtc", "mirostat"])
def test_rounding_changes_only_undecided_tokens(stage: str):
    """Float32-sized noise on logits with near ties, at a threshold half of the time."""
    rng = np.random.default_rng(7)
    differing = certain = 0
    for trial in range(300):
        x = rng.choice(13, size=8, replace=False) / 3.0 - 2
        if trial % 3 == 0:
            x[rng.integers(8)] = x[rng.integers(8)] * (1 + 1e-7)
        rank = int(rng.integers(1, 5))
        settings = settings_at_a_threshold(stage, x, rank)
        if trial % 2 and stage != "top_k":
            settings = {key: value * 1.001 for key, value in settings.items() if key != "mirostat"}
            settings |= {"mirostat": 2} if stage == "mirostat" else {}
        moved = x * (1 + rng.uniform(-2e-7, 2e-7, size=8))
        before, after = (set(kept(chain.full_chain(v, settings))) for v in (x, moved))
        doubt = near.undecided_in_chain(x, settings)
        assert (before ^ after) <= doubt
        differing += before != after
        certain += not doubt
    assert differing > 0 and certain > 50, "no decision was close, or every one was doubted"
