"""The record of a head, and the inputs for creating heads."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dlm_jax.config import Config
from dlm_jax.data import Tokenizer, noise_ids, text_ids
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.objectives import MixedExample
from dlm_jax.types import Network, Params


@dataclass(frozen=True)
class Setup:
    """The inputs for creating a network, an objective or a head.

    Attributes:
      config: resolved config with ``model.vocab_size`` set.
      tokenizer: tokenizer of the corpus.
      mesh: devices over which the rows of a batch are sharded.
    """

    config: Config
    tokenizer: Tokenizer
    mesh: Mesh

    @property
    def mask_id(self) -> int:
        """The id of MASK."""
        return self.tokenizer.mask_id

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that are never written into a hole."""
        return (*self.tokenizer.banned_ids, self.tokenizer.pad_id)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Ids of text tokens, which can replace the true token in a corruption."""
        return text_ids(self.tokenizer)

    @property
    def noise_ids(self) -> tuple[int, ...]:
        """Ids that forward processes other than the masked one can use as noise."""
        return noise_ids(self.tokenizer)


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
        """Whether the loss has a nonzero weight at a step (counted from 0)."""
        # The weight at the first step of a ramp is 0. Computing the loss at that step would change
        # the rounding of the other losses.
        return step >= self.start + (self.end > self.start) and self.weight != 0

    def weight_at(self, step: jax.Array) -> jax.Array:
        full, step = 1.0 if self.weight is None else self.weight, step.astype(jnp.float32)
        if self.end <= self.start:
            return jnp.where(step >= self.start, full, 0.0)
        return full * jnp.clip((step - self.start) / (self.end - self.start), 0.0, 1.0)


def with_own_parameters(network: Network, heads: tuple[Head, ...]) -> Network:
    """Returns the network with an `init` that also calls the `init` functions of the heads."""
    inits = {head.name: (head.stream, head.init) for head in heads if head.init is not None}
    if not inits:
        return network

    def init(key: jax.Array) -> Params:
        own = {name: make(jax.random.fold_in(key, at)) for name, (at, make) in inits.items()}
        return network.init(key) | own

    return replace(network, init=init)
