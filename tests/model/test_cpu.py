"""The CPU forms equal the plain formulas, in value and gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.model import ops
from dlm_jax.model.kernels import cpu


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def plain_rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def assert_same_values_and_gradients(fast, plain, *inputs, tolerance=2e-5):
    result, fast_vjp = jax.vjp(fast, *inputs)
    expected, plain_vjp = jax.vjp(plain, *inputs)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
    g = normal(9, *result.shape)
    for mine, theirs in zip(fast_vjp(g), plain_vjp(g), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 5, 7), (2, 3, 1, 7)])
def test_linear_equals_the_plain_product(shape):
    inputs = normal(0, *shape), normal(1, 7, 11)
    assert_same_values_and_gradients(ops.linear, lambda x, w: x @ w, *inputs)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 3, 4, 7)])
def test_rms_norm_equals_the_plain_formula(shape):
    scale = normal(1, *(1,) * (len(shape) - 1), 7)
    assert_same_values_and_gradients(
        lambda x, scale: ops.rms_norm(x, scale, epsilon=1e-5),
        plain_rms_norm,
        normal(0, *shape),
        scale,
    )


def test_large_scores_stay_finite():
    q, k, v = (1e3 * normal(i, 1, 6, 1, 4) for i in range(3))
    g = jax.grad(lambda q: jnp.sum(ops.attention(q, k, v, jnp.array([4]), may_see=ops.causal)))(q)
    assert jnp.all(jnp.isfinite(g))


@pytest.mark.parametrize("depth", [1, 3, 17])
def test_scan_layers_equals_a_python_loop(depth):
    shift = normal(2, 3, 4)

    def layer(x, w, shift):
        return x + jnp.tanh(x @ w) * 2 + shift

    def loop(x, w):
        for i in range(depth):
            x = layer(x, w[i], shift)
        return x

    assert_same_values_and_gradients(
        jax.jit(lambda x, w: ops.scan_layers(layer, x, w, shift)),
        loop,
        normal(0, 3, 4),
        0.3 * normal(1, depth, 4, 4),
        tolerance=1e-3,
    )


@pytest.mark.parametrize(("size", "is_split"), [(3 * 4099, True), (2500, True), (10007, False)])
def test_a_product_with_the_rows_of_a_large_table_is_the_plain_one(monkeypatch, size, is_split):
    """Equal blocks of the table, or one product, and the gradients."""
    monkeypatch.setattr(cpu, "_LARGE_TABLE", 1)
    rng = np.random.default_rng(0)
    x_ND, table_VD = (jnp.asarray(rng.normal(size=(n, 4)), jnp.float32) for n in (3, size))
    weight_NV = jnp.asarray(rng.normal(size=(3, size)), jnp.float32)
    found = str(jax.make_jaxpr(ops.linear_by_rows)(x_ND, table_VD))
    assert ("custom_vjp" in found) == is_split

    def both(product):
        def loss(x_ND, table_VD):
            y_NV = product(x_ND, table_VD)
            return jnp.sum(jnp.sin(y_NV) * weight_NV), y_NV

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x_ND, table_VD)

    ours = jax.tree.leaves(both(ops.linear_by_rows))
    plain = jax.tree.leaves(both(lambda x_ND, table_VD: x_ND @ table_VD.T))
    for found, wanted in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
