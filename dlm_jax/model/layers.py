"""Basic layers, and a block of a Transformer: attention, then an MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.config import ModelConfig, RopeScaling, read_scaling
from dlm_jax.distributed.partitions import pin
from dlm_jax.model import ops
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
        rngs: nnx.Rngs,
        bias: bool = False,
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
    """RMSNorm of vectors of `size` elements, by default of hidden vectors.

    It is computed in float32 and returned in the input's dtype.
    """

    def __init__(self, config: ModelConfig, size: int = 0):
        self.scale = parameter(jnp.ones(size or config.width, jnp.float32), None)
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return ops.rms_norm(x, self.scale[...], epsilon=self.epsilon)


def unit_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm without a scale, computed in float32 and returned in the input's dtype."""
    return ops.rms_norm(x, jnp.ones(x.shape[-1:], jnp.float32), epsilon=epsilon)


def kv_shape(config: ModelConfig, *, is_full: bool) -> tuple[int, int]:
    """The number of key/value heads of a layer, and their size."""
    groups, size = config.kv_heads or config.heads, config.size_of_head
    if not is_full:
        return groups, size
    return config.full_kv_heads or groups, config.full_head_size or size


def rotary_angles(
    num_positions: int, head_size: int, theta: float, scaling: str = ""
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, each float32 ``[L, K/2]``.

    Pair ``i`` at position ``l`` is rotated by ``l * theta ** (-2i / K)`` (Su et al. 2021, equation
    15). `scaling` is ``model.rope_scaling``; its `RopeScaling.scale` multiplies the result.
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    found = read_scaling(scaling)
    if found is not None:
        frequencies *= jnp.asarray(rotary_multipliers(found, head_size, theta), jnp.float32)
    angles = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos_LK, sin_LK = jnp.cos(angles), jnp.sin(angles)
    return (cos_LK, sin_LK) if found is None else (cos_LK * found.scale, sin_LK * found.scale)


def rotary_multipliers(scaling: RopeScaling, head_size: int, theta: float) -> np.ndarray:
    """The factor of the frequency of each pair, float64 ``[K/2]``."""

    def pair_with(turns: float) -> float:
        """The index of the pair that makes this number of turns."""
        ratio = scaling.original / (turns * 2 * math.pi)
        return head_size * math.log(ratio) / (2 * math.log(theta))

    pair_K = np.arange(head_size // 2)
    if scaling.kind == "linear":
        unscaled_K = np.zeros(pair_K.size)
    elif scaling.kind == "llama3":
        turns_K = scaling.original * theta ** (-2 * pair_K / head_size) / (2 * math.pi)
        unscaled_K = np.clip((turns_K - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:
        first = max(math.floor(pair_with(scaling.high)), 0)
        last = min(math.ceil(pair_with(scaling.low)), head_size - 1)
        unscaled_K = 1 - np.clip((pair_K - first) / (last - first or 0.001), 0, 1)
    return unscaled_K + (1 - unscaled_K) / scaling.factor


class Attention(nnx.Module):
    """Multi-head attention over the live positions, with RoPE and optional QK-norm.

    In models with canvases, values are normalised, and scores are not scaled. A full layer uses its
    keys as values, before norm and rotation.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_full: bool = False):
        groups, self.head_size = kv_shape(config, is_full=is_full)
        self.is_gemma, self.epsilon = config.attention_type == "canvas", config.norm_epsilon
        project = functools.partial(
            Linear,
            config.width,
            scale=1.0,
            bias=config.qkv_bias,
            rngs=rngs,
            axes=("embed", "heads"),
        )
        inner = config.heads * self.head_size
        self.query = project(inner)
        self.key = project(groups * self.head_size)
        self.value = None if is_full else project(groups * self.head_size)
        self.out = Linear(inner, config.width, scale=0.0, rngs=rngs, axes=("heads", "embed"))
        self.query_norm = Norm(config, self.head_size) if config.qk_norm else None
        self.key_norm = Norm(config, self.head_size) if config.qk_norm else None

    def __call__(self, x_BLD: jax.Array, angles: Any, attend: Callable[..., Any]) -> jax.Array:
        """The outputs of the heads, projected to ``[B, L, D]``.

        `attend` maps the queries, and the keys and values ``[B, L, G, K]``, to ``[B, L, H, K]``.
        Queries and keys are normalised and rotated by `angles`; keys are cached in this form.
        """

        def heads(linear: Linear, name: str) -> jax.Array:
            return ops.split_heads(checkpoint_name(linear(x_BLD), name), self.head_size)

        def rotated(x: jax.Array, norm: Norm | None) -> jax.Array:
            if norm is None:
                return ops.rotate_heads(x, *angles)
            return ops.rotate_heads(x, *angles, scale_K=norm.scale[...], epsilon=norm.epsilon)

        q, k = heads(self.query, "query"), heads(self.key, "key")
        v = k if self.value is None else heads(self.value, "value")
        if self.is_gemma:
            v = unit_norm(v, self.epsilon)
        q, k = rotated(q, self.query_norm), rotated(k, self.key_norm)
        if self.is_gemma:
            # The scores are not scaled, but the kernels divide by the square root of the head size.
            q = (q.astype(jnp.float32) * self.head_size**0.5).astype(q.dtype)
        y_BLHK = pin(attend(pin(q, "queries"), pin(k, "keys"), pin(v, "keys")), "queries")
        return self.out(y_BLHK.reshape(*y_BLHK.shape[:2], -1))


GATES: dict[str, Callable[[jax.Array], jax.Array]] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
"""Activations of the gate in a gated MLP, by the value of ``model.activation``."""


class Mlp(nnx.Module):
    """The position-wise MLP, with squared ReLU (So et al. 2021), GELU, or a gate (Shazeer 2020).

    The inner width is `inner`, by default that of the config.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, inner: int = 0):
        self.activation, inner = config.activation, inner or config.inner_width
        into = functools.partial(
            Linear, config.width, inner, scale=1.0, rngs=rngs, axes=("embed", "mlp")
        )
        self.gate = into() if config.is_gated else None
        self.up = into()
        self.down = Linear(inner, config.width, scale=0.0, rngs=rngs, axes=("mlp", "embed"))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        up = checkpoint_name(self.up(x_BLD), "up")
        if self.gate is not None:
            gate = checkpoint_name(self.gate(x_BLD), "gate")
            inner = GATES[self.activation](gate) * up
        elif self.activation == "gelu":
            inner = jax.nn.gelu(up)
        else:
            inner = jnp.square(jax.nn.relu(up))
        return self.down(pin(inner, "inner"))
