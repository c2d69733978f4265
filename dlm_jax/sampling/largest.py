"""The index of the largest value of an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_Pair = tuple[Array, Array]


def place_of_largest(x: Array, axis: int = -1) -> Array:
    """`jnp.argmax` of floats or booleans along an axis, as int32.

    `jnp.argmax` creates a new function on each use, and JAX caches the trace of each such function
    (jax 0.10.1). The memory of a process would therefore grow with every compiled program.
    """
    axis %= x.ndim
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    lowest = np.array(False if x.dtype == bool else -np.inf, x.dtype)
    return jax.lax.reduce((x, place), (lowest, np.int32(0)), _larger, (axis,))[1]


def _larger(one: _Pair, other: _Pair) -> _Pair:
    """The pair with the larger value, or with the lower index on ties. NaN is the largest."""
    (x, place), (other_x, other_place) = one, other
    is_larger = (x > other_x) | (x != x)
    is_first = is_larger | ((x == other_x) & (place < other_place))
    return jax.lax.select(is_larger, x, other_x), jax.lax.select(is_first, place, other_place)
