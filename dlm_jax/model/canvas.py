"""Networks that denoise a canvas after a text with causal attention.

The cache contains only the keys and values of texts. Each stack of layers (sliding and full) has
one array of keys and one array of values, each ``[B, layers, G, L, K]`` in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.config import ModelConfig
from dlm_jax.model.attention import (
    CachedLayer,
    KeyValue,
    as_it_lies,
    attend_behind,
    attend_beside_kept,
    proportional_angles,
    rotary_angles,
    seen_behind,
)
from dlm_jax.model.cached import by_group, put_at
from dlm_jax.model.kernels import cpu
from dlm_jax.model.layers import rematerialised
from dlm_jax.model.lora import stacks
from dlm_jax.types import CachedTrunk, Params, Window

Angles = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Stack:
    """Layers of one type: sliding (with a limited attention window) or full.

    Attributes:
      module_of: maps the parameters of a layer to its module.
      reach: number of text positions that a text position attends to, including itself (0: all).
      each: number of layers of this type per group of layers.
      groups: number of key/value heads.
      head_size: size of a head.
      angles: maps a number of positions to the rotary angles of the layers.
    """

    module_of: Callable[[Params], Any]
    reach: int
    each: int
    groups: int
    head_size: int
    angles: Callable[[int], Angles]


def stacks_of(
    config: ModelConfig, module_of: Callable[[Params], Any], full_of: Callable[[Params], Any]
) -> tuple[Stack, ...]:
    """The stacks, in the order of `dlm_jax.model.lora.stacks`.

    A group of layers consists of `Stack.each` layers of every stack.
    """
    size, groups = config.size_of_head, config.kv_heads or config.heads

    def angles(num_positions: int) -> Angles:
        size, theta = config.rotary_size, config.rope_theta
        return rotary_angles(num_positions, size, theta, config.rope_scaling)

    full_size, theta = config.full_head_size or size, config.full_rope_theta or config.rope_theta

    def full_angles(num_positions: int) -> Angles:
        return proportional_angles(num_positions, full_size, theta, config.full_rotary_share)

    every = config.full_every
    first = Stack(module_of, config.attention_window, max(every - 1, 1), groups, size, angles)
    if not every:
        return (first,)
    return first, Stack(full_of, 0, 1, config.full_kv_heads or groups, full_size, full_angles)


@dataclass(frozen=True)
class Canvases:
    """The functions of a `dlm_jax.types.Network` with canvases.

    Attributes:
      config: config of the model.
      embed: maps ``(params, ids)`` to vectors in the compute dtype.
      norm: the final norm.
      conditioned: function ``(params, x_BLD, signal_BLD) -> x_BLD`` that adds the self-conditioning
        signal to the embeddings of a canvas; None without self-conditioning.
      layers: the stacks of layers.
    """

    config: ModelConfig
    embed: Callable[[Params, jax.Array], jax.Array]
    norm: Callable[[Params, jax.Array], jax.Array]
    conditioned: Callable[[Params, jax.Array, jax.Array], jax.Array] | None
    layers: tuple[Stack, ...]

    def functions(self) -> dict[str, Any]:
        """Keyword arguments for `dlm_jax.types.Network`."""
        cached = CachedTrunk(0, self.init, self.whole, self.window, self.store, canvas=self.canvas)
        return {
            "trunk": self.trunk,
            "behind": self.behind,
            "signal": None if self.conditioned is None else self.signal,
            "canvas_length": self.config.block_length,
            # The cached functions do not support dense layers, which precede the groups.
            "cached": None if self.config.dense_layers else cached,
        }

    def trunk(
        self, params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        return self.behind(params, tokens_BL, length_B, jnp.zeros_like(length_B)), cache

    def signal(self, params: Params, logits_NV: jax.Array) -> jax.Array:
        table_VD = params["embedding"].astype(self.config.compute_dtype)
        probs_NV = jax.nn.softmax(logits_NV, axis=-1).astype(table_VD.dtype)
        vectors_ND = cpu.linear(probs_NV, table_VD)
        scale = self.config.width**0.5 if self.config.embedding_scaled else 1.0
        return vectors_ND * jnp.asarray(scale, vectors_ND.dtype)

    def behind(
        self,
        params: Params,
        tokens_BL: jax.Array,
        length_B: jax.Array,
        start_B: jax.Array,
        signal_BLD: jax.Array | None = None,
    ) -> jax.Array:
        x_BLD = self.embed(params, tokens_BL)
        is_canvas_BL = jnp.arange(tokens_BL.shape[1])[None] >= start_B[:, None]
        of_canvas_BLD = self._conditioned(params, x_BLD, signal_BLD)
        x_BLD = jnp.where(is_canvas_BL[:, :, None], of_canvas_BLD, x_BLD)

        def layer(of: Stack) -> Callable[..., jax.Array]:
            def run(x_BLD: jax.Array, block: Params, context: Any) -> jax.Array:
                length_B, start_B, is_canvas_BL, angles = context

                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                    return attend_behind(q, k, v, length_B, start_B=start_B, window=of.reach)

                return of.module_of(block).behind(x_BLD, angles, attend, is_canvas_BL)

            return rematerialised(run, self.config)

        runs = [layer(of) for of in self.layers]
        rows = length_B, start_B, is_canvas_BL
        angles = tuple(of.angles(tokens_BL.shape[1]) for of in self.layers)
        if not self.config.full_every:
            for blocks in stacks(params):
                x_BLD = cpu.run_blocks(runs[0], x_BLD, blocks, (*rows, angles[0]))
            return self.norm(params, x_BLD)

        def group(x_BLD: jax.Array, parts: tuple[Params, ...], context: Any) -> jax.Array:
            rows, angles = context
            for at, run in enumerate(runs):

                def layer(x: jax.Array, block: Params, run: Any = run, at: int = at) -> Any:
                    return run(x, block, (*rows, angles[at])), None

                x_BLD, _ = cpu.over_layers(layer, x_BLD, parts[at])
            return x_BLD

        return self.norm(params, cpu.run_blocks(group, x_BLD, self._groups(params), (rows, angles)))

    def init(self, params: Params, num_rows: int, num_positions: int) -> Any:
        shapes = [leaf.shape[0] for leaf in map(_first_leaf, stacks(params))]

        def zeros(of: Stack, depth: int) -> jax.Array:
            shape = num_rows, depth, of.groups, num_positions, of.head_size
            return jnp.zeros(shape, jnp.dtype(self.config.compute_dtype))

        return tuple(
            (zeros(of, n), zeros(of, n)) for of, n in zip(self.layers, shapes, strict=True)
        )

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.whole`: the forward pass over whole rows of text."""
        turns = [of.angles(tokens_NL.shape[1]) for of in self.layers]

        def attend(of: Stack, q: jax.Array, k: jax.Array, v: jax.Array, kept: Any) -> jax.Array:
            return attend_behind(q, k, v, length_N, start_B=length_N, window=of.reach)

        x_NLD = self.embed(params, tokens_NL)
        is_canvas_N1 = jnp.zeros((length_N.shape[0], 1), bool)
        return self._through(params, x_NLD, turns, attend, None, is_canvas_N1)

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
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.window`: the forward pass over a window of text after cached text."""
        x_NWD, place_NW = self._at(params, tokens_NL, window, size)
        context = row_N, tokens_NL.shape[1], length_N, num_seen
        return self._beside(params, kept, x_NWD, place_NW, window, context, is_canvas=False)

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
        x_NWD, place_NW = self._at(params, tokens_NL, window, size)
        x_NWD = self._conditioned(params, x_NWD, signal_NWD)
        context = None, tokens_NL.shape[1], length_N, None
        return self._beside(params, kept, x_NWD, place_NW, window, context, is_canvas=True)[0]

    def store(self, kept: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        return jax.tree.map(put_at(3, row_N, place_N), kept, piece)

    def _conditioned(
        self, params: Params, x_BLD: jax.Array, signal_BLD: jax.Array | None
    ) -> jax.Array:
        if self.conditioned is None:
            return x_BLD
        signal_BLD = jnp.zeros_like(x_BLD) if signal_BLD is None else signal_BLD
        return self.conditioned(params, x_BLD, signal_BLD.astype(x_BLD.dtype))

    def _at(
        self, params: Params, tokens_NL: jax.Array, window: Window, size: int
    ) -> tuple[jax.Array, jax.Array]:
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        return self.embed(params, jnp.take_along_axis(tokens_NL, place_NW, axis=1)), place_NW

    def _beside(
        self,
        params: Params,
        kept: Any,
        x_NWD: jax.Array,
        place_NW: jax.Array,
        window: Window,
        context: tuple[jax.Array | None, int, jax.Array, int | None],
        *,
        is_canvas: bool,
    ) -> tuple[jax.Array, Any]:
        """The hidden vectors, keys and values of a window that follows cached text.

        The window is a canvas if `is_canvas` is True, and text otherwise.
        """
        row_N, num_positions, length_N, num_seen = context
        num_seen = num_positions if num_seen is None else num_seen
        turns: list[Any] = [
            tuple(table_LK[place_NW] for table_LK in of.angles(num_positions)) for of in self.layers
        ]
        seen = {
            of: seen_behind(
                window,
                place_NW,
                length_N,
                num_seen,
                reach=of.reach,
                is_canvas=is_canvas,
                num_shared=self.config.heads // of.groups,
            )
            for of in self.layers
        }

        def attend(of: Stack, q: jax.Array, k: jax.Array, v: jax.Array, old: Any) -> jax.Array:
            leaves, at = old
            kept = CachedLayer(leaves, at, row_N, num_seen)
            return attend_beside_kept(q, kept, (by_group(k), by_group(v)), seen[of])

        is_canvas_N1 = jnp.full((place_NW.shape[0], 1), is_canvas)
        return self._through(params, x_NWD, turns, attend, kept, is_canvas_N1)

    def _through(
        self,
        params: Params,
        x_NWD: jax.Array,
        turns: list[Any],
        attend: Callable[..., jax.Array],
        kept: Any,
        is_canvas_N1: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """The hidden vectors after all layers and the final norm, and the keys and values of each
        layer.
        """

        def body(x: jax.Array, group: tuple[Any, jax.Array]) -> tuple[jax.Array, Any]:
            parts, number = group
            stacked = []
            for at, of in enumerate(self.layers):

                def layer(
                    x: jax.Array, own: tuple[Params, jax.Array], of: Stack = of, at: int = at
                ) -> tuple[jax.Array, KeyValue]:
                    old, made, (block, place) = None, [], own
                    if kept is not None:
                        old = kept[at], number * of.each + place

                    def attended(q: Any, k: Any, v: Any) -> jax.Array:
                        made.append((by_group(k), by_group(v)))
                        return attend(of, q, k, v, old)

                    x = of.module_of(block).behind(x, turns[at], attended, is_canvas_N1)
                    return x, made[0]

                x, made = cpu.over_layers(layer, x, (parts[at], jnp.arange(of.each)))
                stacked.append(made)
            return x, tuple(stacked)

        groups = self._groups(params)
        numbers = jnp.arange(_first_leaf(groups).shape[0])
        with jax.named_scope("layers"):
            x_NWD, made = jax.lax.scan(body, x_NWD, (groups, numbers))

        def as_kept(leaf: jax.Array) -> jax.Array:
            leaf = leaf.reshape(-1, *leaf.shape[2:])
            return as_it_lies(jnp.moveaxis(leaf, 0, 1))

        return self.norm(params, x_NWD), jax.tree.map(as_kept, made)

    def _groups(self, params: Params) -> tuple[Params, ...]:
        """The parameters of each stack, with the groups of layers as the first axis."""
        return tuple(
            jax.tree.map(lambda leaf, n=of.each: leaf.reshape(-1, n, *leaf.shape[1:]), blocks)
            for of, blocks in zip(self.layers, stacks(params), strict=True)
        )


def _first_leaf(tree: Any) -> jax.Array:
    return jax.tree.leaves(tree)[0]
