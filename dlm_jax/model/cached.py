"""The Transformer with cached keys and values, for whole rows and for windows of rows.

The cache has one leaf for keys and one for values, each ``[B, depth, G, L, K]`` in the compute
dtype: ``2 depth B L G K`` numbers in total. The products of attention read this layout in place.
Without a layout constraint, the TPU compiler would transpose the whole cache at every step. On CPU,
the layers are unrolled, and each layer has its own leaves, ``[B, G, L K]``. With shifted
predictions, the hidden vectors of all positions are also cached, ``[B, L, D]``, because the
position before a window predicts the first position of the window. A causal network with shifted
predictions needs no such vectors: position i of its cache contains the keys and values of the token
at i - 1, as if the input were shifted. Position 0 is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config import ModelConfig
from dlm_jax.devices import is_concrete, is_on_one_cpu, platform
from dlm_jax.distributed.partitions import on_own_rows
from dlm_jax.model.attention import (
    CachedLayer,
    KeyValue,
    as_it_lies,
    attend_beside_kept,
    rotary_angles,
    rows_of,
    seen_keys,
)
from dlm_jax.model.lora import stacks
from dlm_jax.types import CachedTrunk, Params, Window, left_of

# Maximum number of rows that are written in place one by one. More rows are written by one scatter
# or, on TPUs, where a scatter copies whole windows, in a loop.
_FEW = 8


def one_later(x_BLD: jax.Array, before_BD: jax.Array | None = None) -> jax.Array:
    """Shifts arrays right by one position, after `before_BD` (None repeats the first position)."""
    first_BD = x_BLD[:, 0] if before_BD is None else before_BD.astype(x_BLD.dtype)
    return jnp.concatenate([first_BD[:, None], x_BLD[:, :-1]], axis=1)


def put_at(
    axis: int, row_N: jax.Array | None, place_N: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function that writes `new` into `old` at the given rows and positions along `axis`."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if row_N is None:
            return jax.vmap(lambda o, n, p: jax.lax.dynamic_update_slice_in_dim(o, n, p, axis - 1))(
                old, new, place_N
            )
        if new.shape[0] > _FEW and platform() == "tpu":
            return jax.lax.fori_loop(0, new.shape[0], lambda n, old: one(old, new, n), old)
        if new.shape[0] > _FEW:
            place_NW = place_N[:, None] + jnp.arange(new.shape[axis])[None]
            where = (row_N[:, None], *[slice(None)] * (axis - 1), place_NW)
            return old.at[where].set(jnp.moveaxis(new, axis, 1))
        for n in range(new.shape[0]):
            old = one(old, new, n)
        return old

    def one(old: jax.Array, new: jax.Array, n: int | jax.Array) -> jax.Array:
        assert row_N is not None
        start = [jnp.zeros((), jnp.int32)] * old.ndim
        start[0], start[axis] = row_N[n], place_N[n]
        return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(new, n, 1), start)

    return put


def shifted(tokens_BL: jax.Array, start_id: int) -> jax.Array:
    """`start_id` and all tokens except the last."""
    return left_of(tokens_BL, start_id)


# Maximum depth of an unrolled network. A scan copies the parameters of each layer at every step,
# but each unrolled layer takes a quarter of a second to compile.
_UNROLLED = 48


def cached_trunk(
    config: ModelConfig,
    embed: Callable[[Params, jax.Array], jax.Array],
    block: Callable[[Any], Any],
    norm: Callable[[Params, jax.Array], jax.Array],
) -> CachedTrunk:
    """The trunk of `config` with a cache.

    `embed` returns vectors in the compute dtype; `block` maps a layer's parameters to its module.
    """
    made = _Pieces(config, embed, block, norm)
    return CachedTrunk(
        made.block_length, made.init, made.whole, made.window, made.store, made.ready
    )


@dataclass(frozen=True)
class _Pieces:
    """The functions of a `CachedTrunk`."""

    config: ModelConfig
    embed: Callable[[Params, jax.Array], jax.Array]
    block: Callable[[Any], Any]
    norm: Callable[[Params, jax.Array], jax.Array]

    @property
    def block_length(self) -> int:
        return 1 if self.config.attention_type == "causal" else self.config.block_length

    @property
    def is_unrolled(self) -> bool:
        return platform() == "cpu" and self.config.depth <= _UNROLLED

    @property
    def num_groups(self) -> int:
        return self.config.kv_heads or self.config.heads

    @property
    def head_size(self) -> int:
        return self.config.size_of_head

    @property
    def is_causal(self) -> bool:
        return self.config.attention_type == "causal"

    @property
    def hides_first(self) -> bool:
        """Whether position i of the cache is of the token at i - 1, and no token is at 0."""
        return not self.config.predicts_first

    @property
    def is_shifted(self) -> bool:
        """Whether the cache contains hidden vectors."""
        return self.config.logit_alignment == "shifted" and not self.is_causal

    def angles(self, num_positions: int) -> tuple[jax.Array, jax.Array]:
        config = self.config
        size = config.rotary_size
        return rotary_angles(num_positions, size, config.rope_theta, config.rope_scaling)

    def init(self, params: Params, num_rows: int, num_positions: int) -> Any:
        del params
        config = self.config
        shape = (num_rows, config.depth, self.num_groups, num_positions, self.head_size)
        if self.is_unrolled:
            shape = (num_rows, self.num_groups, num_positions * self.head_size)

        def zeros() -> KeyValue:
            dtype = jnp.dtype(config.compute_dtype)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

        kept = tuple(zeros() for _ in range(config.depth)) if self.is_unrolled else zeros()
        if not self.is_shifted:
            return kept
        said = jnp.zeros((num_rows, num_positions, config.width), jnp.dtype(config.compute_dtype))
        return kept, said

    def whole(
        self, params: Params, tokens_NL: jax.Array, length_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        turns = self.angles(tokens_NL.shape[1])

        def layer(x_NLD: jax.Array, block: Params, kept: Any) -> tuple[jax.Array, KeyValue]:
            del kept
            module, made = self.block(block), []

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                own = (one_later(k), one_later(v)) if self.hides_first else (k, v)
                made.append((self._as_kept(own[0]), self._as_kept(own[1])))
                return module.attention.attend(q, k, v, length_N)

            return module.around(x_NLD, turns, attend), made[0]

        if self.config.has_start:
            tokens_NL = shifted(tokens_NL, self.config.start_id)
        x_NLD = self.embed(params, tokens_NL)
        x_NLD, piece = self._through(layer, x_NLD, params, None)
        x_NLD = self.norm(params, x_NLD)
        if self.is_shifted:
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
        num_positions = tokens_NL.shape[1]
        num_seen = num_positions if num_seen is None else num_seen
        place_NW = window.place_N[:, None] + jnp.arange(size)[None]
        at_NW = jnp.maximum(place_NW - 1, 0) if self.hides_first else place_NW
        turns = tuple(table_LK[at_NW] for table_LK in self.angles(num_positions))
        seen = seen_keys(
            window,
            place_NW,
            length_N,
            num_seen,
            block_length=self.block_length,
            num_shared=self.config.heads // self.num_groups,
            first=int(self.hides_first),
        )

        def layer(x_NWD: jax.Array, block: Params, kept: Any) -> tuple[jax.Array, KeyValue]:
            module, made, old = self.block(block), [], kept
            if self.is_unrolled:
                old = kept if row_N is None else on_own_rows(rows_of, kept, row_N)
                old = self._seen(old[0], num_seen), self._seen(old[1], num_seen)
            else:
                leaves, at = kept
                old = CachedLayer(leaves, at, row_N, num_seen)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                made.append((self._as_kept(k), self._as_kept(v)))
                return attend_beside_kept(q, old, (by_group(k), by_group(v)), seen)

            return module.around(x_NWD, turns, attend), made[0]

        if self.is_causal:
            tokens_NL = shifted(tokens_NL, max(self.config.start_id, 0))
        tokens_NW = jnp.take_along_axis(tokens_NL, place_NW, axis=1)
        x_NWD = self.embed(params, tokens_NW)
        layers, said_BLD = kept if self.is_shifted else (kept, None)
        x_NWD, piece = self._through(layer, x_NWD, params, layers)
        x_NWD = self.norm(params, x_NWD)
        if not self.is_shifted:
            return x_NWD, piece
        before_N = jnp.maximum(window.place_N - 1, 0)
        rows_N = jnp.arange(before_N.size) if row_N is None else row_N

        def said(said_BLD: jax.Array, row_N: jax.Array, before_N: jax.Array) -> jax.Array:
            return said_BLD[row_N % said_BLD.shape[0], before_N]

        before_ND = jnp.where(
            (window.place_N > 0)[:, None],
            on_own_rows(said, said_BLD, rows_N, before_N),
            x_NWD[:, 0],
        )
        return one_later(x_NWD, before_ND), (piece, x_NWD)

    def store(self, kept: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        if self.is_shifted:
            (layers, said_BLD), (new, new_BLD) = kept, piece
            said_BLD = put_at(1, row_N, place_N)(said_BLD, new_BLD)
            return self._put(layers, new, row_N, place_N), said_BLD
        return self._put(kept, piece, row_N, place_N)

    def _put(self, kept: Any, piece: Any, row_N: jax.Array | None, place_N: jax.Array) -> Any:
        if self.is_unrolled:
            return jax.tree.map(put_at(2, row_N, place_N * self.head_size), kept, piece)
        return jax.tree.map(put_at(3, row_N, place_N), kept, piece)

    def _as_kept(self, made_NWGK: jax.Array) -> jax.Array:
        """A layer's keys or values in the shape of the cache."""
        made_NGWK = by_group(made_NWGK)
        if not self.is_unrolled:
            return made_NGWK
        return made_NGWK.reshape(*made_NGWK.shape[:2], -1)

    def _seen(self, kept: jax.Array, num_seen: int) -> jax.Array:
        """The first `num_seen` positions of a layer of an unrolled cache, ``[N, G, S, K]``."""
        return kept.reshape(*kept.shape[:2], -1, self.head_size)[:, :, :num_seen]

    def ready(self, params: Params) -> Params:
        if not self.is_unrolled or "layers" in params:
            return params
        layers = tuple(layer for blocks in stacks(params) for layer in _layers_of(blocks))
        if not all(map(is_concrete, jax.tree.leaves(layers))):
            # The barrier ensures that the layers are sliced once, not at every step.
            layers = jax.lax.optimization_barrier(layers)
        return params | {"layers": layers}

    def _through(
        self,
        layer: Callable[..., tuple[jax.Array, KeyValue]],
        x: jax.Array,
        params: Params,
        kept: Any,
    ) -> tuple[jax.Array, Any]:
        """Hidden vectors after all layers, and each layer's keys and values in the cache layout.

        ``layer`` receives its part of an unrolled cache, or the cache and the layer's index.
        """
        if self.is_unrolled:
            layers, found = self.ready(params)["layers"], []
            # All layers share one trace. The compiler inlines its calls.
            layer = jax.jit(layer)
            for at, block in enumerate(layers):
                x, made = layer(x, block, None if kept is None else kept[at])
                found.append(made)
            return x, tuple(found)

        def body(x: jax.Array, at_layer: tuple[Params, jax.Array]) -> tuple[jax.Array, KeyValue]:
            block, at = at_layer
            return layer(x, block, None if kept is None else (kept, at))

        pieces, first = [], 0
        for blocks in stacks(params):
            last = first + blocks["mlp_norm"]["scale"].shape[0]
            with jax.named_scope("layers"):
                x, made = jax.lax.scan(body, x, (blocks, jnp.arange(first, last)))
            pieces.append(made)
            first = last
        made = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *pieces)
        return x, jax.tree.map(lambda leaf: as_it_lies(jnp.moveaxis(leaf, 0, 1)), made)


def _layers_of(blocks: Params) -> list[Params]:
    """The parameters of each layer of a stack.

    Arrays on one CPU device are not copied: the layers are views of their memory.
    """
    depth = blocks["mlp_norm"]["scale"].shape[0]

    def sliced(leaf: jax.Array) -> list[jax.Array]:
        if not is_on_one_cpu(leaf):
            return [leaf[at] for at in range(depth)]
        stacked = np.asarray(leaf)
        place = leaf.sharding if leaf.committed else None
        return [jax.device_put(stacked[at], place) for at in range(depth)]

    leaves, tree = jax.tree.flatten(blocks)
    return [jax.tree.unflatten(tree, layer) for layer in zip(*map(sliced, leaves), strict=True)]


def by_group(x_BLGK: jax.Array) -> jax.Array:
    return x_BLGK.transpose(0, 2, 1, 3)
