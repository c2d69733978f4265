"""Thresholds and entropy bounds against plain Python, and the measures they read."""

import math

import commit_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rules as oracle
from scipy.special import expit

from dlm_jax.sampling.commit import EntropyBound, JointThreshold, Threshold
from dlm_jax.sampling.commit.commit_rule import log_odds_of
from dlm_jax.sampling.commit.orders import certainty, margin, maximum, sampled

ROWS, LENGTH = 300, 12
RNG = np.random.default_rng(0)
IS_HOLE = RNG.random((ROWS, LENGTH)) < 0.6
SETTING = RNG.uniform(0.0, 2.0, ROWS).astype(np.float32)


def _threshold(cuts, *, above=False, least=1, unit=0, kind=Threshold, **more):
    given = (above, bool), (least, jnp.int32), (unit, jnp.int32)
    columns = (jnp.broadcast_to(jnp.asarray(x, dtype), len(cuts)) for x, dtype in given)
    return kind(jnp.asarray(cuts), *columns, **more)


def _confidences():
    """Numbers on a coarse grid in some rows, so that there are ties, and fine ones in the rest."""
    fine = RNG.random((ROWS, LENGTH)) ** 0.3
    return np.where(np.arange(ROWS)[:, None] % 2, np.round(fine * 8) / 8, fine).astype(np.float32)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (_threshold(SETTING / 2), lambda c, h, s: oracle.threshold(c, h, s / 2)),
        (EntropyBound(jnp.asarray(SETTING)), lambda c, h, s: oracle.entropy_bound(-c, h, s)),
    ],
    ids=["threshold", "entropy_bound"],
)
def test_rule_equals_the_oracle_and_commits_at_least_one(rule, expected):
    confidence = _confidences()
    score = log_odds_of(confidence)
    if isinstance(rule, EntropyBound):
        confidence = confidence - 1
        score = -jnp.log(-confidence)
    chosen = np.asarray(cases.select(rule, cases.context(IS_HOLE), cases.proposal(score)))
    sizes = set()
    for row in range(ROWS):
        want = expected(confidence[row].astype(np.float64), IS_HOLE[row], float(SETTING[row]))
        assert set(np.flatnonzero(chosen[row]).tolist()) == want, row
        sizes.add(len(want))
        assert want or not IS_HOLE[row].any()
    assert len(sizes) > 5


@pytest.mark.parametrize("least", [1, 3])
def test_a_threshold_may_have_to_be_passed_and_some_commit_in_any_case(least):
    confidence = _confidences()
    cuts = np.where(np.arange(ROWS) % 2, 0.875, SETTING / 2).astype(np.float32)
    rule = _threshold(cuts, above=True, least=least)
    proposed = cases.proposal(log_odds_of(confidence))
    chosen = np.asarray(cases.select(rule, cases.context(IS_HOLE), proposed))
    for row in range(ROWS):
        holes = np.flatnonzero(IS_HOLE[row])
        sure = [i for i in holes if confidence[row, i] > cuts[row]]
        surest = sorted(holes, key=lambda i: (-confidence[row, i], i))[:least]
        want = sure if len(sure) >= least else surest
        assert set(np.flatnonzero(chosen[row])) == set(want), row


def test_measures_equal_the_formulas():
    logits = RNG.normal(size=(40, 9)).astype(np.float32) * 3
    logits[::4, 2] = -np.inf
    tokens = RNG.integers(3, 9, 40)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[:, None], 1)
    ours = [measure(jnp.asarray(logits), logprobs[:, 0])
            for measure in (sampled, maximum, certainty, margin)]  # fmt: skip
    for row in range(40):
        expected = oracle.measures(logits[row], int(tokens[row]))
        found = [float(our[row]) for our in ours]
        shown = [expit(found[0]), expit(found[1]), -math.exp(-found[2]), -math.expm1(-found[3])]
        np.testing.assert_allclose(shown, expected, rtol=2e-5)


def test_margin_of_a_vocabulary_of_one_is_its_whole_probability():
    assert margin(jnp.zeros((2, 1)), jnp.zeros(2)).tolist() == [math.inf, math.inf]


def _passed(sure, places, cut):
    """Those above the cut or, where there is none, the surest."""
    return {i for i in places if sure[i] > cut} or {*sorted(places, key=lambda i: -sure[i])[:1]}


def test_a_hole_at_a_multiple_commits_alone_and_the_others_wait_for_it():
    sure, unit = RNG.random((ROWS, LENGTH)).astype(np.float32), np.arange(ROWS) % 5
    rule = _threshold(np.full(ROWS, 0.4, np.float32), above=True, unit=unit)
    now, proposed = cases.context(IS_HOLE), cases.proposal(log_odds_of(sure))
    open_BL = np.asarray(rule.eligible((), now))
    chosen = np.asarray(rule.select((), now, proposed)[0])
    for row in range(ROWS):
        holes = np.flatnonzero(IS_HOLE[row]).tolist()
        alone = [place for place in holes if unit[row] and place % unit[row] == 0][:1]
        assert np.flatnonzero(open_BL[row]).tolist() == (alone or holes)
        assert set(np.flatnonzero(chosen[row])) == (set(alone) or _passed(sure[row], holes, 0.4))


def test_written_tokens_give_way_to_another_that_is_sure_enough_and_given_ones_do_not():
    kind = RNG.integers(0, 3, (ROWS, LENGTH))  # hole, written, given
    written = np.where(kind == 1, RNG.integers(0, 3, kind.shape), -1).astype(np.int32)
    tokens = RNG.integers(0, 3, kind.shape).astype(np.int32)
    sure = RNG.random(kind.shape).astype(np.float32)
    rule = _threshold(
        np.full(ROWS, 0.7, np.float32), above=True, kind=JointThreshold,
        rewrite_B=jnp.full(ROWS, 0.5), rewrites=jnp.full(ROWS, 4, jnp.int32),
    )  # fmt: skip
    now = cases.context(kind == 0, written_BL=jnp.asarray(written))
    chosen = np.asarray(rule.select((), now, cases.proposal(log_odds_of(sure), tokens))[0])
    for row in range(ROWS):
        wanted = _passed(sure[row], np.flatnonzero(kind[row] == 0), 0.7)
        wanted |= {
            place for place in np.flatnonzero(kind[row] == 1)
            if sure[row, place] > 0.5 and tokens[row, place] != written[row, place]
        }  # fmt: skip
        assert set(np.flatnonzero(chosen[row])) == wanted
