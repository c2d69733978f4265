"""The oracles of commit and remask rules against numbers worked out by hand, and laws they keep."""

from __future__ import annotations

import math

import pytest

from . import remask, rules

HOLES = [True, True, False, True, True]
SCHEDULES = [("linear", 1.0), ("cosine", 1.0), ("polynomial", 2.0), ("polynomial", 0.5)]
GRID = [(i, n) for n in (1, 2, 5, 16) for i in range(n)]


def alphas(schedule: str, power: float, step: int, steps: int) -> tuple[float, float]:
    t, s = rules.times(step, steps)
    return rules.alpha(schedule, t, power), rules.alpha(schedule, s, power)


def test_measures_of_a_certain_id_and_of_a_lone_one():
    certain = rules.measures([3.0, -math.inf, -math.inf], 0)
    assert certain == (1.0, 1.0, 0.0, 1.0)
    assert rules.measures([0.3], 0) == (1.0, 1.0, 0.0, 1.0)
    even = rules.measures([1.0, 1.0], 1)
    assert even == pytest.approx((0.5, 0.5, -math.log(2), 0.0))


def test_threshold_takes_all_that_reach_it_and_at_least_the_best_hole():
    confidence = [0.9, 0.95, 1.0, 0.2, 0.9]
    assert rules.threshold(confidence, HOLES, 0.9) == {0, 1, 4}
    assert rules.threshold(confidence, HOLES, 0.99) == {1}, "position 2 is no hole"
    assert rules.threshold([0.3, 0.5, 0.9, 0.5, 0.1], HOLES, 0.8) == {1}, "ties: the lower one"
    assert rules.threshold(confidence, [False] * 5, 0.0) == set()


def test_entropy_bound_counts_what_was_accepted_before():
    entropy = [0.25, 0.5, 0.0, 0.125, 3.0]
    # In order 3, 0, 1, 4 the entropies before each are 0, 0.125, 0.375 and 0.875.
    assert rules.entropy_bound(entropy, HOLES, 0.0) == {3}
    assert rules.entropy_bound(entropy, HOLES, 0.125) == {3, 0}, "exactly the bound is accepted"
    assert rules.entropy_bound(entropy, HOLES, 0.375) == {3, 0, 1}
    assert rules.entropy_bound(entropy, HOLES, 0.875) == {3, 0, 1, 4}
    assert rules.entropy_bound([2.0] * 5, HOLES, 1.0) == {0}, "ties: the lower one"
    assert rules.entropy_bound([0.0, 0.0, 9.0, 1.0, 2.0], HOLES, 0.0) == {0, 1, 3}
    assert rules.entropy_bound(entropy, [False] * 5, 9.0) == set()


def test_schedules_by_hand():
    assert rules.alpha("linear", 0.25) == 0.75
    assert rules.alpha("cosine", 1 / 3) == pytest.approx(0.5)
    assert rules.alpha("polynomial", 0.5, 3.0) == 0.875
    for schedule, power in SCHEDULES:
        assert rules.alpha(schedule, 0.0, power) == 1
        assert rules.alpha(schedule, 1.0, power) == 0
    with pytest.raises(ValueError, match="schedule='sine' is unknown; use linear"):
        rules.alpha("sine", 0.5)


def test_ancestral_linear_fills_one_of_the_steps_left():
    for steps in (1, 2, 7):
        for step in range(steps):
            expected = 1 / (steps - step)
            assert rules.ancestral_probability("linear", step, steps) == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "power"), SCHEDULES)
@pytest.mark.parametrize("kind", ["cap", "rescale"])
@pytest.mark.parametrize("eta", [0.0, 0.04, 0.5, 1.0])
def test_remasking_keeps_the_marginals(kind, eta, schedule, power):
    probability = {"cap": remask.remdm_cap, "rescale": remask.remdm_rescale}[kind]
    for step, steps in GRID:
        alpha_t, alpha_s = alphas(schedule, power, step, steps)
        sigma = probability(alpha_t, alpha_s, eta)
        unmask = remask.remdm_unmask_probability(kind, alpha_t, alpha_s, eta)
        raw = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        assert 0 <= sigma <= 1
        assert unmask == pytest.approx(raw, abs=1e-12), "nothing but rounding is clipped"
        assert alpha_t * (1 - sigma) + (1 - alpha_t) * unmask == pytest.approx(alpha_s, abs=1e-12)


def test_confident_tokens_are_remasked_less_and_all_shares_sum_to_sigma_max():
    shares = remask.remdm_confidence(0.8, 0.9, [0.1, 0.9, 0.5, 0.1], [True, True, False, True])
    assert sum(shares.values()) == pytest.approx(remask.sigma_max(0.8, 0.9))
    assert shares[0] == shares[3]
    assert shares[0] / shares[1] == pytest.approx(math.exp(0.8))
    assert set(shares) == {0, 1, 3}
    assert remask.remdm_confidence(0.8, 0.9, [0.1], [False]) == {}


def test_ratio_goes_from_start_to_end():
    ratios = [remask.scheduled_ratio(i, 4, 0.9, 0.3) for i in range(4)]
    assert ratios == pytest.approx([0.9, 0.7, 0.5, 0.3])
    assert remask.scheduled_ratio(0, 1, 0.9, 0.3) == 0.3


def test_worst_tokens_go_first_ties_to_the_lower_position():
    wrong = [0.5, 0.9, 1.0, 0.5, 0.1]
    members = [True, True, False, True, True]
    assert remask.worst(wrong, members, 0.25) == {1}
    assert remask.worst(wrong, members, 0.5) == {1, 0}
    assert remask.worst(wrong, members, 0.74) == {1, 0}, "2.96 is two"
    assert remask.worst(wrong, members, 0.0) == set()
    assert len(remask.worst([0.5] * 10, [True] * 10, 0.3)) == 3, "0.3 * 10 is below 3 in binary"
