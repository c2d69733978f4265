"""Training tasks. A `Task` contains the losses and the evaluation of a run."""

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
from dlm_jax.diffusion.likelihood import costs, half_width, plus_minus, ratio_and_error
from dlm_jax.diffusion.mixing import mixture_of
from dlm_jax.diffusion.objectives import (
    TAUGHT,
    Batch,
    Mixture,
    NetworkObjective,
    Objective,
    next_token,
)
from dlm_jax.heads import HEADS, MAIN, Head, scorer, with_own_parameters
from dlm_jax.model.transformer import build
from dlm_jax.rl import Rollouts, objective_of, reward_line
from dlm_jax.settings import SettingError
from dlm_jax.training.optimisers import (
    by_update,
    learning_rates,
    make_grouped_optimizer,
    matrices_of,
)
from dlm_jax.training.train_step import (
    Stage,
    StageLoss,
    TrainState,
    abstract_state,
    group_of,
    init_state,
    keeping,
    stage_at,
)
from dlm_jax.types import Network, Params

MakeNetwork = Callable[[ModelConfig], Network]
MakeObjective = Callable[[Setup], Objective | NetworkObjective | Mixture]
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
      measure: ``(params, batch, number_B, key)`` -> values for the held-out rows with indices
        ``number_B``, a pytree of ``[B]`` arrays. With `rollouts`, neither `measure` nor `summarize`
        is called.
      summarize: ``(measured, free_N) -> figures`` for N rows, given their numbers of free
        positions.
      line: ``(figures) -> text`` for the log.
      is_gain: whether higher values of the figure are better.
      writes_text: whether the model can generate samples.
      next_command: suggested command for the trained model, with ``{path}`` for the directory of
        its checkpoints.
      own_optimizer: custom optimiser of the main group; None uses ``[optim]``.
      schedule: maps a step (counted from 0) to a factor that scales the learning rates, or the
        updates of a custom optimiser. None uses the warm-up and cosine decay, or a factor of 1
        for a custom optimiser.
      rollouts: generates the training samples of a step; None trains on rows of the corpus.
    """

    setup: Setup
    network: Network
    mixture: Mixture
    heads: tuple[Head, ...]
    measure: Callable[[Params, Batch, jax.Array, jax.Array], Any]
    summarize: Callable[[Any, np.ndarray], dict[str, float]]
    line: Callable[[dict[str, float]], str]
    is_gain: bool = False
    writes_text: bool = True
    next_command: str = "sample more with: python sample.py --checkpoint {path}"
    own_optimizer: optax.GradientTransformation | None = None
    schedule: optax.Schedule | None = None
    rollouts: Rollouts | None = None

    @functools.cached_property
    def matrices(self) -> frozenset[str]:
        """The paths of the parameters to which Muon and weight decay apply."""
        return matrices_of(self.network, self.heads)

    @property
    def figure(self) -> str:
        """Name of the evaluation metric that selects the best model."""
        return figure_of(self.setup.config)[0]

    @property
    def updates(self) -> int:
        """Number of parameter updates per step."""
        return 1 if self.rollouts is None else self.setup.config.rl.updates

    @property
    def rows(self) -> int:
        """Number of corpus rows per step: the batch size, or the number of prompts."""
        config = self.setup.config
        return config.train.batch_size // (1 if self.rollouts is None else config.rl.group)

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
        config, schedule = by_update(self.setup.config, self.schedule, self.updates)
        made = make_grouped_optimizer(
            config.optim,
            config.heads,
            self.heads,
            stage,
            num_steps=config.train.steps,
            matrices=self.matrices,
            own=self.own_optimizer,
            schedule=schedule,
        )

        def trained(params: Params) -> Params:
            return self.loss(stage).split(params)[0]

        reference = previous = None
        if self.mixture.needs_teacher:
            reference = self._taught
        elif self.rollouts is not None and config.rl.kl:
            reference = trained
        if self.rollouts is not None and config.rl.asynchronous:
            previous = trained
        if reference is None and previous is None:
            return made
        return keeping(made, reference=reference, previous=previous)

    def learning_rates(self, stage: Stage, step: int) -> dict[str, float]:
        """The learning rates of a step (counted from 0), for its metrics."""
        config, schedule = by_update(self.setup.config, self.schedule, self.updates)
        return learning_rates(
            config,
            self.heads,
            stage,
            step * self.updates,
            num_steps=config.train.steps,
            is_own=self.own_optimizer is not None,
            schedule=schedule,
        )

    def _taught(self, params: Params) -> Params:
        """The parameters in the main group, which are the trainable parameters of the model."""
        adapts = self.setup.config.model.lora_rank > 0
        groups = {name: group_of(name, self.heads, adapts=adapts) for name in params}
        return {name: params[name] for name in params if groups[name] == MAIN}

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
    report: Callable[[str], None] = lambda line: None,
) -> Task:
    """The task of a run. See `dlm_jax.training.train` for the arguments."""
    if not isinstance(network, Network):
        network = (network or build)(setup.config.model)
    records = make_heads(setup, heads)
    for head in HEADS:
        if head.switch and head.is_added(setup.config.model) and head.key not in network.heads:
            raise ValueError(f"model.{head.switch}=True requires a network with a {head.key} head")
    network = with_own_parameters(network, records)
    if setup.config.rl.reward:
        task = policy(setup, network, objective, records, report)
    else:
        task = TASKS[setup.config.model.mode](setup, network, objective, records)
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        optimizer = _made_optimizer(optimizer, setup)
    return replace(task, own_optimizer=optimizer, schedule=schedule)


def _made_optimizer(make: MakeOptimizer, setup: Setup) -> optax.GradientTransformation:
    """The optimizer that `make` creates. Raises ValueError for any other result."""
    wanted = (
        "optimizer must be a gradient transformation, such as optax.adam(1e-3), or a function of "
        "the Setup that returns one"
    )
    try:
        made = make(setup)
    except Exception as error:
        error.add_note(wanted)
        raise
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(f"{wanted}, not a {type(made).__name__}")
    return made


def language_model(
    setup: Setup, network: Network, objective: MakeObjective | None, heads: tuple[Head, ...]
) -> Task:
    """The task that trains on `objective`, or on the objectives of the config, and evaluates the
    likelihood bound.

    A causal model predicts the next token, and has an exact likelihood instead of a bound.
    """
    cost = functools.partial(
        costs,
        network,
        is_causal=setup.config.model.attention_type == "causal",
        mask_id=setup.mask_id,
        eos_id=setup.tokenizer.eos_id,
        process=setup.config.objective.noise_process,
        noise_ids=setup.noise_ids,
    )
    mixture = make_mixture(setup) if objective is None else _own_mixture(setup, objective)
    return Task(
        setup,
        network,
        mixture,
        heads,
        lambda *rows: cost(*rows).nats_B,
        _bound_of,
        _bound_line,
    )


def figure_of(config: Config) -> tuple[str, str]:
    """The evaluation metric of a run that is plotted with its training loss, and their unit."""
    if config.rl.reward:
        return "reward", "reward, and nats per token"
    if config.model.mode == "sequence_scorer":
        return "cross_entropy", "nats per text"
    return "bound", "nats per token"


def sequence_scorer(
    setup: Setup, network: Network, objective: MakeObjective | None, heads: tuple[Head, ...]
) -> Task:
    """The task that trains on `objective`, or on the loss of the scorer head.

    The model does not generate text.
    """
    if "scorer" not in network.heads:
        raise ValueError("model.mode='sequence_scorer' requires a network with a scorer")
    corruption = setup.config.objective
    mixture = Mixture(random_length_share=corruption.random_length_share)
    return Task(
        setup,
        network,
        mixture if objective is None else _own_mixture(setup, objective),
        heads,
        measure=functools.partial(
            scorer.errors, network, how=corruption, random_ids=setup.text_ids
        ),
        summarize=scorer.summary,
        line=scorer.error_line,
        writes_text=False,
        next_command="score texts with: python -m dlm_jax.evaluate --checkpoint {path} --text FILE",
    )


def policy(
    setup: Setup,
    network: Network,
    objective: MakeObjective | None,
    heads: tuple[Head, ...],
    report: Callable[[str], None],
) -> Task:
    """The task that trains on the model's own samples with `objective`, or with the loss of
    ``[rl]``, and evaluates the reward.

    Raises:
      ValueError: the run has heads, or a setting is incompatible.
    """
    if heads:
        raise ValueError(f"rl.reward does not train heads; remove {heads[0].name}")
    made = objective_of(setup) if objective is None else objective(setup)
    if not isinstance(made, NetworkObjective):
        raise ValueError("a custom objective of rl.reward must be a NetworkObjective of rollouts")
    needs_trace = setup.config.rl.loss == "trace"
    return Task(
        setup,
        network,
        Mixture({"policy": made}, {"policy": 1.0}),
        heads,
        measure=lambda *rows: None,
        summarize=lambda measured, free_N: {},
        line=reward_line,
        is_gain=True,
        rollouts=Rollouts(setup, network, needs_trace=needs_trace, report=report),
    )


TASKS: dict[str, Callable[..., Task]] = {
    "language_model": language_model,
    "sequence_scorer": sequence_scorer,
}
"""Tasks by ``model.mode``."""


def make_heads(setup: Setup, own: Sequence[Head | MakeHead]) -> tuple[Head, ...]:
    """The heads of the config, followed by those of the caller.

    Raises:
      ValueError: two heads have the same name or metric, or nothing trains.
    """
    made = [one if isinstance(one, Head) else one(setup) for one in (*HEADS, *own)]
    heads = tuple(head for head in made if head is not None)
    for names in ([head.name for head in heads], [head.metric for head in heads]):
        if len(set(names)) < len(names):
            raise ValueError(f"two heads have the same name: {', '.join(names)}; rename one")
    taken = {
        "loss",
        "grad_norm",
        "param_norm",
        "elbo",
        "denoising",
        "proofreading",
        "next_token",
        *TAUGHT,
    }
    for head in own:
        if isinstance(head, Head) and head.metric in taken:
            raise ValueError(
                f"head {head.name!r} has the metric {head.metric!r}, which is already taken"
            )
    if not setup.config.heads.train_main and all(head.joins_main for head in heads):
        raise ValueError(
            "heads.train_main=False leaves nothing to train; set "
            + " or ".join(f"model.{head.switch}" for head in HEADS if head.switch)
        )
    return heads


def make_mixture(setup: Setup) -> Mixture:
    """The mixture of objectives of the config, or next-token prediction for a causal model.

    Raises:
      ValueError: the rows per batch of an objective are rounded to 0, or the objective does not fit
        the model.
    """
    config = setup.config
    _check_canvases(config)
    if config.model.attention_type == "causal":
        example = functools.partial(next_token, predicts_first=config.model.predicts_first)
        return Mixture({"next_token": lambda batch, key: example(batch)}, {"next_token": 1.0})
    mixture = mixture_of(
        config.objective,
        mask_id=setup.mask_id,
        random_ids=setup.text_ids,
        banned_ids=setup.banned_ids,
        noise_ids=setup.noise_ids,
        block_length=config.model.block_length,
        has_canvases=config.model.attention_type == "canvas",
    )
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


def _check_canvases(config: Config) -> None:
    objective, model = config.objective, config.model
    if model.attention_type == "canvas" and objective.noise_process.is_masked:
        raise SettingError(
            "objective.process",
            objective.process,
            "has no sampler for models with canvases",
            "use uniform",
            "model.attention_type",
        )


def _own_mixture(setup: Setup, make: MakeObjective) -> Mixture:
    """The mixture of a custom objective. A custom `Mixture` is returned unchanged. With a single
    objective, rows are cut to random lengths as in the config.
    """
    made = make(setup)
    if isinstance(made, Mixture):
        return made
    share = setup.config.objective.random_length_share
    return Mixture({"objective": made}, {"objective": 1.0}, random_length_share=share)


def _bound_of(nats_N: np.ndarray, free_N: np.ndarray) -> dict[str, float]:
    mean, error = ratio_and_error(nats_N.astype(np.float64), free_N)
    windows = int((free_N > 0).sum())
    # The error cannot be estimated from a single window, and JSON cannot represent NaN.
    return (
        {"bound": mean} | ({"standard_error": error} if windows > 1 else {}) | {"windows": windows}
    )


def _bound_line(figures: dict[str, float]) -> str:
    half = half_width(figures.get("standard_error", math.nan), int(figures["windows"]))
    return f"bound {figures['bound']:.4f}{plus_minus(half)} nats/token"
