"""The Transformer, for whole rows and for windows of rows beside cached keys and values.

With shifted predictions, the hidden vectors of all positions are also cached, ``[B, L, D]``,
because the position before a window predicts the first position of the window. A causal network
with shifted predictions needs no such vectors: position i of its cache contains the keys and values
of the token at i - 1, as if the input were shifted. Position 0 is hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.config import ModelConfig
from dlm_jax.distributed.partitions import on_own_rows, pin
from dlm_jax.heads import HEADS
from dlm_jax.model import ops
from dlm_jax.model.diffusion_gemma import DiffusionGemma
from dlm_jax.model.layers import Attention, Mlp, Norm
from dlm_jax.model.lora import stacks_of
from dlm_jax.model.moe import Experts
from dlm_jax.model.trunk import Trunk
from dlm_jax.types import (
    CachedTrunk,
    Inside,
    Network,
    Params,
    Window,
    left_of,
    live_positions,
    text_starts,
)


class Block(nnx.Module):
    """A pre-norm block: attention, then an MLP or experts, each added to its input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_dense: bool):
        self.attention_norm, self.mlp_norm = Norm(config), Norm(config)
        self.attention = Attention(config, rngs=rngs)
        mlp: Any = Experts if config.experts and not is_dense else Mlp
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, angles: Any, attend: Callable[..., Any]) -> jax.Array:
        """Hidden vectors after the block, ``[B, L, D]``; see `Attention.__call__`."""
        x_BLD = pin(x_BLD, "hidden")
        y_BLD = self.attention(self.attention_norm(x_BLD), angles, attend)
        x_BLD = checkpoint_name(x_BLD + y_BLD, "middle")
        return pin(x_BLD + self.mlp(self.mlp_norm(x_BLD)), "hidden")


@dataclass(frozen=True)
class InBlocks:
    """A position attends to its own block of `length` positions and to all earlier blocks."""

    length: int

    def __call__(self, query: Any, key: Any) -> Any:
        return key // self.length <= query // self.length


@dataclass(frozen=True)
class BesideClean:
    """Noisy positions attend to their own noisy block and to all earlier clean blocks."""

    length: int
    num_positions: int

    def __call__(self, query: Any, key: Any) -> Any:
        is_noisy = key < self.num_positions
        is_own = key // self.length == query // self.length
        is_before = (key - self.num_positions) // self.length < query // self.length
        return (is_noisy & is_own) | (~is_noisy & is_before)


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
        num_positions = tokens_BL.shape[1]
        angles, place_L = self.angles(num_positions), jnp.arange(num_positions)
        hidden, maps = [self.embed(params, self.inputs(tokens_BL))], []
        is_seen_B1LL = live_positions(jnp.maximum(length_B, 1), num_positions)[:, None, None]
        if self.may_see is not None:
            is_seen_B1LL = is_seen_B1LL & self.may_see(place_L[:, None], place_L[None])[None, None]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
            scores_BHLL = jnp.einsum("blhk,bmhk->bhlm", q, k).astype(jnp.float32)
            scores_BHLL = jnp.where(is_seen_B1LL, scores_BHLL / math.sqrt(q.shape[-1]), -jnp.inf)
            maps.append(jax.nn.softmax(scores_BHLL))
            return jnp.einsum("bhlm,bmhk->blhk", maps[-1].astype(v.dtype), v)

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
        """`Network.beside_clean`: a noisy and a clean stream of the same rows.

        A noisy position attends to the noisy positions of its block and the clean positions of
        earlier blocks. A clean position attends to the clean positions of its own and earlier
        blocks (Arriola et al. 2025, Block diffusion, section 3.1). The streams are concatenated
        along the row axis, ``[2 B, L, ...]``, and have the same lengths.
        """
        half, num_positions = shown_BL.shape
        blocks = InBlocks(block_length or self.block_length)
        beside = BesideClean(blocks.length, num_positions)

        def attend(_: str, q: jax.Array, k: jax.Array, v: jax.Array, length_B: Any) -> jax.Array:
            both_k, both_v = (jnp.concatenate([x[:half], x[half:]], axis=1) for x in (k, v))
            noisy = ops.attention(q[:half], both_k, both_v, length_B, may_see=beside)
            clean = ops.attention(q[half:], k[half:], v[half:], length_B, may_see=blocks)
            return jnp.concatenate([noisy, clean])

        x = self.embed(params, jnp.concatenate([shown_BL, clean_BL]))
        x = self.run_layers(params, x, self.angles(num_positions), attend, length_B)
        return self.outputs(params, x[:half])

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
        num_positions, block = tokens_NL.shape[1], self.block_length
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        at_NW = jnp.maximum(place_NW - 1, 0) if self.hides_first else place_NW
        angles = jax.tree.map(lambda x_LK: x_LK[at_NW], self.angles(num_positions))
        attend = self.attend_beside(
            window,
            place_NW,
            length_N,
            row_N,
            num_positions if num_seen is None else num_seen,
            lambda name, query, key: not block or key // block <= query // block,
            first=int(self.hides_first),
        )
        if self.is_causal:
            tokens_NL = left_of(tokens_NL, max(self.config.start_id, 0))
        x_NWD = self.embed(params, jnp.take_along_axis(tokens_NL, place_NW, axis=1))
        layers, hidden_BLD = cache if self.caches_hidden else (cache, None)
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
