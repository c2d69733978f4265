"""The training of a head, and what a built-in head consists of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dlm_jax.config import ModelConfig
from dlm_jax.objectives.losses import Loss
from dlm_jax.objectives.objective import Drawn
from dlm_jax.types import Network, Params

if TYPE_CHECKING:  # sampling does not need optax
    import optax

MAIN = "main"
"""The name of the group of all parameters that do not belong to a head."""


@dataclass(frozen=True)
class Stage:
    """The parameter groups that are trained.

    Attributes:
      groups: ``main`` and names of heads, in this order.
      adapts: whether ``main`` consists only of the model's adapters.
    """

    groups: tuple[str, ...]
    adapts: bool = False

    def trains(self, group: str) -> bool:
        return group in self.groups

    def __str__(self) -> str:
        return " + ".join(self.groups) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head on the trunk: an objective of its own parameters, which reads what the objectives of
    the model drew. Optimiser groups, stages, metrics and checkpoints are derived from this record.

    Attributes:
      name: top-level name of the head's parameters; must end in ``_head``.
      loss: ``(network, params, drawn) -> (sum, weight)`` or a `Loss`. `drawn` is the `Drawn` of the
        batch, with what `draw` returned as ``noise`` and the trunk's output as ``hidden_BLD``. Only
        the head's own parameters have a gradient, unless it `trains_trunk`. ``network.heads`` lacks
        the heads that do not train yet.
      draw: ``(drawn, key) -> noise``, a pytree of random values and totals, drawn for the whole
        batch before it is split into microbatches. Each leaf is ``[B, ...]`` or a scalar.
      init: ``(key) -> params``; None if `Network.init` creates the parameters.
      axes: ``(params) -> tree`` of the `dlm_jax.Axes` of these parameters. If None, those
        with two axes are matrices, and each device has the whole of each parameter.
      trains_trunk: whether the gradient flows into other parameters. If False, the other parameters
        are bitwise equal to those of a run without the head.
      start: first step at which the head is trained.
      end: step at which the loss reaches its full weight, after growing linearly from 0 at `start`.
        If `end` is not after `start`, the loss has its full weight from the start.
      weight: full weight of the loss; if None, the weight is 1 at every step, and the metrics have
        no ``_alpha``.
      optimizer: maps the number of training steps to a gradient transformation; None means AdamW
        with the settings in ``[heads]``.
      stream: index of the head's noise stream; -1 derives the index from the name.
    """

    name: str
    loss: Callable[[Network, Params, Drawn], Loss | tuple[jax.Array, jax.Array]]
    draw: Callable[[Drawn, jax.Array], Any] = lambda drawn, key: ()
    init: Callable[[jax.Array], Params] | None = None
    axes: Callable[[Params], Params] | None = None
    trains_trunk: bool = False
    start: int = 0
    end: int = 0
    weight: float | None = None
    optimizer: Callable[[int], optax.GradientTransformation] | None = None
    stream: int = -1

    def __post_init__(self) -> None:
        if not self.name.endswith("_head") or "/" in self.name:
            raise ValueError(f"the name of head {self.name!r} does not end in '_head'; rename it")
        if self.stream < 0:
            object.__setattr__(self, "stream", zlib.crc32(self.name.encode()))

    @property
    def metric(self) -> str:
        """The metric of the loss: the head's name without ``_head``."""
        return self.name.removesuffix("_head")

    def trains_at(self, step: int) -> bool:
        """Returns whether the loss has a nonzero weight at a step (counted from 0)."""
        # The weight at the first step of a ramp is 0. Computing the loss at that step would change
        # the rounding of the other losses.
        return step >= self.start + (self.end > self.start) and self.weight != 0

    def weight_at(self, step: jax.Array) -> jax.Array:
        full, step = 1.0 if self.weight is None else self.weight, step.astype(jnp.float32)
        if self.end <= self.start:
            return jnp.where(step >= self.start, full, 0.0)
        return full * jnp.clip((step - self.start) / (self.end - self.start), 0.0, 1.0)


class BuiltInHead:
    """A head that a config can add to a model: its layers, its function and its training.

    Attributes:
      name: top-level name of the head's parameters; must end in ``_head``.
      switch: the key of ``[model]`` that adds the head.
      start: the key of ``[heads]`` with the first step at which the head is trained; empty if it
        trains from the first step.
      sampling: keys of ``[sample]`` that the head's training reads.
    """

    name: str
    switch: str
    start: str = ""
    sampling: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The head's name in `Network.heads` and in messages."""
        return self.name.removesuffix("_head")

    def is_added(self, config: ModelConfig) -> bool:
        return getattr(config, self.switch)

    def layers(self, config: ModelConfig, linear: Callable[..., Any], norm: Any) -> dict[str, Any]:
        """The layers by name, in order of initialisation, created by ``linear(fan_in, fan_out,
        scale=..., axes=...)`` and ``norm(size)``, as `dlm_jax.model.layers.Linear` and `Norm`.
        """
        raise NotImplementedError

    def function(
        self, config: ModelConfig, layers_of: Callable[[Params], Any], readout: Any
    ) -> Any:
        """The entry of the head in `Network.heads`. ``layers_of(params)`` has the layers as
        attributes, and ``readout`` is `Network.readout`.
        """
        raise NotImplementedError

    def training_of(self, setup: Any) -> Head:
        """The training of the head, for a `dlm_jax.training.Setup`."""
        raise NotImplementedError

    def __call__(self, setup: Any) -> Head | None:
        """The training of the head, or None for a model without it."""
        return self.training_of(setup) if self.is_added(setup.config.model) else None
