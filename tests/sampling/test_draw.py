"""Draws follow the softmax, far tail included, and depend on their own key and logits only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as tc

from dlm_jax.sampling import vocab
from dlm_jax.sampling.positions import place_of_largest

SIZES = (1, 2, 40, 2503)


def keys(seed: int, num: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), num)


draw = jax.jit(vocab.draw)


def counts_of(x: np.ndarray, num: int, seed: int) -> np.ndarray:
    """How often each id came in `num` draws from the same logits, at most 4096 at a time."""
    total, batch = np.zeros(x.size, int), 4096
    for first in range(0, num, batch):
        ids = draw(np.broadcast_to(x, (batch, x.size)), keys(seed + first, batch))
        total += np.bincount(np.asarray(ids), minlength=x.size)
    return total


def chi_square_quantile(freedom: int, z: float) -> float:
    """Wilson-Hilferty approximation of the quantile at normal deviate `z`."""
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("kind", ["peaked", "ties"])
def test_draws_follow_the_softmax(kind):
    # with 40,960 draws a relative error of 15% in a token of mass 0.1 is seen with power > 0.99
    x = tc.logits(kind, 3)[0]
    counts = counts_of(x, 40_960, seed=1)
    p = np.exp(x.astype(np.float64) - x.max())
    expected = counts.sum() * p / p.sum()
    is_common = expected >= 5
    statistic = ((counts - expected)[is_common] ** 2 / expected[is_common]).sum()
    assert statistic < chi_square_quantile(max(1, is_common.sum() - 1), 3.7)
    assert counts[~is_common].sum() <= 5 + 5 * expected[~is_common].sum()


def test_draws_at_a_temperature_follow_the_softmax_in_a_vocabulary_of_many_columns():
    """Ids that differ by 1024 share a column, and columns beside each other a group."""
    num, temperature, V = 4096, 0.5, 2503
    ids = np.array([column + 1024 * member for column in (3, 9, 20, 400) for member in range(3)])
    logits = np.random.default_rng(0).normal(size=ids.size) / 2
    x = np.full((num, V), -np.inf, np.float32)
    x[:, ids] = logits
    drawn = draw(x / temperature, keys(2, num))
    counts = np.bincount(np.asarray(drawn), minlength=V)[ids]
    assert counts.sum() == num
    p = np.exp(logits / temperature)
    expected = num * p / p.sum()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < chi_square_quantile(ids.size - 1, 3.7)


def test_a_tail_of_mass_1e_9_keeps_its_proportions():
    # the uniforms that reach it are rare, so they are made: the levels are drawn given the tail
    weight = jnp.asarray([[1e-9, 3e-9, 0.0, 1.0]], jnp.float32)
    uniforms = jnp.linspace(0, 4e-9, 401, dtype=jnp.float32)[:-1]
    picked = jax.vmap(lambda u: vocab._pick(weight, u[None])[0])(uniforms)
    shares = np.bincount(picked, minlength=4) / 400
    np.testing.assert_allclose(shares, [0.25, 0.75, 0, 0], atol=0.01)


@pytest.mark.parametrize("size", SIZES)
def test_impossible_tokens_are_never_drawn(size):
    for seed, kind in enumerate(tc.KINDS):
        x = tc.logits(kind, seed, (64, size))
        ids = np.asarray(draw(x, keys(seed, 64)))
        assert np.all((ids >= 0) & (ids < size))
        chosen = x[np.arange(64), ids]
        assert np.all(chosen > -np.inf), kind
        assert np.all(np.exp(chosen - x.max(-1)) > 0), kind


def test_a_position_without_candidates_gives_the_lowest_id():
    x = np.full((64, 40), -np.inf, np.float32)
    assert np.all(np.asarray(draw(x, keys(0, 64))) == 0)
    assert np.all(np.asarray(vocab.argmax(jnp.asarray(x))) == 0)


def test_a_token_depends_on_its_own_key_and_logits_wherever_it_stands():
    x = tc.logits("normal", 1, (64, 40))
    alone = np.asarray(draw(x, keys(3, 64)))
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(draw(x[order], keys(3, 64)[order]), alone[order])
    strangers = tc.logits("ties", 2, (64, 40))
    strangers[:5] = x[:5]
    np.testing.assert_array_equal(draw(strangers, keys(3, 64))[:5], alone[:5])


@pytest.mark.parametrize("size", SIZES)
def test_argmax_is_the_lowest_id_of_the_largest_logit(size):
    for seed, kind in enumerate(("normal", "ties", "banned", "huge", "equal", "signed_zero")):
        x = tc.logits(kind, seed, (64, size))
        np.testing.assert_array_equal(jax.jit(vocab.argmax)(x), x.argmax(-1))


@pytest.mark.parametrize("size", [2, 2503])
def test_logits_that_only_rounding_tells_apart_are_ties_of_which_the_lowest_id_wins(size):
    x = np.zeros((4, size), np.float32)
    x[:, 0], x[:, -1] = 1.0, 1.0 + np.array([1e-6, 1e-4, -1e-6, -1e-4])
    found = jax.jit(vocab.argmax)(x)
    np.testing.assert_array_equal(found, [0, size - 1, 0, 0])
    np.testing.assert_array_equal(jax.jit(vocab.argmax)(100 * x), found)


def test_choose_takes_the_argmax_of_greedy_positions_only():
    x, is_greedy = tc.logits("normal", 1, (64, 40)), np.arange(64) % 2 == 0
    choose = jax.jit(vocab.choose_with)
    ids = np.asarray(choose(x, vocab.noise(keys(0, 64)), is_greedy))
    np.testing.assert_array_equal(ids[is_greedy], x.argmax(-1)[is_greedy])
    drawn = np.asarray(draw(x, keys(0, 64)))
    np.testing.assert_array_equal(ids[~is_greedy], drawn[~is_greedy])
    all_greedy = choose(x, vocab.noise(keys(1, 64)), np.ones(64, bool))
    np.testing.assert_array_equal(all_greedy, x.argmax(-1))


def test_log_prob_is_that_of_the_softmax_and_not_finite_where_the_logits_are_not():
    x = tc.logits("normal", 1, (4, 40))
    found = vocab.log_prob(jnp.asarray(x), jnp.arange(4))
    np.testing.assert_allclose(found, jax.nn.log_softmax(x)[np.arange(4), np.arange(4)], rtol=1e-5)
    x[0, 3], x[1, 3], x[2] = np.nan, np.inf, -np.inf
    out = np.asarray(vocab.log_prob(jnp.asarray(x), jnp.zeros(4, jnp.int32)))
    np.testing.assert_array_equal(np.isfinite(out), [False, False, False, True])


_FLOATS = np.array(
    [
        [1.0, 3.0, 3.0, -2.0],
        [-np.inf, -np.inf, -np.inf, -np.inf],
        [np.inf, 1.0, np.inf, 0.0],
        [5.0, np.nan, 7.0, np.nan],
        [-0.0, 0.0, -0.0, 0.0],
        [-np.inf, -np.inf, -3.0, -np.inf],
    ],
    np.float32,
)


@pytest.mark.parametrize("x", [_FLOATS, _FLOATS > 2, np.zeros((2, 3), bool), np.ones((2, 3), bool)])
def test_the_place_of_the_largest_value_is_that_of_numpy(x):
    jitted = jax.jit(place_of_largest, static_argnums=1)
    for axis in range(x.ndim):
        ours = jitted(jnp.asarray(x), axis)
        assert ours.dtype == jnp.int32
        np.testing.assert_array_equal(ours, np.argmax(x, axis=axis))
    np.testing.assert_array_equal(jax.vmap(place_of_largest)(jnp.asarray(x)), np.argmax(x, axis=1))
