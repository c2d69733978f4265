"""Staged training of a model and its heads: the trained groups and the loss of each stage.

A stage is a static set of trained parameter groups, so frozen groups add no cost. Within a stage,
only the weights of the losses change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.losses import Loss, hidden_of
from dlm_jax.diffusion.objectives import Batch, MixedExample, Mixture, NetworkObjective
from dlm_jax.heads import MAIN, Head, HeadInputs, Stage
from dlm_jax.model.lora import GROUP
from dlm_jax.sampling.positions import returned
from dlm_jax.types import Network, Params

_SALT = 0x68656164
KEPT = "kept"
"""The group of parameters that are never trained and have no optimiser state."""


def stage_at(step: int, heads: Sequence[Head], *, train_main: bool, adapts: bool = False) -> Stage:
    """The stage of a step (counted from 0). A head trains if its loss has a positive weight."""
    own = [head.name for head in heads if head.group != MAIN and head.trains_at(step)]
    return Stage((*[MAIN] * train_main, *own), adapts)


def group_of(name: str, heads: Sequence[Head], *, adapts: bool = False) -> str:
    """The optimiser group of the parameters under a top-level name.

    In a model with adapters, the frozen parameters are in the group `KEPT`.
    """
    group = next((head.group for head in heads if head.name == name), MAIN)
    return KEPT if adapts and group == MAIN and name != GROUP else group


def teacher_of(params: Params, reference: Params | None) -> Params:
    """All parameters of the teacher, taken from `reference` if present and otherwise from
    `params`.
    """
    return jax.lax.stop_gradient(params) | (reference or {})


class NoisedBatch(NamedTuple):
    """A batch with all its noise, or some rows of such a batch.

    The leaves are ``[B, ...]`` arrays or scalars. Scalars are totals over the whole batch.
    """

    example: MixedExample
    noise: dict[str, Any]


@dataclass(frozen=True)
class StageLoss:
    """The loss of a stage, as pure functions of a batch.

    Attributes:
      network: the model and its heads.
      mixture: objectives of the model itself.
      heads: all heads of the run.
      stage: the groups that train.
      mask_id: the id of MASK.
    """

    network: Network
    mixture: Mixture
    heads: tuple[Head, ...]
    stage: Stage
    mask_id: int

    @property
    def trained_heads(self) -> list[Head]:
        return [head for head in self.heads if self.stage.trains(head.group)]

    def split(self, params: Params) -> tuple[Params, Params]:
        """The trained and the frozen parameters, each keyed by top-level name."""
        groups = {name: group_of(name, self.heads, adapts=self.stage.adapts) for name in params}
        trained = {name: params[name] for name in params if self.stage.trains(groups[name])}
        return trained, {name: tree for name, tree in params.items() if name not in trained}

    def draw(self, batch: Batch, key: jax.Array, step: jax.Array) -> NoisedBatch:
        """The batch with the noise of a step, which depends only on the key of the run and the
        step.

        Each head has separate noise, so that the noise of the model does not depend on the heads.
        """
        example = self.mixture.example(batch, jax.random.fold_in(key, step))
        noise = {
            head.name: head.draw(example, self._noise_key(head, key, step))
            for head in self.trained_heads
        }
        return NoisedBatch(example, noise)

    def anchored(self, drawn: NoisedBatch, params: Params, reference: Params | None) -> NoisedBatch:
        """The batch with the results of `anchor` for the parameters before a step and the
        reference.
        """
        noise = drawn.example.noise
        for name, objective in self.mixture.objectives.items():
            if isinstance(objective, NetworkObjective) and objective.anchor is not None:
                kept = teacher_of(params, reference)
                noise = noise | {name: objective.anchor(self.network, params, kept, noise[name])}
        return drawn._replace(example=drawn.example._replace(noise=noise))

    def _noise_key(self, head: Head, key: jax.Array, step: jax.Array) -> jax.Array:
        if head.joins_main:
            # The key indices of heads follow those of the objectives.
            place = 1 + len(self.mixture.objectives) + self.heads.index(head)
            return jax.random.fold_in(jax.random.fold_in(key, step), place)
        salted = jax.random.fold_in(jax.random.fold_in(key, _SALT), step)
        return jax.random.fold_in(salted, head.stream)

    def __call__(
        self, params: Params, drawn: NoisedBatch, step: jax.Array, reference: Params | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The total loss, and the loss of each objective and head, for a batch or a part of it.

        The unit of the loss is nats per token if the objectives and heads use this unit.
        `reference` is as in `anchored`; objectives with a teacher read it.
        """
        hidden_BLD = self._hidden(params, drawn.example)
        means: dict[str, jax.Array] = {}
        total = jnp.zeros(())
        if self.stage.trains(MAIN):
            reads = hidden_BLD if self.mixture.reads_trunk else None
            found = self.mixture.losses(
                self.network, params, drawn.example, reads, mask_id=self.mask_id,
                teacher=teacher_of(params, reference) if self.mixture.needs_teacher else None,
            )  # fmt: skip
            means = {name: _mean(loss, name) for name, loss in found.items()}
            total = sum((self.mixture.shares[name] * means[name] for name in means), total)
            for loss in found.values():
                means |= {name: _mean(Loss(*figure), name) for name, figure in loss.figures.items()}
        for head in self.trained_heads:
            mean = _mean(head.loss(self._inputs(head, params, drawn, hidden_BLD)), head.name)
            means[head.metric] = mean
            total = total + (mean if head.weight is None else head.weight_at(step) * mean)
        return total, means

    def metrics(self, means: dict[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
        """The parts of the loss and the weights of heads; empty if the loss has a single part and
        no head trains.
        """
        own = [head for head in self.trained_heads if head.group != MAIN]
        if len(means) < 2 and not own:
            return {}
        weighted = [head for head in own if head.weight is not None]
        return means | {f"{head.metric}_alpha": head.weight_at(step) for head in weighted}

    def _hidden(self, params: Params, example: MixedExample) -> jax.Array | None:
        """The output of the trunk for the shown canvas; None if no loss reads it."""
        is_read = self.stage.trains(MAIN) and self.mixture.reads_trunk
        if not is_read and not any(head.reads_hidden for head in self.trained_heads):
            return None
        batch = example.batch
        hidden_BLD = hidden_of(
            self.network, params, example.shown_BL, batch.tokens_BL, batch.length_B
        )
        # Without this barrier, the heads would be fused into the trunk, so that the trunk would
        # round differently from a trunk without heads.
        return jax.lax.optimization_barrier(hidden_BLD)

    def _inputs(
        self, head: Head, params: Params, drawn: NoisedBatch, hidden_BLD: Any
    ) -> HeadInputs:
        if not head.trains_trunk:
            own = {head.name: params[head.name]}
            params, hidden_BLD = jax.lax.stop_gradient((params, hidden_BLD))
            params = params | own
        return HeadInputs(
            self.network, params, drawn.example, drawn.noise[head.name], hidden_BLD, self.stage
        )


def _mean(loss: Loss, name: str) -> jax.Array:
    returned(loss.sum, name, "loss(...).sum", "", (), float)
    returned(loss.weight, name, "loss(...).weight", "", (), float)
    return loss.sum / jnp.maximum(loss.weight, 1.0)
