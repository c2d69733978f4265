"""Small heads on the trunk: the coherent sampler, the critic, and the scorer of whole texts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.model.layers import Linear, Norm


class SamplerHead(nnx.Module):
    """A two-layer MLP over a position's hidden vector and the embeddings of its neighbours.

    Its features are read out by the LM head. It reads ``model.sampler_context`` neighbours on each
    side, by default one. With
    ``model.sampler_residual`` the second layer, without SiLU and zero at first, adds to the hidden
    vector.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, inner = config.width, config.sampler_width or config.width
        self.is_residual = config.sampler_residual
        linear = functools.partial(Linear, bias=False, rngs=rngs)
        norm = functools.partial(Norm, kind=config.norm, epsilon=config.norm_epsilon)
        self.inner = linear((1 + 2 * config.sampler_context) * width, inner, scale=1.0)
        self.inner_norm = norm(inner)
        self.out = linear(inner, width, scale=0.0 if self.is_residual else 1.0)
        self.out_norm = norm(width)

    def __call__(self, left_NCD: jax.Array, hidden_ND: jax.Array, right_NCD: jax.Array):
        """Features ``[N, D]``; neighbours nearest first, a zero vector where there is none."""
        num = hidden_ND.shape[0]
        sides = (left_NCD.reshape(num, -1), hidden_ND, right_NCD.reshape(num, -1))
        together = jnp.concatenate([x.astype(hidden_ND.dtype) for x in sides], axis=1)
        return self._features(self.inner(together), hidden_ND)

    def sides(self, vector_VD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What each vector adds to the first layer as each neighbour: left and right ``[V, C, H]``.

        That layer is linear, so where few tokens serve many positions these tables save most of it.
        """
        kernel = self.inner.kernel[...].astype(vector_VD.dtype)
        num, width = vector_VD.shape
        reach = (kernel.shape[0] // width - 1) // 2
        parts = kernel.reshape(1 + 2 * reach, width, -1)

        def table(parts_CDH: jax.Array) -> jax.Array:
            flat = vector_VD @ jnp.moveaxis(parts_CDH, 0, 1).reshape(width, -1)
            return flat.reshape(num, reach, -1)

        return table(parts[:reach]), table(parts[reach + 1 :])

    def from_sides(self, sides_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        """Features ``[N, D]`` from the sum of what the neighbours add."""
        kernel = self.inner.kernel[...].astype(hidden_ND.dtype)
        width = hidden_ND.shape[1]
        first = (kernel.shape[0] - width) // 2
        own_NH = hidden_ND @ kernel[first : first + width]
        return self._features(own_NH + sides_NH.astype(hidden_ND.dtype), hidden_ND)

    def _features(self, inner_NH: jax.Array, hidden_ND: jax.Array) -> jax.Array:
        x_ND = self.inner_norm(jax.nn.silu(inner_NH))
        if self.is_residual:
            return self.out_norm(hidden_ND + self.out(x_ND))
        return self.out_norm(jax.nn.silu(self.out(x_ND)))


class CriticHead(nnx.Module):
    """A linear map from a hidden vector to the logit that the token there is wrong."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.out = Linear(config.width, 1, scale=0.0, bias=False, rngs=rngs)

    def __call__(self, hidden_ND: jax.Array) -> jax.Array:
        """Logits, float32 ``[N]``."""
        return self.out(hidden_ND)[..., 0].astype(jnp.float32)


class ScorerHead(nnx.Module):
    """The logit of the share of a row's tokens that are corrupted, from their mean vector."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.inner = Linear(config.width, config.width, scale=1.0, bias=True, rngs=rngs)
        self.out = Linear(config.width, 1, scale=0.0, bias=True, rngs=rngs)

    def __call__(self, hidden_BLD: jax.Array, is_live_BL: jax.Array) -> jax.Array:
        """Logits, float32 ``[B]``."""
        live = is_live_BL[:, :, None]
        total_BD = jnp.sum(jnp.where(live, hidden_BLD.astype(jnp.float32), 0.0), axis=1)
        mean_BD = total_BD / jnp.maximum(jnp.sum(live, axis=1), 1)
        return self.out(jax.nn.silu(self.inner(mean_BD)))[:, 0]


HEADS: dict[str, Any] = {
    "sampler_head": SamplerHead,
    "critic_head": CriticHead,
    "scorer_head": ScorerHead,
}


def heads_of(config: ModelConfig) -> tuple[str, ...]:
    """Names of the parameter groups of its heads, in the order they are drawn."""
    has = {
        "sampler_head": config.add_sampler_head,
        "critic_head": config.add_critic_head,
        "scorer_head": config.mode == "sequence_scorer",
    }
    return tuple(name for name in HEADS if has[name])
