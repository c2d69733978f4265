"""The loss of a run whose model is a sequence scorer, for the training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.objectives import Batch, at_random_length
from dlm_jax.diffusion.scoring import Corrupter, Question, corrupt, scorer_loss
from dlm_jax.types import Network, Params

SCORER = "scorer_head"
"""The top-level name of the head's parameters, which train with the model's own."""


class ScorerPart(NamedTuple):
    """A corrupted batch, or some rows of it.

    Attributes:
      asked: rows with their answers.
      total: float32 scalar, rows of the whole batch that count.
    """

    asked: Question
    total: jax.Array

    def rows_alone(self) -> ScorerPart:
        """What can be cut by rows: all but the total of the whole batch."""
        return self._replace(total=jnp.zeros((0,)))

    def with_totals_of(self, whole: ScorerPart) -> ScorerPart:
        """These rows, with the total of the batch that they were cut from."""
        return self._replace(total=whole.total)


@dataclass(frozen=True)
class ScorerLoss:
    """The loss of a scorer, as pure functions of a batch; everything trains, from the first step.

    Attributes:
      network: with a scorer.
      corrupter: how its texts are corrupted.
      random_length_share: share of the batches that are cut, see `at_random_length`.
    """

    network: Network
    corrupter: Corrupter
    random_length_share: float = 0.0

    def split(self, params: Params) -> tuple[Params, Params]:
        """(parameters that train, which are all, and none)."""
        return params, {}

    def alpha(self, step: jax.Array) -> jax.Array:
        """1: there is one loss, which counts in full at every step."""
        return jnp.ones(())

    def draw(self, batch: Batch, key: jax.Array, step: jax.Array) -> ScorerPart:
        """The batch with the noise of a step: from the run's key and the step alone."""
        length_key, noise_key = jax.random.split(jax.random.fold_in(key, step))
        batch = at_random_length(batch, length_key, share=self.random_length_share)
        asked = corrupt(batch, noise_key, self.corrupter)
        return ScorerPart(asked, jnp.sum(asked.weight_B))

    def __call__(
        self, params: Params, part: Any, alpha: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(what is minimised, the same by its name) of one part of a batch, in nats per row."""
        loss = scorer_loss(self.network, params, part.asked, part.total)
        mean = alpha * loss.sum / jnp.maximum(loss.weight, 1.0)
        return mean, {"cross_entropy": mean}
