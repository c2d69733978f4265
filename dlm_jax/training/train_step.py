"""The training step and the evaluation step, as pure functions compiled for a mesh.

Training is staged: a stage is a static set of trained parameter groups, so frozen groups add no
cost. Within a stage, only the weights of the losses change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax import devices
from dlm_jax.config import Config
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import ROWS, axes_of, batch_sharding, shardings
from dlm_jax.heads import MAIN, Head, Stage
from dlm_jax.model.lora import GROUP
from dlm_jax.objectives.losses import Loss, cross_entropy, hidden_of
from dlm_jax.objectives.objective import Batch, Drawn, Mixture
from dlm_jax.randomness import key_of
from dlm_jax.types import Network, Params, returned

_SALT = 0x68656164
KEPT = "kept"
"""The group of parameters that are never trained and have no optimiser state."""


def stage_at(step: int, heads: Sequence[Head], *, train_main: bool, adapts: bool = False) -> Stage:
    """The stage of a step (counted from 0). A head trains if its loss has a positive weight."""
    own = [head.name for head in heads if head.trains_at(step)]
    return Stage((*[MAIN] * train_main, *own), adapts)


def group_of(name: str, heads: Sequence[Head], *, adapts: bool = False) -> str:
    """The optimiser group of the parameters under a top-level name.

    In a model with adapters, the frozen parameters are in the group `KEPT`.
    """
    if any(head.name == name for head in heads):
        return name
    return KEPT if adapts and name != GROUP else MAIN


@dataclass(frozen=True)
class StageLoss:
    """The loss of a stage, as pure functions of a batch.

    The mixture has the objectives of the model itself, and the heads are all heads of the run.
    """

    network: Network
    mixture: Mixture
    heads: tuple[Head, ...]
    stage: Stage
    mask_id: int

    @property
    def trained_heads(self) -> list[Head]:
        return [head for head in self.heads if self.stage.trains(head.name)]

    def split(self, params: Params) -> tuple[Params, Params]:
        """The trained and the frozen parameters, each keyed by top-level name."""
        groups = {name: group_of(name, self.heads, adapts=self.stage.adapts) for name in params}
        trained = {name: params[name] for name in params if self.stage.trains(groups[name])}
        return trained, {name: tree for name, tree in params.items() if name not in trained}

    def draw(self, batch: Batch, key: jax.Array, step: jax.Array) -> Drawn:
        """The batch with the noise of a step, which depends only on the key of the run and the
        step.

        Each head has separate noise, so that the noise of the model does not depend on the heads.
        """
        drawn = self.mixture.draw(batch, jax.random.fold_in(key, step))
        noise = dict(drawn.noise)
        salted = jax.random.fold_in(jax.random.fold_in(key, _SALT), step)
        for head in self.trained_heads:
            noise[head.name] = head.draw(drawn, jax.random.fold_in(salted, head.stream))
        return drawn._replace(noise=noise)

    def __call__(
        self, params: Params, drawn: Drawn, step: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The total loss, and the loss and the figures of each objective and head, for a batch or a
        part of it.

        The unit of the loss is nats per token if the objectives and heads use this unit.
        """
        network, batch, heads = self.network, drawn.batch, self.trained_heads
        objectives = self.mixture.objectives if self.stage.trains(MAIN) else {}
        shares_trunk = any(one.loss is None for one in objectives.values())
        hidden_BLD: Any = None
        nll_BL: Any = None
        if shares_trunk or heads:
            hidden_BLD = hidden_of(network, params, drawn.shown_BL, batch.tokens_BL, batch.length_B)
            # Without this barrier, the heads would be fused into the trunk, so that the trunk would
            # round differently from a trunk without heads.
            hidden_BLD = jax.lax.optimization_barrier(hidden_BLD)
        if shares_trunk:
            nll_BL = cross_entropy(
                network,
                params,
                hidden_BLD,
                batch.tokens_BL,
                mask_id=self.mask_id,
                is_read_BL=drawn.is_supervised_BL(),
            )
        losses: dict[str, Loss] = {}
        for name, objective in objectives.items():
            noise = drawn.noise[name]
            if objective.loss is not None:
                losses[name] = _pair(objective.loss(network, params, noise), name)
            else:
                weight_BL, weight = noise
                # Positions that are not predicted may contain MASK, whose cost is infinite.
                weighted_BL = jnp.where(weight_BL > 0, weight_BL * nll_BL, 0.0)
                losses[name] = Loss(jnp.sum(weighted_BL), weight)
        means = {name: _mean(loss, name) for name, loss in losses.items()}
        total = sum((self.mixture.shares[name] * means[name] for name in means), jnp.zeros(()))
        # Heads that do not train yet are not there for the others.
        waiting = {head.name for head in self.heads} - {head.name for head in heads}
        seen = {key: one for key, one in network.heads.items() if f"{key}_head" not in waiting}
        for head in heads:
            own, hidden = params, hidden_BLD
            if not head.trains_trunk:
                own, hidden = jax.lax.stop_gradient((params, hidden_BLD))
                own = own | {head.name: params[head.name]}
            given = drawn._replace(noise=drawn.noise[head.name], hidden_BLD=hidden)
            loss = _pair(head.loss(replace(network, heads=seen), own, given), head.name)
            losses[head.name] = loss
            mean = means[head.metric] = _mean(loss, head.name)
            total = total + (mean if head.weight is None else head.weight_at(step) * mean)
        figures = [pair for loss in losses.values() for pair in loss.figures.items()]
        names = ["loss", "grad_norm", "param_norm", *means, *(name for name, _ in figures)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} names two metrics; rename the figure or the head")
        return total, {name: _mean(Loss(*figure), name) for name, figure in figures} | means

    def metrics(self, means: dict[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
        """The parts of the loss and the weights of heads; empty if the loss has a single part and
        no head trains.
        """
        if len(means) < 2 and not self.trained_heads:
            return {}
        weighted = [head for head in self.trained_heads if head.weight is not None]
        return means | {f"{head.metric}_alpha": head.weight_at(step) for head in weighted}


def _pair(found: Any, name: str) -> Loss:
    if not isinstance(found, tuple) or not 2 <= len(found) <= 3:
        kind = type(found).__name__
        raise ValueError(f"{name}.loss returned a {kind}; return (sum, weight) or a Loss")
    return Loss(*found)


def _mean(loss: Loss, name: str) -> jax.Array:
    returned(loss.sum, name, "loss(...).sum", "", (), float)
    returned(loss.weight, name, "loss(...).weight", "", (), float)
    has_weight = loss.weight != 0
    return jnp.where(has_weight, loss.sum / jnp.where(has_weight, loss.weight, 1.0), 0.0)


class TrainState(NamedTuple):
    """The training state, which checkpoints store.

    ``step`` is an int32 scalar: the number of steps taken, which is the index of the next batch.
    ``ema`` is the moving average of the parameters, or None.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    ema: Params | None = None

    @property
    def best_params(self) -> Params:
        """The parameters for evaluation and sampling: their moving average if there is one."""
        return self.params if self.ema is None else self.ema

    def begun_with(self, params: Params) -> TrainState:
        """The initial state with the given parameters, which also replace their average."""
        ema = None if self.ema is None else jax.tree.map(jnp.copy, params)
        return self._replace(params=params, ema=ema)


Metrics = dict[str, jax.Array]
"""Metrics of one step by name, float32 scalars.

``loss`` is the minimised loss in nats per token.
`StageLoss.metrics` adds the parts of the loss. ``grad_norm`` is the Euclidean norm of the gradient
before clipping, and ``grad_norm_NAME`` is the norm of the gradient of the parameters under a
top-level name, such as ``blocks``. ``param_norm`` is the norm of the updated parameters, and
detects parameters that are not finite after the update. The loss, which is computed before the
update, does not detect these parameters.
"""


def abstract_state(
    network: Network, optimizer: optax.GradientTransformation, mesh: Mesh, has_ema: bool = False
) -> TrainState:
    """The shapes, dtypes and shardings of the training state, computed without allocating it."""
    shapes = jax.eval_shape(lambda: _new_state(network, optimizer, key_of(0), has_ema))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(shapes, axes_of(network, shapes.params), mesh),
    )


def abstract_batch(config: Config, rows: NamedSharding) -> Batch:
    """The shapes and the sharding of the rows of a step."""
    size = config.train.batch_size
    columns: list[Any] = [
        jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)
        for shape in ((size, config.data.seq_len), (size,), (size,))
    ]
    return Batch(*columns)


def _new_state(
    network: Network, optimizer: optax.GradientTransformation, key: jax.Array, has_ema: bool
) -> TrainState:
    params = network.init(key)
    ema = jax.tree.map(jnp.copy, params) if has_ema else None
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), ema)


def init_state(
    network: Network,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    has_ema: bool,
    key: jax.Array,
) -> TrainState:
    """A fresh training state, created in shards, so that no device contains the whole state."""
    abstract = abstract_state(network, optimizer, mesh, has_ema)
    target = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(lambda key: _new_state(network, optimizer, key, has_ema), out_shardings=target)
    return make(key)


def make_train_step(
    step_loss: StageLoss,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    *,
    mesh: Mesh,
    batch_size: int,
    accumulate: int = 1,
    ema_decay: float = 0.0,
    compiler_options: Sequence[str] = (),
) -> jax.stages.Wrapped:
    """The compiled training step of a stage, ``(state, batch, key) -> (state, metrics)``. `state`
    is donated.

    Parameters that are not trained have a gradient of zero, and `optimizer` must not change them.

    The noise of a step is drawn with ``fold_in(key, state.step)`` and depends only on the key and
    the step, so a resumed run draws the same noise as an uninterrupted run. The noise is drawn for
    the whole batch before the batch is split, so accumulation gives the gradient of the whole
    batch.

    `state` is a state, or its shapes. The global batch has `batch_size` rows, in `accumulate`
    microbatches, which run sequentially. An `ema_decay` of 0 disables the parameter average.
    """

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        with devices.used(mesh):
            whole = step_loss.draw(batch, key, state.step)
            trained, held = step_loss.split(state.params)

            def part_loss(trained: Params, part: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
                return step_loss(held | trained, part, state.step)

            (loss, means), grads = _add_up(
                jax.value_and_grad(part_loss, has_aux=True), trained, whole, accumulate
            )
            grads = jax.tree.map(jnp.zeros_like, held) | grads
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
            metrics |= step_loss.metrics(means, state.step)
            ema = _averaged(state, params, ema_decay)
            return TrainState(params, opt_state, state.step + 1, ema), metrics

    state_sharding = shardings(state, axes_of(step_loss.network, state.params), mesh)
    rows, everywhere = batch_sharding(mesh, batch_size), NamedSharding(mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(state_sharding, rows, everywhere),
        out_shardings=(state_sharding, everywhere),
        compiler_options=compiler.options("train", mesh, compiler_options),
    )


def _add_up(compute: Callable[..., Any], params: Params, whole: Any, num_parts: int) -> Any:
    """Sums ``compute(params, part)`` over the parts of a batch, one part at a time.

    Part p contains the rows p, p + num_parts, ..., so that each part is divided equally among the
    devices. Scalars are totals over the whole batch and are passed to every part.
    """
    if num_parts == 1:
        return compute(params, whole)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0)

    leaves, structure = jax.tree.flatten(whole)
    rows = [cut(leaf) for leaf in leaves if leaf.ndim]
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(compute, params, whole)
    )

    def one_part(sums: Any, part: list[jax.Array]) -> tuple[Any, None]:
        rest = iter(part)
        merged = [next(rest) if leaf.ndim else leaf for leaf in leaves]
        found = compute(params, jax.tree.unflatten(structure, merged))
        return jax.tree.map(jnp.add, sums, found), None

    return jax.lax.scan(one_part, zeros, rows)[0]


def check_adds_up(
    step_loss: StageLoss, params: Params, *, mesh: Mesh, seq_len: int, token_ids: tuple[int, ...]
) -> None:
    """Raises ValueError if a loss differs between a batch and the same batch in two parts.

    Losses are computed once, for a few rows of `token_ids`. Losses of opposite sign can cancel, so
    the tolerance is relative to the magnitudes of the parts.
    """
    shards = math.prod(mesh.shape[axis] for axis in ROWS if axis in mesh.shape)
    num_rows = next(
        (n for n in range(2 * shards, 128 * shards, 2 * shards) if step_loss.mixture.fills(n, 2)),
        2 * shards,
    )
    rows, everywhere = batch_sharding(mesh, num_rows), NamedSharding(mesh, P())
    tokens_BL = np.resize(np.array(token_ids, np.int32), (num_rows, seq_len))
    length_B, step = np.full(num_rows, seq_len, np.int32), jnp.int32(0)

    def with_sizes(params: Params, part: Any) -> Any:
        means = step_loss(params, part, step)[1]
        return means, jax.tree.map(jnp.abs, means)

    def losses(params: Params) -> list[Any]:
        with devices.used(mesh):
            batch = Batch(*map(jnp.asarray, (tokens_BL, length_B, np.zeros_like(length_B))))
            batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), batch)
            whole = step_loss.draw(batch, key_of(0), step)
            return [_add_up(with_sizes, params, whole, n) for n in (1, 2)]

    options = compiler.options("sample", mesh)
    run = jax.jit(losses, out_shardings=everywhere, compiler_options=options)
    (one, _), (two, size) = jax.device_get(run(params))
    for name in one:
        atol = 1e-6 + 0.01 * np.nan_to_num(size[name], posinf=0.0)
        if not np.isclose(two[name], one[name], rtol=0.0, atol=atol, equal_nan=True):
            raise ValueError(
                f"train.accumulate requires losses that add up over the parts of a batch, but "
                f"{name!r} is {one[name]:.4g} for a batch and {two[name]:.4g} in two parts; "
                "return the plain sum from `loss` and compute its weight in `draw`, or use "
                "train.accumulate=1"
            )


def _averaged(state: TrainState, params: Params, decay: float) -> Params | None:
    """The moving average after one step. The decay at step s is ``(1 + s) / (10 + s)``, at most
    `decay`.

    With a constant decay, the random initial parameters would dominate the average for about
    ``1 / (1 - decay)`` steps.
    """
    if state.ema is None:
        return None
    step = state.step.astype(jnp.float32)
    now = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    # The average is updated by a difference, so that it stays constant for constant parameters.
    return jax.tree.map(lambda old, new: old + (1.0 - now) * (new - old), state.ema, params)


def compile_eval_step(
    measure: Callable[[Params, Batch, jax.Array, jax.Array], Any],
    params: Params,
    *,
    mesh: Mesh,
    batch_size: int,
    compiler_options: Sequence[str] = (),
) -> Callable[..., Any]:
    """Compiles `Task.measure` for parameters that lie like `params`. The per-row results are
    replicated over all devices.
    """

    def measured(params: Params, batch: Batch, number_B: jax.Array, key: jax.Array) -> Any:
        with devices.used(mesh):
            return measure(params, batch, number_B, key)

    rows, everywhere = batch_sharding(mesh, batch_size), NamedSharding(mesh, P())
    return jax.jit(
        measured,
        in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, params), rows, rows, everywhere),
        out_shardings=everywhere,
        compiler_options=compiler.options("sample", mesh, compiler_options),
    )
