"""What the architectures share: the parameters, the embedding, the LM head, and stacks of layers.

Flax NNX declares and initialises the parameters; it is not used outside `model/`. Parameters are a
plain nested dict of float32 arrays. The layers of a stack have a leading axis and run in one loop,
which compiles one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.heads import HEADS
from dlm_jax.model import ops
from dlm_jax.model.attention import rotary_angles
from dlm_jax.model.block import Block
from dlm_jax.model.layers import Linear, Norm, declared, embed, parameter, rematerialised
from dlm_jax.model.lora import GROUP, STACKS, applied, stacks, with_adapters
from dlm_jax.randomness import key_of
from dlm_jax.types import Axes, Network, Params

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines ``[L, K/2]``, or ``[B, L, K/2]`` if positions differ between rows."""


@dataclass(frozen=True)
class Trunk:
    """The functions of a `Network` that do not depend on the order of the layers.

    Subclasses define `make` for their stacks of blocks.
    """

    config: ModelConfig

    def make(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        """The module of the top-level parameters `name`; for a stack of layers, one block."""
        config = self.config
        if name == "norm":
            return Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon)
        if name == "head":
            size = config.width, config.vocab_size
            return Linear(
                *size, scale=0.02, bias=False, rngs=rngs, axes=("embed", "vocab"), is_matrix=False
            )
        linear = functools.partial(Linear, bias=False, rngs=rngs)
        norm = functools.partial(Norm, kind=config.norm, epsilon=config.norm_epsilon)
        return nnx.Dict(HEADS[name.removesuffix("_head")].layers(config, linear, norm))

    def module(self, name: str, params: Params) -> Any:
        """The module `name` with these parameters."""
        return nnx.merge(_graph(self, name), params)

    def init(self, key: jax.Array) -> Params:
        """New parameters; those of a stack have a leading axis of layers."""
        model = _Parameters(self, nnx.Rngs(params=key))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return with_adapters(key, params, declared(model), self.config)

    def axes(self, params: Params) -> Params:
        """`Network.axes`."""
        adapters = jax.tree.map(lambda _: Axes(), params.get(GROUP))
        known = {**_axes(self), GROUP: adapters}
        return {name: tree for name, tree in known.items() if name in params}

    def layers(self, params: Params) -> list[Layers]:
        """The stacks of layers, in the order of `STACKS`, with their adapters."""
        names = [name for name in STACKS if name in params]
        return [Layers(self, name, tree) for name, tree in zip(names, stacks(params), strict=True)]

    def embed(self, params: Params, ids: jax.Array) -> jax.Array:
        """The input vectors of the first block, in the compute dtype."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        vectors = embed(params, ids).astype(dtype)
        if config.embedding_scaled:
            vectors = vectors * jnp.asarray(config.width**0.5, dtype)
        return vectors

    def norm(self, params: Params, x_BLD: jax.Array) -> jax.Array:
        """The final norm."""
        return self.module("norm", params["norm"])(x_BLD)

    def angles(self, num_positions: int) -> Angles:
        config = self.config
        size, theta = config.rotary_size, config.rope_theta
        return rotary_angles(num_positions, size, theta, config.rope_scaling)

    def capped(self, logits: jax.Array) -> jax.Array:
        """Float32 logits, limited to ``model.logit_cap``."""
        logits, cap = logits.astype(jnp.float32), self.config.logit_cap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def readout(self, params: Params, hidden_ND: jax.Array) -> jax.Array:
        """`Network.readout`: the LM head."""
        if self.config.tied_head:
            table_VD = params["embedding"].astype(hidden_ND.dtype)
            return self.capped(ops.linear_by_rows(hidden_ND, table_VD))
        return self.capped(ops.linear(hidden_ND, params["head"]["kernel"].astype(hidden_ND.dtype)))

    def logits_of(self, params: Params, hidden_ND: jax.Array, ids_NK: jax.Array) -> jax.Array:
        """`Network.logits_of`."""
        rows_VD = params["embedding"] if self.config.tied_head else params["head"]["kernel"].T
        columns_NKD = jnp.take(rows_VD, ids_NK, axis=0).astype(hidden_ND.dtype)
        return self.capped(jnp.matmul(columns_NKD, hidden_ND[:, :, None])[..., 0])

    def network(self, **functions: Any) -> Network:
        """The `Network` with the functions that all architectures share, and with others."""
        return Network(
            init=self.init,
            embed=embed,
            readout=self.readout,
            vocab_size=self.config.vocab_size,
            logits_of=self.logits_of,
            axes=self.axes,
            **functions,
        )


@dataclass(frozen=True)
class Layers:
    """A stack of layers. Their parameters have a leading axis, and include the adapters."""

    trunk: Trunk
    name: str
    params: Params

    def __len__(self) -> int:
        return jax.tree.leaves(self.params)[0].shape[0]

    def __iter__(self) -> Iterator[Block]:
        for at in range(len(self)):
            yield self.block(jax.tree.map(lambda leaf, at=at: leaf[at], self.params))

    def block(self, params: Params) -> Any:
        """The block with the parameters of one layer."""
        return self.trunk.module(self.name, applied(params, self.trunk.config))

    def scan(self, run: Callable[..., jax.Array], x: jax.Array, *context: Any) -> jax.Array:
        """``for block in self: x = run(block, x, *context)`` in one loop, rematerialised by
        ``model.remat``. `run` must not close over traced arrays.
        """

        def layer(x: jax.Array, params: Params, context: Any) -> jax.Array:
            return run(self.block(params), x, *context)

        layer = rematerialised(layer, self.trunk.config)
        return ops.scan_layers(layer, x, self.params, context)


class _Parameters(nnx.Module):
    """All parameters of a model."""

    def __init__(self, trunk: Trunk, rngs: nnx.Rngs):
        config = trunk.config
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.float32)
        self.embedding = parameter(table * 0.02, "vocab", "embed")
        for name, layers in config.layers.items():
            setattr(self, name, _stacked(trunk, name, len(layers), rngs) if layers else None)
        names = ["norm"] + ["head"] * (not config.tied_head)
        names += ["self_conditioning"] * config.self_conditioning
        # Heads are initialised last, so that the other parameters do not depend on them.
        names += [f"{name}_head" for name in config.added_heads]
        for name in names:
            setattr(self, name, trunk.make(name, rngs))


def _stacked(trunk: Trunk, name: str, depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """The blocks of a stack as one module whose parameters have a leading axis."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def blocks(rngs: nnx.Rngs) -> nnx.Module:
        return trunk.make(name, rngs)

    return blocks(rngs)


@functools.lru_cache(maxsize=256)
def _graph(trunk: Trunk, name: str) -> Any:
    """The structure of the module `name`, without arrays."""
    made = nnx.eval_shape(lambda: trunk.make(name, nnx.Rngs(params=key_of(0))))
    return nnx.split(made)[0]


@functools.lru_cache(maxsize=256)
def _axes(trunk: Trunk) -> Params:
    return declared(nnx.eval_shape(lambda: _Parameters(trunk, nnx.Rngs(params=key_of(0)))))
