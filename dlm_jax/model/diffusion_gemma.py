"""DiffusionGemma (2026): a trunk that denoises a canvas after a text with causal attention.

Groups of sliding layers, with a limited attention window over the text, each end with a full layer.
The cache contains only the keys and values of texts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import pin
from dlm_jax.model import ops
from dlm_jax.model.layers import (
    Attention,
    Mlp,
    Norm,
    parameter,
    rotary_angles,
    unit_norm,
)
from dlm_jax.model.moe import Experts
from dlm_jax.model.trunk import Angles, Trunk
from dlm_jax.types import CachedTrunk, Network, Params, Window, live_positions


class SelfConditioning(nnx.Module):
    """Adds the previous step's predictions to canvas embeddings (Chen et al. 2022)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = Norm(config)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, signal_BLD: jax.Array) -> jax.Array:
        """The normalised sum of the embeddings and the transformed signal, ``[B, L, D]``."""
        return unit_norm(x_BLD + self.mlp(self.norm(signal_BLD)), self.norm.epsilon)


class GemmaBlock(nnx.Module):
    """A block with norms before and after attention and the MLP, and with experts beside the MLP.

    The output is multiplied by one scale at text positions and by another at canvas positions.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_full: bool):
        norm = functools.partial(Norm, config)
        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Attention(config, rngs=rngs, is_full=is_full)
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = Mlp(config, rngs=rngs)
        self.experts: Any = Experts(config, rngs=rngs) if config.experts else None
        if config.experts:
            self.experts_norm, self.dense_out_norm, self.experts_out_norm = norm(), norm(), norm()
        self.text_scale = parameter(jnp.ones(1, jnp.float32), None)
        self.canvas_scale = parameter(jnp.ones(1, jnp.float32), None)

    def __call__(
        self, x_BLD: jax.Array, angles: Any, attend: Any, is_canvas_BL: jax.Array
    ) -> jax.Array:
        """As `dlm_jax.model.transformer.Block.__call__`; `is_canvas_BL` can be ``[B, 1]``."""
        x_BLD = pin(x_BLD, "hidden")
        y_BLD = self.attention(self.attention_norm(x_BLD), angles, attend)
        x_BLD = checkpoint_name(x_BLD + self.attention_out_norm(y_BLD), "middle")
        y_BLD = self.mlp(self.mlp_norm(x_BLD))
        if self.experts is not None:
            of_experts_BLD = self.experts(self.experts_norm(x_BLD), x_BLD)
            y_BLD = self.dense_out_norm(y_BLD) + self.experts_out_norm(of_experts_BLD)
        x_BLD = pin(x_BLD + self.mlp_out_norm(y_BLD), "hidden")
        of_canvas, of_text = self.canvas_scale[...][None, None], self.text_scale[...][None, None]
        scale_BL1 = jnp.where(is_canvas_BL[:, :, None], of_canvas, of_text)
        return x_BLD * scale_BL1.astype(x_BLD.dtype)


def attend_behind(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    length_B: jax.Array,
    *,
    start_B: jax.Array,
    window: int,
) -> jax.Array:
    """`ops.attention` for a text followed by a canvas that starts at position ``start_B``.

    A text position attends to itself and earlier positions; a canvas position attends to the text
    and the canvas. With a window, a text position attends to the last `window` text positions, and
    a canvas position to the last ``window - 1`` text positions. A window of 0 means no limit.
    """
    start_B11 = start_B[:, None, None]

    def may_see(query: jax.Array, key: jax.Array) -> jax.Array:
        begin = jnp.minimum(query[None], start_B11) - (window or k_BLGK.shape[1])
        is_of_canvas = query[None] >= start_B11
        return (is_of_canvas | (key <= query)[None]) & (key[None] > begin)

    is_live_BL = live_positions(jnp.maximum(length_B, 1), q_BLHK.shape[1])
    return ops.formula_attention(q_BLHK, k_BLGK, v_BLGK, is_live_BL, may_see=may_see)


@dataclass(frozen=True)
class DiffusionGemma(Trunk):
    """A trunk with canvases: groups of sliding layers, each followed by a full layer."""

    def make(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        if name == "self_conditioning":
            return SelfConditioning(self.config, rngs=rngs)
        return super().make(name, rngs)

    def block(self, name: str, rngs: nnx.Rngs) -> GemmaBlock:
        return GemmaBlock(self.config, rngs=rngs, is_full=name == "full_blocks")

    def __call__(
        self,
        params: Params,
        tokens_BL: jax.Array,
        length_B: jax.Array,
        start_B: jax.Array,
        signal_BLD: jax.Array | None = None,
    ) -> jax.Array:
        """`Network.behind`."""

        def attend(name: str, q: jax.Array, k: jax.Array, v: jax.Array, rows: Any) -> jax.Array:
            length_B, start_B = rows
            return attend_behind(q, k, v, length_B, start_B=start_B, window=self._window_of(name))

        x_BLD = self.embed(params, tokens_BL)
        is_canvas_BL = jnp.arange(tokens_BL.shape[1])[None] >= start_B[:, None]
        of_canvas_BLD = self._conditioned(params, x_BLD, signal_BLD)
        x_BLD = jnp.where(is_canvas_BL[:, :, None], of_canvas_BLD, x_BLD)
        angles, rows = self.angles(tokens_BL.shape[1]), (length_B, start_B)
        x_BLD = self.run_layers(params, x_BLD, angles, attend, rows, is_canvas_BL)
        return self.norm(params, x_BLD)

    def functions(self) -> Network:
        """The `Network` of this trunk."""
        cached = CachedTrunk(
            block_length=0,
            init=self.init_cache,
            whole=self.whole,
            window=self.window,
            store=self.store,
            canvas=self.canvas,
        )
        return self.network(
            trunk=self.trunk,
            behind=self.__call__,
            signal=self.signal,
            canvas_length=self.config.block_length,
            cached=cached,
        )

    def trunk(
        self, params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        """`Network.trunk`: the whole row is a canvas."""
        return self(params, tokens_BL, length_B, jnp.zeros_like(length_B)), cache

    def embed(self, params: Params, ids: jax.Array) -> jax.Array:
        return self._scaled(super().embed(params, ids))

    def signal(self, params: Params, logits_NV: jax.Array) -> jax.Array:
        """`Network.signal`."""
        table_VD = params["embedding"].astype(self.config.compute_dtype)
        probs_NV = jax.nn.softmax(logits_NV, axis=-1).astype(table_VD.dtype)
        return self._scaled(ops.linear(probs_NV, table_VD))

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.whole`: the forward pass over whole rows of text."""

        def attend(name: str, _: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            window = self._window_of(name)
            return attend_behind(q, k, v, length_N, start_B=length_N, window=window), k, v

        is_canvas_N1 = jnp.zeros((length_N.shape[0], 1), bool)
        angles = self.angles(tokens_NL.shape[1])
        x_NLD = self.embed(params, tokens_NL)
        return self.run_cached(params, x_NLD, angles, attend, None, is_canvas_N1)

    def window(
        self,
        params: Params,
        cache: Any,
        row_N: jax.Array | None,
        tokens_NL: jax.Array,
        length_N: jax.Array,
        window: Window,
        *,
        size: int,
        num_seen: int | None = None,
        signal_NWD: jax.Array | None = None,
        is_canvas: bool = False,
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.window`: a window of text, or a canvas, after cached text."""
        num_positions = tokens_NL.shape[1]
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        x_NWD = self.embed(params, jnp.take_along_axis(tokens_NL, place_NW, axis=1))
        if is_canvas:
            x_NWD = self._conditioned(params, x_NWD, signal_NWD)
        angles = jax.tree.map(lambda x_LK: x_LK[place_NW], self.angles(num_positions))
        begin_N11, end_N11 = window.begin_N[:, None, None], window.end_N[:, None, None]

        def sees(name: str, query: jax.Array, key: jax.Array) -> jax.Array:
            # All positions of a canvas attend to the same keys; see `attend_behind`.
            last, from_ = (end_N11 - 1, begin_N11) if is_canvas else (query, query)
            return (key <= last) & (key > from_ - (self._window_of(name) or num_positions))

        num_seen = num_positions if num_seen is None else num_seen
        attend = self.attend_beside(window, place_NW, length_N, row_N, num_seen, sees)
        is_canvas_N1 = jnp.full((place_NW.shape[0], 1), is_canvas)
        return self.run_cached(params, x_NWD, angles, attend, cache, is_canvas_N1)

    def canvas(
        self,
        params: Params,
        cache: Any,
        tokens_NL: jax.Array,
        length_N: jax.Array,
        window: Window,
        signal_NWD: jax.Array | None,
        *,
        size: int,
    ) -> jax.Array:
        """`CachedTrunk.canvas`."""
        given = params, cache, None, tokens_NL, length_N, window
        return self.window(*given, size=size, signal_NWD=signal_NWD, is_canvas=True)[0]

    def angles(self, num_positions: int) -> dict[str, Angles]:
        """In full layers, only the first ``model.full_rotary_share`` of the pairs are rotated."""
        config = self.config
        size = config.full_head_size or config.size_of_head
        theta = config.full_rope_theta or config.rope_theta
        cos_LK, sin_LK = rotary_angles(num_positions, size, theta)
        turns_K = jnp.arange(size // 2) < int(config.full_rotary_share * size // 2)
        full = jnp.where(turns_K[None], cos_LK, 1.0), jnp.where(turns_K[None], sin_LK, 0.0)
        return super().angles(num_positions) | {"full_blocks": full}

    def _window_of(self, name: str) -> int:
        """Number of text positions that a text position attends to, and itself (0: all)."""
        return 0 if name == "full_blocks" else self.config.attention_window

    def _scaled(self, vectors: jax.Array) -> jax.Array:
        return vectors * jnp.asarray(self.config.width**0.5, vectors.dtype)

    def _conditioned(
        self, params: Params, x_BLD: jax.Array, signal_BLD: jax.Array | None
    ) -> jax.Array:
        """The embeddings of a canvas, with the signal (None: zeros)."""
        signal_BLD = jnp.zeros_like(x_BLD) if signal_BLD is None else signal_BLD
        module = self.module("self_conditioning", params["self_conditioning"])
        return module(x_BLD, signal_BLD.astype(x_BLD.dtype))
