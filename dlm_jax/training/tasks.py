"""The tasks that a run can train a model for, each one record: its losses, and its evaluation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from dlm_jax.diffusion import sequence_scores
from dlm_jax.diffusion.corruption import SCHEDULES
from dlm_jax.diffusion.likelihood import bound, causal_nll, half_width, plus_minus, ratio_and_error
from dlm_jax.diffusion.mixture import Mixture, NetworkObjective
from dlm_jax.diffusion.objectives import (
    Batch,
    Normaliser,
    Objective,
    denoising,
    denoising_settings,
    elbo,
    next_token,
    proofreading,
)
from dlm_jax.heads import HEADS, Head, Setup, corrupter_of
from dlm_jax.training.stages import Stage, StageLoss
from dlm_jax.types import Network, Params

MakeObjective = Callable[[Setup], Objective | NetworkObjective | Mixture]
MakeHead = Callable[[Setup], Head | None]


class Evaluation(NamedTuple):
    """The result of an evaluation: figures for the metrics, and a line for the log."""

    figures: dict[str, float]
    line: str


@dataclass(frozen=True)
class Task:
    """What a run trains a model for, and how it is evaluated.

    Attributes:
      network: the model, whose `init` makes the parameters of all heads.
      mixture: objectives of the model itself.
      heads: in the order in which their losses are added up.
      mask_id: the id of MASK.
      measure: ``(params, batch, key)`` -> figures of held-out rows, a pytree of ``[B]``.
      summarize: ``(measured, free_N) -> Evaluation`` of N rows, given their free positions.
      figure: the figure of an evaluation that is drawn beside the training loss.
      unit: of that figure and of the loss.
      writes_text: whether samples can be shown.
      next_command: what to do with the trained model; ``{out_dir}`` is its directory.
    """

    network: Network
    mixture: Mixture
    heads: tuple[Head, ...]
    mask_id: int
    measure: Callable[[Params, Batch, jax.Array], Any]
    summarize: Callable[[Any, np.ndarray], Evaluation]
    figure: str = "bound"
    unit: str = "nats per token"
    writes_text: bool = True
    next_command: str = "sample more with: python sample.py --checkpoint {out_dir}"

    def loss(self, stage: Stage) -> StageLoss:
        """The loss of a stage."""
        return StageLoss(self.network, self.mixture, self.heads, stage, self.mask_id)


def language_model(
    setup: Setup, network: Network, objective: MakeObjective | None, heads: tuple[Head, ...]
) -> Task:
    """Trains for the objectives of the config, or `objective`; evaluated by its bound.

    A causal model has an exact likelihood instead of a bound, and predicts the next token.
    """
    is_causal = setup.config.model.attention_type == "causal"

    def measure(params: Params, batch: Batch, key: jax.Array) -> jax.Array:
        if is_causal:
            return causal_nll(network, params, batch, mask_id=setup.mask_id)
        return bound(network, params, batch, key, mask_id=setup.mask_id).nats_B

    mixture = make_mixture(setup) if objective is None else _own_mixture(setup, objective)
    return Task(network, mixture, heads, setup.mask_id, measure, _bound_of)


def sequence_scorer(
    setup: Setup, network: Network, objective: MakeObjective | None, heads: tuple[Head, ...]
) -> Task:
    """Trains for the loss of the scorer's head, unless for an `objective`; writes no text."""
    if network.scorer is None:
        raise ValueError("model.mode='sequence_scorer' needs a network with a scorer")
    mixture = Mixture(random_length_share=setup.config.objective.random_length_share)
    return Task(
        network,
        mixture if objective is None else _own_mixture(setup, objective),
        heads,
        setup.mask_id,
        measure=functools.partial(sequence_scores.errors, network, how=corrupter_of(setup)),
        summarize=_errors_of,
        figure="cross_entropy",
        unit="nats per text",
        writes_text=False,
        next_command=(
            "judge texts with: python -m dlm_jax.evaluate --checkpoint {out_dir} --text FILE"
        ),
    )


TASKS: dict[str, Callable[..., Task]] = {
    "language_model": language_model,
    "sequence_scorer": sequence_scorer,
}
"""Tasks by ``model.mode``."""


