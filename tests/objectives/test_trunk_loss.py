"""The sampler head's loss on the predictions of its trunk, beside formulas in NumPy."""

from __future__ import annotations

from typing import Any

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from enumerable import LENGTH, MASK, NETWORK, PARAMS

from benchmarks import markov
from dlm_jax.heads.sampler import prepare_sampler_inputs, trunk_loss
from dlm_jax.model.transformer import build
from dlm_jax.objectives.objective import Batch, Drawn

EMPTY = (MASK,) * LENGTH


def _log_law(params: Any, canvas: tuple[int, ...]) -> np.ndarray:
    """``ln p`` at each position of a canvas, of all ids but MASK."""
    logits = np.asarray(params["table"], np.float64)[int(enumerable.code(np.array(canvas)))]
    logits = logits[:, [id_ for id_ in range(enumerable.V) if id_ != MASK]]
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _divergence(network: Any, params: Any, tokens_BL: Any, is_revealed_BL: Any, mask_id: int):
    params = {"sampler_head": {}} | params
    shown_BL = jnp.full_like(tokens_BL, mask_id)
    length_B = jnp.full(tokens_BL.shape[0], tokens_BL.shape[1])
    weight_BL, batch = jnp.ones(tokens_BL.shape), Batch(tokens_BL, length_B, 0 * length_B)
    drawn = Drawn(
        batch, shown_BL, weight_BL, weight_BL.sum(),
        hidden_BLD=network.trunk(params, shown_BL, length_B, None)[0],
    )  # fmt: skip
    inputs = prepare_sampler_inputs(network, params, drawn, is_revealed_BL, mask_id=mask_id)
    is_asked_BL = ~is_revealed_BL
    return trunk_loss(
        network, params, inputs, drawn, is_revealed_BL, is_asked_BL,
        jnp.sum(is_asked_BL).astype(jnp.float32), mask_id=mask_id,
    )  # fmt: skip


def test_an_exact_head_of_a_markov_chain_says_what_the_trunk_says():
    """Where every other token is revealed, neighbours are all that the trunk sees, too."""
    network = markov.network()
    params = network.init(jax.random.key(0))
    tokens_BL = jnp.array([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])
    odd_BL = jnp.broadcast_to(jnp.arange(5)[None] % 2 == 1, (2, 5))
    found = _divergence(network, params, tokens_BL, odd_BL, markov.MASK)
    assert float(found.weight) == 6
    assert abs(float(found.sum)) < 1e-5
    other = params | {"step": params["step"][::-1]}
    assert float(_divergence(network, other, tokens_BL, ~odd_BL & False, markov.MASK).sum) < 1e-5


def test_the_divergence_of_a_head_is_that_of_its_formula():
    tokens_BL, is_revealed_BL = jnp.array([[0, 1, 1]]), jnp.array([[False, True, False]])
    found = _divergence(NETWORK, PARAMS, tokens_BL, is_revealed_BL, MASK)
    trunk = _log_law(PARAMS, (MASK, 1, MASK))
    empty = np.asarray(PARAMS["table"], np.float64)[int(enumerable.code(np.array(EMPTY)))]
    beside = np.asarray(PARAMS["beside"], np.float64)
    vector, ids = np.eye(LENGTH)[1], [id_ for id_ in range(enumerable.V) if id_ != MASK]
    wanted = 0.0
    for place, neighbours in ((0, 2.0 * vector), (2, vector)):
        logits = (empty[place] + (neighbours @ beside[:, :1]) * beside[0])[ids]
        wanted += _kl(trunk[place], logits - np.log(np.exp(logits).sum()))
    assert wanted > 0.01
    assert float(found.sum) == pytest.approx(float(wanted), rel=1e-4)


def test_only_the_head_learns_from_the_trunk():
    network = build(toy.config(depth=1, add_sampler_head=True))
    params = network.init(jax.random.key(0))
    tokens_BL = jnp.array([[0, 1, 2, 3, 1, 2, 0, 3]])
    is_revealed_BL = jnp.arange(8)[None] % 2 == 0
    gradient = jax.jit(jax.grad(
        lambda params: _divergence(network, params, tokens_BL, is_revealed_BL, toy.MASK).sum
    ))(params)  # fmt: skip
    for name, tree in gradient.items():
        largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))
        assert (largest > 0) == (name == "sampler_head"), name
