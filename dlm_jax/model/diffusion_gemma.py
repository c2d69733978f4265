"""DiffusionGemma (2026): a trunk that denoises a canvas after a text with causal attention.

Sliding layers, with a limited attention window over the text, and full layers alternate in groups.
The cache contains only the keys and values of texts. Each stack of layers (sliding and full) has
one array of keys and one array of values, each ``[B, layers, G, L, K]`` in the compute dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.model import ops
from dlm_jax.model.attention import attend_behind, proportional_angles, seen_keys
from dlm_jax.model.block import Mlp
from dlm_jax.model.layers import Norm, parameter, unit_norm
from dlm_jax.model.moe import MoeBlock
from dlm_jax.model.ops import by_group
from dlm_jax.model.trunk import Angles, Layers, Trunk
from dlm_jax.types import CachedTrunk, Network, Params, Window


class SelfConditioning(nnx.Module):
    """Adds the previous step's predictions to canvas embeddings (Chen et al. 2022)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = Norm(config.width, kind=config.norm, epsilon=config.norm_epsilon)
        self.mlp = Mlp(config, rngs=rngs)
        self.epsilon = config.norm_epsilon

    def __call__(self, x_BLD: jax.Array, signal_BLD: jax.Array) -> jax.Array:
        """The normalised sum of the embeddings and the transformed signal, ``[B, L, D]``."""
        return unit_norm(x_BLD + self.mlp(self.norm(signal_BLD)), self.epsilon)


