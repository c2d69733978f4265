"""Commit rules against plain Python, one row at a time."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commit_cases import context, proposal, select
from oracles import commit as oracle

from dlm_jax.config import SamplingParams
from dlm_jax.sampling.commit import COMMIT_RULES, RandomOrder, most
from dlm_jax.sampling.commit.commit_rule import preferences
from dlm_jax.sampling.commit.orders import QUOTAS, QuotaRule, linear_quota
from dlm_jax.sampling.rules import BUILT_IN, ModelFacts

MAX_HOLES, MAX_STEPS, VOCAB = 24, 30, 7
ORDERS = {name: cls for name, cls in COMMIT_RULES.items() if issubclass(cls, QuotaRule)}

_most = jax.jit(most)
_eligible = jax.jit(lambda context: RandomOrder(linear_quota).eligible((), context))


def _rule(order, quota, rows):
    """The rule for that many rows, with the defaults of its other settings."""
    settings = [SamplingParams(order=order, schedule=quota)] * rows
    return BUILT_IN.pack(settings, ModelFacts(vocab_size=VOCAB)).commit


def _counts(name, first, steps):
    """Commits of every step of rows with `first` holes and `steps` steps."""
    quota = jax.jit(QUOTAS[name])
    holes, counts = first.copy(), []
    for step in range(MAX_STEPS):
        is_hole_BL = np.arange(MAX_HOLES)[None] < holes[:, None]
        count = np.asarray(quota(context(is_hole_BL, first=first, step=step, steps=steps)))
        count = np.where(step < steps, count, 0)
        counts.append(count)
        holes = holes - count
    return np.array(counts)


def _expected(name, holes, steps):
    first, counts = holes, []
    for step in range(1, steps + 1):
        if name == "all":
            count = holes
        elif name == "linear":
            count = oracle.quota(holes, steps - step + 1)
        elif name == "timesteps":
            count = oracle.timestep_quota(holes, step, steps)
        else:
            count = oracle.cosine_quota(first, holes, step, steps)
        counts.append(count)
        holes -= count
    return counts + [0] * (MAX_STEPS - steps)


@pytest.mark.parametrize("name", QUOTAS)
def test_quota_equals_the_oracle_for_every_number_of_holes_and_steps(name):
    grid = itertools.product(range(MAX_HOLES + 1), range(1, MAX_STEPS + 1))
    first, steps = np.array(list(grid), np.int32).T
    counts = _counts(name, first, steps)
    for row, (holes, num_steps) in enumerate(zip(first, steps, strict=True)):
        assert counts[:, row].tolist() == _expected(name, int(holes), int(num_steps))
        assert counts[:, row].sum() == holes


def test_linear_quota_spreads_what_is_left_when_a_step_committed_more_than_its_share():
    is_hole_BL = np.arange(10)[None] < np.array([[4], [1], [0]])
    count = jax.jit(linear_quota)(context(is_hole_BL, first=[10, 10, 10], step=1, steps=4))
    assert count.tolist() == [2, 1, 0]


def test_most_takes_the_highest_scores_and_lower_positions_on_ties():
    rng = np.random.default_rng(0)
    rows, length = 400, 12
    scores = rng.integers(-2, 3, (rows, length)).astype(np.float32)
    scores[scores == 2] = -np.inf
    scores[::3] = rng.standard_normal(scores[::3].shape)
    is_open = rng.random((rows, length)) < 0.7
    count = rng.integers(-1, length + 2, rows)
    chosen = np.asarray(_most(jnp.asarray(scores), jnp.asarray(is_open), jnp.asarray(count)))
    for row in range(rows):
        open_scores = {int(i): float(scores[row, i]) for i in np.flatnonzero(is_open[row])}
        want = oracle.most_confident(open_scores, max(0, int(count[row])))
        assert np.flatnonzero(chosen[row]).tolist() == sorted(want)


def test_scores_that_rounding_tells_apart_tie_and_the_row_prefers_one_of_them():
    rng = np.random.default_rng(2)
    rows, length = 400, 12
    exact = rng.choice([-8.0, -0.25, 0.0, 0.5, 1.0], (rows, length))
    is_open = rng.random((rows, length)) < 0.8
    count = rng.integers(-1, length + 2, rows)
    keys = jax.vmap(jax.random.key)(jnp.arange(rows))
    given = jnp.asarray(is_open), jnp.asarray(count)
    choose = jax.jit(lambda x, liked: most(x, *given, liked, 1.0))
    for is_lower in (False, True):
        liked = np.asarray(preferences(keys, jnp.full(rows, is_lower), length))
        chosen = []
        for _ in range(3):
            noise = 3e-7 * rng.standard_normal(exact.shape) * np.maximum(np.abs(exact), 1)
            chosen.append(np.asarray(choose(jnp.asarray(exact + noise, jnp.float32), liked)))
        np.testing.assert_array_equal(chosen[0], chosen[1])
        np.testing.assert_array_equal(chosen[0], chosen[2])
        for row in range(rows):
            order = np.lexsort((-np.asarray(liked[row], np.int64), -exact[row]))
            wanted = [i for i in order if is_open[row, i]][: max(0, int(count[row]))]
            assert np.flatnonzero(chosen[0][row]).tolist() == sorted(wanted)
            if is_lower:
                assert (np.diff(np.asarray(liked[row], np.int64)) < 0).all()


def test_of_equal_positions_each_is_preferred_as_often_and_the_same_on_a_wider_canvas():
    rows, length = 12_000, 6
    keys = jax.vmap(jax.random.key)(jnp.arange(rows))
    liked, wide = (preferences(keys, jnp.zeros(rows, bool), n) for n in (length, 41))
    np.testing.assert_array_equal(wide[:, :length], liked)
    one = jnp.ones(rows, jnp.int32)
    chosen = most(jnp.ones((rows, length)), jnp.ones((rows, length), bool), one, liked)
    counts = np.asarray(chosen).sum(0)
    assert ((counts - rows / length) ** 2 / (rows / length)).sum() < 20.5


def test_random_order_takes_every_set_of_holes_equally_often():
    rows, holes = 20_000, [1, 2, 4, 5]
    is_hole_BL = np.zeros((rows, 6), bool)
    is_hole_BL[:, holes] = True
    chosen = np.asarray(_eligible(context(is_hole_BL, steps=2)))
    counts = collections.Counter(map(tuple, (np.flatnonzero(row).tolist() for row in chosen)))
    sets = list(itertools.combinations(holes, 2))
    assert set(counts) == set(sets)
    expected = rows / len(sets)
    chi2 = sum((counts[s] - expected) ** 2 / expected for s in sets)
    assert chi2 < 20.5  # 0.999 quantile for 5 degrees of freedom


@pytest.mark.parametrize("quota", QUOTAS)
@pytest.mark.parametrize("order", ORDERS)
def test_rule_commits_exactly_its_quota_of_holes(order, quota):
    rule = _rule(order, quota, 12)
    rng = np.random.default_rng(3)
    is_hole_BL = rng.random((12, 20)) < 0.6
    now = context(is_hole_BL, step=1, steps=4)
    chosen = np.asarray(select(rule, now, proposal(np.ones(is_hole_BL.shape, np.float32))))
    count = np.asarray(rule.quota(now))
    assert not (chosen & ~is_hole_BL).any()
    assert chosen.sum(1).tolist() == count.tolist()
