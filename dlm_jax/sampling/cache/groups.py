"""Rows that a pass is run for, in groups of a fixed size: a row comes out the same in any of them.

A row is computed beside as many others as there always are, whoever they are and however many are
due, so that what it gets does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
    is_due_B: jax.Array,
    size: int,
    one_group: Callable[[Carry, Rows, jax.Array], Carry],
    carry: Carry,
    rows: Rows,
) -> Carry:
    """`carry` after ``one_group(carry, rows, row_N)`` for each group of `size` of the due rows.

    `rows` is what a group reads. A last group that is not full holds its first row several times.
    Nothing runs where none is due.
    """
    num_rows = is_due_B.shape[0]
    num_due = jnp.sum(is_due_B)
    (row_B,) = jnp.nonzero(is_due_B, size=num_rows, fill_value=0)
    place_P = jnp.arange(-(-num_rows // size) * size)
    first_P = place_P // size * size
    row_P = row_B[jnp.where(place_P < num_due, place_P, first_P) % num_rows].astype(jnp.int32)

    def one(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        # Behind a barrier: of a single row the compiler would know the place, take the pass out of
        # the loop, and run it where none is due.
        (first, carry), mine = jax.lax.optimization_barrier((state, rows))
        row_N = jax.lax.dynamic_slice_in_dim(row_P, first, size)
        return first + size, one_group(carry, mine, row_N)

    start = (jnp.zeros((), num_due.dtype), carry)
    return jax.lax.while_loop(lambda state: state[0] < num_due, one, start)[1]


def after(hidden_NWD: jax.Array, place_N: jax.Array) -> jax.Array:
    """The places, known only once the hidden vectors are.

    What is put there then comes after everything that was read to compute them, and what is kept is
    written where it lies; the compiler would copy it to write at any time. A barrier is gone before
    the compiler decides that. Vectors that are as large belong to a row that ends as not finite.
    """
    is_huge_N = jnp.max(hidden_NWD.astype(jnp.float32), axis=(1, 2)) > _HUGE
    return jnp.where(is_huge_N, 0, place_N)


def rows_of(row_N: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """Those rows of each array."""
    return tuple(leaf[row_N] for leaf in leaves)


def cut(x_NLD: jax.Array, place_N: jax.Array, size: int) -> jax.Array:
    """`size` positions of each row from its place on."""
    return jax.vmap(lambda x_LD, place: jax.lax.dynamic_slice_in_dim(x_LD, place, size))(
        x_NLD, place_N
    )
