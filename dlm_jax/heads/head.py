"""The training of a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from dlm_jax.objectives.losses import Loss
from dlm_jax.objectives.objective import Drawn
from dlm_jax.types import Network, Params

MAIN = "main"
"""The name of the group of all parameters that do not belong to a head."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head on the trunk: an objective of its own parameters, which reads what the objectives of
    the model drew. Heads are passed by name, which is that of their parameters and ends in
    ``_head``. Optimiser groups, stages, metrics (without ``_head``) and checkpoints use this name.

    Attributes:
      loss: ``(network, params, drawn) -> (sum, weight)`` or a `Loss`. `drawn` is the `Drawn` of the
        batch, with what `draw` returned as ``noise`` and the trunk's output as ``hidden_BLD``. Only
        the head's own parameters have a gradient, unless it `trains_trunk`. ``network.heads`` lacks
        the heads that do not train yet.
      draw: ``(drawn, key) -> noise``, a pytree of random values and totals, drawn for the whole
        batch before it is split into microbatches. Each leaf is ``[B, ...]`` or a scalar.
      init: ``(key) -> params``; None if `Network.init` creates the parameters.
      trains_trunk: whether the gradient flows into other parameters. If False, the other parameters
        are bitwise equal to those of a run without the head.
      start: first step at which the head can train, and that of its learning rate.
      weight: factor of the loss, or a function of the step, whose values are metrics with
        ``_alpha``. The head trains from the first step on, not before `start`, at which it is not
        0: even with the weight 0, a loss changes the rounding of the others.
    """

    loss: Callable[[Network, Params, Drawn], Loss | tuple[jax.Array, jax.Array]]
    draw: Callable[[Drawn, jax.Array], Any] = lambda drawn, key: ()
    init: Callable[[jax.Array], Params] | None = None
    trains_trunk: bool = False
    start: int = 0
    weight: float | Callable[[jax.Array], jax.Array] = 1.0


def weight_at(head: Head, step: jax.Array) -> jax.Array | float:
    """The weight of a head at a step."""
    return head.weight(step) if callable(head.weight) else head.weight


def metric_of(name: str) -> str:
    """The name of the loss of a head in metrics, and of its functions in `Network.heads`."""
    return name.removesuffix("_head")
