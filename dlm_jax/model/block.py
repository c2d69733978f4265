"""A block of a Transformer: attention, then an MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import pin
from dlm_jax.model import ops
from dlm_jax.model.attention import sight
from dlm_jax.model.layers import GATES, Linear, Norm, unit_norm


class Attention(nnx.Module):
    """Multi-head attention over the live positions, with RoPE and optional QK-norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_full: bool = False):
        self.head_size = (config.full_head_size if is_full else 0) or config.size_of_head
        self.scale, self.epsilon = config.attention_scale, config.norm_epsilon
        self.norms_value = config.value_norm
        self.may_see = sight(config.attention_type, config.block_length)
        all_heads = config.heads * self.head_size
        groups = (config.full_kv_heads if is_full else 0) or config.kv_heads or config.heads
        kv_width = groups * self.head_size
        project = functools.partial(
            Linear,
            config.width,
            scale=1.0,
            bias=config.qkv_bias,
            rngs=rngs,
            axes=("embed", "heads"),
        )
        self.query = project(all_heads)
        self.key = project(kv_width)
        self.value = None if is_full and config.full_value_from_key else project(kv_width)
        self.out = Linear(
            all_heads, config.width, scale=0.0, bias=False, rngs=rngs, axes=("heads", "embed")
        )
        norm = functools.partial(Norm, self.head_size, kind="rms", epsilon=config.norm_epsilon)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def project(self, x_BLD: jax.Array, angles: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries ``[B, L, H, K]``, keys and values ``[B, L, G, K]``, rotated by `angles`.

        The keys are cached in this normalised and rotated form.
        """

        def heads(linear: Linear, name: str) -> jax.Array:
            return ops.split_heads(checkpoint_name(linear(x_BLD), name), self.head_size)

        def rotated(x: jax.Array, norm: Norm | None) -> jax.Array:
            if norm is None:
                return ops.rotate_heads(x, *angles)
            return ops.rotate_heads(x, *angles, scale_K=norm.scale[...], epsilon=norm.epsilon)

        q, k = heads(self.query, "query"), heads(self.key, "key")
        v = k if self.value is None else heads(self.value, "value")
        if self.norms_value:
            v = unit_norm(v, self.epsilon)
        q, k = rotated(q, self.query_norm), rotated(k, self.key_norm)
        if self.scale:
            # The kernels divide by the square root of the head size.
            q = (q.astype(jnp.float32) * (self.scale * self.head_size**0.5)).astype(q.dtype)
        return pin(q, "queries"), pin(k, "keys"), pin(v, "keys")

    def join(self, y_BLHK: jax.Array) -> jax.Array:
        """The heads' outputs projected to ``[B, L, D]``."""
        y_BLHK = pin(y_BLHK, "queries")
        return self.out(y_BLHK.reshape(*y_BLHK.shape[:2], -1))


class Mlp(nnx.Module):
    """The position-wise MLP, with squared ReLU (So et al. 2021), GELU, or a gate (Shazeer 2020).

    The inner width is `inner`, by default that of the config.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, inner: int = 0):
        self.activation, inner = config.activation, inner or config.inner_width
        linear = functools.partial(Linear, bias=False, rngs=rngs)
        into = functools.partial(linear, config.width, inner, scale=1.0, axes=("embed", "mlp"))
        self.gate = into() if config.is_gated else None
        self.up = into()
        self.down = linear(inner, config.width, scale=0.0, axes=("mlp", "embed"))

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


class Block(nnx.Module):
    """A pre-norm block: attention, then the MLP, each added to its input.

    With ``config.post_norms``, the outputs of attention and of the MLP are also normalised. `mlp`
    makes the MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        is_full: bool = False,
        mlp: Callable[..., Any] = Mlp,
    ):
        norm = functools.partial(Norm, config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs, is_full=is_full)
        self.mlp_norm = norm()
        self.mlp = mlp(config, rngs=rngs)
        self.attention_out_norm = norm() if config.post_norms else None
        self.mlp_out_norm = norm() if config.post_norms else None

    def __call__(self, x_BLD: jax.Array, length_B: jax.Array, angles: Any) -> jax.Array:
        """Hidden vectors after the block, ``[B, L, D]``."""
        may_see = self.attention.may_see
        return self.around(
            x_BLD, angles, lambda q, k, v: ops.attention(q, k, v, length_B, may_see=may_see)
        )

    def around(self, x_BLD: jax.Array, angles: Any, attend: Callable[..., jax.Array]) -> jax.Array:
        """Hidden vectors after the block; `attend` maps ``(q, k, v)`` to ``[B, L, H, K]``."""
        x_BLD = pin(x_BLD, "hidden")
        q, k, v = self.attention.project(self.attention_norm(x_BLD), angles)
        y_BLD = self.attention.join(attend(q, k, v))
        if self.attention_out_norm is not None:
            y_BLD = self.attention_out_norm(y_BLD)
        x_BLD = checkpoint_name(x_BLD + y_BLD, "middle")
        y_BLD = self.update(x_BLD)
        return pin(
            x_BLD + (y_BLD if self.mlp_out_norm is None else self.mlp_out_norm(y_BLD)), "hidden"
        )

    def update(self, x_BLD: jax.Array) -> jax.Array:
        """The output of the MLP, before its norm."""
        return self.mlp(self.mlp_norm(x_BLD))
