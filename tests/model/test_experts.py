"""Experts over several devices say what they say on one, and each device holds its own alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax import devices
from dlm_jax.config import MeshConfig, ModelConfig
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.model.moe import route
from dlm_jax.model.transformer import build

CONFIG = ModelConfig(
    depth=2, width=16, heads=2, vocab_size=11, activation="swiglu", mlp_width=12, experts=8,
    experts_per_token=3, expert_width=6, shared_width=6, dense_layers=1, router_score="sigmoid",
    router_normalised=True,
)  # fmt: skip
LENGTHS = np.full(8, 5)


def _params():
    params = build(CONFIG).init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def _loss(params, tokens_BL):
    hidden_BLD, _ = build(CONFIG).trunk(params, tokens_BL, LENGTHS[: tokens_BL.shape[0]], None)
    return jnp.sum(jnp.sin(3 * hidden_BLD)), hidden_BLD


@functools.cache
def _alone(num_rows):
    tokens_BL = _tokens(num_rows)
    return jax.jit(jax.value_and_grad(_loss, has_aux=True))(_params(), tokens_BL)


def _tokens(num_rows):
    return np.random.default_rng(2).integers(0, 11, (num_rows, 5)).astype(np.int32)


@pytest.mark.parametrize(
    ("axes", "num_rows"),
    [
        pytest.param({"expert": 4, "tensor": 2}, 8, marks=pytest.mark.slow),
        ({"data": 2, "fsdp": 2, "expert": 2}, 8),
        # Rows that no axis splits.
        pytest.param({"expert": 8}, 3, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_over_eight_devices_are_those_of_one(axes, num_rows):
    mesh = make_mesh(MeshConfig(**axes))
    params = _params()
    split = jax.device_put(params, shardings(params, axes_of(build(CONFIG)), mesh))

    def on_mesh(params, tokens_BL):
        with devices.used(mesh):
            return jax.value_and_grad(_loss, has_aux=True)(params, tokens_BL)

    compiled = jax.jit(on_mesh).lower(split, _tokens(num_rows)).compile()
    found, expected = compiled(split, _tokens(num_rows)), _alone(num_rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max()),
        found, expected,
    )  # fmt: skip
    # No device ever holds the kernels of all experts.
    assert "f32[8,16,6]" not in compiled.as_text()
    assert "f32[8,6,16]" not in compiled.as_text()


@pytest.mark.parametrize("bias", ["none", "choice", "weight"])
@pytest.mark.parametrize(("score", "is_normalised"), [("sigmoid", True), ("softmax", False)])
@pytest.mark.parametrize("groups_kept", [4, 2])
def test_tokens_go_to_the_best_experts_of_the_best_groups(bias, score, is_normalised, groups_kept):
    """Groups by the sum of their two best scores; the bias chooses, and weighs only if asked."""
    config = dataclasses.replace(
        CONFIG, experts=12, router_groups=4, router_groups_kept=groups_kept, router_bias=bias,
        router_score=score, router_normalised=is_normalised, router_scale=2.5,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    logits_NE, bias_E = rng.normal(size=(50, 12)), 0.1 * rng.normal(size=12)
    given_E = None if bias == "none" else jnp.asarray(bias_E, jnp.float32)
    ids_NK, weights_NK = map(np.asarray, route(config, jnp.float32(logits_NE), given_E))
    by_best_alone = 0
    for logits, ids, weights in zip(logits_NE, ids_NK, weights_NK, strict=True):
        odds = np.exp(logits)
        scores = odds / (1 + odds) if score == "sigmoid" else odds / odds.sum()
        chosen = scores + (0 if bias == "none" else bias_E)
        groups = [sorted(range(3 * g, 3 * g + 3), key=lambda e: -chosen[e]) for g in range(4)]
        ranked = sorted(groups, key=lambda group: -chosen[group[:2]].sum())[:groups_kept]
        best = sorted(groups, key=lambda group: -chosen[group[0]])[:groups_kept]
        by_best_alone += {*map(tuple, ranked)} == {*map(tuple, best)}
        expected = sorted(sum(ranked, []), key=lambda e: -chosen[e])[:3]
        assert ids.tolist() == expected
        own = (chosen if bias == "weight" else scores)[expected]
        own = own / own.sum() if is_normalised else own
        np.testing.assert_allclose(weights, 2.5 * own, rtol=1e-4)
    assert (by_best_alone < 50) == (groups_kept == 2)
