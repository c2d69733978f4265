"""The training of a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.objectives.losses import Loss
from dlm_jax.objectives.objective import Drawn
from dlm_jax.types import Network, Params

MAIN = "main"
"""The name of the group of all parameters that do not belong to a head."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head on the trunk: an objective of its own parameters, which reads what the objectives of
    the model drew. Optimiser groups, stages, metrics and checkpoints are derived from this record.

    Attributes:
      name: top-level name of the head's parameters; must end in ``_head``. The metric of the loss
        has this name without ``_head``.
      loss: ``(network, params, drawn) -> (sum, weight)`` or a `Loss`. `drawn` is the `Drawn` of the
        batch, with what `draw` returned as ``noise`` and the trunk's output as ``hidden_BLD``. Only
        the head's own parameters have a gradient, unless it `trains_trunk`. ``network.heads`` lacks
        the heads that do not train yet.
      draw: ``(drawn, key) -> noise``, a pytree of random values and totals, drawn for the whole
        batch before it is split into microbatches. Each leaf is ``[B, ...]`` or a scalar.
      init: ``(key) -> params``; None if `Network.init` creates the parameters.
      trains_trunk: whether the gradient flows into other parameters. If False, the other parameters
        are bitwise equal to those of a run without the head.
      start: first step at which the head is trained.
      end: step at which the loss reaches its full weight, after growing linearly from 0 at `start`.
        If `end` is not after `start`, the loss has its full weight from the start.
      weight: full weight of the loss; if None, the weight is 1 at every step, and the metrics have
        no ``_alpha``.
    """

    name: str
    loss: Callable[[Network, Params, Drawn], Loss | tuple[jax.Array, jax.Array]]
    draw: Callable[[Drawn, jax.Array], Any] = lambda drawn, key: ()
    init: Callable[[jax.Array], Params] | None = None
    trains_trunk: bool = False
    start: int = 0
    end: int = 0
    weight: float | None = None

    def __post_init__(self) -> None:
        if not self.name.endswith("_head") or "/" in self.name:
            raise ValueError(f"the name of head {self.name!r} does not end in '_head'; rename it")

    @property
    def metric(self) -> str:
        return self.name.removesuffix("_head")

    @property
    def first_step(self) -> int:
        """The first step whose loss has a nonzero weight. At the first step of a ramp, computing
        the loss would change the rounding of the other losses.
        """
        return self.start + (self.end > self.start)

    def weight_at(self, step: jax.Array) -> jax.Array:
        full, step = 1.0 if self.weight is None else self.weight, step.astype(jnp.float32)
        if self.end <= self.start:
            return jnp.where(step >= self.start, full, 0.0)
        return full * jnp.clip((step - self.start) / (self.end - self.start), 0.0, 1.0)
