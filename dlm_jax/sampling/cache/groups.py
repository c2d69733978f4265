"""Rows that a pass is run for, in groups of a fixed size: a row comes out the same in any of them.

A row is computed beside as many others as there always are, whoever they are and however many are
due, so that what it gets does not depend on them. Where rows are split over devices, a group holds
as many of each, and all devices run it together: the layers of a model whose parameters are split
are gathered one by one, as in any other forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform

Carry = TypeVar("Carry")
Rows = TypeVar("Rows")

_HUGE = 3e38
# Positions of one pass: a CPU is busy with few, an accelerator wants many.
_CPU_POSITIONS = 256
_ACCELERATOR_POSITIONS = 8192


def group_size(num_rows: int, num_positions: int) -> int:
    """Rows of a group whose passes have so many positions."""
    is_cpu = platform() == "cpu"
    wanted = (_CPU_POSITIONS if is_cpu else _ACCELERATOR_POSITIONS) // num_positions
    return max(1, min(wanted, num_rows))


def in_groups(
    by_rows: Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]],
    is_due_B: jax.Array,
    num_positions: int,
    compute: Callable[[Carry, Rows, jax.Array], Any],
    put: Callable[[Carry, Any, jax.Array], Carry],
    carry: Carry,
    rows: Rows,
) -> Carry:
    """`carry` with what is computed of the due rows put into it, group by group.

    Nothing runs where no row of any device is due. A group that is not full holds its first row
    several times.

    Args:
      by_rows: `Program.by_rows`.
      is_due_B: which rows are.
      num_positions: of a row that a pass computes.
      compute: ``(carry, rows_N, row_N) -> made`` for the rows of a group and their numbers: the
        pass. Each device's part of `row_N` are numbers of its own rows.
      put: ``(carry, made, row_N) -> carry``, on each device with its own parts alone, in which the
        rows have the numbers `row_N`.
      carry: a pytree of rows.
      rows: what a pass reads, a pytree of rows.
    """

    def ordered(_: Any, is_due_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_rows = is_due_B.shape[0]
        size, num_due = group_size(num_rows, num_positions), jnp.sum(is_due_B)
        (row_B,) = jnp.nonzero(is_due_B, size=num_rows, fill_value=0)
        place_P = jnp.arange(-(-num_rows // size) * size)
        first_P = place_P // size * size
        row_P = row_B[jnp.where(place_P < num_due, place_P, first_P) % num_rows]
        return num_due[None], row_P.astype(jnp.int32).reshape(1, -1, size)

    num_due_S, own_SGN = by_rows(ordered)((), is_due_B)
    num_shares, _, size = own_SGN.shape
    num_own = is_due_B.shape[0] // num_shares
    most = jnp.max(num_due_S)

    def one(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        # Behind a barrier: of a single row the compiler would know the place, take the pass out of
        # the loop, and run it where none is due.
        (first, carry), mine = jax.lax.optimization_barrier((state, rows))
        own_SN = jax.lax.dynamic_index_in_dim(own_SGN, first // size, 1, keepdims=False)
        own_N = own_SN.reshape(-1)
        row_N = (own_SN + num_own * jnp.arange(num_shares)[:, None]).reshape(-1)
        given = by_rows(lambda _, own: rows_of(*own))((), (own_N, mine))
        made = compute(carry, given, row_N)
        return first + size, by_rows(put_if_due)(first, (carry, made, own_N, num_due_S))

    def put_if_due(first: jax.Array, own: tuple[Carry, Any, jax.Array, jax.Array]) -> Carry:
        carry, made, own_N, num_due_1 = own
        if num_shares == 1:  # or the loop would have ended
            return put(carry, made, own_N)
        return jax.lax.cond(first < num_due_1[0], lambda: put(carry, made, own_N), lambda: carry)

    start = (jnp.zeros((), most.dtype), carry)
    return jax.lax.while_loop(lambda state: state[0] < most, one, start)[1]


def after(hidden_NWD: jax.Array, place_N: jax.Array) -> jax.Array:
    """The places, known only once the hidden vectors are.

    What is put there then comes after everything that was read to compute them, and what is kept is
    written where it lies; the compiler would copy it to write at any time. A barrier is gone before
    the compiler decides that. Vectors that are as large belong to a row that ends as not finite.
    """
    is_huge_N = jnp.max(hidden_NWD.astype(jnp.float32), axis=(1, 2)) > _HUGE
    return jnp.where(is_huge_N, 0, place_N)


def rows_of(row_N: jax.Array, rows: Rows) -> Rows:
    """Those rows of each array, by their numbers on this device."""
    return jax.tree.map(lambda leaf: leaf[row_N], rows)


def cut(x_NLD: jax.Array, place_N: jax.Array, size: int) -> jax.Array:
    """`size` positions of each row from its place on."""
    return jax.vmap(lambda x_LD, place: jax.lax.dynamic_slice_in_dim(x_LD, place, size))(
        x_NLD, place_N
    )
