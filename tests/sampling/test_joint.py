"""Texts of an exact model of a Markov chain, beside their law by enumeration."""

import numpy as np
import pytest

from benchmarks import laws as chain

BLIND = chain.Fill(is_parallel=True)
ROWS = 5000
NUMBER = 8 * ROWS


def _is_of(law, settings, seed=0) -> float:
    """The share of as many texts of the law that are as far from it as those of the loop."""
    return chain.p_value(chain.write(settings, NUMBER, seed, rows=ROWS), law, draws=500)


def test_a_one_sided_fill_of_everything_keeps_the_joint_whatever_is_committed_of_it():
    fill = chain.Fill(fills_all=True, is_one_sided=True)
    for steps in (1, 2, 3, 4):
        law = chain.text_law(fill, chain.in_random_order(steps))
        np.testing.assert_allclose(law, chain.joint(), atol=1e-12)
    for other in (BLIND, chain.Fill(), chain.Fill(is_one_sided=True)):
        law = chain.text_law(other, chain.in_random_order(2))
        assert chain.total_variation(law, chain.joint()) > 0.03


@pytest.mark.parametrize(
    "arm",
    [
        "all filled, one-sided",
        *(pytest.param(a, marks=pytest.mark.slow) for a in chain.ARMS if "one-sided" not in a),
    ],
)
def test_texts_follow_the_law_of_what_fills_and_commits_them(arm):
    settings, fill = chain.ARMS[arm]
    law = chain.text_law(fill, chain.in_random_order(2))
    assert _is_of(law, {"steps": 2} | settings) > 0.01
    if arm == "all filled, one-sided":
        settings = settings | {"sampler_one_sided": False}
        assert _is_of(law, {"steps": 2} | settings, seed=NUMBER) < 0.01
