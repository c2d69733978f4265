"""The task of a run: its network, losses, optimiser and evaluation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from dlm_jax.config import Config, ModelConfig
from dlm_jax.data import Setup
from dlm_jax.distributed.partitions import axes_of
from dlm_jax.heads import HEADS, MAIN, Head
from dlm_jax.model.transformer import build
from dlm_jax.objectives.canvas_denoising import canvas_denoising
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.likelihood import costs, half_width, plus_minus, ratio_and_error
from dlm_jax.objectives.objective import (
    Batch,
    Drawn,
    Mixture,
    Objective,
    denoising,
    elbo,
    next_token,
    process_elbo,
    proofreading,
)
from dlm_jax.objectives.processes import noise_process
from dlm_jax.settings import SettingError, require
from dlm_jax.training.optimisers import (
    Rates,
    make_grouped_optimizer,
    rates_at,
    rates_of,
)
from dlm_jax.training.train_step import (
    Stage,
    StageLoss,
    TrainState,
    abstract_state,
    init_state,
    stage_at,
)
from dlm_jax.types import Network, Params

MakeNetwork = Callable[[ModelConfig], Network]
MakeObjective = Callable[[Setup], Objective | Callable[[Batch, jax.Array], Drawn] | Mixture]
MakeHead = Callable[[Setup], Head | None]
MakeOptimizer = Callable[[Setup], optax.GradientTransformation]


@dataclass(frozen=True)
class Task:
    """The training task of a run, and its evaluation.

    Attributes:
      setup: inputs of the task.
      network: the model. Its `init` creates the parameters of all heads.
      mixture: objectives of the model itself.
      heads: heads, in the order in which their losses are added.
      own_optimizer: custom optimiser of the main group; None uses ``[optim]``.
      schedule: maps a step (counted from 0) to a factor that scales the learning rates of
        ``[optim]``. None uses the warm-up and cosine decay.
    """

    setup: Setup
    network: Network
    mixture: Mixture
    heads: tuple[Head, ...]
    own_optimizer: optax.GradientTransformation | None = None
    schedule: optax.Schedule | None = None

    @functools.cached_property
    def axes(self) -> Params:
        """The `dlm_jax.Axes` of the parameters."""
        return axes_of(self.network)

    @functools.cached_property
    def rates(self) -> Rates:
        """The learning rates, which a custom optimiser of the main group does not have."""
        config = self.setup.config
        rates = rates_of(
            config.optim,
            config.heads,
            self.heads,
            num_steps=config.train.steps,
            schedule=self.schedule,
        )
        return rates if self.own_optimizer is None else {**rates, MAIN: {}}

    def measure(
        self, params: Params, batch: Batch, number_B: jax.Array, key: jax.Array
    ) -> jax.Array:
        """The likelihood bound of the held-out rows with indices `number_B`, nats ``[B]``.

        A causal model has an exact likelihood instead of a bound.
        """
        setup = self.setup
        return costs(
            self.network,
            params,
            batch,
            number_B,
            key,
            is_causal=setup.config.model.attention_type == "causal",
            mask_id=setup.mask_id,
            eos_id=setup.tokenizer.eos_id,
            process=noise_process(setup.config.objective),
            noise_ids=setup.noise_ids,
        ).nats_B

    def stage(self, step: int) -> Stage:
        """The groups that train at a step (counted from 0)."""
        config = self.setup.config
        return stage_at(
            step, self.heads, train_main=config.heads.train_main, adapts=config.model.lora_rank > 0
        )

    def loss(self, stage: Stage) -> StageLoss:
        return StageLoss(self.network, self.mixture, self.heads, stage, self.setup.mask_id)

    def optimizer(self, stage: Stage) -> optax.GradientTransformation:
        """The optimiser of a stage. Its state has the same structure in all stages."""
        config = self.setup.config
        return make_grouped_optimizer(
            config.optim,
            config.heads,
            self.heads,
            stage,
            self.rates,
            axes=self.axes,
            num_steps=config.train.steps,
            own=self.own_optimizer,
        )

    def learning_rates(self, stage: Stage, step: int) -> dict[str, float]:
        """The learning rates of a step (counted from 0), for its metrics."""
        return rates_at(self.rates, self.heads, stage, step)

    def abstract_state(self) -> TrainState:
        return abstract_state(*self._state_of())

    def fresh_state(self, key: jax.Array) -> TrainState:
        return init_state(*self._state_of(), key)

    def _state_of(self) -> tuple[Network, optax.GradientTransformation, Mesh, bool]:
        has_ema = self.setup.config.optim.ema_decay > 0
        return self.network, self.optimizer(self.stage(0)), self.setup.mesh, has_ema


def make_task(
    setup: Setup,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    optimizer: optax.GradientTransformation | MakeOptimizer | None = None,
    schedule: optax.Schedule | None = None,
) -> Task:
    """The task of a run. See `dlm_jax.training.train` for the arguments.

    With a single custom objective, rows are cut to random lengths as in the config.
    """
    if not isinstance(network, Network):
        network = (network or build)(setup.config.model)
    for head in HEADS:
        if head.is_added(setup.config.model) and head.key not in network.heads:
            raise ValueError(f"model.{head.switch}=True requires a network with a {head.key} head")
    records = make_heads(setup, heads)
    inits = {head.name: (head.stream, head.init) for head in records if head.init is not None}
    if inits or any(head.axes is not None for head in records):
        init_model, axes_of_model = network.init, network.axes

        def init(key: jax.Array) -> Params:
            own = {name: make(jax.random.fold_in(key, at)) for name, (at, make) in inits.items()}
            return init_model(key) | own

        def axes(params: Params) -> Params:
            known = {} if axes_of_model is None else axes_of_model(params)
            own = {head.name: head.axes for head in records if head.axes is not None}
            return known | {name: of(params[name]) for name, of in own.items() if name in params}

        network = replace(network, init=init, axes=axes)
    mixture = make_mixture(setup) if objective is None else objective(setup)
    if not isinstance(mixture, Mixture):
        cut = setup.config.objective.random_length_share
        mixture = Mixture({"objective": mixture}, {"objective": 1.0}, cut)
    for name in {head.name for head in records} & mixture.objectives.keys():
        raise ValueError(f"an objective and a head have the same name: {name}; rename one")
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        optimizer = optimizer(setup)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ValueError(
                "optimizer must be a gradient transformation, such as optax.adam(1e-3), or a "
                f"function of the Setup that returns one, not a {type(optimizer).__name__}"
            )
    if optimizer is not None and schedule is not None:
        optimizer = optax.chain(optimizer, optax.scale_by_schedule(schedule))
    return Task(setup, network, mixture, records, optimizer, schedule)


def make_heads(setup: Setup, own: Sequence[Head | MakeHead]) -> tuple[Head, ...]:
    """The heads of the config, followed by those of the caller.

    Raises:
      ValueError: two heads have the same name, or nothing trains.
    """
    made = [one if isinstance(one, Head) else one(setup) for one in (*HEADS, *own)]
    heads = tuple(head for head in made if head is not None)
    names = [head.name for head in heads]
    if len(set(names)) < len(names):
        raise ValueError(f"two heads have the same name: {', '.join(names)}; rename one")
    if not setup.config.heads.train_main and not heads:
        raise ValueError(
            "heads.train_main=False leaves nothing to train; set "
            + " or ".join(f"model.{head.switch}" for head in HEADS)
        )
    return heads


def make_mixture(setup: Setup) -> Mixture:
    """The mixture of objectives of the config, or next-token prediction for a causal model.

    Objectives whose share is 0 are omitted.

    Raises:
      ValueError: the rows per batch of an objective are rounded to 0, or the objective does not fit
        the model.
    """
    config, objective, model = setup.config, setup.config.objective, setup.config.model
    check_process(config)
    has_canvases, process = model.attention_type == "canvas", noise_process(objective)
    if has_canvases and process.is_masked:
        raise SettingError(
            "objective.process",
            objective.process,
            "has no sampler for models with canvases",
            "use uniform",
            "model.attention_type",
        )
    if model.attention_type == "causal":
        return Mixture(
            {"next_token": lambda batch, key: next_token(batch, model.predicts_first)},
            {"next_token": 1.0},
        )
    schedule = SCHEDULES[objective.schedule](objective.schedule_power)
    cut = objective.random_length_share
    if has_canvases or not process.is_masked:
        common: dict[str, Any] = {
            "schedule": schedule, "mask_id": setup.mask_id, "noise_ids": setup.noise_ids,
        }  # fmt: skip
        if not has_canvases:
            own = process_elbo(process, block_length=model.block_length, **common)
            return Mixture({"elbo": own}, {"elbo": 1.0}, cut)
        own = canvas_denoising(
            process,
            canvas_length=model.block_length,
            text_weight=objective.text_weight,
            conditioned_share=objective.conditioned_share,
            **common,
        )
        return Mixture({"denoising": own}, {"denoising": 1.0}, cut)
    objectives = {
        "elbo": functools.partial(
            elbo,
            schedule=schedule,
            mask_id=setup.mask_id,
            block_length=model.block_length,
            over=objective.normaliser,
            is_weighted=objective.time_weight,
        ),
        "denoising": functools.partial(
            denoising, settings=objective, mask_id=setup.mask_id, random_ids=setup.text_ids
        ),
        "proofreading": functools.partial(
            proofreading,
            max_ratio=objective.misprint_ratio,
            mask_id=setup.mask_id,
            kinds=objective.misprint_kinds,
            masked_rows=objective.misprint_masked_rows,
        ),
    }
    shares = {
        "elbo": 1.0 - objective.denoising_share - objective.proofreading_share,
        "denoising": objective.denoising_share,
        "proofreading": objective.proofreading_share,
    }
    shares = {name: share for name, share in shares.items() if share > 1e-6}
    mixture = Mixture({name: objectives[name] for name in shares}, shares, cut)
    num_rows = config.train.batch_size
    for name in mixture.without_rows(num_rows):
        share = mixture.shares[name]
        what = f"objective.{name}_share={share}" if name != "elbo" else f"the ELBO's share {share}"
        raise ValueError(
            f"{what} is less than one of train.batch_size={num_rows} rows, so it would never be "
            f"trained; raise the share to {1 / num_rows:.4g}, or train.batch_size to "
            f"{math.ceil(1 / share)}"
        )
    return mixture


def check_process(config: Config) -> None:
    """Raises SettingError if the forward process does not fit other settings."""
    objective, name = config.objective, config.objective.process
    if noise_process(objective).is_masked:
        return
    for key, value in {
        "denoising_share": 0,
        "proofreading_share": 0,
        "time_weight": True,
        "normaliser": "tokens",
    }.items():
        given, why = getattr(objective, key), f"requires objective.process='masked', not {name!r}"
        require(given == value, f"objective.{key}", given, why, f"use {value!r}")
    is_causal = config.model.attention_type == "causal"
    why = "is not supported with model.attention_type='causal'"
    require(not is_causal, "objective.process", name, why, "use 'masked'")


def bound_of(nats_N: np.ndarray, free_N: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation of N rows, given their numbers of free positions."""
    mean, error = ratio_and_error(nats_N.astype(np.float64), free_N)
    windows = int((free_N > 0).sum())
    # The error cannot be estimated from a single window, and JSON cannot represent NaN.
    return (
        {"bound": mean} | ({"standard_error": error} if windows > 1 else {}) | {"windows": windows}
    )


def bound_line(figures: dict[str, float]) -> str:
    half = half_width(figures.get("standard_error", math.nan), int(figures["windows"]))
    return f"bound {figures['bound']:.4f}{plus_minus(half)} nats/token"
