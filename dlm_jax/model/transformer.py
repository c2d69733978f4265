"""The Transformer, for whole rows and for windows of rows beside cached keys and values.

The cache has one leaf for keys and one for values, each ``[B, depth, G, L, K]`` in the compute
dtype: ``2 depth B L G K`` numbers in total. The products of attention read this layout in place.
Without a layout constraint, the TPU compiler would transpose the whole cache at every step. On CPU,
the layers are unrolled, and each layer has its own leaves, ``[B, G, L K]``, which the compiler does
not transpose. With shifted predictions, the hidden vectors of all positions are also cached,
``[B, L, D]``, because the position before a window predicts the first position of the window. A
causal network with shifted predictions needs no such vectors: position i of its cache contains the
keys and values of the token at i - 1, as if the input were shifted. Position 0 is hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.devices import is_concrete, is_on_one_cpu
from dlm_jax.distributed.partitions import on_own_rows
from dlm_jax.heads import HEADS
from dlm_jax.model import ops
from dlm_jax.model.attention import attend_beside_clean, attention_weights, seen_keys
from dlm_jax.model.block import Block
from dlm_jax.model.diffusion_gemma import DiffusionGemma
from dlm_jax.model.moe import MoeBlock
from dlm_jax.model.ops import KeyValue, by_group
from dlm_jax.model.trunk import Layers, Trunk
from dlm_jax.types import CachedTrunk, Inside, Network, Params, Window, left_of


def one_later(x_BLD: jax.Array, before_BD: jax.Array | None = None) -> jax.Array:
    """Shifts arrays right by one position, after `before_BD` (None repeats the first position)."""
    first_BD = x_BLD[:, 0] if before_BD is None else before_BD.astype(x_BLD.dtype)
    return jnp.concatenate([first_BD[:, None], x_BLD[:, :-1]], axis=1)


@dataclass(frozen=True)
class Transformer(Trunk):
    """A Transformer whose positions have one type of attention, with its functions for decoding.

    With experts, its first ``model.dense_layers`` layers have none. The input of a causal network
    is ``start_id`` followed by all tokens except the last. The output at a position depends only on
    earlier tokens and predicts the token at that position. With shifted predictions, the input is
    the tokens themselves, and the output at a position is that of the token before it, so the first
    token has no prediction (`Network.predicts_first`).
    """

    def make(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        if name == "blocks" and self.config.experts:
            return MoeBlock(self.config, rngs=rngs)
        if name in ("blocks", "dense_blocks"):
            return Block(self.config, rngs=rngs)
        return super().make(name, rngs)

    def __call__(
        self, params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        """`Network.trunk`."""
        angles = self.angles(tokens_BL.shape[1])
        x_BLD = self.embed(params, self.inputs(tokens_BL))
        for blocks in self.layers(params):
            x_BLD = blocks.scan(Block.__call__, x_BLD, length_B, angles)
        return self.outputs(params, x_BLD), cache

    @property
    def block_length(self) -> int:
        return 1 if self.is_causal else self.config.block_length

    @property
    def is_causal(self) -> bool:
        return self.config.attention_type == "causal"

    @property
    def hides_first(self) -> bool:
        """Whether position i of the cache is of the token at i - 1, and no token is at 0."""
        return not self.config.predicts_first

    @property
    def caches_hidden(self) -> bool:
        return self.config.logit_alignment == "shifted" and not self.is_causal

    def functions(self) -> Network:
        """The `Network` of this trunk."""
        cached = CachedTrunk(
            self.block_length,
            self.init_cache,
            self.whole,
            self.window,
            self.store,
            self.ready,
        )
        return self.network(
            trunk=self.__call__,
            cached=cached,
            beside_clean=self.beside_clean if self.block_length > 1 else None,
            inside=self.inside,
            heads=self.heads(),
            predicts_first=self.config.predicts_first,
        )

    def heads(self) -> dict[str, Any]:
        """`Network.heads`."""

        def function(name: str) -> Any:
            def layers_of(params: Params) -> Any:
                return self.module(f"{name}_head", params[f"{name}_head"])

            return HEADS[name].function(self.config, layers_of, self.readout)

        return {name: function(name) for name in self.config.added_heads}

    def inputs(self, tokens_BL: jax.Array) -> jax.Array:
        """The tokens at the input: in a causal network, those before each position."""
        return left_of(tokens_BL, self.config.start_id) if self.config.has_start else tokens_BL

    def outputs(self, params: Params, x_BLD: jax.Array) -> jax.Array:
        """The final norm, aligned with the positions that are predicted."""
        x_BLD = self.norm(params, x_BLD)
        return one_later(x_BLD) if self.config.logit_alignment == "shifted" else x_BLD

    def inside(self, params: Params, tokens_BL: jax.Array, length_B: jax.Array) -> Inside:
        """`Network.inside`: the blocks one by one, with plain attention."""
        angles = self.angles(tokens_BL.shape[1])
        hidden, maps = [self.embed(params, self.inputs(tokens_BL))], []
        for block in (block for layers in self.layers(params) for block in layers):

            def attend(q: Any, k: Any, v: Any, may_see: Any = block.attention.may_see) -> Any:
                maps.append(attention_weights(q, k, length_B, may_see))
                v_BLHK = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
                return jnp.einsum("bhlm,bmhk->blhk", maps[-1].astype(v.dtype), v_BLHK)

            hidden.append(block.around(hidden[-1], angles, attend))
        final_BLD = self.outputs(params, hidden[-1])
        return Inside(jnp.stack(hidden, axis=1), jnp.stack(maps, axis=1), final_BLD)

    def beside_clean(
        self,
        params: Params,
        shown_BL: jax.Array,
        clean_BL: jax.Array,
        length_B: jax.Array,
        *,
        block_length: int = 0,
    ) -> jax.Array:
        """`Network.beside_clean`: a noisy and a clean stream of the same rows."""
        block_length = block_length or self.block_length

        def run(block: Block, x: jax.Array, length_B: jax.Array, angles: Any) -> jax.Array:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return attend_beside_clean(q, k, v, length_B, block_length=block_length)

            return block.around(x, angles, attend)

        angles = self.angles(shown_BL.shape[1])
        x = self.embed(params, jnp.concatenate([shown_BL, clean_BL]))
        for layers in self.layers(params):
            x = layers.scan(run, x, length_B, angles)
        return self.outputs(params, x[: shown_BL.shape[0]])

    def init_cache(self, params: Params, num_rows: int, num_positions: int) -> Any:
        """`CachedTrunk.init`."""
        del params
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        groups = config.kv_heads or config.heads
        shape = (num_rows, config.depth, groups, num_positions, config.size_of_head)
        if ops.unrolls_cache(config.depth):
            shape = (num_rows, groups, num_positions * config.size_of_head)
            kept = tuple(
                (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.depth)
            )
        else:
            kept = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        if not self.caches_hidden:
            return kept
        return kept, jnp.zeros((num_rows, num_positions, config.width), dtype)

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.whole`."""
        angles = self.angles(tokens_NL.shape[1])

        def run(block: Block, x_NLD: jax.Array, _: Any) -> tuple[jax.Array, KeyValue]:
            new: list[KeyValue] = []

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                kept = (one_later(k), one_later(v)) if self.hides_first else (k, v)
                new.append((self._as_kept(kept[0]), self._as_kept(kept[1])))
                return ops.attention(q, k, v, length_N, may_see=block.attention.may_see)

            return block.around(x_NLD, angles, attend), new[0]

        x_NLD = self.embed(params, self.inputs(tokens_NL))
        x_NLD, piece = self._run_layers(run, x_NLD, params, None)
        x_NLD = self.norm(params, x_NLD)
        if self.caches_hidden:
            return one_later(x_NLD), (piece, x_NLD)
        return one_later(x_NLD) if self.hides_first else x_NLD, piece

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
        """`CachedTrunk.window`."""
        config, num_positions, block = self.config, tokens_NL.shape[1], self.block_length
        num_seen = num_positions if num_seen is None else num_seen
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        at_NW = jnp.maximum(place_NW - 1, 0) if self.hides_first else place_NW
        cos_LK, sin_LK = self.angles(num_positions)
        angles = cos_LK[at_NW], sin_LK[at_NW]
        seen = seen_keys(
            window,
            place_NW,
            length_N,
            num_seen,
            sees=lambda query, key: not block or key // block <= query // block,
            num_shared=config.heads // (config.kv_heads or config.heads),
            first=int(self.hides_first),
        )

        def run(block: Block, x_NWD: jax.Array, cache: Any) -> tuple[jax.Array, KeyValue]:
            new: list[KeyValue] = []
            if ops.unrolls_cache(config.depth):
                old = cache if row_N is None else on_own_rows(ops.rows_of, cache, row_N)
                size_K = config.size_of_head
                old = tuple(x.reshape(*x.shape[:2], -1, size_K)[:, :, :num_seen] for x in old)
            else:
                old = ops.CachedLayer(cache[0], cache[1], row_N, num_seen)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                new.append((self._as_kept(k), self._as_kept(v)))
                return ops.window_attention(q, old, (by_group(k), by_group(v)), seen)

            return block.around(x_NWD, angles, attend), new[0]

        if self.is_causal:
            tokens_NL = left_of(tokens_NL, max(config.start_id, 0))
        x_NWD = self.embed(params, jnp.take_along_axis(tokens_NL, place_NW, axis=1))
        layers, hidden_BLD = kept if self.caches_hidden else (kept, None)
        x_NWD, piece = self._run_layers(run, x_NWD, params, layers)
        x_NWD = self.norm(params, x_NWD)
        if not self.caches_hidden:
            return x_NWD, piece
        before_N = jnp.maximum(window.place_N - 1, 0)
        rows_N = jnp.arange(before_N.size) if row_N is None else row_N
        before_ND = on_own_rows(
            lambda hidden_BLD, row_N, at_N: hidden_BLD[row_N % hidden_BLD.shape[0], at_N],
            hidden_BLD,
            rows_N,
            before_N,
        )
        before_ND = jnp.where((window.place_N > 0)[:, None], before_ND, x_NWD[:, 0])
        return one_later(x_NWD, before_ND), (piece, x_NWD)

    def store(self, kept: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        """`CachedTrunk.store`."""
        hidden = None
        if self.caches_hidden:
            (kept, hidden_BLD), (piece, new_BLD) = kept, piece
            hidden = ops.write_rows(1, row_N, place_N)(hidden_BLD, new_BLD)
        if ops.unrolls_cache(self.config.depth):
            write = ops.write_rows(2, row_N, place_N * self.config.size_of_head)
        else:
            write = ops.write_rows(3, row_N, place_N)
        kept = jax.tree.map(write, kept, piece)
        return (kept, hidden) if self.caches_hidden else kept

    def _as_kept(self, x_NWGK: jax.Array) -> jax.Array:
        """A layer's keys or values in the shape of the cache."""
        x_NGWK = by_group(x_NWGK)
        if not ops.unrolls_cache(self.config.depth):
            return x_NGWK
        return x_NGWK.reshape(*x_NGWK.shape[:2], -1)

    def ready(self, params: Params) -> Params:
        """`CachedTrunk.ready`: the parameters of each layer, if the layers are unrolled."""
        if not ops.unrolls_cache(self.config.depth) or "layers" in params:
            return params
        layers = tuple(one for layers in self.layers(params) for one in _apart(layers))
        if not all(map(is_concrete, jax.tree.leaves(layers))):
            # The barrier ensures that the layers are sliced once, not at every step.
            layers = jax.lax.optimization_barrier(layers)
        return params | {"layers": layers}

    def _run_layers(
        self,
        run: Callable[[Block, jax.Array, Any], tuple[jax.Array, KeyValue]],
        x: jax.Array,
        params: Params,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """The hidden vectors after all layers, and the new keys and values as they are cached.

        `run` gets the cache of its layer if the layers are unrolled, else the cache and the index.
        """
        stacks, first, new = self.layers(params), 0, []
        if ops.unrolls_cache(self.config.depth):
            flat = self.ready(params)["layers"]
            for layers in stacks:
                # The layers of a stack share one trace. The compiler inlines its calls.
                layer = jax.jit(lambda x, one, old, of=layers: run(of.block(one), x, old))
                for at in range(first, first + len(layers)):
                    x, made = layer(x, flat[at], None if cache is None else cache[at])
                    new.append(made)
                first += len(layers)
            return x, tuple(new)
        for layers in stacks:

            def body(x: jax.Array, layer: Any, of: Layers = layers) -> tuple[jax.Array, KeyValue]:
                one, at = layer
                return run(of.block(one), x, None if cache is None else (cache, at))

            numbers = jnp.arange(first, first + len(layers))
            with jax.named_scope("layers"):
                x, made = jax.lax.scan(body, x, (layers.params, numbers))
            new.append(made)
            first += len(layers)
        piece = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *new)
        return x, jax.tree.map(lambda leaf: ops.as_it_lies(jnp.moveaxis(leaf, 0, 1)), piece)


def _apart(layers: Layers) -> list[Params]:
    """The parameters of each layer.

    Arrays on one CPU device are not copied: the layers are views of their memory.
    """

    def slices(leaf: jax.Array) -> list[jax.Array]:
        if not is_on_one_cpu(leaf):
            return list(leaf[at] for at in range(len(layers)))
        stacked = np.asarray(leaf)
        place = leaf.sharding if leaf.committed else None
        return [jax.device_put(stacked[at], place) for at in range(len(layers))]

    leaves, tree = jax.tree.flatten(layers.params)
    return [jax.tree.unflatten(tree, layer) for layer in zip(*map(slices, leaves), strict=True)]


@functools.cache
def build(config: ModelConfig) -> Network:
    """Builds the network of `config` as pure functions; calls with equal configs return the same
    `Network`.
    """
    if config.vocab_size < 1:
        raise ValueError("model.vocab_size=0 is unresolved; set it to the tokenizer's vocabulary")
    if config.has_start and config.start_id < 0:
        raise ValueError("model.start_id=-1 is unresolved; set it to the tokenizer's MASK")
    if config.attention_type == "canvas":
        return DiffusionGemma(config).functions()
    return Transformer(config).functions()
