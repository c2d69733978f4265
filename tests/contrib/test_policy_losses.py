"""The policy loss beside an oracle, and its gradient beside that of the expected reward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerable import LENGTH, MASK, MODEL, NETWORK, PARAMS, TEMPERATURE, log_law, probability
from enumerable import TEXTS as ALL_TEXTS

import dlm_jax
from dlm_jax.contrib.rl import (
    Estimator,
    PolicySettings,
    Rollout,
    advantages,
    policy_loss,
    token_log_probs,
    trace_rl,
)

TEXTS = np.array(ALL_TEXTS, np.int32)
EMPTY = (MASK,) * LENGTH
OTHER = {"table": PARAMS["table"][:, :, ::-1], "beside": PARAMS["beside"]}
THIRD = {"table": 0.5 * PARAMS["table"], "beside": PARAMS["beside"]}
ADVANTAGE = np.linspace(-1.5, 1.0, len(TEXTS)).astype(np.float32)
REWARDS = np.array([0.0, 1.0, 0.2, 0.5, 0.0, 0.9, 0.3, 0.1])


def _rollout(texts: np.ndarray, advantage: np.ndarray, trace: Any = None) -> Rollout:
    rows = len(texts)
    length_B = np.full(rows, LENGTH, np.int32)
    steps_BL = np.zeros((rows, LENGTH), np.int32)
    return Rollout(texts, length_B, np.zeros(rows, np.int32), steps_BL, advantage, trace)


def _draw(rollout: Rollout, key: Any = None) -> jax.Array:
    """The answers hidden, as in equation 3 of d1 (Zhao et al. 2025)."""
    return jnp.where(rollout.is_answer_BL(), MASK, rollout.tokens_BL)


ONE_PASS = Estimator(_draw, functools.partial(token_log_probs, mask_id=MASK))


def _loss(rollout: Rollout, settings: PolicySettings) -> Any:
    return policy_loss(
        NETWORK, PARAMS, OTHER, THIRD, rollout, _draw(rollout), estimator=ONE_PASS,
        settings=settings,
    )  # fmt: skip


def oracle_surrogate(now, old, reference, advantages, weights, *, clip, beta):
    """PPO's clipped surrogate with the divergence, in float64, one action after another."""
    total = 0.0
    for b, advantage in enumerate(advantages):
        for n, weight in enumerate(weights[b]):
            ratio = np.exp(now[b][n] - old[b][n])
            held = min(max(ratio, 1 - clip), 1 + clip)
            gain = min(ratio * advantage, held * advantage)
            log_ratio = reference[b][n] - now[b][n]
            total -= weight * (gain - beta * (np.exp(log_ratio) - log_ratio - 1))
    return total / len(advantages)


def test_a_loss_is_what_its_paper_says():
    """Other parameters sample and refer, so that ratios are clipped and the divergence counts."""
    loss = _loss(_rollout(TEXTS, ADVANTAGE), PolicySettings(updates=2, kl=0.3))
    now, old, reference = (
        np.array([log_law(params, EMPTY)[range(LENGTH), text] for text in TEXTS])
        for params in (PARAMS, OTHER, THIRD)
    )
    weights = np.full(now.shape, 1 / LENGTH)
    expected = oracle_surrogate(now, old, reference, ADVANTAGE, weights, clip=0.2, beta=0.3)
    assert float(loss.sum / loss.weight) == pytest.approx(expected, rel=1e-4)
    ratio, sign = np.exp(now - old), ADVANTAGE[:, None]
    is_clipped = ((ratio > 1.2) & (sign > 0)) | ((ratio < 0.8) & (sign < 0))
    clipped, rows = loss.figures["clip_share"]
    assert float(clipped / rows) == pytest.approx((weights * is_clipped).sum() / len(TEXTS))
    assert 0 < is_clipped.mean() < 1


@pytest.mark.parametrize("updates", [1, 2])
def test_ratios_are_relative_to_the_parameters_that_sampled_if_these_can_be_others(updates):
    clipped, _ = _loss(_rollout(TEXTS, ADVANTAGE), PolicySettings(updates=updates)).figures[
        "clip_share"
    ]
    assert (float(clipped) > 0) == (updates > 1)


def test_a_row_that_ended_with_holes_changes_no_gradient():
    """Such a row is excluded, and MASK has no probability."""
    rollout = _rollout(TEXTS[:3], np.array([1.0, -1.0, 0.5], np.float32))
    hole = _rollout(np.array([[0, 1, MASK]], np.int32), np.zeros(1, np.float32))
    hole = hole._replace(step_BL=np.full((1, LENGTH), -1, np.int32))
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), rollout, hole)
    np.testing.assert_allclose(_gradient(ONE_PASS, both), _gradient(ONE_PASS, rollout), atol=1e-6)


