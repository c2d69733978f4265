"""The training step and the evaluation step, compiled for a mesh.

Training is staged: a stage is a static set of trained parameter groups, so frozen groups add no
cost. Within a stage, only the weights of the losses change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax import devices
from dlm_jax.data import text_ids
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import axes_of, batch_sharding, shardings
from dlm_jax.objectives.likelihood import costs
from dlm_jax.objectives.objective import Batch
from dlm_jax.randomness import key_of
from dlm_jax.training.optimisers import Stage
from dlm_jax.training.tasks import Task, metric_of, process_of
from dlm_jax.types import Params


class TrainState(NamedTuple):
    """The training state, which checkpoints store.

    ``step`` is an int32 scalar: the number of steps taken, which is the index of the next batch.
    ``ema`` is the moving average of the parameters, or None. Its decay at step s is
    ``(1 + s) / (10 + s)``, at most ``optim.ema_decay``.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    ema: Params | None = None

    @property
    def best_params(self) -> Params:
        """The parameters for evaluation and sampling: their moving average if there is one."""
        return self.params if self.ema is None else self.ema

    def start_from(self, params: Params) -> TrainState:
        """The initial state with these parameters, which also replace their average."""
        ema = None if self.ema is None else jax.tree.map(jnp.copy, params)
        return self._replace(params=params, ema=ema)


Metrics = dict[str, jax.Array]
"""Metrics of one step by name, float32 scalars.

``loss`` is the minimised loss in nats per token. If it has several parts, they have the names of
objectives, heads (``NAME_alpha`` is the weight of a head) and figures. ``grad_norm`` is the
Euclidean norm of the gradient before clipping, and ``grad_norm_NAME`` is the norm of the gradient
of the parameters under a top-level name, such as ``blocks``. ``param_norm`` is the norm of the
updated parameters, and detects parameters that are not finite after the update. The loss, which is
computed before the update, does not detect these parameters.
"""


def abstract_state(task: Task) -> TrainState:
    """The shapes, dtypes and shardings of the training state, computed without allocating it."""
    shapes = jax.eval_shape(lambda: _fresh(task, key_of(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(shapes, axes_of(task.network, shapes.params), task.mesh),
    )


def init_state(task: Task, key: jax.Array) -> TrainState:
    """A fresh training state, created in shards, so that no device contains the whole state."""
    target = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(task))
    return jax.jit(lambda key: _fresh(task, key), out_shardings=target)(key)


def _fresh(task: Task, key: jax.Array) -> TrainState:
    params = task.network.init(key)
    ema = jax.tree.map(jnp.copy, params) if task.config.optim.ema_decay > 0 else None
    return TrainState(params, task.optimizer().init(params), jnp.zeros((), jnp.int32), ema)


def make_train_step(task: Task, stage: Stage, state: TrainState) -> jax.stages.Wrapped:
    """The compiled training step of a stage, ``(state, batch, key) -> (state, metrics)``, for a
    state or its shapes. The state is donated.

    The noise of a step is drawn with ``fold_in(key, state.step)`` and depends only on the key and
    the step, so a resumed run draws the same noise as an uninterrupted run. The noise is drawn for
    the whole batch before the batch is split into ``train.accumulate`` microbatches, which run
    sequentially, so accumulation gives the gradient of the whole batch.
    """
    mesh, optimizer, train = task.mesh, task.optimizer(stage), task.config.train
    weights = {
        f"{metric_of(name)}_alpha": head.weight
        for name, head in task.heads.items()
        if name in stage and callable(head.weight)
    }

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        with devices.used(mesh):
            drawn = task.draw(batch, key, state.step, stage)
            trained, frozen = task.split(state.params, stage)
            gradient = jax.value_and_grad(task.losses, has_aux=True)
            (loss, means), grads = add_up(
                lambda part: gradient(trained, frozen, part, state.step, stage),
                drawn,
                train.accumulate,
            )
            # Parameters that are not trained have a gradient of zero.
            grads = jax.tree.map(jnp.zeros_like, frozen) | grads
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = {
                "loss": loss,
                "grad_norm": optax.tree.norm(grads),
                "param_norm": optax.tree.norm(params),
            }
            metrics |= {
                f"grad_norm_{name}": optax.tree.norm(grads[name]) for name in sorted(trained)
            }
            if len(means) > 1 or task.heads.keys() & stage:
                metrics |= means | {name: of(state.step) for name, of in weights.items()}
            ema = None
            if state.ema is not None:
                # With a constant decay, the random initial parameters would dominate the average
                # for about 1 / (1 - decay) steps. The average is updated by a difference, so that
                # it stays constant for constant parameters.
                past = state.step.astype(jnp.float32)
                decay = jnp.minimum(task.config.optim.ema_decay, (1.0 + past) / (10.0 + past))
                ema = jax.tree.map(
                    lambda old, new: old + (1.0 - decay) * (new - old), state.ema, params
                )
            return TrainState(params, opt_state, state.step + 1, ema), metrics

    state_sharding = shardings(state, axes_of(task.network, state.params), mesh)
    rows, everywhere = batch_sharding(mesh, train.batch_size), NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state_sharding, rows, everywhere),
        out_shardings=(state_sharding, everywhere),
        compiler_options=compiler.options("train", mesh, task.config.mesh.compiler_options),
    )


