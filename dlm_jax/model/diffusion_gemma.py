"""DiffusionGemma (2026): a trunk that denoises a canvas after a text with causal attention.

Sliding layers, with a limited attention window over the text, and full layers alternate in groups.
The cache contains only the keys and values of texts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.model import ops
from dlm_jax.model.attention import attend_behind, proportional_angles, seen_keys
from dlm_jax.model.layers import Mlp, kv_shape, norm_of, parameter, unit_norm
from dlm_jax.model.moe import Block
from dlm_jax.model.trunk import Angles, Trunk
from dlm_jax.types import CachedTrunk, Network, Params, Window


class SelfConditioning(nnx.Module):
    """Adds the previous step's predictions to canvas embeddings (Chen et al. 2022)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = norm_of(config)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, signal_BLD: jax.Array) -> jax.Array:
        """The normalised sum of the embeddings and the transformed signal, ``[B, L, D]``."""
        return unit_norm(x_BLD + self.mlp(self.norm(signal_BLD)), self.norm.epsilon)


class CanvasBlock(Block):
    """A block of text and canvas positions.

    With ``config.layer_scales``, its output is multiplied by a scale of its kind of position.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        is_full: bool = False,
        is_dense: bool = False,
    ):
        super().__init__(config, rngs=rngs, is_full=is_full, is_dense=is_dense)
        has_scales = config.layer_scales
        self.text_scale = parameter(jnp.ones(1, jnp.float32), None) if has_scales else None
        self.canvas_scale = parameter(jnp.ones(1, jnp.float32), None) if has_scales else None

    def __call__(
        self, x_BLD: jax.Array, angles: Any, attend: Any, is_canvas_BL: jax.Array
    ) -> jax.Array:
        """As `Block.__call__`; `is_canvas_BL` can be ``[B, 1]``."""
        x_BLD = super().__call__(x_BLD, angles, attend)
        if self.text_scale is None or self.canvas_scale is None:
            return x_BLD
        of_canvas, of_text = self.canvas_scale[...][None, None], self.text_scale[...][None, None]
        scale_BL1 = jnp.where(is_canvas_BL[:, :, None], of_canvas, of_text)
        return x_BLD * scale_BL1.astype(x_BLD.dtype)


@dataclass(frozen=True)
class DiffusionGemma(Trunk):
    """A trunk with canvases: groups of sliding layers, each followed by a full layer.

    With ``model.full_every`` of 0, all layers are sliding, with an unlimited window.
    """

    def make(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        if name == "self_conditioning":
            return SelfConditioning(self.config, rngs=rngs)
        return super().make(name, rngs)

    def block(self, name: str, rngs: nnx.Rngs) -> CanvasBlock:
        is_full, is_dense = name == "full_blocks", name == "dense_blocks"
        return CanvasBlock(self.config, rngs=rngs, is_full=is_full, is_dense=is_dense)

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
            window = self._reach(name)
            return attend_behind(q, k, v, length_B, start_B=start_B, window=window)

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
            signal=self.signal if self.config.self_conditioning else None,
            canvas_length=self.config.block_length,
            cached=cached,
        )

    def trunk(
        self, params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        """`Network.trunk`: the whole row is a canvas."""
        return self(params, tokens_BL, length_B, jnp.zeros_like(length_B)), cache

    def signal(self, params: Params, logits_NV: jax.Array) -> jax.Array:
        """`Network.signal`."""
        table_VD = params["embedding"].astype(self.config.compute_dtype)
        probs_NV = jax.nn.softmax(logits_NV, axis=-1).astype(table_VD.dtype)
        vectors_ND = ops.linear(probs_NV, table_VD)
        scale = self.config.width**0.5 if self.config.embedding_scaled else 1.0
        return vectors_ND * jnp.asarray(scale, vectors_ND.dtype)

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.whole`: the forward pass over whole rows of text."""

        def attend(name: str, _: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            window = self._reach(name)
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

        def sees(reach: int, query: jax.Array, key: jax.Array) -> jax.Array:
            # All positions of a canvas attend to the same keys; see `attend_behind`.
            last, from_ = (end_N11 - 1, begin_N11) if is_canvas else (query, query)
            return (key <= last) & (key > from_ - (reach or num_positions))

        seen = {
            name: seen_keys(
                window,
                place_NW,
                length_N,
                num_positions if num_seen is None else num_seen,
                sees=functools.partial(sees, self._reach(name)),
                num_shared=self.config.heads
                // kv_shape(self.config, is_full=name == "full_blocks")[0],
            )
            for name in angles
        }
        is_canvas_N1 = jnp.full((place_NW.shape[0], 1), is_canvas)
        attend = self.attend_beside(row_N, seen)
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
        config, angles = self.config, super().angles(num_positions)
        if config.full_every:
            angles["full_blocks"] = proportional_angles(
                num_positions,
                config.full_head_size or config.size_of_head,
                config.full_rope_theta or config.rope_theta,
                config.full_rotary_share,
            )
        return angles

    def _reach(self, name: str) -> int:
        """Number of text positions that a text position attends to, and itself (0: all)."""
        return 0 if name == "full_blocks" else self.config.attention_window

    def _conditioned(
        self, params: Params, x_BLD: jax.Array, signal_BLD: jax.Array | None
    ) -> jax.Array:
        """The embeddings of a canvas, with the signal (None: zeros)."""
        if not self.config.self_conditioning:
            return x_BLD
        signal_BLD = jnp.zeros_like(x_BLD) if signal_BLD is None else signal_BLD
        module = self.module("self_conditioning", params["self_conditioning"])
        return module(x_BLD, signal_BLD.astype(x_BLD.dtype))
