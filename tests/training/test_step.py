from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from dlm_jax.config import MeshConfig, OptimConfig
from dlm_jax.diffusion.corruption import LinearSchedule
from dlm_jax.diffusion.losses import Loss, elbo
from dlm_jax.sharding import make_mesh
from dlm_jax.training.optim import make_optimizer
from dlm_jax.training.step import (
    TrainState,
    abstract_state,
    init_state,
    make_eval_step,
    make_train_step,
)

ROWS, POSITIONS, STEPS = 8, 8, 3
OPTIMIZER = make_optimizer(OptimConfig(warmup_steps=1, weight_decay=0.1), num_steps=20)
MESHES = {
    "one": (MeshConfig(), 1),
    "data": (MeshConfig(data=8), 8),
    "cube": (MeshConfig(data=2, fsdp=2, tensor=2), 8),
}


def _mesh(name: str):
    config, devices = MESHES[name]
    return make_mesh(config, jax.devices()[:devices])


def _batch(seed: int):
    rng = np.random.default_rng(seed)
    tokens_BL = rng.integers(0, toy.MASK, (ROWS, POSITIONS)).astype(np.int32)
    return tokens_BL, np.full(ROWS, POSITIONS, np.int32)


@functools.cache
def _host_state() -> TrainState:
    """A new state, except that no projection is zero, so that every parameter has a gradient."""
    state = init_state(toy.network(), OPTIMIZER, jax.random.key(0), mesh=_mesh("one"))
    return jax.device_get(state._replace(params=toy.params()))


def _state(mesh) -> TrainState:
    abstract = abstract_state(toy.network(), OPTIMIZER, mesh)
    place = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.device_put(jax.tree.map(np.copy, _host_state()), place)


@functools.cache
def _compiled(name: str):
    mesh = _mesh(name)
    loss = functools.partial(elbo, toy.network(), mask_id=toy.MASK, schedule=LinearSchedule())
    return make_train_step(loss, OPTIMIZER, _state(mesh), mesh=mesh, batch_size=ROWS)


@functools.cache
def _trained(name: str):
    step, state, key = _compiled(name), _state(_mesh(name)), jax.random.key(5)
    seen = []
    for index in range(STEPS):
        state, metrics = step(state, *_batch(index), key)
        seen.append(metrics)
    return jax.device_get((state, seen))


@pytest.mark.parametrize("name", ["data", "cube"])
def test_eight_devices_train_like_one(name):
    (ours, metrics), (theirs, expected) = _trained(name), _trained("one")
    for a, b in zip(metrics, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), ours, theirs)


def test_training_moves_every_parameter():
    moved = jax.tree.map(
        lambda new, old: float(np.abs(new - old).max()), _trained("one")[0].params, toy.params()
    )
    assert min(jax.tree.leaves(moved)) > 1e-4, moved


def test_many_steps_are_one_program():
    _trained("cube")
    assert _compiled("cube")._cache_size() == 1


def test_a_state_keeps_its_place_on_the_devices_from_step_to_step():
    state = _state(_mesh("cube"))
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    after, _ = _compiled("cube")(state, *_batch(0), jax.random.key(5))
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == before


@pytest.mark.parametrize("name", ["one", "cube"])
def test_a_step_writes_its_state_over_the_old_one(name):
    step, state = _compiled(name), _state(_mesh(name))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    state_in = state
    state, _ = step(state, *_batch(0), jax.random.key(5))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state_in))
    memory = step.lower(state, *_batch(0), jax.random.key(5)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.9 * total / (8 if name == "cube" else 1)


@functools.cache
def _noise_step():
    """A step whose loss shows the noise it drew."""

    def noise(params, tokens_BL, length_B, key):
        return Loss(jax.random.uniform(key) + 0.0 * params["norm"]["scale"].sum(), jnp.float32(1))

    return _plain_step(noise)


def _plain_step(loss_fn):
    """A step of plain gradient descent on one device, which compiles fast."""
    mesh = _mesh("one")
    return make_train_step(loss_fn, optax.sgd(0.1), _plain_state(), mesh=mesh, batch_size=ROWS)


def _plain_state(*, step: int = 0, scale: float = 1.0) -> TrainState:
    params = jax.tree.map(lambda leaf: jnp.asarray(scale * leaf), _host_state().params)
    return TrainState(params, optax.sgd(0.1).init(params), jnp.int32(step))


def _noise(*, step: int, seed: int, batch: int = 0, params_scale: float = 1.0) -> float:
    state = _plain_state(step=step, scale=params_scale)
    _, metrics = _noise_step()(state, *_batch(batch), jax.random.key(seed))
    return float(metrics.loss)


def test_noise_depends_on_seed_and_step_alone():
    drawn = _noise(step=3, seed=1)
    assert _noise(step=3, seed=1, batch=9, params_scale=2.0) == drawn
    others = {_noise(step=4, seed=1), _noise(step=3, seed=2), _noise(step=1, seed=3)}
    assert len(others | {drawn}) == 4


def test_the_loss_is_the_mean_over_all_tokens_and_the_norms_are_what_they_say():
    def loss_fn(params, tokens_BL, length_B, key):
        return Loss(60.0 * params["norm"]["scale"].sum(), jnp.float32(20))

    scale = np.asarray(toy.params()["norm"]["scale"])
    state, metrics = _plain_step(loss_fn)(_plain_state(), *_batch(0), jax.random.key(0))
    np.testing.assert_allclose(metrics.loss, 3 * scale.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, 3 * np.sqrt(scale.size), rtol=1e-5)
    squares = sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(state.params))
    np.testing.assert_allclose(metrics.param_norm, np.sqrt(squares), rtol=1e-5)


def test_eight_devices_evaluate_like_one_and_every_device_knows_every_row():
    tokens_BL, length_B = _batch(0)
    length_B = np.array([8, 8, 8, 5, 8, 8, 0, 0], np.int32)
    results = []
    for name in ("one", "cube"):
        mesh = _mesh(name)
        state = _state(mesh)
        evaluate = make_eval_step(toy.network(), state, mesh=mesh, batch_size=ROWS,
                                  mask_id=toy.MASK)  # fmt: skip
        nats_B = evaluate(state.params, tokens_BL, length_B, jax.random.key(2))
        assert nats_B.is_fully_replicated
        results.append(np.asarray(nats_B))
    np.testing.assert_allclose(*results, rtol=2e-5)
    assert (results[0][length_B > 0] > 0).all()
    assert (results[0][length_B == 0] == 0).all()