class CanvasBlock(MoeBlock):
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

    def scaled(self, x_BLD: jax.Array, is_canvas_BL: jax.Array) -> jax.Array:
        """The output of the block, scaled; `is_canvas_BL` can be ``[B, 1]``."""
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
        if not name.endswith("blocks"):
            return super().make(name, rngs)
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
        x_BLD = self.embed(params, tokens_BL)
        is_canvas_BL = jnp.arange(tokens_BL.shape[1])[None] >= start_B[:, None]
        of_canvas_BLD = self._conditioned(params, x_BLD, signal_BLD)
        x_BLD = jnp.where(is_canvas_BL[:, :, None], of_canvas_BLD, x_BLD)
        context = length_B, start_B, is_canvas_BL, self._angles(tokens_BL.shape[1])

        def run_all(layers: Layers, x_BLD: jax.Array, context: Any) -> jax.Array:
            reach = self._reach(layers.name)

            def run(block: CanvasBlock, x_BLD: jax.Array, *context: Any) -> jax.Array:
                length_B, start_B, is_canvas_BL, angles = context

                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                    return attend_behind(q, k, v, length_B, start_B=start_B, window=reach)

                x_BLD = block.around(x_BLD, angles[layers.name], attend)
                return block.scaled(x_BLD, is_canvas_BL)

            return layers.scan(run, x_BLD, *context)

        stacks = self.layers(params)
        if not self.config.full_every:
            for layers in stacks:
                x_BLD = run_all(layers, x_BLD, context)
            return self.norm(params, x_BLD)
        sliding, full = stacks

        def group(x_BLD: jax.Array, parts: tuple[Params, Params], context: Any) -> jax.Array:
            x_BLD = run_all(Layers(self, sliding.name, parts[0]), x_BLD, context)
            return run_all(Layers(self, full.name, parts[1]), x_BLD, context)

        return self.norm(params, ops.scan_layers(group, x_BLD, self._groups(stacks), context))

    def functions(self) -> Network:
        """The `Network` of this trunk."""
        cached = CachedTrunk(
            0, self.init_cache, self.whole, self.window, self.store, canvas=self.canvas
        )
        return self.network(
            trunk=self.trunk,
            behind=self.__call__,
            signal=self.signal if self.config.self_conditioning else None,
            canvas_length=self.config.block_length,
            # The cached functions do not support dense layers, which precede the groups.
            cached=None if self.config.dense_layers else cached,
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

    def init_cache(self, params: Params, num_rows: int, num_positions: int) -> Any:
        """`CachedTrunk.init`."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)

        def zeros(layers: Layers) -> jax.Array:
            is_full = layers.name == "full_blocks"
            size = (is_full and config.full_head_size) or config.size_of_head
            shape = num_rows, len(layers), self._num_groups(layers.name), num_positions, size
            return jnp.zeros(shape, dtype)

        return tuple((zeros(layers), zeros(layers)) for layers in self.layers(params))

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.whole`: the forward pass over whole rows of text."""

        def attend(name: str, q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
            window = self._reach(name)
            return attend_behind(q, k, v, length_N, start_B=length_N, window=window)

        is_canvas_N1 = jnp.zeros((length_N.shape[0], 1), bool)
        angles = self._angles(tokens_NL.shape[1])
        x_NLD = self.embed(params, tokens_NL)
        return self._run_layers(params, x_NLD, angles, attend, None, is_canvas_N1)

    def window(
        self,
        params: Params,
        kept: Any,
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
        num_seen = num_positions if num_seen is None else num_seen
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        x_NWD = self.embed(params, jnp.take_along_axis(tokens_NL, place_NW, axis=1))
        if is_canvas:
            x_NWD = self._conditioned(params, x_NWD, signal_NWD)
        angles = {
            name: (cos_LK[place_NW], sin_LK[place_NW])
            for name, (cos_LK, sin_LK) in self._angles(num_positions).items()
        }
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
                num_seen,
                sees=functools.partial(sees, self._reach(name)),
                num_shared=self.config.heads // self._num_groups(name),
            )
            for name in angles
        }

        def attend(name: str, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> jax.Array:
            old = ops.CachedLayer(cache[0], cache[1], row_N, num_seen)
            return ops.window_attention(q, old, (by_group(k), by_group(v)), seen[name])

        is_canvas_N1 = jnp.full((place_NW.shape[0], 1), is_canvas)
        return self._run_layers(params, x_NWD, angles, attend, kept, is_canvas_N1)

    def canvas(
        self,
        params: Params,
        kept: Any,
        tokens_NL: jax.Array,
        length_N: jax.Array,
        window: Window,
        signal_NWD: jax.Array | None,
        *,
        size: int,
    ) -> jax.Array:
        """`CachedTrunk.canvas`."""
        given = params, kept, None, tokens_NL, length_N, window
        return self.window(*given, size=size, signal_NWD=signal_NWD, is_canvas=True)[0]

    def store(self, kept: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        """`CachedTrunk.store`."""
        return jax.tree.map(ops.write_rows(3, row_N, place_N), kept, piece)

    def _reach(self, name: str) -> int:
        """Number of text positions that a text position attends to, and itself (0: all)."""
        return 0 if name == "full_blocks" else self.config.attention_window

    def _num_groups(self, name: str) -> int:
        config = self.config
        is_full = name == "full_blocks"
        return (is_full and config.full_kv_heads) or config.kv_heads or config.heads

    def _angles(self, num_positions: int) -> dict[str, Angles]:
        """The rotary angles of each stack of layers."""
        config, angles = self.config, self.angles(num_positions)
        found = {name: angles for name, layers in config.layers.items() if layers}
        if config.full_every:
            size, theta = config.full_head_size, config.full_rope_theta
            found["full_blocks"] = proportional_angles(
                num_positions,
                size or config.size_of_head,
                theta or config.rope_theta,
                config.full_rotary_share,
            )
        return found

    def _conditioned(
        self, params: Params, x_BLD: jax.Array, signal_BLD: jax.Array | None
    ) -> jax.Array:
        """The embeddings of a canvas, with the signal (None: zeros)."""
        if not self.config.self_conditioning:
            return x_BLD
        signal_BLD = jnp.zeros_like(x_BLD) if signal_BLD is None else signal_BLD
        module = self.module("self_conditioning", params["self_conditioning"])
        return module(x_BLD, signal_BLD.astype(x_BLD.dtype))

    def _groups(self, stacks: list[Layers]) -> tuple[Params, ...]:
        """The parameters of each stack, with the groups of layers as the first axis."""
        num_groups = len(stacks[-1])
        return tuple(
            jax.tree.map(lambda leaf: leaf.reshape(num_groups, -1, *leaf.shape[1:]), layers.params)
            for layers in stacks
        )

    def _run_layers(
        self,
        params: Params,
        x_NWD: jax.Array,
        angles: dict[str, Angles],
        attend: Callable[..., jax.Array],
        kept: Any,
        is_canvas_N1: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """The hidden vectors after all layers and the final norm, and each layer's keys and values.

        `attend` gets the name of the stack, and the cache of the stack with the layer's index.
        """
        stacks = self.layers(params)

        def run(at: int, x: jax.Array, given: tuple[Params, jax.Array]) -> tuple[jax.Array, Any]:
            layers, (one, number), new = stacks[at], given, []
            block = layers.block(one)
            cache = None if kept is None else (kept[at], number)

            def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                new.append((by_group(k), by_group(v)))
                return attend(layers.name, q, k, v, cache)

            x = block.around(x, angles[layers.name], attended)
            return block.scaled(x, is_canvas_N1), new[0]

        def group(x: jax.Array, given: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
            parts, number = given
            stacked = []
            for at, layers in enumerate(stacks):
                each = len(layers) // len(stacks[-1])
                numbers = number * each + jnp.arange(each)
                x, made = jax.lax.scan(functools.partial(run, at), x, (parts[at], numbers))
                stacked.append(made)
            return x, tuple(stacked)

        with jax.named_scope("layers"):
            numbers = jnp.arange(len(stacks[-1]))
            x_NWD, made = jax.lax.scan(group, x_NWD, (self._groups(stacks), numbers))

        def as_kept(leaf: jax.Array) -> jax.Array:
            return ops.as_it_lies(jnp.moveaxis(leaf.reshape(-1, *leaf.shape[2:]), 0, 1))

        return self.norm(params, x_NWD), jax.tree.map(as_kept, made)
