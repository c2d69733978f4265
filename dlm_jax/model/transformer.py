"""The Transformer, for whole rows and for windows of rows beside cached keys and values.

With shifted predictions, the hidden vectors of all positions are also cached, ``[B, L, D]``,
because the position before a window predicts the first position of the window. A causal network
with shifted predictions needs no such vectors: position i of its cache contains the keys and values
of the token at i - 1, as if the input were shifted. Position 0 is hidden.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import on_own_rows
from dlm_jax.heads import HEADS
from dlm_jax.model import ops
from dlm_jax.model.attention import InBlocks, attend_beside_clean, attention_weights, seen_keys
from dlm_jax.model.diffusion_gemma import DiffusionGemma
from dlm_jax.model.lora import stacks_of
from dlm_jax.model.moe import Block
from dlm_jax.model.trunk import Trunk
from dlm_jax.types import CachedTrunk, Inside, Network, Params, Window, left_of, text_starts


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

    def block(self, name: str, rngs: nnx.Rngs) -> Block:
        return Block(self.config, rngs=rngs, is_dense=name == "dense_blocks")

    def __call__(
        self, params: Params, tokens_BL: jax.Array, length_B: jax.Array, cache: None = None
    ) -> tuple[jax.Array, None]:
        """`Network.trunk`."""

        def attend(_: str, *qkv_and_length: jax.Array) -> jax.Array:
            return ops.attention(*qkv_and_length, may_see=self.may_see)

        angles, is_first_BL = self.angles(tokens_BL.shape[1]), None
        if length_B.ndim == 2:  # packed texts
            num_positions = tokens_BL.shape[1]
            place_BL = jnp.arange(num_positions)[None] - text_starts(length_B, num_positions)
            angles, is_first_BL = jax.tree.map(lambda x_LK: x_LK[place_BL], angles), place_BL == 0
        x_BLD = self.embed(params, self.inputs(tokens_BL, is_first_BL))
        x_BLD = self.run_layers(params, x_BLD, angles, attend, length_B)
        return self.outputs(params, x_BLD, is_first_BL), cache

    @property
    def block_length(self) -> int:
        return 1 if self.is_causal else self.config.block_length

    @property
    def may_see(self) -> ops.MaySee | None:
        """What the positions of a row attend to; None means all positions."""
        if self.config.block_length:
            return InBlocks(self.config.block_length)
        return ops.causal if self.is_causal else None

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
            block_length=self.block_length,
            init=self.init_cache,
            whole=self.whole,
            window=self.window,
            store=self.store,
            ready=self.ready,
        )
        heads = {
            name: HEADS[name].function(
                self.config,
                lambda params, key=f"{name}_head": self.module(key, params[key]),
                self.readout,
            )
            for name in self.config.added_heads
        }
        return self.network(
            trunk=self.__call__,
            cached=cached,
            beside_clean=self.beside_clean if self.block_length > 1 else None,
            inside=self.inside,
            heads=heads,
            predicts_first=self.config.predicts_first,
            packs=self.block_length <= 1,
        )

    def inputs(self, tokens_BL: jax.Array, is_first_BL: jax.Array | None = None) -> jax.Array:
        """The tokens at the input: in a causal network, those before each position.

        `is_first_BL` is True at the first position of each text; None means that of the row.
        """
        if not self.config.has_start:
            return tokens_BL
        before_BL = left_of(tokens_BL, self.config.start_id)
        if is_first_BL is None:
            return before_BL
        return jnp.where(is_first_BL, self.config.start_id, before_BL)

    def outputs(
        self, params: Params, x_BLD: jax.Array, is_first_BL: jax.Array | None = None
    ) -> jax.Array:
        """The final norm, aligned with the positions that are predicted."""
        x_BLD = self.norm(params, x_BLD)
        if self.config.logit_alignment != "shifted":
            return x_BLD
        before_BLD = one_later(x_BLD)
        if is_first_BL is None:
            return before_BLD
        return jnp.where(is_first_BL[:, :, None], x_BLD, before_BLD)

    def inside(self, params: Params, tokens_BL: jax.Array, length_B: jax.Array) -> Inside:
        """`Network.inside`: the blocks one by one, with plain attention."""
        angles = self.angles(tokens_BL.shape[1])
        hidden, maps = [self.embed(params, self.inputs(tokens_BL))], []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            maps.append(attention_weights(q, k, length_B, self.may_see))
            v_BLHK = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
            return jnp.einsum("bhlm,bmhk->blhk", maps[-1].astype(v.dtype), v_BLHK)

        for name, stack in stacks_of(params).items():
            for one in ops.slices(stack):
                hidden.append(self.run_block(name, one, hidden[-1], angles[name], attend))
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

        def attend(_: str, *qkv_and_length: jax.Array) -> jax.Array:
            return attend_beside_clean(*qkv_and_length, block_length=block_length)

        angles = self.angles(shown_BL.shape[1])
        x = self.embed(params, jnp.concatenate([shown_BL, clean_BL]))
        x = self.run_layers(params, x, angles, attend, length_B)
        return self.outputs(params, x[: shown_BL.shape[0]])

    def init_cache(self, params: Params, num_rows: int, num_positions: int) -> Any:
        """`CachedTrunk.init`."""
        config, cache = self.config, super().init_cache(params, num_rows, num_positions)
        if not self.caches_hidden:
            return cache
        return cache, jnp.zeros((num_rows, num_positions, config.width), config.compute_dtype)

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.whole`."""

        def attend(_: str, __: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            y = ops.attention(q, k, v, length_N, may_see=self.may_see)
            return (y, one_later(k), one_later(v)) if self.hides_first else (y, k, v)

        x_NLD = self.embed(params, self.inputs(tokens_NL))
        x_NLD, piece = self.run_cached(params, x_NLD, self.angles(tokens_NL.shape[1]), attend)
        if self.caches_hidden:
            return one_later(x_NLD), (piece, x_NLD)
        return one_later(x_NLD) if self.hides_first else x_NLD, piece

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
    ) -> tuple[jax.Array, Any]:
        """`CachedTrunk.window`."""
        config, num_positions, block = self.config, tokens_NL.shape[1], self.block_length
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        at_NW = jnp.maximum(place_NW - 1, 0) if self.hides_first else place_NW
        angles = jax.tree.map(lambda x_LK: x_LK[at_NW], self.angles(num_positions))
        seen = seen_keys(
            window,
            place_NW,
            length_N,
            num_positions if num_seen is None else num_seen,
            sees=lambda query, key: not block or key // block <= query // block,
            num_shared=config.heads // (config.kv_heads or config.heads),
            first=int(self.hides_first),
        )
        if self.is_causal:
            tokens_NL = left_of(tokens_NL, max(config.start_id, 0))
        x_NWD = self.embed(params, jnp.take_along_axis(tokens_NL, place_NW, axis=1))
        layers, hidden_BLD = cache if self.caches_hidden else (cache, None)
        attend = self.attend_beside(row_N, dict.fromkeys(angles, seen))
        x_NWD, piece = self.run_cached(params, x_NWD, angles, attend, layers)
        if not self.caches_hidden:
            return x_NWD, piece
        before_N = jnp.maximum(window.place_N - 1, 0)
        before_ND = on_own_rows(
            lambda hidden_BLD, row_N, at_N: hidden_BLD[row_N % hidden_BLD.shape[0], at_N],
            hidden_BLD,
            jnp.arange(before_N.size) if row_N is None else row_N,
            before_N,
        )
        before_ND = jnp.where((window.place_N > 0)[:, None], before_ND, x_NWD[:, 0])
        return one_later(x_NWD, before_ND), (piece, x_NWD)

    def store(self, cache: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        """`CachedTrunk.store`."""
        if not self.caches_hidden:
            return super().store(cache, piece, row_N, place_N)
        (cache, hidden_BLD), (piece, new_BLD) = cache, piece
        hidden_BLD = ops.write_rows(hidden_BLD, new_BLD, axis=1, row_N=row_N, place_N=place_N)
        return super().store(cache, piece, row_N, place_N), hidden_BLD


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
