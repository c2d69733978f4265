"""The optimiser of a run: clipping, followed by Muon or AdamW with a warm-up and cosine schedule.

The model and each of its heads are separate groups, each with its own clipping, schedule and state.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from optax import contrib

from dlm_jax import devices
from dlm_jax.config import Config, OptimConfig
from dlm_jax.distributed.partitions import partition
from dlm_jax.heads import MAIN, Head
from dlm_jax.model.lora import GROUP
from dlm_jax.types import Axes, Params

KEPT = "kept"
"""The group of parameters that are never trained and have no optimiser state."""

Stage = tuple[str, ...]
"""The parameter groups that are trained: ``main`` and names of heads, in this order."""


def group_of(name: str, groups: Collection[str]) -> str:
    """The optimiser group of the parameters under a top-level name.

    In a model with adapters, which has a group `KEPT`, the frozen parameters are in this group.
    """
    if name in groups:
        return name
    return KEPT if KEPT in groups and name != GROUP else MAIN


# The quintic iteration on the singular values (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


class Group(NamedTuple):
    """An optimiser group: learning rates by the names of their metrics, each a function of the
    number of steps that the group has trained, and the transformation of its gradient.
    """

    rates: Mapping[str, optax.Schedule]
    update: optax.GradientTransformation


def learning_rate(peak: float, config: OptimConfig, *, num_steps: int) -> optax.Schedule:
    """The learning rate by step: a linear increase to `peak`, then a cosine to ``final_ratio *
    peak``.

    The rate reaches the peak at step ``warmup_steps``. No step has a rate of 0, because the first
    step has a rate of ``peak / (warmup_steps + 1)``, and the cosine ends one step after the last
    step.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (config.warmup_steps + 1),
        peak_value=peak,
        warmup_steps=config.warmup_steps,
        decay_steps=max(num_steps, config.warmup_steps + 1),
        end_value=config.final_ratio * peak,
    )


def rates_of(
    config: OptimConfig, *, num_steps: int, schedule: optax.Schedule | None = None
) -> dict[str, optax.Schedule]:
    """The learning rates of the main group, by the names of their metrics.

    ``learning_rate`` is that of the matrices of Muon, or of all parameters with AdamW, and
    ``adam_learning_rate`` that of the parameters that Adam updates beside Muon. `schedule` maps a
    step to a factor that scales the peaks, and replaces the warm-up and cosine.
    """

    def rate(peak: float) -> optax.Schedule:
        if schedule is None:
            return learning_rate(peak, config, num_steps=num_steps)
        return lambda step, factor=schedule: peak * factor(step)

    rates = {"learning_rate": rate(config.learning_rate)}
    if config.name == "muon":
        rates["adam_learning_rate"] = rate(config.adam_learning_rate)
    return rates


def make_optimizer(
    config: OptimConfig, rates: Mapping[str, optax.Schedule], *, axes: Params
) -> optax.GradientTransformation:
    """Returns the gradient transformation of the main group.

    Gradients are clipped to a global norm of ``clip``. With ``muon`` (Jordan et al. 2024), Muon
    updates the matrices, and Adam updates the other parameters, each with its own learning rate.
    With ``adamw`` (Loshchilov and Hutter 2019), AdamW updates all parameters. Weight decay is
    decoupled and applies only to the matrices.

    Args:
      config: the settings.
      rates: the learning rates by name, such as ``rates_of(config, num_steps=1000)``.
      axes: the `Axes` of the parameters, from `dlm_jax.distributed.partitions.axes_of`.
    """

    def where(value: Any, other: Any) -> Any:
        """A function of the parameters: a tree with `value` at the matrices, `other` elsewhere."""
        return lambda params: {
            name: jax.tree.map(lambda one: value if one.is_matrix else other, axes[name])
            for name in params
        }

    beta = {"b1": config.b1, "b2": config.b2}
    if config.name == "adamw":
        decay = {"weight_decay": config.weight_decay, "mask": where(True, False)}
        update = optax.adamw(rates["learning_rate"], **beta, **decay)
    else:
        matrices = optax.chain(
            orthogonalized_momentum(axes, beta=0.95),
            # The identity replaces optax's shape-dependent scale: the state is that of optax.
            optax.identity(),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(rates["learning_rate"]),
        )
        rest = optax.adamw(rates["adam_learning_rate"], **beta, weight_decay=0.0, nesterov=True)
        update = optax.partition({"muon": matrices, "adam": rest}, where("muon", "adam"))
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def orthogonalized_momentum(axes: Params, *, beta: float) -> optax.GradientTransformation:
    """The update direction of Muon, before weight decay and learning rate.

    The direction is the Nesterov momentum, with its matrices orthogonalised and scaled by
    ``sqrt(max(1, fan_out / fan_in))``. On a single device, the operations are those of
    ``optax.contrib.muon``; the state is the same on any devices.
    """

    def momentum(ns_steps: int) -> optax.GradientTransformation:
        # Stacked kernels are [..., fan_in, fan_out]; the leading axes are a batch of matrices.
        each = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return contrib.scale_by_muon(
            ns_coeffs=_COEFFICIENTS,
            ns_steps=ns_steps,
            beta=beta,
            weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: each, updates),
        )

    def scaled(update: jax.Array) -> jax.Array:
        fan_in, fan_out = update.shape[-2:]
        return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * update

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mesh = devices.mesh_in_use()
        # Without iterations, the optax transformation divides the momentum by its norm.
        updates, state = momentum(_STEPS if mesh is None else 0).update(updates, state, params)
        updates = updates if mesh is None else orthogonalized(updates, axes, mesh)
        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(momentum(_STEPS).init, update)


