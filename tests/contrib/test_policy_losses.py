"""Each policy loss beside an oracle in NumPy, and its gradient beside that of the expected reward.

The toy has one prompt token and two answer tokens of three letters, so that all 9 texts and 18
ways to write them can be enumerated.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dlm_jax
from dlm_jax.config import SamplingParams
from dlm_jax.contrib.rl import (
    ADVANTAGES,
    Estimator,
    PolicySettings,
    Rollout,
    advantages,
    diffu_grpo,
    policy_loss,
    trace_rl,
)
from dlm_jax.data import CharacterTokenizer
from dlm_jax.types import Network, live_positions

TOKENIZER = CharacterTokenizer("abc")
MASK = TOKENIZER.mask_id
LETTERS = 3
SIZE, WIDTH = 3, 4
SAMPLE = SamplingParams(steps=2, order="random", ignore_eos=True)


def _init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    shapes = {"table": (TOKENIZER.vocab_size, WIDTH), "mix": (SIZE, SIZE, WIDTH, WIDTH)}
    shapes["out"] = (WIDTH, LETTERS)
    return {n: 0.5 * jax.random.normal(k, shapes[n]) for k, n in zip(keys, shapes, strict=True)}


def _trunk(params: Any, tokens_BL: jax.Array, length_B: jax.Array, cache: Any):
    """Each position of the first three sees the others through matrices of their own."""
    live_BL1 = live_positions(length_B, tokens_BL.shape[1])[:, :, None]
    seen_BLD = jnp.where(live_BL1, params["table"][tokens_BL], 0.0)
    mixed_BLD = jnp.tanh(jnp.einsum("bjd,jide->bie", seen_BLD[:, :SIZE], params["mix"]))
    return seen_BLD.at[:, :SIZE].add(mixed_BLD), cache


def _readout(params: Any, hidden_ND: jax.Array) -> jax.Array:
    """Ids that are no letters are as good as impossible."""
    rest = jnp.full((hidden_ND.shape[0], TOKENIZER.vocab_size - LETTERS), -40.0)
    return jnp.concatenate([hidden_ND @ params["out"], rest], axis=1)


NETWORK = Network(
    _init, _trunk, lambda params, ids: params["table"][ids], _readout, TOKENIZER.vocab_size
)
PARAMS, OTHER, THIRD = (_init(jax.random.key(seed)) for seed in (3, 4, 5))
TEXTS = np.array([(0, *pair) for pair in itertools.product(range(LETTERS), repeat=2)], np.int32)
REWARDS = np.array([0.0, 1.0, 0.2, 0.5, 0.0, 0.9, 0.3, 0.1, 1.0])


@jax.jit
def _log_softmax(params: Any, tokens_BL: jax.Array) -> jax.Array:
    hidden_BLD, _ = _trunk(params, tokens_BL, jnp.full(tokens_BL.shape[0], SIZE), None)
    logits = _readout(params, hidden_BLD.reshape(-1, WIDTH)).reshape(*tokens_BL.shape, -1)
    return jax.nn.log_softmax(logits.at[:, :, MASK].set(-jnp.inf))


def _log_p(params: Any, canvas: Any, place: int, token: int) -> jax.Array:
    """Log-probability of a token at a place of one canvas."""
    return _log_softmax(params, jnp.asarray(canvas, jnp.int32)[None])[0, place, token]


def _rollout(texts: np.ndarray, advantage: np.ndarray, trace: Any = None) -> Rollout:
    rows = len(texts)
    step_BL = np.tile(np.array([-1, 0, 1], np.int32), (rows, 1))
    length_B = np.full(rows, SIZE, np.int32)
    return Rollout(texts, length_B, np.ones(rows, np.int32), step_BL, advantage, trace)


# ---------------------------------------------------------------------------- oracles in NumPy


def _hidden(text: np.ndarray, places: Any) -> np.ndarray:
    canvas = text.copy()
    canvas[list(places)] = MASK
    return canvas


def oracle_diffu(params: Any, text: np.ndarray, shown: np.ndarray) -> list[float]:
    """d1, equation 3: one forward with the whole answer hidden."""
    return [float(_log_p(params, shown, place, text[place])) for place in (1, 2)]


def oracle_surrogate(now, old, reference, advantages, weights, *, clip, beta, estimator):
    """PPO's clipped surrogate with the divergence, in float64, one action after another."""
    total = 0.0
    for b, advantage in enumerate(advantages):
        for n, weight in enumerate(weights[b]):
            ratio = np.exp(now[b][n] - old[b][n])
            held = min(max(ratio, 1 - clip), 1 + clip)
            gain = min(ratio * advantage, held * advantage)
            log_ratio = reference[b][n] - now[b][n]
            k3 = np.exp(log_ratio) - log_ratio - 1
            distance = log_ratio**2 / 2 if estimator == "k2" else k3
            total -= weight * (gain - beta * distance)
    return total / len(advantages)


