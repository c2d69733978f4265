"""Several objectives in one batch: which rows each has, and the loss of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.diffusion.losses import Loss, cross_entropy
from dlm_jax.diffusion.objectives import Batch, Objective, at_random_length
from dlm_jax.types import Network, Params


@dataclass(frozen=True)
class NetworkObjective:
    """An objective that runs the network itself, as often and on whatever it needs.

    Attributes:
      draw: ``(batch, key) -> noise``, a pytree of everything random, drawn for the whole batch
        before it is cut into microbatches: every leaf is ``[B, ...]`` or, like the total that a
        loss is divided by, a scalar. Rows of other objectives have length 0.
      loss: ``(network, params, noise) -> Loss``, differentiated for all parameters that train.
    """

    draw: Callable[[Batch, jax.Array], Any]
    loss: Callable[[Network, Params, Any], Loss]


class MixedExample(NamedTuple):
    """A batch with the examples of a mixture: each row belongs to one objective.

    Attributes:
      batch: the rows to predict.
      shown_BL: int32 canvas that the trunk reads.
      weights: by objective, float32 ``[B, L]`` as in `Example`; 0 in the rows of the others.
      totals: by objective, float32 scalar as in `Example`.
      noise: what each `NetworkObjective` drew.
    """

    batch: Batch
    shown_BL: jax.Array
    weights: dict[str, jax.Array]
    totals: dict[str, jax.Array]
    noise: dict[str, Any]

    def is_supervised_BL(self) -> jax.Array:
        """True where some objective asks the LM head for the token."""
        weights = [weight_BL > 0 for weight_BL in self.weights.values()]
        return jnp.any(jnp.stack(weights or [jnp.zeros(self.shown_BL.shape, bool)]), axis=0)


@dataclass(frozen=True)
class Mixture:
    """Objectives that share every batch: each has its rows, and its share of the loss.

    Attributes:
      objectives: by name.
      shares: by name, share of the rows (rounded) and of the loss; they add up to 1.
      random_length_share: share of the batches that are cut, see `at_random_length`.
    """

    objectives: Mapping[str, Objective | NetworkObjective] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    random_length_share: float = 0.0

    @property
    def reads_trunk(self) -> bool:
        """Whether an objective is answered from the trunk's pass over the shown canvas."""
        return any(not isinstance(one, NetworkObjective) for one in self.objectives.values())

    def example(self, batch: Batch, key: jax.Array) -> MixedExample:
        """The batch's example, with noise from `key` alone."""
        length_key, *keys = jax.random.split(key, 1 + len(self.objectives))
        if self.random_length_share > 0:
            batch = at_random_length(batch, length_key, share=self.random_length_share)
        mixed = MixedExample(batch, batch.tokens_BL, {}, {}, {})
        owner_B = self._owners(batch.tokens_BL.shape[0])
        for number, (name, objective) in enumerate(self.objectives.items()):
            is_own_B = owner_B == number
            own = batch._replace(length_B=jnp.where(is_own_B, batch.length_B, 0))
            if isinstance(objective, NetworkObjective):
                mixed.noise[name] = objective.draw(own, keys[number])
            else:
                mixed = _with_rows(mixed, name, is_own_B, objective(own, keys[number]))
        return mixed

    def losses(
        self,
        network: Network,
        params: Params,
        example: MixedExample,
        hidden_BLD: jax.Array | None,
        *,
        mask_id: int,
    ) -> dict[str, Loss]:
        """By objective, its loss over the example.

        `hidden_BLD` is what the trunk returned for ``example.shown_BL``, if the mixture
        `reads_trunk`. MASK is never a prediction.
        """
        found = {}
        if hidden_BLD is not None:
            targets_BL = example.batch.tokens_BL
            nll_BL = cross_entropy(
                network, params, hidden_BLD, targets_BL,
                mask_id=mask_id, is_read_BL=example.is_supervised_BL(),
            )  # fmt: skip
            for name, weight_BL in example.weights.items():
                # Where nothing is predicted, the text may hold a MASK, which costs infinity.
                weighted_BL = jnp.where(weight_BL > 0, weight_BL * nll_BL, 0.0)
                found[name] = Loss(jnp.sum(weighted_BL), example.totals[name])
        for name, objective in self.objectives.items():
            if isinstance(objective, NetworkObjective):
                found[name] = objective.loss(network, params, example.noise[name])
        return {name: found[name] for name in self.objectives}

    def without_rows(self, num_rows: int) -> list[str]:
        """Names of the objectives whose shares round to no row of a batch."""
        counts = np.bincount(self._owners(num_rows), minlength=len(self.objectives))
        return [name for name, count in zip(self.objectives, counts, strict=True) if not count]

    def fills(self, num_rows: int, num_parts: int) -> bool:
        """Whether every objective has a row in each part of a batch, rows dealt out in turn."""
        owner_B, names = self._owners(num_rows), range(len(self.objectives))
        return all(set(names) <= set(owner_B[part::num_parts]) for part in range(num_parts))

    def _owners(self, num_rows: int) -> np.ndarray:
        """Number of the objective that each row belongs to, interleaved."""
        middle = (np.arange(num_rows) + 0.5) / num_rows
        # Rows are dealt in an order that spreads every objective over the batch (golden ratio).
        spread = np.argsort(np.argsort((np.arange(num_rows) * 0.618034) % 1.0))
        bounds = np.cumsum(list(self.shares.values()))[:-1]
        return np.searchsorted(bounds, middle[spread], side="right")


def _with_rows(mixed: MixedExample, name: str, is_own_B: np.ndarray, example: Any) -> MixedExample:
    """`mixed`, with the example of one objective in that objective's rows."""

    def choose(own: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.where(is_own_B.reshape(-1, *[1] * (own.ndim - 1)), own, other)

    batch = mixed.batch
    if example.truth is not None:
        batch = Batch(*map(choose, example.truth, batch))
    return mixed._replace(
        batch=batch,
        shown_BL=choose(example.shown_BL, mixed.shown_BL),
        weights=mixed.weights | {name: example.weight_BL},
        totals=mixed.totals | {name: example.total},
    )
