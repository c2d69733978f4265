"""Positions and a canvas for measurements of logit transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.sampling.transforms import At, Context

ROWS = 16


def place(num: int) -> At:
    """Positions spread over the rows."""
    return At(
        jnp.arange(num, dtype=jnp.int32) % ROWS,
        jnp.zeros(num, jnp.int32),
        jax.random.split(jax.random.key(1), num),
        jnp.ones(num, bool),
    )


def scene() -> Context:
    """A canvas that no transform reads."""
    shape = (ROWS, 64)
    return Context(
        jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool),
        jnp.full(ROWS, 64),
    )  # fmt: skip
