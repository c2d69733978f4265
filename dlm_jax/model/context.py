"""Attention of a noisy and a clean stream whose positions are split over the axis ``context``.

A device has the same positions of both streams. Clean keys and values are gathered. Noisy keys and
values stay on their device, because a noisy position attends only to the noisy positions of its own
block (Arriola et al. 2025, Block diffusion, section 3.1).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dlm_jax.devices import mesh_in_use
from dlm_jax.distributed.partitions import PLACES, fitting, with_trivial
from dlm_jax.model import ops

AXIS = "context"
_GROUPS = 8


@dataclass(frozen=True)
class RowPieces:
    """The positions of each device along ``context``: one piece of the front half of a row and the
    mirrored piece of the back half.

    Later positions attend to more keys. With two such pieces, all devices have equal work.
    """

    num_positions: int
    count: int

    @property
    def own(self) -> int:
        """Number of positions of one device."""
        return self.num_positions // self.count

    def position(self, index: Any) -> Any:
        """The position in the row of each index of an arranged row; NumPy or JAX integers."""
        device, within = index // self.own, index % self.own
        half = self.own // 2
        is_back = within // half
        return (device + is_back * (2 * self.count - 1 - 2 * device)) * half + within % half

    def key_index(self, device: Any, key: Any) -> Any:
        """The index in an arranged row of each key of a device; see `BesideGathered`."""
        return key + (key >= self.num_positions) * (device - self.count) * self.own


@dataclass(frozen=True)
class BesideGathered:
    """Which keys the queries of a device attend to; a `dlm_jax.model.ops.MaySee`.

    The queries of a device are its noisy positions followed by its clean positions; those of all
    devices are concatenated. The keys are the clean positions of all devices, followed by the
    noisy positions of the query's device.
    """

    block_length: int
    pieces: RowPieces

    def __call__(self, query: Any, key: Any) -> Any:
        pieces = self.pieces
        device, within = query // (2 * pieces.own), query % (2 * pieces.own)
        own = device * pieces.own + within % pieces.own
        query_block = pieces.position(own) // self.block_length
        key_block = pieces.position(pieces.key_index(device, key)) // self.block_length
        is_noisy_query, is_clean_key = within < pieces.own, key < pieces.num_positions
        is_seen = (key_block < query_block) & is_clean_key
        return is_seen | ((key_block == query_block) & (is_noisy_query ^ is_clean_key))


def pieces_of(num_positions: int, block_length: int) -> RowPieces | None:
    """The pieces of rows on the mesh in use; None if the mesh does not split rows, if the pieces
    are not multiples of the block length, or if the kernel cannot split the mask.
    """
    mesh = mesh_in_use()
    count = 1 if mesh is None else mesh.shape.get(AXIS, 1)
    if count == 1 or num_positions % (2 * count * block_length):
        return None
    pieces = RowPieces(num_positions, count)
    if ops.uses_splash(pieces.own // 2):
        from dlm_jax.model.kernels.splash import tile_of

        # JAX cannot split a mask without a partially visible tile.
        return None if block_length % tile_of(pieces.own // 2) == 0 else pieces
    return pieces


def paired(noisy_BL: jax.Array, clean_BL: jax.Array, pieces: RowPieces) -> jax.Array:
    """Both streams as alternating rows ``[2 B, L]`` of arranged positions.

    A device has both streams of its rows.
    """
    position_L = pieces.position(np.arange(pieces.num_positions))
    streams_B2L = jnp.stack([noisy_BL, clean_BL], axis=1)[:, :, position_L]
    return streams_B2L.reshape(-1, pieces.num_positions)


def noisy_in_order(x_PLD: jax.Array, pieces: RowPieces) -> jax.Array:
    """The noisy rows of `paired` rows, with positions in the order of the row, ``[B, L, D]``.

    Each device sends its two pieces to the devices that have them in this order.
    """
    mesh = mesh_in_use()
    assert mesh is not None
    x_BLD = x_PLD.reshape(-1, 2, *x_PLD.shape[1:])[:, 0]
    spec = with_trivial(fitting(PLACES["hidden"], x_BLD.shape, mesh), mesh)
    count = pieces.count

    def of_device(x_BCD: jax.Array) -> jax.Array:
        front, back = jnp.split(x_BCD, 2, axis=1)
        is_even = jax.lax.axis_index(AXIS) % 2 == 0
        # One of the numbers of the pieces, n and 2 count - 1 - n, is even.
        even, odd = jnp.where(is_even, front, back), jnp.where(is_even, back, front)
        numbers = [(n, 2 * count - 1 - n) for n in range(count)]
        to_even = [(n, min(pair, key=lambda at: at % 2) // 2) for n, pair in enumerate(numbers)]
        to_odd = [(n, max(pair, key=lambda at: at % 2) // 2) for n, pair in enumerate(numbers)]
        sent = jax.lax.ppermute(even, AXIS, to_even), jax.lax.ppermute(odd, AXIS, to_odd)
        return jnp.concatenate(sent, axis=1)

    return jax.shard_map(of_device, in_specs=(spec,), out_specs=spec, check_vma=False)(x_BLD)


def attend_beside_gathered(
    q_PLHK: jax.Array,
    k_PLGK: jax.Array,
    v_PLGK: jax.Array,
    length_B: jax.Array,
    *,
    block_length: int,
    pieces: RowPieces,
) -> jax.Array:
    """`dlm_jax.model.attention.attend_beside_clean` for `paired` rows, ``[2 B, L, H, K]``."""
    mesh, num_heads = mesh_in_use(), q_PLHK.shape[2]
    assert mesh is not None
    if k_PLGK.shape[2] % mesh.shape.get("tensor", 1):
        k_PLGK, v_PLGK = (jnp.repeat(x, num_heads // x.shape[2], axis=2) for x in (k_PLGK, v_PLGK))
    q, k, v = (x.reshape(-1, 2, *x.shape[1:]) for x in (q_PLHK, k_PLGK, v_PLGK))
    place = fitting(PLACES["queries"], (q.shape[0], *q_PLHK.shape[1:]), mesh)
    rows, positions, heads, _ = with_trivial(place, mesh)
    spec, may_see = P(rows, None, positions, heads, None), BesideGathered(block_length, pieces)
    kernel, shares = None, (1.0, 1.0)
    if ops.uses_splash(pieces.own // 2):
        kernel, shares = splash_kernel(may_see)

    def of_device(
        kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, length_B: jax.Array
    ) -> jax.Array:
        device = jax.lax.axis_index(AXIS)
        key_M = pieces.key_index(device, jnp.arange(pieces.num_positions + pieces.own))
        is_live_BM = pieces.position(key_M)[None] < jnp.maximum(length_B, 1)[:, None]

        def of_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k, v = (
                checkpoint_name(jnp.concatenate([_from_all(x[:, 1]), x[:, 0]], axis=1), "gathered")
                for x in (k, v)
            )
            given = q.reshape(q.shape[0], -1, *q.shape[3:]), k, v, is_live_BM
            if kernel is None:
                first = device * given[0].shape[1]
                y = ops.formula_attention(
                    *given, may_see=lambda query, key: may_see(first + query, key)
                )
            else:
                from dlm_jax.model.kernels.splash import on_cores, with_kernel

                y = on_cores(functools.partial(with_kernel, kernel, shares=shares), *given)
            return y.reshape(q.shape)

        # The keys of a group of heads travel while the previous group is computed.
        num_groups = 1 if kernel is None else math.gcd(k.shape[3] // 2 or 1, _GROUPS)
        groups = (jnp.split(x, num_groups, axis=3) for x in (q, k, v))
        return jnp.concatenate([*map(of_heads, *groups)], axis=3)

    split = NamedSharding(mesh, P(None, AXIS))
    kernel_spec = None if kernel is None else kernel.manual_sharding_spec(split)
    y = jax.shard_map(
        of_device,
        in_specs=(kernel_spec, spec, spec, spec, P(rows)),
        out_specs=spec,
        check_vma=False,
    )(kernel, q, k, v, length_B)
    return y.reshape(q_PLHK.shape)


@jax.custom_vjp
def _from_all(x_BCGK: jax.Array) -> jax.Array:
    """The positions of all devices along ``context``, in the order of the devices.

    It has its own gradient because of the TPU compiler; see `_summed`.
    """
    return jax.lax.all_gather(x_BCGK, AXIS, axis=1, tiled=True)


def _summed(_: None, g_BMGK: jax.Array) -> tuple[jax.Array]:
    """The sum of the gradients of all devices at the positions of this device.

    Heads are summed one at a time, with the devices along the first axis. The TPU compiler turns
    other reduce-scatters into all-reduces, which send twice as much.
    """
    count = jax.lax.axis_size(AXIS)

    def of_head(g_BMK: jax.Array) -> jax.Array:
        g_BNCK = g_BMK.reshape(g_BMK.shape[0], count, -1, g_BMK.shape[2])
        return jax.lax.psum_scatter(jnp.moveaxis(g_BNCK, 1, 0), AXIS)

    heads = [of_head(g_BMGK[:, :, head]) for head in range(g_BMGK.shape[2])]
    return (jnp.stack(heads, axis=2),)


_from_all.defvjp(lambda x_BCGK: (_from_all(x_BCGK), None), _summed)


def splash_kernel(
    may_see: BesideGathered, *, interpret: bool = False
) -> tuple[Any, tuple[float, float]]:
    """The kernel for the queries of all devices, and the shares of the scores it computes."""
    from dlm_jax.model.kernels.splash import split_kernel

    pieces = may_see.pieces
    return split_kernel(
        2 * pieces.num_positions,
        pieces.num_positions + pieces.own,
        may_see,
        num_devices=pieces.count,
        multiple=pieces.own // 2,
        unit=may_see.block_length,
        saved=ops.SAVED,
        interpret=interpret,
    )