def make_heads(setup: Setup, own: Sequence[Head | MakeHead]) -> tuple[Head, ...]:
    """The heads that the config asks for, then one's own.

    Raises:
      ValueError: two have the same name or metric, or nothing is left that trains.
    """
    made = [one if isinstance(one, Head) else one(setup) for one in (*HEADS, *own)]
    heads = tuple(head for head in made if head is not None)
    for names in ([head.name for head in heads], [head.metric for head in heads]):
        if len(set(names)) < len(names):
            raise ValueError(f"two heads have the same name: {', '.join(names)}; rename one")
    taken = {"loss", "grad_norm", "param_norm", "elbo", "denoising", "proofreading", "next_token"}
    for head in own:
        if isinstance(head, Head) and head.metric in taken:
            raise ValueError(f"head {head.name!r} has the metric {head.metric!r}, which is taken")
    if not setup.config.heads.train_main and all(head.joins_main for head in heads):
        raise ValueError(
            "heads.train_main=False leaves nothing to train; set model.add_sampler_head or "
            "model.add_critic_head"
        )
    return heads


def make_mixture(setup: Setup) -> Mixture:
    """The objectives as the config mixes them, or the next token for a causal model.

    Raises:
      ValueError: the share of an objective rounds to no row of a batch.
    """
    config, mask_id = setup.config.objective, setup.mask_id
    if setup.config.model.attention_type == "causal":
        return Mixture({"next_token": lambda batch, key: next_token(batch)}, {"next_token": 1.0})
    schedule = SCHEDULES[config.schedule](config.schedule_power)
    objectives: dict[str, Objective] = {
        "elbo": functools.partial(
            elbo, schedule=schedule, mask_id=mask_id,
            block_length=setup.config.model.block_length,
            normaliser=Normaliser(config.normaliser, config.time_weight),
        ),
        "denoising": functools.partial(
            denoising, settings=denoising_settings(config), mask_id=mask_id,
            random_ids=setup.text_ids,
        ),
        "proofreading": functools.partial(
            proofreading, max_ratio=config.misprint_ratio, mask_id=mask_id,
            kinds=config.misprint_kinds, masked_rows=config.misprint_masked_rows,
        ),
    }  # fmt: skip
    shares = {
        "elbo": 1.0 - config.denoising_share - config.proofreading_share,
        "denoising": config.denoising_share,
        "proofreading": config.proofreading_share,
    }
    used = [name for name, share in shares.items() if share > 1e-6]
    mixture = Mixture(
        {name: objectives[name] for name in used},
        {name: shares[name] for name in used},
        random_length_share=config.random_length_share,
    )
    _check_rows(mixture, setup.config.train.batch_size)
    return mixture


def _check_rows(mixture: Mixture, num_rows: int) -> None:
    for name in mixture.without_rows(num_rows):
        share = mixture.shares[name]
        what = f"objective.{name}_share={share}" if name != "elbo" else f"the ELBO's share {share}"
        raise ValueError(
            f"{what} is less than one of train.batch_size={num_rows} rows, so that nothing of it "
            f"would be trained; raise the share to {1 / num_rows:.4g}, or train.batch_size to "
            f"{math.ceil(1 / share)}"
        )


def _own_mixture(setup: Setup, make: MakeObjective) -> Mixture:
    """A `Mixture` is taken as it is; one objective is given batches as the config cuts them."""
    made = make(setup)
    if isinstance(made, Mixture):
        return made
    share = setup.config.objective.random_length_share
    return Mixture({"objective": made}, {"objective": 1.0}, random_length_share=share)


def _bound_of(nats_N: np.ndarray, free_N: np.ndarray) -> Evaluation:
    mean, error = ratio_and_error(nats_N.astype(np.float64), free_N)
    windows = int((free_N > 0).sum())
    # A single window tells nothing of its error, and JSON has no NaN.
    errors = {"standard_error": error} if windows > 1 else {}
    figures = {"bound": mean} | errors | {"windows": windows}
    interval = plus_minus(half_width(error, windows))
    return Evaluation(figures, f"bound {mean:.4f}{interval} nats/token")


def _errors_of(measured: sequence_scores.Errors, free_N: np.ndarray) -> Evaluation:
    figures = sequence_scores.summary(measured, free_N)
    return Evaluation(figures, sequence_scores.error_line(figures))