def _estimator(name: str, prompt_mask: float = 0.15) -> Estimator:
    if name == "trace":
        return trace_rl(order=SAMPLE.order, fill=SAMPLE.fill)
    return diffu_grpo(prompt_mask=prompt_mask, mask_id=MASK)


@pytest.mark.parametrize("kl_estimator", ["k2", "k3"])
def test_a_loss_is_what_its_paper_says(kl_estimator):
    """Other parameters sample and refer, so that ratios are clipped and the divergence counts."""
    advantage = np.linspace(-1.5, 1.0, 9).astype(np.float32)
    settings = PolicySettings("diffu_grpo", updates=2, kl=0.3, kl_estimator=kl_estimator)
    estimator, rollout = _estimator("diffu_grpo", 0.5), _rollout(TEXTS, advantage)
    shown = estimator.draw(rollout, jax.random.key(7))
    loss = policy_loss(
        NETWORK, PARAMS, OTHER, THIRD, rollout, shown, estimator=estimator, settings=settings
    )
    now, old, reference = (
        [oracle_diffu(params, *row) for row in zip(TEXTS, np.asarray(shown), strict=True)]
        for params in (PARAMS, OTHER, THIRD)
    )
    weights = np.full((9, 2), 0.5)
    expected = oracle_surrogate(
        now, old, reference, advantage, weights, clip=0.2, beta=0.3, estimator=kl_estimator
    )
    assert float(loss.sum / loss.weight) == pytest.approx(expected, rel=1e-4)
    ratio = np.exp(np.subtract(now, old))
    sign = advantage[:, None]
    is_clipped = ((ratio > 1.2) & (sign > 0)) | ((ratio < 0.8) & (sign < 0))
    clipped, rows = loss.figures["clip_share"]
    assert float(clipped / rows) == pytest.approx((weights * is_clipped).sum() / 9)
    assert 0 < is_clipped.mean() < 1


@pytest.mark.parametrize("updates", [1, 2])
def test_ratios_are_relative_to_the_parameters_that_sampled_if_these_can_be_others(updates):
    estimator = _estimator("diffu_grpo")
    rollout = _rollout(TEXTS, np.linspace(-1.5, 1.0, 9).astype(np.float32))
    loss = policy_loss(
        NETWORK, PARAMS, OTHER, THIRD, rollout, estimator.draw(rollout, jax.random.key(7)),
        estimator=estimator, settings=PolicySettings("diffu_grpo", updates=updates),
    )  # fmt: skip
    clipped, _ = loss.figures["clip_share"]
    assert (float(clipped) > 0) == (updates > 1)


def test_a_row_that_ended_with_holes_changes_no_gradient():
    """Such a row is excluded, and MASK has no probability."""
    advantage = np.array([1.0, -1.0, 0.5], np.float32)
    rollout = _rollout(TEXTS[:3], advantage)
    hole = _rollout(np.array([[0, 1, MASK]], np.int32), np.zeros(1, np.float32))
    hole = hole._replace(step_BL=np.full((1, 3), -1, np.int32))
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), rollout, hole)
    shown = _estimator("diffu_grpo").draw(both, jax.random.key(2))
    np.testing.assert_allclose(
        _gradient("diffu_grpo", both, shown), _gradient("diffu_grpo", rollout, shown[:3]), atol=1e-6
    )


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


def test_masks_are_drawn_as_the_paper_says():
    rollout = _rollout(np.tile(TEXTS, (400, 1)), np.zeros(3600, np.float32))
    shown = np.asarray(_estimator("diffu_grpo", 0.25).draw(rollout, jax.random.key(1)))
    assert (shown[:, 1:] == MASK).all()
    assert (shown[:, 0] == MASK).mean() == pytest.approx(0.25, abs=0.03)


# ------------------------------------------------------------------- gradients by enumeration


