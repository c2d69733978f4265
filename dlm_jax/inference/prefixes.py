"""Prompt caching: keys and values of prompt chunks, looked up by a digest of the tokens.

In a causal or block-causal model, the keys and values of a prefix depend only on its tokens. Keys
and values are computed in chunks of a fixed size, by one program for each canvas length. Each chunk
is cached under the digest of all tokens up to its end. Cached and newly computed keys and values
are bitwise identical.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from dlm_jax import devices
from dlm_jax.types import CachedTrunk, Params, Window

_AT_LEAST = 64


class Prefixes:
    """Keys and values of prompt chunks on every device. The least recently used chunks are evicted
    first.

    Args:
      cached: cached trunk of a causal or block-causal network.
      max_bytes: maximum total size of the chunks in bytes, on each device.
      rows: sharding of the rows; None on one device. All devices compute every chunk.

    Attributes:
      size: number of positions per chunk, a multiple of the network's block length.
      found: number of prompt positions whose keys and values were found in the cache so far.
      computed: number of prompt positions whose keys and values were computed so far.
    """

    def __init__(self, cached: CachedTrunk, max_bytes: int, rows: Sharding | None = None):
        block_length = max(1, cached.block_length)
        self.size = -(-_AT_LEAST // block_length) * block_length
        self.found = self.computed = 0
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[bytes, Any] = OrderedDict()
        self._bytes = 0
        self._init, self._piece, self._add, self._put = _programs(cached, self.size, rows)

    def fill(self, params: Params, kept: Any, slot: int, tokens: np.ndarray, canvas: int) -> Any:
        """Writes the keys and values of `tokens` to the start of a slot's row in `kept`.

        Args:
          params: parameters returned by `CachedTrunk.ready`.
          kept: the cache of all slots; donated.
          slot: index of the row.
          tokens: int32 ``[n]``, where n is a multiple of the network's block length.
          canvas: number of positions per row of `kept`.
        """
        row, digest = self._init(params, 1, canvas), np.int64(canvas).tobytes()
        size = min(self.size, canvas)
        tokens_1L = np.zeros((1, canvas), np.int32)
        tokens_1L[0, : tokens.size] = tokens
        for begin in range(0, tokens.size, size):
            end = min(begin + size, tokens.size)
            digest = hashlib.blake2b(digest + tokens_1L[0, begin:end].tobytes()).digest()
            first = np.array([min(begin, canvas - size)], np.int32)
            piece = self._pieces.get(digest)
            if piece is None:
                shown = np.where(np.arange(canvas) < end, tokens_1L, 0)
                piece = self._piece(
                    params, row, shown, first, *np.array([[begin], [end]], np.int32)
                )
                self.computed += end - begin
                if end - begin == size:
                    self._keep(digest, piece)
            else:
                self.found += end - begin
                self._pieces.move_to_end(digest)
            row = self._add(row, piece, first)
        return self._put(kept, row, np.int32(slot))

    def _keep(self, digest: bytes, piece: Any) -> None:
        self._pieces[digest] = piece
        self._bytes += _num_bytes(piece)
        while self._bytes > self._max_bytes:
            self._bytes -= _num_bytes(self._pieces.popitem(last=False)[1])


@functools.lru_cache(maxsize=16)
def _programs(
    cached: CachedTrunk, size: int, rows: Sharding | None
) -> tuple[Callable[..., Any], ...]:
    """Returns the compiled functions of a network, shared by all its `Prefixes` objects."""

    def piece(
        params: Params,
        row: Any,
        tokens_1L: jax.Array,
        first_1: jax.Array,
        begin_1: jax.Array,
        end_1: jax.Array,
    ) -> Any:
        width = min(size, tokens_1L.shape[1])
        window = Window(first_1, begin_1, end_1)
        with devices.exact(rows):
            return cached.window(params, row, None, tokens_1L, end_1, window, size=width)[1]

    def init(params: Params, num_rows: int, canvas: int) -> Any:
        with devices.used(rows):
            return cached.init(params, num_rows, canvas)

    def add(row: Any, piece: Any, first_1: jax.Array) -> Any:
        with devices.used(rows):
            return cached.store(row, piece, None, first_1)

    return (
        jax.jit(init, static_argnums=(1, 2)),
        jax.jit(piece),
        jax.jit(add, donate_argnums=0),
        jax.jit(_in_slot, donate_argnums=0),
    )


def _in_slot(kept: Any, row: Any, slot: jax.Array) -> Any:
    return jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, 0), kept, row
    )


def _num_bytes(piece: Any) -> int:
    """Bytes on each device."""
    leaves = jax.tree.leaves(piece)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
