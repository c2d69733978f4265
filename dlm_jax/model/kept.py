"""What is kept of rows, pieces put into it, and vectors that predict what stands behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Rows whose pieces are put down one by one, in place; more of them go by one scatter.
_FEW = 8


class Shifted(NamedTuple):
    """Keys and values of the layers, and what the trunk said, before it was shifted."""

    layers: Any
    said_BLD: jax.Array


def one_later(x_BLD: jax.Array, before_BD: jax.Array | None = None) -> jax.Array:
    """Each vector one position later, behind `before_BD`; None: the first one, twice."""
    first_BD = x_BLD[:, 0] if before_BD is None else before_BD.astype(x_BLD.dtype)
    return jnp.concatenate([first_BD[:, None], x_BLD[:, :-1]], axis=1)


def put_at(
    axis: int, row_N: jax.Array | None, place_N: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """``(old, new) -> old`` with `new` put at its rows and places along that axis."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if row_N is None:
            return jax.vmap(lambda o, n, p: jax.lax.dynamic_update_slice_in_dim(o, n, p, axis - 1))(
                old, new, place_N
            )
        if new.shape[0] > _FEW:
            place_NW = place_N[:, None] + jnp.arange(new.shape[axis])[None]
            where = (row_N[:, None], *[slice(None)] * (axis - 1), place_NW)
            return old.at[where].set(jnp.moveaxis(new, axis, 1))
        for n in range(new.shape[0]):
            start = [jnp.zeros((), jnp.int32)] * old.ndim
            start[0], start[axis] = row_N[n], place_N[n]
            old = jax.lax.dynamic_update_slice(old, new[n : n + 1], start)
        return old

    return put


def shifted(tokens_BL: jax.Array, start_id: int) -> jax.Array:
    """What a causal network reads: each token one place to the right, behind `start_id`."""
    return jnp.pad(tokens_BL, ((0, 0), (1, 0)), constant_values=start_id)[:, :-1]