def lower_step(task: Task, stage: Stage, state: TrainState) -> jax.stages.Lowered:
    """The training step of a stage, for a state or its shapes, before it is compiled."""
    train, length = task.config.train, task.config.data.seq_len
    rows = batch_sharding(task.mesh, train.batch_size, train.accumulate)
    texts = (task.config.data.pack,) if task.config.data.pack > 1 else ()
    columns: list[Any] = [
        jax.ShapeDtypeStruct((train.batch_size, *shape), np.int32, sharding=rows)
        for shape in ((length,), texts, texts)
    ]
    step = make_train_step(task, stage, state)
    return step.lower(state, Batch(*columns), jax.eval_shape(lambda: key_of(0)))


def add_up(compute: Callable[[Any], Any], whole: Any, num_parts: int) -> Any:
    """Sums ``compute(part)`` over the parts of a batch, one part at a time.

    Part p contains the rows p, p + num_parts, ..., so that each part is divided equally among the
    devices. Scalars are totals over the whole batch and are passed to every part.
    """
    if num_parts == 1:
        return compute(whole)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0)

    leaves, structure = jax.tree.flatten(whole)
    rows = [cut(leaf) for leaf in leaves if leaf.ndim]
    shapes = jax.eval_shape(compute, whole)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def one_part(sums: Any, part: list[jax.Array]) -> tuple[Any, None]:
        rest = iter(part)
        merged = [next(rest) if leaf.ndim else leaf for leaf in leaves]
        result = compute(jax.tree.unflatten(structure, merged))
        return jax.tree.map(jnp.add, sums, result), None

    return jax.lax.scan(one_part, zeros, rows)[0]


def check_adds_up(task: Task, params: Params) -> None:
    """Raises ValueError if a loss differs between a batch and the same batch in parts.

    Losses are computed once, for rows of text ids. Losses of opposite sign can cancel, so the
    tolerance is relative to the magnitudes of the parts.
    """
    train, mesh, step, stage = task.config.train, task.mesh, jnp.int32(0), task.last_stage
    shape = train.batch_size, task.config.data.seq_len
    tokens_BL = np.resize(np.array(text_ids(task.tokenizer), np.int32), shape)
    length_B = np.full(shape[0], shape[1], np.int32)
    rows, everywhere = batch_sharding(mesh, train.batch_size), NamedSharding(mesh, P())

    def losses(params: Params) -> list[Any]:
        def with_sizes(part: Any) -> Any:
            means = task.losses(params, {}, part, step, stage)[1]
            return means, jax.tree.map(jnp.abs, means)

        with devices.used(mesh):
            batch = Batch(*map(jnp.asarray, (tokens_BL, length_B, np.zeros_like(length_B))))
            batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), batch)
            drawn = task.draw(batch, key_of(0), step, stage)
            return [add_up(with_sizes, drawn, n) for n in (1, train.accumulate)]

    options = compiler.options("sample", mesh)
    run = jax.jit(losses, out_shardings=everywhere, compiler_options=options)
    (whole, _), (parts, size) = jax.device_get(run(params))
    for name in whole:
        atol = 1e-6 + 0.01 * np.nan_to_num(size[name], posinf=0.0)
        if not np.isclose(parts[name], whole[name], rtol=0.0, atol=atol, equal_nan=True):
            raise ValueError(
                f"train.accumulate requires losses that add up over the parts of a batch, but "
                f"{name!r} is {whole[name]:.4g} for a batch and {parts[name]:.4g} in parts; "
                "return the plain sum from `loss` and compute its weight in `draw`, or use "
                "train.accumulate=1"
            )


def make_eval_step(task: Task, params: Params) -> jax.stages.Wrapped:
    """The compiled likelihood bound of held-out rows, ``(params, batch, number_B, key) -> nats_B``,
    for parameters that lie like `params`, and replicated over all devices.

    ``number_B`` are the indices of the rows. A causal model has an exact likelihood instead of a
    bound.
    """
    mesh, train = task.mesh, task.config.train
    bound = functools.partial(
        costs,
        task.network,
        is_causal=task.config.model.attention_type == "causal",
        mask_id=task.tokenizer.mask_id,
        eos_id=task.tokenizer.eos_id,
        process=process_of(task.config, task.tokenizer),
    )

    def measure(params: Params, batch: Batch, number_B: jax.Array, key: jax.Array) -> Any:
        with devices.used(mesh):
            return bound(params, batch, number_B, key).nats_B

    rows, everywhere = batch_sharding(mesh, train.batch_size), NamedSharding(mesh, P())
    return jax.jit(
        measure,
        in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, params), rows, rows, everywhere),
        out_shardings=everywhere,
        compiler_options=compiler.options("sample", mesh, task.config.mesh.compiler_options),
    )
