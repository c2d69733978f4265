"""The heads are what their formulas say, and a model with heads is the same model without."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.model.transformer import build

ROWS, WIDTH = 5, 16
VARIANTS = {
    "document": {},
    "wide": {"sampler_context": 2, "sampler_residual": True, "tied_head": False},
}


def _config(variant: str = "document", **changes):
    both = {"add_sampler_head": True, "add_critic_head": True}
    return toy.config(**(both | VARIANTS[variant] | changes))


def _params(network):
    """Parameters as after training, without compiling what draws fresh ones."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)


def _inputs(reach: int):
    """Left neighbours, hidden vectors and right neighbours, all of them different."""
    rng = np.random.default_rng(0)
    shapes = ((ROWS, reach, WIDTH), (ROWS, WIDTH), (ROWS, reach, WIDTH))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _numpy_sampler_logits(config, params, left_CD, hidden_D, right_CD):
    """Logits ``[V]`` of one position in float64: the rules in docs/."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    head = p["sampler_head"]

    def norm(x, weights):
        return x / np.sqrt((x**2).mean() + config.norm_epsilon) * weights["scale"]

    def silu(x):
        return x / (1 + np.exp(-x))

    together = np.concatenate([*left_CD, hidden_D, *right_CD])
    x = norm(silu(together @ head["inner"]["kernel"]), head["inner_norm"])
    x = x @ head["out"]["kernel"]
    x = hidden_D + x if config.sampler_residual else silu(x)
    kernel = p["embedding"].T if config.tied_head else p["head"]["kernel"]
    return norm(x, head["out_norm"]) @ kernel


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_sampler_head_is_its_formula_read_by_the_lm_head(variant):
    config = _config(variant)
    network = build(config)
    params = _params(network)
    inputs = _inputs(config.sampler_context)
    logits_NV = jax.jit(network.heads["sampler"].readout)(params, *map(jnp.asarray, inputs))
    assert logits_NV.dtype == jnp.float32
    for row in range(ROWS):
        expected = _numpy_sampler_logits(config, params, *(x[row] for x in inputs))
        np.testing.assert_allclose(logits_NV[row], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_neighbour_changes_the_logits_of_its_own_position_alone(variant):
    network = build(_config(variant))
    params, inputs = _params(network), _inputs(network.heads["sampler"].context)
    read = jax.jit(network.heads["sampler"].readout)
    before_NV = np.asarray(read(params, *map(jnp.asarray, inputs)))
    changes_NV = []
    for side in (0, 2):
        for offset in range(network.heads["sampler"].context):
            changed = [x.copy() for x in inputs]
            changed[side][1, offset] = 0.0
            after_NV = np.asarray(read(params, *map(jnp.asarray, changed)))
            np.testing.assert_array_equal(np.delete(after_NV, 1, 0), np.delete(before_NV, 1, 0))
            changes_NV.append(after_NV[1] - before_NV[1])
            assert np.abs(changes_NV[-1]).max() > 1e-2
    # No two of them are the same place to the head.
    for index, one in enumerate(changes_NV):
        assert all(np.abs(one - other).max() > 1e-2 for other in changes_NV[:index])


@functools.cache
def _fresh(**changes):
    """A small untied network and its first parameters."""
    network = build(toy.config(depth=1, tied_head=False, **changes))
    return network, jax.jit(network.init)(jax.random.key(3))


HEADS = {"add_sampler_head": True, "sampler_residual": True, "add_critic_head": True}


def test_a_model_begins_with_the_same_parameters_with_heads_and_without():
    plain, with_heads = _fresh()[1], _fresh(**HEADS)[1]
    assert with_heads.keys() - plain.keys() == {"sampler_head", "critic_head"}
    main = {name: with_heads[name] for name in plain}
    chex.assert_trees_all_equal(main, plain)


def test_the_critic_is_a_linear_map_of_a_hidden_vector():
    network = toy.network_with_heads()
    params = _params(network)
    hidden_ND = _inputs(1)[1]
    kernel = np.asarray(params["critic_head"]["out"]["kernel"], np.float64)
    logit_N = network.heads["critic"](params, jnp.asarray(hidden_ND))
    assert logit_N.shape == (ROWS,) and logit_N.dtype == jnp.float32
    np.testing.assert_allclose(logit_N, (hidden_ND @ kernel)[:, 0], rtol=1e-4, atol=1e-5)
