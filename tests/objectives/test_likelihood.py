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

from dlm_jax.model.transformer import build
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.likelihood import (
    bound_at,
    causal_nll,
    costs,
    half_width,
    hidden_nll,
    ratio_and_error,
)
from dlm_jax.objectives.objective import Batch
from dlm_jax.types import Network

LENGTH = 4
CANVAS = 6
_bound_at = jax.jit(functools.partial(bound_at, toy.network(), mask_id=toy.MASK))
_costs = functools.partial(costs, is_causal=False, mask_id=toy.MASK, eos_id=toy.EOS)
_drawn = jax.jit(functools.partial(_costs, toy.network()), static_argnames="num_draws")


def _bound(params, batch, key, *, num_draws):
    return _drawn(params, batch, jnp.arange(len(batch.length_B)), key, num_draws=num_draws)


ROWS = ([0, 3, 7, 2], [5, 5, 5, 5], [1, 0, 11, 4])


@jax.jit
def _elbo_sum(params, batch, is_masked_BL):
    """Cross-entropy that each mask hides, weight 1."""
    return jnp.sum(hidden_nll(toy.network(), params, batch, is_masked_BL, mask_id=toy.MASK))


def _row(tokens):
    return jnp.array([list(tokens) + [toy.PAD] * (CANVAS - LENGTH)])


def _oracle_logits(tokens_L):
    padded = np.concatenate([tokens_L, np.full(CANVAS - LENGTH, toy.PAD)])
    return np.asarray(toy.row_logits(padded, LENGTH))[:LENGTH]


def _all_masks():
    """Every mask of the live positions but the empty one, ``[15, CANVAS]``."""
    masks = [m for m in itertools.product([False, True], repeat=LENGTH) if any(m)]
    return np.array([list(m) + [False] * (CANVAS - LENGTH) for m in masks])


def _repeat(tokens, count, given=0):
    return Batch(jnp.tile(_row(tokens), (count, 1)), jnp.full(count, LENGTH),
                 jnp.full(count, given))  # fmt: skip


@pytest.mark.parametrize("tokens", ROWS)
def test_bound_averaged_over_counts_and_sets_equals_enumeration_of_all_orders(tokens):
    masks = _all_masks()
    count = masks.sum(1)
    per_set = np.array([1 / (LENGTH * math.comb(LENGTH, k)) for k in count])
    assert per_set.sum() == pytest.approx(1)
    nats = _bound_at(toy.params(), _repeat(tokens, len(masks)), jnp.asarray(masks))[:, 0]
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK)
    assert float(np.dot(per_set, np.asarray(nats))) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tokens", ROWS[:2])
def test_training_loss_integrated_over_times_and_masks_is_the_same_bound(tokens, schedule):
    masks = _all_masks()
    count = masks.sum(1)
    batch = _repeat(tokens, 1)
    sums = np.array([float(_elbo_sum(toy.params(), batch, mask[None])) for mask in masks])
    # Midpoint rule over t for E over independent masks of weight(t) * cross-entropy.
    times = (np.arange(4000) + 0.5) / 4000
    noise = SCHEDULES[schedule](2.0)
    ratio = np.asarray(noise.masked_ratio(jnp.asarray(times)), np.float64)[:, None]
    chance = ratio**count * (1 - ratio) ** (LENGTH - count)
    integral = float((chance @ sums * np.asarray(noise.weight(jnp.asarray(times)))).mean())
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK)
    assert integral == pytest.approx(exact, rel=3e-4)


@pytest.mark.parametrize("tokens", ROWS)
def test_bound_is_never_below_the_true_negative_log_likelihood(tokens):
    estimate = _bound(toy.params(), _repeat(tokens, 512), jax.random.key(7), num_draws=1)
    nats = np.asarray(estimate.nats_B, np.float64)
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK)
    error = nats.std() / math.sqrt(nats.size)
    assert abs(nats.mean() - exact) < 5 * error
    assert exact >= oracle.true_nll(_oracle_logits, tokens, mask_id=toy.MASK) - 1e-9


def test_as_many_draws_as_tokens_hide_each_number_of_tokens_once():
    """A token costs what the number of hidden tokens says, so mean and variance are exact."""
    ids = [token for token in range(toy.VOCAB_SIZE) if token != toy.MASK]

    def trunk(params, tokens_BL, length_B, cache):
        hidden_B = (tokens_BL == toy.MASK).sum(axis=1).astype(jnp.float32)
        return jnp.broadcast_to(hidden_B[:, None, None], (*tokens_BL.shape, 1)), cache

    network = Network(
        init=lambda key: {},
        trunk=trunk,
        embed=lambda params, tokens: jnp.zeros((*tokens.shape, 1)),
        readout=lambda params, hidden_ND: hidden_ND * (jnp.arange(toy.VOCAB_SIZE)[None] == ids[0]),
        vocab_size=toy.VOCAB_SIZE,
    )
    batch = _repeat([ids[0]] * LENGTH, 8)
    estimate = jax.jit(functools.partial(_costs, network), static_argnames="num_draws")(
        {}, batch, jnp.arange(8), jax.random.key(3), num_draws=LENGTH
    )
    counts = np.arange(1, LENGTH + 1)
    nats = LENGTH * (np.log(np.exp(counts) + len(ids) - 1) - counts)
    np.testing.assert_allclose(estimate.nats_B, nats.mean(), rtol=1e-5)
    np.testing.assert_allclose(estimate.variance_B, nats.var(ddof=1) / LENGTH, rtol=1e-4)


