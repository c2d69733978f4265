from __future__ import annotations

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage_cases as cases
import toy

from dlm_jax.config import ObjectiveConfig, OptimConfig
from dlm_jax.heads import MAIN
from dlm_jax.objectives.objective import Batch, Drawn, Objective
from dlm_jax.training.tasks import Task
from dlm_jax.training.train_step import (
    TrainState,
    abstract_state,
    check_adds_up,
    init_state,
    make_eval_step,
    make_train_step,
)
from dlm_jax.types import Network

ROWS, POSITIONS, STEPS = cases.ROWS, cases.POSITIONS, 3
CUBE = pytest.param("cube", marks=pytest.mark.slow)
OPTIM = OptimConfig(warmup_steps=1, weight_decay=0.1, ema_decay=0.15)


def _batch(seed: int) -> Batch:
    return cases.batch(seed)._replace(length_B=np.full(ROWS, POSITIONS, np.int32))


def _task(name: str = "one", **parts: object) -> Task:
    given = {
        "optim": OPTIM, "train": {"steps": 20},
        "objective": ObjectiveConfig(random_length_share=0.5), "objectives": cases.mixture(0.25),
    }  # fmt: skip
    return cases.task(place=cases.mesh(name), **(given | parts))


@functools.cache
def _host_state() -> TrainState:
    """A new state, except that no projection is zero, so that every parameter has a gradient."""
    return jax.device_get(init_state(_task(), jax.random.key(0))._replace(params=toy.params()))


def _state(name: str) -> TrainState:
    place = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(_task(name)))
    return jax.device_put(jax.tree.map(np.copy, _host_state()), place)


@functools.cache
def _compiled(name: str):
    return make_train_step(_task(name), (MAIN,), _state(name))


@functools.cache
def _trained(name: str):
    step, state, key = _compiled(name), _state(name), jax.random.key(5)
    seen = []
    for index in range(STEPS):
        state, metrics = step(state, _batch(index), key)
        seen.append(metrics)
    return jax.device_get((state, seen))


@pytest.mark.parametrize("name", ["data", CUBE])
def test_eight_devices_train_like_one(name):
    _assert_near(_trained(name), _trained("one"))


@functools.cache
def _descended(name: str, parts: int):
    """One step of plain gradient descent, the batch cut into parts."""
    task = _task(name, optimizer=optax.sgd(0.1), train={"accumulate": parts})
    step = make_train_step(task, (MAIN,), _plain_state())
    state, metrics = step(_plain_state(), _batch(0), jax.random.key(5))
    return jax.device_get((state, [metrics]))


@pytest.mark.parametrize(
    ("name", "parts"), [("one", 4), pytest.param("cube", 2, marks=pytest.mark.nightly)]
)
def test_accumulating_parts_gives_the_step_of_the_whole_batch(name, parts):
    _assert_near(_descended(name, parts), _descended("one", 1))


def _assert_near(result, expected_result):
    (ours, metrics), (theirs, expected) = result, expected_result
    for a, b in zip(metrics, expected, strict=True):
        groups = {f"grad_norm_{name}" for name in ours.params}
        names = {"loss", "elbo", "denoising", "grad_norm", "param_norm"} | groups
        assert a.keys() == b.keys() == names
        for figure in a:
            np.testing.assert_allclose(a[figure], b[figure], rtol=3e-5, err_msg=figure)
    chex.assert_trees_all_close(ours, theirs, atol=2e-4, rtol=1e-6)


def test_the_loss_is_the_mean_of_the_objectives_weighted_by_their_shares():
    for metrics in _trained("one")[1]:
        expected = 0.75 * metrics["elbo"] + 0.25 * metrics["denoising"]
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_the_average_of_the_parameters_is_that_of_its_formula():
    step, state, key = _compiled("one"), _state("one"), jax.random.key(5)
    average = jax.tree.map(np.float64, _host_state().ema)
    for index in range(STEPS):
        state, _ = step(state, _batch(index), key)
        # The decay rises as (1 + s) / (10 + s): 0.1 at first, then 0.15 at most.
        decay = min(0.15, (1 + index) / (10 + index))
        params = jax.device_get(state.params)
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.ema, average
    )
    assert state.best_params is state.ema


@pytest.mark.parametrize("name", ["data", CUBE])
def test_many_steps_are_one_program(name):
    _trained(name)
    assert _compiled(name)._cache_size() == 1


