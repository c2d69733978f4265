"""The oracles of the published decoders against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from contrib import oracle as decoders


def test_frechet_bounds_by_hand_and_for_equal_confidences():
    # Leads: 0.9 - 0.1, 0.7 - 0.2, 0.4 - 0.3 and 0 - 0.4.
    confidence, holes = [0.8, 0.9, 0.6, 0.7], [0, 1, 2, 3]
    assert decoders.frechet(confidence, holes, 0.6) == {1}
    assert decoders.frechet(confidence, holes, 0.45) == {0, 1}
    assert decoders.frechet(confidence, holes, 0.05) == {0, 1, 3}
    assert decoders.frechet(confidence, holes, -0.5) == {0, 1, 2, 3}
    assert decoders.frechet(confidence, holes, 1.0) == {1}, "one at least"
    for c in (0.55, 0.81, 0.93):
        for margin in (0.05, 0.26):
            # The bound of n equal confidences: n (1 - c) is at most 1 - margin - (1 - c).
            wanted = max([n for n in range(1, 10) if c >= 1 - (1 - margin) / (n + 1)], default=1)
            assert len(decoders.frechet([c] * 9, range(9), margin)) == wanted


def test_near_an_anchor_less_is_enough():
    confidence = [0.8, 0.7, 0.95, 0.7, 0.7, 0.8]
    assert decoders.local_leap(confidence, range(6), 0.9, 0.75, 2) == {0, 2}
    assert decoders.local_leap(confidence, range(6), 0.9, 0.7, 1) == {1, 2, 3}
    assert decoders.local_leap(confidence, [0, 1, 3], 0.9, 0.7, 1) == {0}, "no anchor is a hole"


def test_each_run_has_its_surest():
    confidence = [0.5, 0.6, 0.1, 0.2, 0.3, 0.95]
    assert decoders.hierarchical(confidence, [0, 1, 3, 4], 0.9, 0.0) == {1, 4}
    assert decoders.hierarchical(confidence, [0, 1, 3, 4], 0.9, 0.4) == {1}
    assert decoders.hierarchical(confidence, [0, 1, 3, 4, 5], 0.5, 0.0) == {0, 1, 5}


def test_holes_that_depend_on_each_other_do_not_commit_together():
    # Position 1 attends to 0, 2 to 1, and all to 4.
    attention = [
        [0.6, 0.0, 0.0, 0.0, 0.4],
        [0.5, 0.1, 0.0, 0.0, 0.4],
        [0.0, 0.5, 0.1, 0.0, 0.4],
        [0.0, 0.0, 0.0, 0.6, 0.4],
        [0.0, 0.0, 0.0, 0.0, 1.0],
    ]
    confidence, common = [0.8, 0.85, 0.75, 0.72, 1.0], {"high": 0.9, "edge": 0.3, "sink": 0.5}
    arguments = confidence, attention, [0, 1, 2, 3], [4]
    assert decoders.dawn(*arguments, induced=0.9, low=0.7, **common) == {1, 3}
    assert decoders.dawn(*arguments, induced=0.9, low=0.74, **common) == {1}
    assert decoders.dawn(*arguments, induced=0.7, low=0.9, **common | {"sink": 0.6}) == {0, 1, 2, 3}
    assert decoders.dawn(*arguments, induced=0.9, low=0.9, **common) == {1}, "one at least"


def test_rounds_of_eight_holes():
    chosen, left = [], list(range(8))
    for step in range(3):
        chosen.append(sorted(decoders.dilated(left, 8, step, 2)))
        left = [i for i in left if i not in chosen[-1]]
    assert chosen == [[0, 4], [2, 6], [1, 3, 5, 7]] and not left
    assert decoders.dilated(range(9), 9, 0, 3) == {0, 3, 6}


def test_position_and_rarity_weigh_as_the_formula_says():
    common = {0: 0.5}
    # -ln f is ln 2 for id 0 and ln 4 for the other two, whose shares are a quarter each.
    scores = 0.9 * math.log(2), math.exp(-0.5) * 0.6 * math.log(4)
    assert scores[0] > scores[1]
    arguments = [0.9, 0.6], [0, 1], [0, 1]
    assert decoders.position_aware(*arguments, 0.5, 10.0, common, 3, 1) == {0}
    assert decoders.position_aware(*arguments, 0.0, 10.0, common, 3, 1) == {1}
    assert decoders.position_aware(*arguments, 0.0, 0.3, common, 3, 1) == {0}, "both at the limit"


def test_the_bound_on_the_mean_gap_falls_in_three_stages():
    arguments = [0.1, 0.2, 0.3], [4.0, 6.0, 99.0], [0, 1]
    assert decoders.prophet(*arguments, 7.5, 0, 9) == {1}
    assert decoders.prophet(*arguments, 7.5, 3, 9) == {0, 1}, "5.0 in the second stage"
    assert decoders.prophet(*arguments, 15.0, 6, 9) == {0, 1}


def test_a_prediction_is_stable_after_so_many_small_moves():
    even, near, far = [0.5, 0.5], [0.5001, 0.4999], [0.9, 0.1]
    assert decoders.divergence(far, even) == pytest.approx(
        0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    )
    history = [[even, far], [near, even], [even, even]]
    assert decoders.klass(history, [0, 1], 0.4, 0.01, 2) == {0}
    assert decoders.klass(history, [0, 1], 0.4, 0.01, 1) == {0, 1}
    assert decoders.klass(history, [0, 1], 0.4, 0.01, 3) == {0}, "none is ready: the surest"


def test_credit_of_two_steps():
    # beta 0.5: the credit of id 0 is 0.5 * 0.6 + 0.5, with gamma 1.
    raised = 0.5 * 1.8, 0.5
    found = decoders.credited([[0.6, 0.4], [0.5, 0.5]], 1.0, 0.5, 1.0)
    assert found == pytest.approx(raised[0] / sum(raised))
    assert decoders.credited([[0.6, 0.4]], 0.0, 0.5, 1.0) == pytest.approx(0.6)


def test_a_span_is_found_when_two_ends_agree():
    row = decoders.SlowFast(0, 0.9, 0.3, 6, 1.0)
    confidence = [0.5, 0.4, 0.35, 0.1, 0.1]
    assert row.step(confidence, [0, 1, 2, 3, 4]) == {0}
    assert row.end == 0
    assert row.step(confidence, [1, 2, 3, 4]) == {1}
    assert row.end == 3
    assert row.step([0.0, 0.0, 0.2, 0.95, 0.1], [2, 3, 4]) == {2}, "3 is outside the span"
    assert (row.begin, row.end) == (3, 0)


def test_fewer_are_remasked_than_committed():
    probability = [0.1, 0.95, 0.3, 0.2]
    assert decoders.wino(probability, [0, 1, 2, 3], 3, 0.9) == {0, 3}
    assert decoders.wino(probability, [0, 1, 2, 3], 9, 0.9) == {0, 2, 3}
    assert decoders.wino(probability, [0, 1, 2, 3], 1, 0.9) == set()