@pytest.mark.parametrize("tokens", ROWS[:2])
def test_bound_given_a_prompt_equals_enumeration_of_the_orders_of_the_rest(tokens):
    exact = oracle.elbo_by_orders(_oracle_logits, tokens, mask_id=toy.MASK, given=(0,))
    free = [mask for mask in _all_masks() if not mask[0]]
    count = np.array([mask.sum() for mask in free])
    per_set = np.array([1 / (3 * math.comb(3, k)) for k in count])
    assert per_set.sum() == pytest.approx(1)
    nats = _bound_at(toy.params(), _repeat(tokens, len(free), given=1), jnp.asarray(free))[:, 0]
    assert float(np.dot(per_set, np.asarray(nats))) == pytest.approx(exact, rel=1e-5)
    drawn = np.asarray(
        _bound(toy.params(), _repeat(tokens, 512, given=1), jax.random.key(3), num_draws=1).nats_B
    )
    assert abs(drawn.mean() - exact) < 5 * drawn.std() / math.sqrt(drawn.size)
    assert exact >= oracle.true_nll(_oracle_logits, tokens, mask_id=toy.MASK, given=(0,)) - 1e-9


def test_the_part_of_the_text_is_what_its_tokens_cost_over_all_orders():
    tokens = np.array([0, 3, toy.EOS, toy.EOS])
    subsets = np.array(list(itertools.product([False, True], repeat=LENGTH)))
    shown = np.where(subsets, toy.MASK, tokens)
    padded = jnp.asarray(np.pad(shown, ((0, 0), (0, CANVAS - LENGTH)), constant_values=toy.PAD))
    logits = np.array(toy.logits(toy.network(), toy.params(), padded, jnp.full(16, LENGTH)))
    logits = logits[:, :LENGTH].astype(np.float64)
    logits[..., toy.MASK] = -np.inf
    nll = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, np.broadcast_to(tokens, (16, 4))[..., None], axis=-1)[..., 0]
    )
    of_hidden = {tuple(subset): row for subset, row in zip(subsets.tolist(), nll, strict=True)}
    costs = []
    for order in itertools.permutations(range(LENGTH)):
        for step, place in enumerate(order):
            hidden = tuple(other in order[step:] for other in range(LENGTH))
            costs.append((place, of_hidden[hidden][place]))
    expected = {
        name: sum(cost for place, cost in costs if place in places) / math.factorial(LENGTH)
        for name, places in (("whole", range(4)), ("text", range(2)))
    }
    rows = Batch(jnp.repeat(_row(tokens), 64, 0), jnp.full(64, LENGTH), jnp.zeros(64, jnp.int32))
    found = _bound(toy.params(), rows, jax.random.key(0), num_draws=64)
    for name, nats_B, variance_B in (
        ("whole", found.nats_B, found.variance_B),
        ("text", found.text_nats_B, found.text_variance_B),
    ):
        error = float(np.sqrt(np.sum(variance_B)) / 64)
        assert float(jnp.mean(nats_B)) == pytest.approx(expected[name], abs=4 * error)


def test_a_rows_masks_are_those_of_its_number_whatever_stands_beside_it():
    rows = Batch(jnp.asarray([[0, 3, 7, 2]] * 6), jnp.full(6, 4), jnp.zeros(6, jnp.int32))
    whole = _bound(toy.params(), rows, jax.random.key(2), num_draws=3)
    assert len(set(np.asarray(whole.nats_B).tolist())) > 1
    for number_B in ([4, 1], [5], [2, 0, 3]):
        some = jax.tree.map(lambda column, at=number_B: column[jnp.array(at)], rows)
        found = _drawn(toy.params(), some, jnp.array(number_B), jax.random.key(2), num_draws=3)
        at = np.array(number_B)
        np.testing.assert_allclose(found.nats_B, np.asarray(whole.nats_B)[at], rtol=1e-6)
        np.testing.assert_allclose(found.variance_B, np.asarray(whole.variance_B)[at], rtol=1e-4)


def test_a_causal_models_likelihood_is_a_distribution_over_all_rows():
    config = toy.config(attention_type="causal", start_id=2, vocab_size=5)
    network = build(config)
    params = toy.random_params(network)
    rows = jnp.asarray(list(itertools.product([0, 1, 3, 4], repeat=3)), jnp.int32)
    batch = Batch(rows, jnp.full(64, 3), jnp.zeros(64, jnp.int32))
    nats = np.asarray(jax.jit(functools.partial(causal_nll, network, mask_id=2))(params, batch))
    assert float(np.exp(-nats.astype(np.float64).sum(1)).sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 10, 100])
def test_the_95_percent_interval_covers_the_truth_95_times_in_100(num_rows):
    rng = np.random.default_rng(num_rows)
    counts = np.full(num_rows, 4)
    covered = 0
    for nats in rng.normal(8.0, 2.0, (4000, num_rows)):
        ratio, error = ratio_and_error(nats, counts)
        covered += abs(ratio - 2.0) <= half_width(error, num_rows)
    # Within four standard deviations of the count.
    assert abs(covered / 4000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)
    assert math.isnan(half_width(1.0, 1))