def orthogonalized(updates: Any, axes: Params, mesh: AbstractMesh) -> Any:
    """Applies the Newton-Schulz iteration to every matrix in the tree, on one device per matrix.

    Every device receives some whole matrices, in half precision on accelerators, and the results
    are sharded like the parameters. By default, the compiler would replicate the products on every
    device, or sum each product over the devices. By the estimates of `dlm_jax.contrib.pod_costs`,
    the update of 1.3B parameters on v5p:4x4x4 with ``fsdp=16`` takes 7 to 11 ms, and 44 to 82 ms
    with ``optax.contrib.muon``.

    Args:
      updates: matrices ``[..., fan_in, fan_out]`` with norm at most 1, stacked by layers and
        optionally by experts.
      axes: the `Axes` of the parameters.
      mesh: the devices in use.
    """
    known = dict(jax.tree.leaves_with_path(axes))
    specs = [
        tuple(spec) + (None,) * (leaf.ndim - len(spec))
        for path, leaf in jax.tree.leaves_with_path(updates)
        for spec in [partition(known[path], leaf.shape, mesh)]
    ]
    is_cpu = devices.platform() == "cpu"

    def exchanged(x_NIO: jax.Array, axis: str, split: int, joined: int) -> jax.Array:
        # Without this barrier, the CPU backend of XLA assigns different layouts to the parts that
        # it sends, and then rejects these layouts.
        x_NIO = jax.lax.optimization_barrier(x_NIO) if is_cpu else x_NIO
        return jax.lax.all_to_all(x_NIO, axis, split, joined, tiled=True)

    def of_device(leaves: list[jax.Array]) -> list[jax.Array]:
        # Matrices of equal shape and sharding are sent together. The iteration commutes with
        # transposition, so matrices whose first axis is sharded over `tensor` are transposed.
        parts = [leaf.astype(jnp.float32 if is_cpu else jnp.bfloat16) for leaf in leaves]
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, spec in enumerate(specs):
            split = spec[-2:]
            if spec[-2] == "tensor":
                parts[place], split = parts[place].swapaxes(-1, -2), split[::-1]
            stacked = tuple(axis for axis in spec[:-2] if axis)
            groups[parts[place].shape[-2:], split, stacked].append(place)
        for (shape, split, stacked), places in groups.items():
            x_NIO = jnp.concatenate([parts[place].reshape(-1, *shape) for place in places])
            num = x_NIO.shape[0]
            axis_of = {dimension: axis for dimension, axis in enumerate(split, 1) if axis}
            copies = tuple(
                name for name in mesh.axis_names if name not in (*axis_of.values(), *stacked)
            )
            sharing = mesh.size // math.prod(mesh.shape[name] for name in stacked)
            x_NIO = jnp.pad(x_NIO, ((0, -num % sharing), (0, 0), (0, 0)))
            share = x_NIO.shape[0] // math.prod(mesh.shape[name] for name in copies)
            first = jax.lax.axis_index(copies) * share if copies else 0
            x_NIO = jax.lax.dynamic_slice_in_dim(x_NIO, first, share)
            for dimension, axis in axis_of.items():
                x_NIO = exchanged(x_NIO, axis, 0, dimension)
            x_NIO = iterated(x_NIO)
            for dimension, axis in reversed(axis_of.items()):
                x_NIO = exchanged(x_NIO, axis, dimension, 0)
            if copies:
                x_NIO = jax.lax.all_gather(x_NIO, copies, tiled=True)
            cuts = np.cumsum([math.prod(parts[place].shape[:-2]) for place in places]).tolist()
            for place, piece in zip(places, jnp.split(x_NIO[:num], cuts[:-1]), strict=True):
                piece = piece.reshape(parts[place].shape)
                turned = specs[place][-2] == "tensor"
                parts[place] = piece.swapaxes(-1, -2) if turned else piece
        return [part.astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]

    def iterated(x_NIO: jax.Array) -> jax.Array:
        # The Gram matrices are those of the shorter side.
        is_tall = x_NIO.shape[1] > x_NIO.shape[2]
        x = x_NIO.swapaxes(1, 2) if is_tall else x_NIO
        first, second, third = _COEFFICIENTS
        for _ in range(_STEPS):
            gram = x @ x.swapaxes(1, 2)
            x = first * x + (second * gram + third * (gram @ gram)) @ x
        return x.swapaxes(1, 2) if is_tall else x

    places = [P(*spec) for spec in specs]
    split = jax.shard_map(of_device, in_specs=(places,), out_specs=places, check_vma=False)
    return jax.tree.unflatten(jax.tree.structure(updates), split(jax.tree.leaves(updates)))


