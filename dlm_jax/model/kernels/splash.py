"""Attention with Pallas's splash kernel, which never writes the scores to main memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    FullMask,
    Mask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)

from dlm_jax import devices
from dlm_jax.model.kernels.split import by_device, padded

_LANES = 128
# Tiles by the schedules of the TPU compiler (benchmarks/results/scaling.md). Tiles have twice as
# many keys without a mask: the kernel writes one partial gradient of the queries per tile of keys.
_MAX_BLOCK = 1024
_MAX_BYTES = 256


def splash_attention(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    *,
    may_see: Callable[[Any, Any], Any] | None = None,
    saved: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `dlm_jax.model.ops.attention`; each device computes its own rows and heads.

    Scores and sums are float32. Queries and keys are padded to multiples of 128. Rematerialisation
    may save the residuals under the name `saved`. With `interpret`, for tests, Pallas interprets
    the kernel, which works on any device.
    """
    compute = functools.partial(_of_rows, may_see=may_see, saved=saved, interpret=interpret)
    return by_device(
        functools.partial(_on_cores, compute),
        q_BLHK,
        k_BMGK,
        v_BMGK,
        is_live_BM,
        splits_queries=may_see is None,
    )


def _on_cores(
    compute: Callable[..., jax.Array],
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
) -> jax.Array:
    """``compute(q, k, v, is_live)``. With an odd number of rows on two cores, half the heads of a
    row make a row.

    The cores of a chip split the rows, and in the backward pass nothing else.
    """
    num_rows, num_heads = q_BLHK.shape[0], q_BLHK.shape[2]
    is_shared = devices.num_cores() == 1 or num_rows % 2 == 0
    if is_shared or num_heads % 2 or k_BMGK.shape[2] % 2:
        return compute(q_BLHK, k_BMGK, v_BMGK, is_live_BM)

    def halves(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], 2, -1, x.shape[3])
        return jnp.moveaxis(x, 2, 1).reshape(2 * num_rows, x.shape[1], *x.shape[3:])

    y = compute(*map(halves, (q_BLHK, k_BMGK, v_BMGK)), jnp.repeat(is_live_BM, 2, axis=0))
    return jnp.moveaxis(y.reshape(num_rows, 2, *y.shape[1:]), 1, 2).reshape(q_BLHK.shape)


def _of_rows(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    *,
    may_see: Callable[[Any, Any], Any] | None,
    saved: str | None,
    interpret: bool,
) -> jax.Array:
    num_queries, num_heads, head_size = q_BLHK.shape[1:]
    q_BLHK, k_BMGK, v_BMGK, is_live_BM = (
        padded(x, 1, _LANES) for x in (q_BLHK, k_BMGK, v_BMGK, is_live_BM)
    )
    shape = (q_BLHK.shape[1], k_BMGK.shape[1])
    mask = FullMask(shape) if may_see is None else _Places(shape, may_see)
    block_q, block_k = map(tile_of, shape)
    # Longer tiles of wider keys exceed the on-chip memory of the compiler's default options.
    is_long = may_see is None and head_size * k_BMGK.dtype.itemsize <= _MAX_BYTES
    block_keys = 2 * block_k if is_long and shape[1] % (2 * block_k) == 0 else block_k
    kernel = make_splash_mha(
        mask=MultiHeadMask([mask] * num_heads),
        block_sizes=BlockSizes(
            block_q=block_q,
            block_kv=block_keys,
            block_kv_compute=block_k,
            block_q_dkv=block_q,
            block_kv_dkv=block_keys,
            block_kv_dkv_compute=block_k,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=saved,
        interpret=interpret,
    )
    # The kernel does not scale the scores, so the queries are scaled, in float32.
    q_BLHK = (q_BLHK.astype(jnp.float32) * head_size**-0.5).astype(q_BLHK.dtype)
    q_BHLK, k_BGMK, v_BGMK = (x.swapaxes(1, 2) for x in (q_BLHK, k_BMGK, v_BMGK))
    segments = SegmentIds(
        q=jnp.ones((q_BHLK.shape[0], q_BHLK.shape[2]), jnp.int32),
        kv=is_live_BM.astype(jnp.int32),
    )
    y_BHLK: Any = jax.vmap(kernel)(q_BHLK, k_BGMK, v_BGMK, segments)
    return y_BHLK.swapaxes(1, 2)[:, :num_queries]


def tile_of(num_positions: int) -> int:
    """The largest multiple of `_LANES`, at most `_MAX_BLOCK`, that divides `num_positions`."""
    lanes = num_positions // _LANES
    return _LANES * max(n for n in range(1, _MAX_BLOCK // _LANES + 1) if lanes % n == 0)


class _Places(Mask):
    """The mask that `may_see` defines; only partially masked blocks are materialised."""

    def __init__(self, shape: tuple[int, int], may_see: Callable[[Any, Any], Any]):
        self._shape, self._may_see = shape, may_see

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, index: Any) -> np.ndarray:
        ends = (at.indices(size) for size, at in zip(self._shape, index, strict=True))
        query, key = (np.arange(start, stop) for start, stop, _ in ends)
        return np.asarray(self._may_see(query[:, None], key[None]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Places) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._shape, self._may_see))
