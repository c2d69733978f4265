"""One optimiser step and one evaluation, as pure functions compiled for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.diffusion.likelihood import bound, causal_nll
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.model import cpu
from dlm_jax.sharding import batch_sharding, shardings
from dlm_jax.types import Network, Params


class TrainState(NamedTuple):
    """What training carries from step to step, and all that a checkpoint must hold of it.

    ``step`` is an int32 scalar: the number of steps taken, and the index of the next batch.
    ``ema`` is the moving average of the parameters, or None where none is kept.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    ema: Params | None = None

    @property
    def best_params(self) -> Params:
        """What is evaluated and sampled: the average if there is one."""
        return self.params if self.ema is None else self.ema


Metrics = dict[str, jax.Array]
"""What one step tells, by name, as float32 scalars.

``loss``, what is minimised, in nats per token (per row for a sequence scorer), and each part of it:
the objectives where there are several, and of the heads that train ``sampler`` and ``critic`` with
the ``critic_alpha`` that it counts for. ``grad_norm`` is the gradient's Euclidean norm before
clipping. ``param_norm`` is that of the new parameters: only it tells that they are still finite,
for the loss was taken before the update.
"""


class BatchPart(Protocol):
    """A batch with all of its noise, or some rows of it; a pytree."""

    def rows_alone(self) -> Any:
        """What can be cut by rows: all but the totals of the whole batch."""
        ...

    def with_totals_of(self, whole: Any) -> Any:
        """These rows, with the totals of the batch that they were cut from."""
        ...


class StepLoss(Protocol):
    """What a training step minimises: `StagedLoss` for language models, or `ScorerLoss`."""

    def split(self, params: Params) -> tuple[Params, Params]:
        """(parameters that train, the others), each with its top-level names."""
        ...

    def alpha(self, step: jax.Array) -> jax.Array:
        """What the part of the loss that changes its weight counts for at a step."""
        ...

    def draw(self, batch: Batch, key: jax.Array, step: jax.Array) -> BatchPart:
        """The batch with the noise of a step: from the run's key and the step alone."""
        ...

    def __call__(
        self, params: Params, part: Any, alpha: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(what is minimised, each loss apart) of one part of a batch."""
        ...


@dataclass(frozen=True)
class StepConfig:
    """What is compiled into a training step beside the network and the optimiser.

    Attributes:
      mask_id: the id of MASK.
      batch_size: rows of a batch over all devices.
      accumulate: parts that the batch is cut into; they run one after the other.
      ema_decay: of the average of the parameters, in [0, 1); 0 keeps none.
    """

    mask_id: int
    batch_size: int
    accumulate: int = 1
    ema_decay: float = 0.0


def abstract_state(
    network: Network,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_ema: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings of the training state; nothing is allocated."""
    shapes = jax.eval_shape(lambda: _new_state(network, optimizer, jax.random.key(0), has_ema))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(shapes, mesh),
    )


def _new_state(
    network: Network, optimizer: optax.GradientTransformation, key: jax.Array, has_ema: bool
) -> TrainState:
    params = network.init(key)
    ema = jax.tree.map(jnp.copy, params) if has_ema else None
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), ema)


def init_state(
    network: Network,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    mesh: Mesh,
    has_ema: bool = False,
) -> TrainState:
    """A fresh training state, created where it lives: no device ever holds all of it."""
    abstract = abstract_state(network, optimizer, mesh, has_ema=has_ema)
    target = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(lambda key: _new_state(network, optimizer, key, has_ema), out_shardings=target)
    return make(key)


