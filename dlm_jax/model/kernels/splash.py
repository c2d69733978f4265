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
    make_splash_mha_single_device,
)

from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.partitions import PLACES, fitting

_LANES = 128
# Of 512, 1024 and 2048 positions per block, 1024 is fastest according to the TPU compiler's
# estimates.
_MAX_BLOCK = 1024


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
    """Computes `dlm_jax.model.attention.attention`; each device computes its own rows and heads.

    Scores and sums are float32. Queries and keys are padded to multiples of 128.

    Args:
      q_BLHK: queries.
      k_BMGK: keys.
      v_BMGK: values.
      is_live_BM: True at live keys.
      may_see: as in `attention`.
      saved: name under which rematerialisation may save the residuals.
      interpret: whether Pallas interprets the kernel, which works on any device; for tests.
    """
    mesh = mesh_in_use()
    compute = functools.partial(_of_rows, may_see=may_see, saved=saved, interpret=interpret)
    if mesh is None:
        return compute(q_BLHK, k_BMGK, v_BMGK, is_live_BM)
    if k_BMGK.shape[2] % mesh.shape.get("tensor", 1):
        num_shared = q_BLHK.shape[2] // k_BMGK.shape[2]
        k_BMGK, v_BMGK = (jnp.repeat(x, num_shared, axis=2) for x in (k_BMGK, v_BMGK))
    queries = fitting(PLACES["queries"], q_BLHK.shape, mesh)
    keys = fitting(PLACES["keys"], k_BMGK.shape, mesh)
    rows = fitting(PLACES["rows"], is_live_BM.shape, mesh)
    split = jax.shard_map(
        compute, in_specs=(queries, keys, keys, rows), out_specs=queries, check_vma=False
    )
    return split(q_BLHK, k_BMGK, v_BMGK, is_live_BM)


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
    # The kernel does not scale the scores, so the queries are scaled, in float32.
    q_BLHK = (q_BLHK.astype(jnp.float32) * head_size**-0.5).astype(q_BLHK.dtype)
    q_BHLK, k_BGMK, v_BGMK = (_padded(x).swapaxes(1, 2) for x in (q_BLHK, k_BMGK, v_BMGK))
    kernel = _kernel(num_heads, q_BHLK.shape[2], k_BGMK.shape[2], may_see, saved, interpret)
    segments = SegmentIds(
        q=jnp.ones((q_BHLK.shape[0], q_BHLK.shape[2]), jnp.int32),
        kv=_padded(is_live_BM).astype(jnp.int32),
    )
    y_BHLK = jax.vmap(kernel)(q_BHLK, k_BGMK, v_BGMK, segments)
    return y_BHLK.swapaxes(1, 2)[:, :num_queries]


def _padded(x: jax.Array) -> jax.Array:
    """`x` padded with zeros along the second axis to a multiple of `_LANES`."""
    missing = -x.shape[1] % _LANES
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))


def _kernel(
    num_heads: int,
    num_queries: int,
    num_keys: int,
    may_see: Callable[[Any, Any], Any] | None,
    saved: str | None,
    interpret: bool,
) -> Any:
    shape = (num_queries, num_keys)
    mask = FullMask(shape) if may_see is None else _Places(shape, may_see)
    block_q, block_k = _block(num_queries), _block(num_keys)
    return make_splash_mha_single_device(
        mask=MultiHeadMask([mask] * num_heads),
        block_sizes=BlockSizes(
            block_q=block_q,
            block_kv=block_k,
            block_q_dkv=block_q,
            block_kv_dkv=block_k,
            use_fused_bwd_kernel=True,
        ),
        residual_checkpoint_name=saved,
        interpret=interpret,
    )


def _block(num_positions: int) -> int:
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
        query, key = (np.arange(size)[at] for size, at in zip(self._shape, index, strict=True))
        return np.asarray(self._may_see(query[:, None], key[None]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Places):
            return NotImplemented
        return (self._shape, self._may_see) == (other._shape, other._may_see)

    def __hash__(self) -> int:
        return hash((self._shape, self._may_see))
