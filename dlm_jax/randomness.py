"""Random keys that are independent of JAX settings, and the JAX settings that affect results."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

_REQUIRED: dict[str, Any] = {
    "jax_threefry_partitionable": True,
    "jax_high_dynamic_range_gumbel": False,
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
}
"""JAX settings that change random numbers for the same key, or dtypes in the same program."""


def key_of(seed: int | jax.Array) -> jax.Array:
    """The typed threefry key of a seed in [0, 2**32), whatever ``jax_default_prng_impl`` and
    ``jax_random_seed_offset`` are.
    """
    low = jnp.asarray(seed, jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(low), low]), impl="threefry2x32")


def salted(key_N: jax.Array, salt: int) -> jax.Array:
    """Keys ``[N]`` that are derived from other keys for one purpose, which the salt identifies."""
    return jax.vmap(lambda key: jax.random.fold_in(key, salt))(key_N)


def settings() -> dict[str, Any]:
    """The current values of the JAX settings that affect results."""
    found = {name: getattr(jax.config, name) for name in _REQUIRED}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def check_settings() -> None:
    """Raises ValueError for a JAX setting that changes results."""
    for name, value in settings().items():
        if value != _REQUIRED[name]:
            raise ValueError(
                f"JAX is set to {name}={value!r}, which changes random draws and results; unset "
                f"{name.upper()}, or set it to {_REQUIRED[name]!r}"
            )


@functools.cache
def fingerprint() -> dict[str, Any]:
    """Random numbers that identify the generators of this version of JAX."""
    one, two = jax.random.split(key_of(7))
    bits = jax.random.bits(one, (2,)).tolist()
    return {"draws": [*bits, float(jax.random.uniform(two))], "version of jax": jax.__version__}
