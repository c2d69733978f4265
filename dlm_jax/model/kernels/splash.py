"""Attention with Pallas's splash kernel, which never writes the scores to main memory."""

from __future__ import annotations

import functools
import math
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
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import (
    MaskInfo,
    process_mask,
    process_mask_dkv,
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
        functools.partial(on_cores, compute),
        q_BLHK,
        k_BMGK,
        v_BMGK,
        is_live_BM,
        splits_queries=may_see is None,
    )


def on_cores(
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
    sizes = BlockSizes(
        block_q=block_q,
        block_kv=block_keys,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_keys,
        block_kv_dkv_compute=block_k,
        use_fused_bwd_kernel=True,
    )
    kernel = _kernel(MultiHeadMask([mask] * num_heads), sizes, saved, interpret)
    return with_kernel(kernel, q_BLHK, k_BMGK, v_BMGK, is_live_BM)[:, :num_queries]


def with_kernel(
    kernel: Any,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    is_live_BM: jax.Array,
    *,
    shares: tuple[float, float] = (1.0, 1.0),
) -> jax.Array:
    """The attention that a splash kernel computes on one device, ``[B, L, H, K]``.

    `shares` are the shares of the scores that the kernel computes in the forward and in the
    backward pass; they are used only in the estimates of `dlm_jax.contrib.pod_costs`.
    """
    # The kernel does not scale the scores, so the queries are scaled, in float32.
    q_BLHK = (q_BLHK.astype(jnp.float32) * q_BLHK.shape[-1] ** -0.5).astype(q_BLHK.dtype)
    q_BHLK, k_BGMK, v_BGMK = (x.swapaxes(1, 2) for x in (q_BLHK, k_BMGK, v_BMGK))
    segments = SegmentIds(
        q=jnp.ones((q_BHLK.shape[0], q_BHLK.shape[2]), jnp.int32),
        kv=is_live_BM.astype(jnp.int32),
    )
    # Estimates of the cost of a program read the shares from this name.
    scope = "scores_{}_{}_of_10000".format(*(round(1e4 * share) for share in shares))
    with jax.named_scope(scope):
        return jax.vmap(kernel)(q_BHLK, k_BGMK, v_BGMK, segments).swapaxes(1, 2)


def split_kernel(
    num_queries: int,
    num_keys: int,
    may_see: Callable[[Any, Any], Any],
    *,
    num_devices: int,
    multiple: int,
    unit: int = 1,
    saved: str | None = None,
    interpret: bool = False,
) -> tuple[Any, tuple[float, float]]:
    """A kernel for queries that are split evenly over devices, and the shares of the blocks of
    scores that a device computes in the forward and in the backward pass.

    The kernel must be sharded like the queries.

    Args:
      num_queries: number of queries of all devices.
      num_keys: number of keys, the same on all devices.
      may_see: as in `splash_attention`, for queries of all devices.
      num_devices: number of devices.
      multiple: a common divisor of the numbers of queries per device and of keys; a multiple of
        128.
      unit: squares of so many queries and keys, which need not divide `multiple`, are equal in the
        mask.
      saved: as in `splash_attention`.
      interpret: as in `splash_attention`.
    """
    block = tile_of(multiple)
    # Short blocks of queries need less on-chip memory for masks.
    block_q = block // 2 if block == _MAX_BLOCK else block
    # All heads share one mask.
    mask = MultiHeadMask([_Places((num_queries, num_keys), may_see, math.gcd(block_q, unit))])
    sizes = BlockSizes(
        block_q=block_q,
        block_kv=block,
        block_q_dkv=block_q,
        block_kv_dkv=block,
        use_fused_bwd_kernel=True,
    )
    kernel = _kernel(mask, sizes, saved, interpret, num_devices)
    given = {"downcast_smem_data": True, "head_shards": 1, "q_seq_shards": num_devices}
    # Both are in the cache of JAX.
    forward, _ = process_mask(mask, (block_q, block), **given)
    backward, _ = process_mask_dkv(mask, (block_q, block), **given, shrink_grid=False)

    def share(info: MaskInfo) -> float:
        is_computed_DN = np.asarray(info.block_mask).reshape(num_devices, -1) > 0
        most = int(is_computed_DN.sum(axis=1).max())
        return most * block_q * block * num_devices / (num_queries * num_keys)

    return kernel, (share(forward), share(backward))


def _kernel(
    mask: MultiHeadMask,
    sizes: BlockSizes,
    saved: str | None,
    interpret: bool,
    num_devices: int = 1,
) -> Any:
    return make_splash_mha(
        mask=mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=num_devices,
        residual_checkpoint_name=saved,
        interpret=interpret,
    )


def tile_of(num_positions: int) -> int:
    """The largest multiple of `_LANES`, at most `_MAX_BLOCK`, that divides `num_positions`."""
    lanes = num_positions // _LANES
    return _LANES * max(n for n in range(1, _MAX_BLOCK // _LANES + 1) if lanes % n == 0)


class _Places(Mask):
    """The mask that `may_see` defines; only partially masked blocks are materialised.

    Squares of `unit` queries and keys are known to be equal.
    """

    def __init__(self, shape: tuple[int, int], may_see: Callable[[Any, Any], Any], unit: int = 1):
        self._shape, self._may_see, self._unit = shape, may_see, unit
        # JAX reads each block several times.
        self._uniform: dict[tuple[range, range], np.ndarray] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, index: Any) -> np.ndarray:
        ends = (at.indices(size) for size, at in zip(self._shape, index, strict=True))
        query, key = (range(start, stop, self._unit) for start, stop, _ in ends)
        if (query, key) in self._uniform:
            return self._uniform[query, key]
        is_seen = np.asarray(self._may_see(np.array(query)[:, None], np.array(key)[None]))
        if is_seen.any() and not is_seen.all():
            return is_seen.repeat(self._unit, axis=0).repeat(self._unit, axis=1)
        shape = len(query) * self._unit, len(key) * self._unit
        return self._uniform.setdefault((query, key), _full(shape, bool(is_seen.any())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Places) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self._shape, self._may_see, self._unit


@functools.cache
def _full(shape: tuple[int, int], value: bool) -> np.ndarray:
    return np.full(shape, value)
