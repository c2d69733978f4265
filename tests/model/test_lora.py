"""Low-rank adapters: the adapted matrix, its start and what is trained, from the formulas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.model import lora
from dlm_jax.model.transformer import build
from dlm_jax.types import Axes

RANK, ALPHA = 4, 10.0
TARGETS = ("query", "value", "down")
CONFIG = toy.config(lora_rank=RANK, lora_alpha=ALPHA, lora_targets=TARGETS)


@functools.cache
def _params():
    """Parameters whose adapters are not zero."""
    return toy.random_params(build(CONFIG))


def _adapted(params) -> dict:
    """``W + (alpha / rank) A B`` for each target, in NumPy."""
    whole = jax.tree.map(np.float64, {k: v for k, v in params.items() if k != lora.GROUP})
    for stack, parts in params[lora.GROUP].items():
        for part, maps in parts.items():
            for name, pair in maps.items():
                a, b = np.float64(pair["a"]), np.float64(pair["b"])
                added = ALPHA / RANK * np.einsum("dir,dro->dio", a, b)
                whole[stack][part][name]["kernel"] = whole[stack][part][name]["kernel"] + added
    return whole


def test_an_adapted_matrix_is_the_matrix_and_alpha_by_rank_times_the_factors():
    merged, expected = lora.merged(_params(), CONFIG), _adapted(_params())
    assert merged.keys() == expected.keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), merged, expected
    )
    found = {name for maps in _params()[lora.GROUP]["blocks"].values() for name in maps}
    assert found == set(TARGETS)


def test_a_network_with_adapters_is_that_with_adapted_matrices():
    tokens_BL, length_B = jnp.array([[1, 2, toy.MASK, 4]]), jnp.array([4])
    plain = jax.tree.map(jnp.float32, _adapted(_params()))
    expected = toy.logits(toy.network(), plain, tokens_BL, length_B)
    found = toy.logits(build(CONFIG), _params(), tokens_BL, length_B)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    bare = {name: tree for name, tree in _params().items() if name != lora.GROUP}
    without = toy.logits(toy.network(), bare, tokens_BL, length_B)
    assert np.abs(np.asarray(found) - np.asarray(without)).max() > 0.1


@pytest.mark.parametrize("fan_in", [64, 256])
def test_the_first_factor_has_the_variance_of_its_inputs_and_the_second_is_zero(fan_in):
    kernel = jnp.zeros((2, fan_in, 8))
    params = {"blocks": {"attention": {"query": {"kernel": kernel}}}}
    config = toy.config(lora_rank=16, lora_targets=("query",))
    axes = jax.tree.map(lambda _: Axes(is_matrix=True), params)
    made = lora.with_adapters(jax.random.key(0), params, axes, config)
    pair = made[lora.GROUP]["blocks"]["attention"]["query"]
    assert pair["a"].shape == (2, fan_in, 16) and pair["b"].shape == (2, 16, 8)
    assert not pair["b"].any()
    # Five standard errors of the deviation of so many normal numbers.
    error = 5 / (2 * pair["a"].size) ** 0.5
    assert float(pair["a"].std()) * fan_in**0.5 == pytest.approx(1.0, abs=error)


def test_only_the_factors_have_a_gradient():
    block = lora.stacks_of(_params())["blocks"]

    def total(block):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(lora.applied(block, CONFIG)))

    slope = jax.grad(total)(block)
    own = slope.pop(lora.GROUP)
    assert not any(leaf.any() for leaf in jax.tree.leaves(slope))
    assert all(leaf.any() for leaf in jax.tree.leaves(own))
