"""The declaration of a built-in head, and the record of a head in training."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import MixedExample
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


class HeadInputs(NamedTuple):
    """The inputs of the loss of a head.

    Attributes:
      network: the model.
      params: all parameters. Unless the head `trains_trunk`, only its own parameters have a
        gradient.
      example: the batch, with the examples of the objectives.
      noise: the result of `Head.draw`.
      hidden_BLD: output of the trunk for ``example.shown_BL``; None if no head of the stage reads
        it. No gradient flows through it unless the head `trains_trunk`.
      stage: the groups that train in this stage.
    """

    network: Network
    params: Params
    example: MixedExample
    noise: Any
    hidden_BLD: jax.Array
    stage: Stage


def _no_noise(example: MixedExample, key: jax.Array) -> Any:
    return ()


@dataclass(frozen=True)
class Head:
    """A head on the trunk. Optimiser groups, stages, metrics and checkpoints are derived from this
    record.

    Attributes:
      name: top-level name of the head's parameters; must end in ``_head``.
      loss: ``(inputs) -> Loss``, in nats or another unit.
      draw: ``(example, key) -> noise``, a pytree of random values and totals, drawn for the whole
        batch before it is split into microbatches. Each leaf is ``[B, ...]`` or a scalar.
      init: ``(key) -> params``; None if `Network.init` creates the parameters.
      axes: ``(params) -> tree`` of the `dlm_jax.Axes` of these parameters. If None, those
        with two axes are matrices, and each device has the whole of each parameter.
      metric: metric name of the loss; if empty, the head's name without ``_head``.
      reads_hidden: whether the loss reads `HeadInputs.hidden_BLD`.
      trains_trunk: whether the gradient flows into other parameters. If False, the other parameters
        are bitwise equal to those of a run without the head.
      joins_main: whether the parameters belong to the main optimiser group and train with it;
        `start`, `end` and `optimizer` are then ignored.
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
    loss: Callable[[HeadInputs], Loss]
    draw: Callable[[MixedExample, jax.Array], Any] = _no_noise
    init: Callable[[jax.Array], Params] | None = None
    axes: Callable[[Params], Params] | None = None
    metric: str = ""
    reads_hidden: bool = True
    trains_trunk: bool = False
    joins_main: bool = False
    start: int = 0
    end: int = 0
    weight: float | None = None
    optimizer: Callable[[int], optax.GradientTransformation] | None = None
    stream: int = -1

    def __post_init__(self) -> None:
        if not self.name.endswith("_head") or "/" in self.name:
            raise ValueError(f"the name of head {self.name!r} does not end in '_head'; rename it")
        if not self.metric:
            object.__setattr__(self, "metric", self.name.removesuffix("_head"))
        if self.stream < 0:
            object.__setattr__(self, "stream", zlib.crc32(self.name.encode()))

    @property
    def group(self) -> str:
        return MAIN if self.joins_main else self.name

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


@dataclass(frozen=True)
class BuiltInHead:
    """A head that a config can add to a model, with its settings, its layers and its training.

    `config` arguments are sections of a config, which this declaration is a part of.

    Attributes:
      name: top-level name of the head's parameters; must end in ``_head``.
      make: ``(setup) -> Head``, for a `dlm_jax.training.Setup`.
      layers: ``(config, linear, norm) -> layers``: the layers by name, in order of initialisation,
        for the section ``[model]``. They are created by ``linear(fan_in, fan_out, scale=...,
        axes=...)`` and ``norm(size)``, as `dlm_jax.model.layers.Linear` and `Norm`.
      function: ``(config, layers_of, readout) -> Any``: the entry of the head in `Network.heads`.
        ``layers_of(params)`` has the layers as attributes.
      switch: the key of ``[model]`` that adds the head.
      model: settings of ``[model]`` by key, as `setting` fields. Their traits are ``OWN`` and
        ``IDLE``, because published models have no such heads.
      training: settings of ``[heads]`` by key, as `setting` fields.
      start: the key of ``[heads]`` with the first step at which the head is trained; empty if it
        trains from the first step.
      sampling: keys of ``[sample]`` that the head's training reads.
      attention: values of ``model.attention_type`` that the head supports.
    """

    name: str
    make: Callable[[Any], Head]
    layers: Callable[..., dict[str, Any]]
    function: Callable[..., Any]
    switch: str
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    sampling: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("bidirectional",)

    @property
    def key(self) -> str:
        """The head's name in `Network.heads` and in messages."""
        return self.name.removesuffix("_head")

    def is_added(self, config: Any) -> bool:
        """Whether the section ``[model]`` adds the head."""
        return getattr(config, self.switch)

    def __call__(self, setup: Any) -> Head | None:
        """The record of the head, or None for a model without it."""
        return self.make(setup) if self.is_added(setup.config.model) else None


def with_own_parameters(network: Network, heads: tuple[Head, ...]) -> Network:
    """Returns the network with the parameters of the heads in its `init` and its `axes`."""
    inits = {head.name: (head.stream, head.init) for head in heads if head.init is not None}
    if not inits:
        return network

    def init(key: jax.Array) -> Params:
        own = {name: make(jax.random.fold_in(key, at)) for name, (at, make) in inits.items()}
        return network.init(key) | own

    def axes(params: Params) -> Params:
        declared = {} if network.axes is None else network.axes(params)
        own = {head.name: head.axes for head in heads if head.axes is not None}
        return declared | {name: of(params[name]) for name, of in own.items() if name in params}

    return replace(network, init=init, axes=axes)
