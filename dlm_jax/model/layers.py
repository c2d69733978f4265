"""Basic layers: linear maps and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import on_own_share
from dlm_jax.model import ops
from dlm_jax.model.lora import GROUP, MASK_ROW
from dlm_jax.types import LAYERS, Axes, Params


def parameter(value: jax.Array, *names: str | None, is_matrix: bool = False) -> nnx.Param:
    """A parameter with its `Axes`: a logical name for each axis of `value`."""
    return nnx.Param(value, axes=Axes(names, is_matrix))


def declared(module: nnx.Module) -> Params:
    """The `Axes` of each parameter of a module; a stack of layers has one more axis in front."""

    def read(variable: Any) -> Axes:
        axes = variable.get_metadata()["axes"]
        num_stacked = variable.get_value().ndim - len(axes.names)
        return Axes((LAYERS,) * num_stacked + axes.names, axes.is_matrix)

    return nnx.to_pure_dict(nnx.state(module, nnx.Param), read)


class Linear(nnx.Module):
    """A linear map, ``x @ kernel (+ bias)``.

    The initial kernel is normal with standard deviation ``scale / sqrt(fan_in)``. Projections into
    the residual stream have a ``scale`` of 0, so that every block starts as the identity. `axes`
    are the logical names of the kernel's axes. `is_matrix` is False for maps to logits.
    """

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        *,
        scale: float,
        bias: bool,
        rngs: nnx.Rngs,
        axes: tuple[str | None, str | None] = (None, None),
        is_matrix: bool = True,
    ):
        draw = jax.random.normal(rngs.params(), (fan_in, fan_out), jnp.float32)
        self.kernel = parameter(draw * (scale * fan_in**-0.5), *axes, is_matrix=is_matrix)
        self.bias = parameter(jnp.zeros(fan_out, jnp.float32), axes[1]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Projected vectors, shape ``[..., fan_out]``, in the dtype of `x`."""
        y = ops.linear(x, self.kernel[...].astype(x.dtype))
        if self.bias is None:
            return y
        return y + jnp.expand_dims(self.bias[...].astype(x.dtype), tuple(range(y.ndim - 1)))


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with a bias, computed in float32 and returned in the input's dtype."""

    def __init__(self, size: int, *, kind: str, epsilon: float):
        self.scale = parameter(jnp.ones(size, jnp.float32), None)
        self.bias = parameter(jnp.zeros(size, jnp.float32), None) if kind == "layer" else None
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.bias is None:
            return ops.rms_norm(x, self.scale[...], epsilon=self.epsilon)
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = ops.rms_norm(x32, self.scale[...], epsilon=self.epsilon)
        return (y + jnp.expand_dims(self.bias[...], tuple(range(x.ndim - 1)))).astype(x.dtype)


def unit_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm without a scale, computed in float32 and returned in the input's dtype."""
    return ops.rms_norm(x, jnp.ones(x.shape[-1:], jnp.float32), epsilon=epsilon)


GATES: dict[str, Callable[[jax.Array], jax.Array]] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
"""Activations of the gate in a gated MLP, by the value of ``model.activation``."""


def embed(params: Params, ids: jax.Array) -> jax.Array:
    """The embedding of each id, with the adapter of the last id if there is one.

    If the table is sharded by feature, the table is gathered instead of the embeddings. An id
    outside the table, such as the MASK of a causal model without one, has a finite embedding.
    """

    def look_up(params: Params, ids: jax.Array) -> jax.Array:
        return jnp.take(params["embedding"], ids, axis=0, mode="clip")

    if ids.ndim == 2:
        vectors = on_own_share(look_up, params, (ids,), kind="tokens")
    else:
        vectors = look_up(params, ids)
    adapter = params.get(GROUP, {}).get(MASK_ROW)
    if adapter is None:
        return vectors
    is_last = ids == params["embedding"].shape[0] - 1
    return vectors + jnp.where(is_last[..., None], adapter["row"], 0).astype(vectors.dtype)


def rematerialised(
    block: Callable[..., jax.Array], config: ModelConfig
) -> Callable[..., jax.Array]:
    """Rematerialises ``block(x, parameters, context)`` by ``model.remat``.

    The input of each block is always saved. ``none`` saves everything, and ``block`` nothing else,
    at the cost of a second forward pass. Names joined by ``+`` (see `dlm_jax.config.NAMED`) save
    the values with these names.
    """
    if config.remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable
    if config.remat != "block":
        policy = policies.save_only_these_names(*config.remat.split("+"))
    return jax.checkpoint(block, prevent_cse=False, policy=policy)