def test_an_action_that_a_truncation_cuts_has_no_weight():
    """Under the parameters of now, of the sample or of the reference; the others are as without."""
    advantage, now = np.array([1.0, -2.0]), np.array([[-1.0, -np.inf, -3.0], [-1.0, -2.0, -np.inf]])
    reference = np.array([[-np.inf, -1.0, -2.0], [-1.5, -2.0, -1.0]])
    rollout = _rollout(np.zeros((2, 3), np.int32), advantage)

    def estimate(network, params, rollout, views):
        return params["now"]

    kept = Estimator(lambda rollout, key: (), estimate, lambda rollout: jnp.ones((2, 3)))

    def total(x):
        return policy_loss(
            NETWORK, {"now": x}, {}, {"now": jnp.array(reference)}, rollout, (), estimator=kept,
            settings=PolicySettings(kl=0.5),
        ).sum  # fmt: skip

    value, grad = jax.value_and_grad(total)(jnp.array(now))
    distance = [-2.0 - -3.0, -1.5 - -1.0, 0.0]  # of the three actions that nothing cuts
    wanted = -(1.0 - 2.0 - 2.0) + 0.5 * sum(np.expm1(d) - d for d in distance)
    assert value == pytest.approx(wanted, rel=1e-5)
    is_cut = ~np.isfinite(now) | ~np.isfinite(reference)
    assert np.isfinite(grad).all() and (np.asarray(grad)[is_cut] == 0).all()


def _gradient(estimator: Estimator, rollout: Rollout) -> np.ndarray:
    """Ascent direction of the loss at the sampling parameters, times the actions of a row."""

    @jax.jit
    def loss(params: Any) -> jax.Array:
        found = policy_loss(
            NETWORK, params, {}, {}, rollout, estimator.draw(rollout, jax.random.key(0)),
            estimator=estimator, settings=PolicySettings(),
        )  # fmt: skip
        return found.sum / found.weight

    return -LENGTH * np.asarray(jax.grad(loss)(PARAMS)["table"])


def test_the_gradient_of_traces_is_that_of_the_expected_reward():
    """All ways to write a text, two letters and then the last, each with its probability."""
    made = dlm_jax.generate(
        MODEL, [""], num_samples=768, gen_length=LENGTH, steps=2, order="random", fill="parallel",
        temperature=TEMPERATURE, ignore_eos=True, seed=5, trace=True, batch_size=768,
        logit_bias=tuple((i, float("-inf")) for i in range(2, NETWORK.vocab_size)),
    )  # fmt: skip
    trace = made.trace
    assert trace is not None
    ways = np.concatenate([made.tokens[:, :LENGTH], made.committed[:, :LENGTH]], axis=1)
    _, first_of = np.unique(ways, axis=0, return_index=True)
    assert len(first_of) == 24
    trace = trace.rows(first_of)
    chance = np.where(trace.is_written, trace.logprobs, 0).sum((1, 2))
    chance = np.exp(np.float64(chance + trace.choice_logprobs.sum(1)))
    assert chance.sum() == pytest.approx(1.0, abs=1e-4)
    texts = made.tokens[first_of][:, :LENGTH]
    number = texts @ [4, 2, 1]

    def policy(params: Any) -> jax.Array:
        return jnp.stack([probability(params, text, EMPTY) for text in ALL_TEXTS])

    np.testing.assert_allclose(np.bincount(number, chance), policy(PARAMS), atol=1e-5)
    expected = jax.grad(lambda params: policy(params) @ REWARDS)(PARAMS)["table"]
    reward = REWARDS[number]
    advantage = (len(chance) * chance * (reward - chance @ reward)).astype(np.float32)
    estimator = trace_rl(order="random", fill="parallel")
    found = _gradient(estimator, _rollout(texts, advantage, trace))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(expected).max() > 1e-2


def test_advantages_are_those_of_the_formula():
    rewards_PG = np.array([[1.0, 0.0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.2]])
    for row, one in enumerate(rewards_PG):
        deviation = np.sqrt(((one - one.mean()) ** 2).sum() / 3)
        expected = (one - one.mean()) / (deviation + 1e-4)
        np.testing.assert_allclose(advantages(rewards_PG)[row], expected, atol=1e-5)


def test_what_is_left_out_has_no_advantage_and_counts_for_no_other():
    found = advantages(np.array([[1.0, np.nan, 0.0], [np.nan, 0.5, np.nan]]))
    assert found[0, 1] == 0 and not found[1].any()
    np.testing.assert_allclose(found[0, [0, 2]], advantages(np.array([[1.0, 0.0]]))[0], rtol=1e-6)
