"""Texts of an exact model of a Markov chain, beside their law by enumeration."""

import numpy as np
import pytest

from benchmarks import laws, markov

BLIND = markov.Fill(is_parallel=True)
ROWS = 5000
NUMBER = 8 * ROWS


def _is_of(law, settings, seed=0) -> float:
    """The share of as many texts of the law that are as far from it as those of the loop."""
    return laws.p_value(laws.write(settings, NUMBER, seed, rows=ROWS), law, draws=500)


@pytest.mark.parametrize("fill", [fill for _, fill in laws.ARMS.values()], ids=list(laws.ARMS))
def test_the_law_of_a_fill_is_a_distribution_and_exact_one_token_at_a_time(fill):
    for steps in (1, 2, 3):
        law = markov.text_law(fill, markov.in_random_order(steps))
        assert (law >= 0).all() and law.sum() == pytest.approx(1)
    if not fill.fills_all:
        alone = markov.text_law(fill, markov.in_random_order(markov.LENGTH))
        np.testing.assert_allclose(alone, markov.joint(), atol=1e-12)


def test_a_one_sided_fill_of_everything_keeps_the_joint_whatever_is_committed_of_it():
    fill = markov.Fill(fills_all=True, is_one_sided=True)
    for steps in (1, 2, 3, 4):
        law = markov.text_law(fill, markov.in_random_order(steps))
        np.testing.assert_allclose(law, markov.joint(), atol=1e-12)
    for other in (BLIND, markov.Fill(), markov.Fill(is_one_sided=True)):
        law = markov.text_law(other, markov.in_random_order(2))
        assert markov.total_variation(law, markov.joint()) > 0.03


@pytest.mark.slow
def test_ancestral_texts_are_off_by_just_what_their_steps_commit_together():
    """0.0078 at 64 steps; with as many steps as it takes nothing is left."""
    counts = (2, 8, 64, 100_000)
    far = {steps: markov.text_law(BLIND, markov.ancestral(steps)) for steps in counts}
    off = {steps: markov.total_variation(law, markov.joint()) for steps, law in far.items()}
    assert far[64].sum() == pytest.approx(1)
    assert off[64] == pytest.approx(0.00775, abs=1e-5)
    assert off[2] > 0.15 and off[100_000] < 1e-5
    for steps in (2, 8):
        settings = {"order": "ancestral", "steps": steps}
        assert _is_of(far[steps], settings) > 0.01
    # The test would tell: texts of two steps are none of the joint.
    assert _is_of(markov.joint(), {"order": "ancestral", "steps": 2}) < 0.01


@pytest.mark.parametrize(
    "arm",
    [
        "all filled, one-sided",
        *(pytest.param(a, marks=pytest.mark.slow) for a in laws.ARMS if "one-sided" not in a),
    ],
)
def test_texts_follow_the_law_of_what_fills_and_commits_them(arm):
    settings, fill = laws.ARMS[arm]
    law = markov.text_law(fill, markov.in_random_order(2))
    assert _is_of(law, {"steps": 2} | settings) > 0.01
    if arm == "all filled, one-sided":
        settings = settings | {"sampler_one_sided": False}
        assert _is_of(law, {"steps": 2} | settings, seed=NUMBER) < 0.01


@pytest.mark.slow
def test_blind_candidates_that_are_not_committed_change_nothing():
    some, all_of_them = (
        laws.write({"order": order, "steps": 3}, ROWS, 7, rows=ROWS)
        for order in ("random", "random_filled")
    )
    np.testing.assert_array_equal(all_of_them.counts, some.counts)
    assert (some.filled, all_of_them.filled) == (5, 5 + 3 + 1)