def make_groups(
    config: Config,
    heads: Mapping[str, Head],
    axes: Params,
    *,
    main: optax.GradientTransformation | None = None,
    schedule: optax.Schedule | None = None,
) -> dict[str, Group]:
    """The optimiser groups of a run: the model, each head, and `KEPT` if adapters are trained.

    The optimiser of the model is `make_optimizer`, or `main`, whose updates `schedule` scales. With
    ``heads.train_main = false`` the model has no optimiser state. That of a head is gradient
    clipping to a norm of ``heads.clip`` and AdamW, with a warm-up and cosine from its start to the
    end of the run. `axes` are the `Axes` of the parameters.
    """
    optim, settings, num_steps = config.optim, config.heads, config.train.steps
    rates: dict[str, optax.Schedule] = {}
    if main is None:
        rates = rates_of(optim, num_steps=num_steps, schedule=schedule)
        # Matrices in heads, which map to logits or scores, are not the model's.
        of_heads = {n: jax.tree.map(lambda _: Axes(), t) for n, t in axes.items() if n in heads}
        main = make_optimizer(optim, rates, axes=axes | of_heads)
    elif schedule is not None:
        main = optax.chain(main, optax.scale_by_schedule(schedule))
    groups = {MAIN: Group(rates, main if settings.train_main else optax.set_to_zero())}
    optim = dataclasses.replace(
        optim, name="adamw", clip=settings.clip, weight_decay=settings.weight_decay
    )
    for name, head in heads.items():
        left = max(1, num_steps - head.start)
        own = dataclasses.replace(optim, warmup_steps=min(settings.warmup_steps, left - 1))
        rate = learning_rate(settings.learning_rate, own, num_steps=left)
        update = make_optimizer(optim, {"learning_rate": rate}, axes=axes)
        groups[name] = Group({f"{name.removesuffix('_head')}_learning_rate": rate}, update)
    if config.model.lora_rank > 0:
        groups[KEPT] = Group({}, optax.set_to_zero())
    return groups


def optimizer_of_stage(groups: Mapping[str, Group], stage: Stage) -> optax.GradientTransformation:
    """The optimiser of a stage, whose state has the same structure in every stage.

    The state and parameters of groups that do not train are unchanged.
    """
    if len(groups) == 1:
        return groups[MAIN].update

    def frozen(update: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.GradientTransformation(
            update.init, lambda updates, state, params=None: (optax.tree.zeros_like(updates), state)
        )

    def group_by_leaf(params: Params) -> Params:
        return {
            name: jax.tree.map(lambda _, n=name: group_of(n, groups), tree)
            for name, tree in params.items()
        }

    updates: dict[Hashable, optax.GradientTransformation] = {
        name: update if name in stage else frozen(update) for name, (_, update) in groups.items()
    }
    return optax.partition(updates, group_by_leaf)