@pytest.mark.parametrize("name", ["one", CUBE])
def test_a_step_writes_its_state_over_the_old_one(name):
    step, state = _compiled(name), _state(name)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    state_in = state
    state, _ = step(state, _batch(0), jax.random.key(5))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state_in))
    memory = step.lower(state, _batch(0), jax.random.key(5)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.9 * total / (8 if name == "cube" else 1)


def _noise_task(batch: Batch, key: jax.Array) -> Drawn:
    """A task whose weights are the noise it drew."""
    weight_BL = jax.random.uniform(key, batch.tokens_BL.shape)
    return Drawn(batch, jnp.zeros_like(batch.tokens_BL), weight_BL, jnp.float32(1))


@functools.cache
def _flat_network() -> Network:
    """A network for which every token is equally likely, whatever it sees."""
    return dataclasses.replace(
        toy.network(),
        trunk=lambda params, tokens_BL, length_B, cache: (jnp.ones((*tokens_BL.shape, 1)), cache),
        readout=lambda params, hidden_ND: (
            0.0 * params["norm"]["scale"].sum() * jnp.ones((hidden_ND.shape[0], toy.VOCAB_SIZE))
        ),
    )


def _plain_step(network: Network, task):
    """A step of plain gradient descent on one device, which compiles fast."""
    parts = {"objectives": {"noise": Objective(task)}, "optimizer": optax.sgd(0.1)}
    return make_train_step(cases.task(network, **parts), (MAIN,), _plain_state())


def _plain_state(*, step: int = 0, scale: float = 1.0) -> TrainState:
    params = jax.tree.map(lambda leaf: jnp.asarray(scale * leaf), _host_state().params)
    return TrainState(params, optax.sgd(0.1).init(params), jnp.int32(step))


@functools.cache
def _noise_step():
    return _plain_step(_flat_network(), _noise_task)


def _noise(*, step: int, seed: int, batch: int = 0, params_scale: float = 1.0) -> float:
    state = _plain_state(step=step, scale=params_scale)
    _, metrics = _noise_step()(state, _batch(batch), jax.random.key(seed))
    return float(metrics["loss"])


def test_noise_depends_on_seed_and_step_alone():
    drawn = _noise(step=3, seed=1)
    assert _noise(step=3, seed=1, batch=9, params_scale=2.0) == drawn
    others = {_noise(step=4, seed=1), _noise(step=3, seed=2), _noise(step=1, seed=3)}
    assert len(others | {drawn}) == 4


@functools.cache
def _one_parameter_network() -> Network:
    """A network whose logit of token 0 is the sum of its last scales; all others are 0."""
    return dataclasses.replace(
        _flat_network(),
        readout=lambda params, hidden_ND: (
            params["norm"]["scale"].sum()
            * jax.nn.one_hot(jnp.zeros(hidden_ND.shape[0], jnp.int32), toy.VOCAB_SIZE)
        ),
    )


def test_the_loss_is_divided_by_the_total_and_the_norms_are_what_they_say():
    def task(batch, key):
        return Drawn(batch, batch.tokens_BL, jnp.ones(batch.tokens_BL.shape), jnp.float32(20))

    network = _one_parameter_network()
    scale = np.asarray(toy.params()["norm"]["scale"], np.float64)
    batch = _batch(0)
    state, metrics = _plain_step(network, task)(_plain_state(), batch, jax.random.key(0))
    x = scale.sum()
    log_total = np.log(np.exp(x) + toy.VOCAB_SIZE - 2)
    zeros = int((batch.tokens_BL == 0).sum())
    count = ROWS * POSITIONS
    np.testing.assert_allclose(metrics["loss"], (count * log_total - zeros * x) / 20, rtol=1e-5)
    slope = (count * np.exp(x - log_total) - zeros) / 20
    np.testing.assert_allclose(metrics["grad_norm"], abs(slope) * np.sqrt(scale.size), rtol=1e-4)
    squares = sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(state.params))
    np.testing.assert_allclose(metrics["param_norm"], np.sqrt(squares), rtol=1e-5)


def test_eight_devices_evaluate_like_one_and_every_device_knows_every_row():
    length_B = np.array([8, 8, 8, 5, 8, 8, 0, 0], np.int32)
    batch = _batch(0)._replace(length_B=length_B)
    results = []
    for name in ("one", "cube"):
        params = _state(name).params
        evaluate = make_eval_step(_task(name), params)
        nats_B = evaluate(params, batch, np.arange(ROWS), jax.random.key(2))
        assert nats_B.is_fully_replicated
        results.append(np.asarray(nats_B))
    np.testing.assert_allclose(*results, rtol=2e-5)
    assert (results[0][length_B > 0] > 0).all()
    assert (results[0][length_B == 0] == 0).all()


@pytest.mark.parametrize(("scale", "is_refused"), [(1.0, False), (1.5, True)])
def test_losses_of_both_signs_add_up_within_the_rounding_of_their_parts(scale, is_refused):
    """Two parts of 400 and -399.6 that are each rounded by 0.1% or so."""

    def draw(batch, key):
        return jnp.tile(jnp.array([100.0, -99.9]), 4)

    def loss(network, params, drawn):
        total = drawn.sum()
        rounded = total + 1e-3 * jnp.abs(total)
        return jnp.where(total > 1, scale, 1.0) * rounded, jnp.ones(())

    task = _task(train={"accumulate": 2}, objectives={"x": Objective(draw, loss)})
    with pytest.raises(ValueError, match="'x' is") if is_refused else contextlib.nullcontext():
        check_adds_up(task, toy.params())
