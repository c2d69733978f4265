"""The optimiser of a run: clipping, then Muon or AdamW under a warm-up and cosine schedule.

The model and each of its heads are groups of their own, each with its clip, schedule and state.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dlm_jax.config import Config, HeadsConfig, OptimConfig
from dlm_jax.distributed.sharding import path_name
from dlm_jax.training.heads import CRITIC, MAIN, SAMPLER, Head
from dlm_jax.training.muon import orthogonalized_momentum
from dlm_jax.training.stages import KEPT, Stage, group_of

# Checkpoints hold a group for each of them, empty where the model lacks the head.
_ALWAYS = (SAMPLER, CRITIC)


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
    """Whether the parameter at `path` is a matrix inside a block: what Muon orthogonalises.

    The matrices of experts are stacked by layers and experts, all others by layers.
    """
    return re.search(r"(^|/)(dense_)?blocks/.*/(kernel|expert_(gate|up|down))$", path) is not None


def _over_paths(params: Any, value: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: value(path_name(path)), params)


def make_optimizer(config: OptimConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Gradient transformation of a run of `num_steps` steps.

    Gradients are scaled down to a global norm of ``clip``. ``muon`` (Jordan et al. 2024) updates
    the matrices of the blocks, those of each expert too, and Adam the rest, each with its own
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
        update = _muon(config, rate, num_steps=num_steps)
    return optax.chain(optax.clip_by_global_norm(config.clip), update)


def _muon(
    config: OptimConfig, rate: optax.Schedule, *, num_steps: int
) -> optax.GradientTransformation:
    """As ``optax.contrib.muon``, with the matrices dealt out over the devices."""
    adam_rate = learning_rate(config.adam_learning_rate, config, num_steps=num_steps)
    matrices = optax.chain(
        orthogonalized_momentum(beta=config.muon_momentum),
        # Checkpoints hold an empty state in the place of optax's scale by shape.
        optax.identity(),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    rest = optax.adamw(adam_rate, b1=config.b1, b2=config.b2, weight_decay=0.0, nesterov=True)
    return optax.partition(
        {"muon": matrices, "adam": rest},
        lambda params: _over_paths(params, lambda path: "muon" if is_matrix(path) else "adam"),
    )


def make_grouped_optimizer(
    optim: OptimConfig,
    settings: HeadsConfig,
    heads: Sequence[Head],
    stage: Stage,
    *,
    num_steps: int,
) -> optax.GradientTransformation:
    """Gradient transformation of a stage of a run: a group for the model, and one for each head.

    `make_optimizer` for the model itself and the heads that join it, which is all where there is no
    other head; for each of those its own, by default gradients scaled down to a norm of
    ``heads.clip`` and AdamW, under a warm-up and cosine that begin where the head begins to train.
    With ``heads.train_main = false`` the model itself has no state, with adapters these alone
    have. The state is the same in every stage; groups that do not train keep theirs, and their
    parameters, as they are.
    """
    main = make_optimizer(optim, num_steps=num_steps)
    own = [head for head in heads if head.group != MAIN]
    if not own and not stage.adapts:
        return main
    # What is kept through the whole run has no state at all.
    kept = optax.set_to_zero()
    groups = {KEPT: kept} if stage.adapts else {}
    groups |= {MAIN: main if settings.train_main else kept} | {
        name: _head_optimizer(optim, settings, 1) for name in _ALWAYS
    }
    for head in own:
        left = max(1, num_steps - head.start)
        make = head.optimizer or functools.partial(_head_optimizer, optim, settings)
        groups[head.name] = make(left)
    transforms: dict[Hashable, optax.GradientTransformation] = {
        name: group if stage.trains(name) or group is kept else _frozen(group)
        for name, group in groups.items()
    }
    return optax.partition(
        transforms,
        lambda params: _over_paths(
            params, lambda path: group_of(path.split("/")[0], heads, adapts=stage.adapts)
        ),
    )


def learning_rates(
    config: Config, heads: Sequence[Head], stage: Stage, step: int
) -> dict[str, float]:
    """The learning rates of a step, from 0, for its metrics.

    ``learning_rate`` is that of the model itself, muon's matrices or all of adamw, and
    ``adam_learning_rate`` that of what muon leaves to Adam; a head of its
    own group has ``sampler_learning_rate``, say, unless it has an optimiser of one's own.
    """
    rates: dict[str, float] = {}
    num_steps = config.train.steps
    if stage.trains(MAIN):
        main = learning_rate(config.optim.learning_rate, config.optim, num_steps=num_steps)
        rates["learning_rate"] = float(np.asarray(main(step)))
        if config.optim.name == "muon":
            adam = learning_rate(config.optim.adam_learning_rate, config.optim, num_steps=num_steps)
            rates["adam_learning_rate"] = float(np.asarray(adam(step)))
    for head in heads:
        if head.group != MAIN and stage.trains(head.group) and head.optimizer is None:
            rate = _head_rate(config.optim, config.heads, max(1, num_steps - head.start))
            first = head.start + (head.end > head.start)
            rates[f"{head.metric}_learning_rate"] = float(np.asarray(rate(step - first)))
    return rates


def _head_rate(optim: OptimConfig, settings: HeadsConfig, num_steps: int) -> optax.Schedule:
    warmup = dataclasses.replace(optim, warmup_steps=min(settings.warmup_steps, num_steps - 1))
    return learning_rate(settings.learning_rate, warmup, num_steps=num_steps)


def _head_optimizer(
    optim: OptimConfig, settings: HeadsConfig, num_steps: int
) -> optax.GradientTransformation:
    def decays(params: Any) -> Any:
        return _over_paths(params, lambda path: path.endswith("/kernel"))

    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            _head_rate(optim, settings, num_steps),
            b1=optim.b1, b2=optim.b2, weight_decay=settings.weight_decay, mask=decays,
        ),
    )  # fmt: skip


def _frozen(group: optax.GradientTransformation) -> optax.GradientTransformation:
    """Leaves parameters and state as they are; the state is that of `group`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(group.init, update)