def make_train_step(
    step_loss: StepLoss,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    *,
    mesh: Mesh,
    config: StepConfig,
) -> jax.stages.Wrapped:
    """Compiled ``(state, batch, key) -> (state, metrics)`` of a stage; `state` is donated.

    Groups of parameters that do not train have a gradient of zero; `optimizer` must leave them
    where they are.

    The noise of a step comes from ``fold_in(key, state.step)``: it depends on the run's key and
    the step alone, so a resumed run draws what the uninterrupted one would have. It is drawn for
    the whole batch before that is cut, so accumulating gives the gradient of the whole batch.
    """

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        whole = step_loss.draw(batch, key, state.step)
        trained, held = step_loss.split(state.params)

        def part_loss(trained: Params, part: BatchPart) -> tuple[jax.Array, dict[str, jax.Array]]:
            # The totals are those of the whole batch, whatever part of it this is.
            part = part.with_totals_of(whole)
            return step_loss(held | trained, part, step_loss.alpha(state.step))

        grads, loss, means = _add_up(
            jax.value_and_grad(part_loss, has_aux=True), trained, whole, config.accumulate
        )
        grads = jax.tree.map(jnp.zeros_like, held) | grads
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(params),
        }
        if len(means) > 1 or {"sampler", "critic"} & means.keys():
            metrics |= means
        if "critic" in means:
            metrics["critic_alpha"] = step_loss.alpha(state.step)
        ema = _averaged(state, params, config.ema_decay)
        return TrainState(params, opt_state, state.step + 1, ema), metrics

    state_sharding = shardings(state, mesh)
    rows, everywhere = batch_sharding(mesh, config.batch_size), NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state_sharding, rows, everywhere),
        out_shardings=(state_sharding, everywhere),
        compiler_options=cpu.compiler_options(is_training=True),
    )


def _add_up(
    gradient: Callable[..., Any], params: Params, whole: BatchPart, num_parts: int
) -> tuple[Params, jax.Array, dict[str, jax.Array]]:
    """Gradient, loss and the objectives' losses, summed over the parts, one part at a time.

    Part p holds the rows p, p + num_parts, ...: every device has its share of each.
    """
    if num_parts == 1:
        (loss, means), grads = gradient(params, whole)
        return grads, loss, means

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0)

    by_row = whole.rows_alone()
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(gradient, params, by_row),
    )

    def one_part(total: Any, part: BatchPart) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, part)), None

    ((loss, means), grads), _ = jax.lax.scan(one_part, zeros, jax.tree.map(cut, by_row))
    return grads, loss, means


def _averaged(state: TrainState, params: Params, decay: float) -> Params | None:
    """The moving average one step on; its decay rises to `decay` as ``(1 + s) / (10 + s)`` does.

    Without that rise the random first parameters would stay in it for ``1 / (1 - decay)`` steps.
    """
    if state.ema is None:
        return None
    step = state.step.astype(jnp.float32)
    now = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    # Written as a difference, so that the average of what does not move does not move either.
    return jax.tree.map(lambda old, new: old + (1.0 - now) * (new - old), state.ema, params)


def make_eval_step(
    network: Network,
    params: Params,
    *,
    mesh: Mesh,
    batch_size: int,
    mask_id: int,
    is_causal: bool = False,
) -> Callable[..., jax.Array]:
    """Compiled ``(params, batch, key) -> nats_B``: the bound of each row, or its exact cost.

    Causal models have an exact likelihood; the key is not used then.
    """

    def eval_step(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        if is_causal:
            return causal_nll(network, params, batch, mask_id=mask_id)
        return bound(network, params, batch, key, mask_id=mask_id).nats_B

    return compile_eval_step(eval_step, params, mesh=mesh, batch_size=batch_size)


def compile_eval_step(
    measure: Callable[[Params, Batch, jax.Array], Any],
    params: Params,
    *,
    mesh: Mesh,
    batch_size: int,
) -> Callable[..., Any]:
    """Compiled `measure` ``(params, batch, key)`` -> figures by row, which every device knows."""
    rows, everywhere = batch_sharding(mesh, batch_size), NamedSharding(mesh, P())
    return jax.jit(
        measure,
        in_shardings=(shardings(params, mesh), rows, everywhere),
        out_shardings=everywhere,
        compiler_options=cpu.compiler_options(is_training=False),
    )
