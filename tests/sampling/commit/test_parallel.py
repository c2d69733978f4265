"""Threshold and entropy-bound decoding against plain Python, and the measures they read."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rules as oracle
from scipy.special import expit

from dlm_jax.sampling.commit import CommitContext, EntropyBound, Proposal, Threshold
from dlm_jax.sampling.commit.commit_rule import log_odds_of
from dlm_jax.sampling.commit.orders import certainty, margin, maximum, sampled

ROWS, LENGTH = 300, 12
RNG = np.random.default_rng(0)
IS_HOLE = RNG.random((ROWS, LENGTH)) < 0.6
SETTING = RNG.uniform(0.0, 2.0, ROWS).astype(np.float32)


def _threshold(cuts, *, above=False, least=1):
    rows = len(cuts)
    return Threshold(
        jnp.asarray(cuts), jnp.full(rows, above), jnp.full(rows, least, jnp.int32),
        jnp.zeros(rows, jnp.int32),
    )  # fmt: skip


def _context(is_hole_BL):
    ones_B = jnp.ones(len(is_hole_BL), jnp.int32)
    keys_B = jax.vmap(jax.random.key)(jnp.arange(len(is_hole_BL)))
    is_hole_BL = jnp.asarray(is_hole_BL)
    return CommitContext(is_hole_BL, ones_B, 0 * ones_B, 8 * ones_B, keys_B, ~is_hole_BL)


@jax.jit
def _select(rule, context, confidence_BL):
    zeros_BL = jnp.zeros_like(confidence_BL)
    proposal = Proposal(zeros_BL.astype(jnp.int32), zeros_BL, zeros_BL, confidence_BL)
    return rule.eligible((), context) & rule.select((), context, proposal)[0]


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
    chosen = np.asarray(_select(rule, _context(IS_HOLE), score))
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
    chosen = np.asarray(_select(rule, _context(IS_HOLE), log_odds_of(confidence)))
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
