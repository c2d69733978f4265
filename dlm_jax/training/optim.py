"""The optimiser of a run: clipping, then Muon or AdamW under a warm-up and cosine schedule.

The model and each of its heads are groups of their own, each with its clip, its schedule and its
state (`seeds/sampler_head.md` 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dlm_jax.config import HeadsConfig, OptimConfig
from dlm_jax.sharding import path_name
from dlm_jax.training.stages import CRITIC, MAIN, SAMPLER, Stage, group_of


def learning_rate(peak: float, config: OptimConfig, *, num_steps: int) -> optax.Schedule:
    """Learning rate by step: linear up to `peak`, then a cosine to ``final_ratio * peak``.

    Step ``warmup_steps`` is the first at the peak. Neither end is reached in the run, so that no
    step is wasted on a rate of 0: the first has ``peak / (warmup_steps + 1)``, and the cosine ends
    where the step after the last would be.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (config.warmup_steps + 1),
        peak_value=peak,
        warmup_steps=config.warmup_steps,
        decay_steps=max(num_steps, config.warmup_steps + 1),
        end_value=config.final_ratio * peak,
    )


def is_matrix(path: str) -> bool:
    """Whether the parameter at `path` is a matrix inside a block: what Muon orthogonalises."""
    return "blocks/" in path and path.endswith("/kernel")


def _over_paths(params: Any, value: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: value(path_name(path)), params)


def _muon_dimensions(params: Any) -> Any:
    # Kernels are stacked [depth, fan_in, fan_out]; the depth axis is a batch of matrices.
    stacked = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return _over_paths(params, lambda path: stacked if is_matrix(path) else None)


def make_optimizer(config: OptimConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Gradient transformation of a run of `num_steps` steps.

    Gradients are scaled down to a global norm of ``clip``. ``muon`` (Jordan et al. 2024) updates
    the matrices of the blocks, and Adam the embeddings, the head and the norms, each with its own
    peak learning rate; ``adamw`` (Loshchilov and Hutter 2019) updates everything. Weight decay is
    decoupled and applies to the matrices of the blocks alone.
    """
    rate = learning_rate(config.learning_rate, config, num_steps=num_steps)

    def decays(params: Any) -> Any:
        return _over_paths(params, is_matrix)

    if config.name == "adamw":
        update = optax.adamw(
            rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decays
        )
    else:
        update = contrib.muon(
            rate,
            beta=config.muon_momentum,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_learning_rate=learning_rate(
                config.adam_learning_rate, config, num_steps=num_steps
            ),
            muon_weight_dimension_numbers=_muon_dimensions,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def make_grouped_optimizer(
    optim: OptimConfig, heads: HeadsConfig, stage: Stage, *, num_steps: int
) -> optax.GradientTransformation:
    """Gradient transformation of a stage of a run whose model has heads.

    `make_optimizer` for the model itself; for each head gradients scaled down to a norm of
    ``heads.clip`` and AdamW, under a warm-up and cosine of its own that begin where it begins to
    train. The state is the same in every stage; groups that do not train keep theirs, and their
    parameters, as they are.
    """
    starts = {SAMPLER: heads.start_sampler_iteration, CRITIC: heads.start_critic_iteration}
    groups = {MAIN: make_optimizer(optim, num_steps=num_steps)}
    for name, start in starts.items():
        groups[name] = _head_optimizer(optim, heads, num_steps=max(1, num_steps - start))
    transforms: dict[Hashable, optax.GradientTransformation] = {
        name: group if name in stage.groups else _held(group) for name, group in groups.items()
    }
    return optax.partition(
        transforms, lambda params: _over_paths(params, lambda path: group_of(path.split("/")[0]))
    )


def _head_optimizer(
    optim: OptimConfig, heads: HeadsConfig, *, num_steps: int
) -> optax.GradientTransformation:
    warmup = dataclasses.replace(optim, warmup_steps=min(heads.warmup_steps, num_steps - 1))

    def decays(params: Any) -> Any:
        return _over_paths(params, lambda path: path.endswith("/kernel"))

    return optax.chain(
        optax.clip_by_global_norm(heads.clip),
        optax.adamw(
            learning_rate(heads.learning_rate, warmup, num_steps=num_steps),
            b1=optim.b1, b2=optim.b2, weight_decay=heads.weight_decay, mask=decays,
        ),
    )  # fmt: skip


def _held(group: optax.GradientTransformation) -> optax.GradientTransformation:
    """Leaves parameters and state as they are; the state is that of `group`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(group.init, update)
