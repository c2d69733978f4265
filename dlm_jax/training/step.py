"""One optimiser step and one evaluation, as pure functions compiled for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.diffusion.likelihood import bound
from dlm_jax.diffusion.losses import Loss
from dlm_jax.model import cpu
from dlm_jax.sharding import batch_sharding, shardings
from dlm_jax.types import Network, Params


class TrainState(NamedTuple):
    """What training carries from step to step, and all that a checkpoint must hold of it.

    ``step`` is an int32 scalar: the number of steps taken, and the index of the next batch.
    """

    params: Params
    opt_state: Any
    step: jax.Array


class Metrics(NamedTuple):
    """What one step tells: the loss in nats per token, and two global Euclidean norms.

    ``grad_norm`` is the gradient's before clipping. ``param_norm`` is that of the new parameters:
    only it tells that they are still finite, for the loss was taken before the update.
    """

    loss: jax.Array
    grad_norm: jax.Array
    param_norm: jax.Array


LossFn = Callable[[Params, jax.Array, jax.Array, jax.Array], Loss]
"""``(params, tokens_BL, length_B, key) -> Loss``."""


def abstract_state(
    network: Network, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and shardings of the training state; nothing is allocated."""
    shapes = jax.eval_shape(lambda: _new_state(network, optimizer, jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(shapes, mesh),
    )


def _new_state(
    network: Network, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    params = network.init(key)
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def init_state(
    network: Network, optimizer: optax.GradientTransformation, key: jax.Array, *, mesh: Mesh
) -> TrainState:
    """A fresh training state, created where it lives: no device ever holds all of it."""
    target = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(network, optimizer, mesh))
    make = jax.jit(lambda key: _new_state(network, optimizer, key), out_shardings=target)
    return make(key)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    *,
    mesh: Mesh,
    batch_size: int,
) -> jax.stages.Wrapped:
    """Compiled ``(state, tokens_BL, length_B, key) -> (state, metrics)``; `state` is donated.

    The noise of a step comes from ``fold_in(key, state.step)``: it depends on the run's key and
    the step alone, so a resumed run draws what the uninterrupted one would have.
    """

    def train_step(
        state: TrainState, tokens_BL: jax.Array, length_B: jax.Array, key: jax.Array
    ) -> tuple[TrainState, Metrics]:
        def mean_loss(params: Params) -> jax.Array:
            loss = loss_fn(params, tokens_BL, length_B, jax.random.fold_in(key, state.step))
            return loss.sum / jnp.maximum(loss.weight, 1.0)

        loss, grads = jax.value_and_grad(mean_loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = Metrics(loss, optax.tree.norm(grads), optax.tree.norm(params))
        return TrainState(params, opt_state, state.step + 1), metrics

    state_sharding = shardings(state, mesh)
    rows, everywhere = batch_sharding(mesh, batch_size), NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state_sharding, rows, rows, everywhere),
        out_shardings=(state_sharding, everywhere),
        compiler_options=cpu.compiler_options(is_training=True),
    )


def make_eval_step(
    network: Network, state: TrainState, *, mesh: Mesh, batch_size: int, mask_id: int
) -> Callable[..., jax.Array]:
    """Compiled ``(params, tokens_BL, length_B, key) -> nats_B``: the bound of each row."""

    def eval_step(
        params: Params, tokens_BL: jax.Array, length_B: jax.Array, key: jax.Array
    ) -> jax.Array:
        return bound(network, params, tokens_BL, length_B, key, mask_id=mask_id).nats_B

    rows, everywhere = batch_sharding(mesh, batch_size), NamedSharding(mesh, P())
    return jax.jit(
        eval_step,
        in_shardings=(shardings(state.params, mesh), rows, rows, everywhere),
        out_shardings=everywhere,
        compiler_options=cpu.compiler_options(is_training=False),
    )
