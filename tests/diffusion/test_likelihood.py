"""Law 7: the reported bound is a bound, exact against enumeration."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import likelihood as oracle

from dlm_jax.diffusion.likelihood import bound, bound_at
from dlm_jax.diffusion.losses import elbo_at

LENGTH = 4
CANVAS = 6
_bound_at = jax.jit(functools.partial(bound_at, toy.network(), mask_id=toy.MASK))
_elbo_at = jax.jit(functools.partial(elbo_at, toy.network(), mask_id=toy.MASK))
_bound = jax.jit(
    functools.partial(bound, toy.network(), mask_id=toy.MASK), static_argnames="num_draws"
)
ROWS = ([0, 3, 7, 2], [5, 5, 5, 5], [1, 0, 11, 4])


def _row(tokens):
    return jnp.array([list(tokens) + [toy.PAD] * (CANVAS - LENGTH)])


def _oracle_logits(tokens_L):
    padded = np.concatenate([tokens_L, np.full(CANVAS - LENGTH, toy.PAD)])
    return np.asarray(toy.row_logits(padded, LENGTH))[:LENGTH]


def _all_masks():
    """Every mask of the live positions but the empty one, ``[15, CANVAS]``."""
    masks = [m for m in itertools.product([False, True], repeat=LENGTH) if any(m)]
    return np.array([list(m) + [False] * (CANVAS - LENGTH) for m in masks])


def _repeat(tokens, count):
    return jnp.tile(_row(tokens), (count, 1)), jnp.full(count, LENGTH)


@pytest.mark.parametrize("tokens", ROWS)
def test_bound_averaged_over_counts_and_sets_equals_enumeration_of_all_orders(tokens):
    masks = _all_masks()
    count = masks.sum(1)
    per_set = np.array([1 / (LENGTH * math.comb(LENGTH, k)) for k in count])
    assert per_set.sum() == pytest.approx(1)
    tokens_BL, length_B = _repeat(tokens, len(masks))
    nats = _bound_at(toy.params(), tokens_BL, length_B, jnp.asarray(masks))
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK)
    assert float(np.dot(per_set, np.asarray(nats))) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("tokens", ROWS)
def test_training_loss_integrated_over_times_and_masks_is_the_same_bound(tokens):
    masks = _all_masks()
    count = masks.sum(1)
    tokens_BL, length_B = _repeat(tokens, 1)
    one = jnp.ones(1)
    sums = np.array(
        [float(_elbo_at(toy.params(), tokens_BL, length_B, mask[None], one).sum) for mask in masks]
    )
    # Midpoint rule over t for E over independent masks of (1/t) * cross-entropy.
    times = (np.arange(4000) + 0.5) / 4000
    chance = times[:, None] ** count * (1 - times[:, None]) ** (LENGTH - count)
    integral = float((chance @ sums / times).mean())
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK)
    assert integral == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("tokens", ROWS)
def test_bound_is_never_below_the_true_negative_log_likelihood(tokens):
    estimate = _bound(toy.params(), *_repeat(tokens, 512), jax.random.key(7), num_draws=1)
    nats = np.asarray(estimate.nats_B, np.float64)
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK)
    error = nats.std() / math.sqrt(nats.size)
    assert abs(nats.mean() - exact) < 5 * error
    assert exact >= oracle.true_nll(_oracle_logits, tokens, mask_id=toy.MASK) - 1e-9


def test_variance_of_the_draws_is_that_of_their_mean():
    estimate = _bound(toy.params(), *_repeat(ROWS[0], 64), jax.random.key(8), num_draws=16)
    spread = float(np.asarray(estimate.nats_B).var(ddof=1))
    claimed = float(np.asarray(estimate.variance_B).mean())
    # Strata only lower the variance of the mean below the claim.
    assert spread < 1.5 * claimed
    assert claimed > 0


def test_padding_and_neighbours_do_not_change_a_rows_bound():
    masks = jnp.asarray(_all_masks()[:3])
    tokens_BL = jnp.concatenate([_row(tokens) for tokens in ROWS])
    length_B = jnp.full(3, LENGTH)
    together = _bound_at(toy.params(), tokens_BL, length_B, masks)
    other = tokens_BL.at[:, LENGTH:].set(3).at[0, :LENGTH].set(6)
    changed = _bound_at(toy.params(), other, length_B, masks)
    np.testing.assert_array_equal(together[1:], changed[1:])
    assert float(together[0]) != float(changed[0])