def _policy(params: Any) -> jax.Array:
    """Probability of each text when a random position is written first: the sum over both."""
    found = []
    for text in TEXTS:
        ways = []
        for first, last in ((1, 2), (2, 1)):
            begun = _hidden(text, (last,))
            ways.append(
                _log_p(params, _hidden(text, (1, 2)), first, text[first])
                + _log_p(params, begun, last, text[last])
            )
        found.append(0.5 * jnp.exp(ways[0]) + 0.5 * jnp.exp(ways[1]))
    return jnp.stack(found)


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


@functools.cache
def _exact() -> tuple[np.ndarray, np.ndarray]:
    """(probabilities, gradient of the expected reward)."""
    probabilities, pull = jax.vjp(jax.jit(_policy), PARAMS)
    (grads,) = pull(jnp.asarray(REWARDS, jnp.float32))
    return np.asarray(probabilities), _flat(grads)


@functools.cache
def _gradient_of(name: str) -> Any:
    """Compiled ``(params, rollout, noise) -> gradient`` at the sampling parameters."""

    def loss(params: Any, rollout: Rollout, noise: Any) -> jax.Array:
        found = policy_loss(
            NETWORK, params, {}, {}, rollout, noise, estimator=_estimator(name, 0.0),
            settings=PolicySettings(name),
        )  # fmt: skip
        return found.sum / found.weight

    return jax.jit(jax.grad(loss))


def _gradient(name: str, rollout: Rollout, noise: Any) -> np.ndarray:
    """Ascent direction of the loss, times the two actions of a row."""
    return -2 * _flat(_gradient_of(name)(PARAMS, rollout, noise))


def test_the_gradient_of_traces_is_that_of_the_expected_reward():
    """All 18 ways to write a text, each with its own probability."""
    model = dlm_jax.Model(NETWORK, PARAMS, TOKENIZER, max_length=SIZE, sample=SAMPLE)
    made = dlm_jax.generate(
        model, [{"tokens": [0]}], num_samples=768, seed=5, trace=True, batch_size=768
    )
    trace = made.trace
    assert trace is not None
    ways = [
        (*tokens[:SIZE], *committed[:SIZE])
        for tokens, committed in zip(made.tokens, made.committed, strict=True)
    ]
    _, first_of = np.unique(ways, axis=0, return_index=True)
    assert len(first_of) == 18
    trace = trace.rows(first_of)
    chance = np.where(trace.is_written, trace.logprobs, 0).sum((1, 2)) + trace.choice_logprobs.sum(
        1
    )
    chance = np.exp(np.asarray(chance, np.float64))
    assert chance.sum() == pytest.approx(1.0, abs=1e-4)
    texts = made.tokens[first_of][:, :SIZE]
    number = texts[:, 1] * LETTERS + texts[:, 2]
    probabilities, exact = _exact()
    np.testing.assert_allclose(np.bincount(number, chance), probabilities, atol=1e-5)
    reward = REWARDS[number]
    advantage = (18 * chance * (reward - chance @ reward)).astype(np.float32)
    found = _gradient("trace", _rollout(texts, advantage, trace), None)
    np.testing.assert_allclose(found, exact, atol=2e-5)


# --------------------------------------------------------------------------------- advantages


def test_advantages_are_those_of_the_formulas():
    rewards_PG = np.array([[1.0, 0.0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.2]])
    for row, one in enumerate(rewards_PG):
        for place, reward in enumerate(one):
            others = np.delete(one, place)
            deviation = np.sqrt(((one - one.mean()) ** 2).sum() / 3)
            expected = {
                "grpo": (reward - one.mean()) / (deviation + 1e-4),
                "grpo_mean": reward - one.mean(),
                "rloo": reward - others.mean(),
            }
            for kind in ADVANTAGES:
                found = advantages(rewards_PG, kind)[row, place]
                assert found == pytest.approx(expected[kind], abs=1e-5)


def test_what_is_left_out_has_no_advantage_and_counts_for_no_other():
    rewards_PG = np.array([[1.0, np.nan, 0.0], [np.nan, 0.5, np.nan]])
    for kind in ADVANTAGES:
        found = advantages(rewards_PG, kind)
        assert found[0, 1] == 0 and not found[1].any()
        np.testing.assert_allclose(
            found[0, [0, 2]], advantages(np.array([[1.0, 0.0]]), kind)[0], rtol=1e-6
        )
