"""Running transforms on a chunk: those that some row of it asks for, by one condition each."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.protocol import At
from dlm_jax.sampling.transforms.truncate import MAX_CANDIDATES


def is_wanted(transform: Any, at: At) -> Array:
    """Whether an active row has a real position in the chunk."""
    return (transform.is_active()[at.row_N] & at.is_real_N).any()


def any_wanted(transforms: Iterable[Any], at: At) -> Array:
    """Whether any of them is."""
    wanted = [is_wanted(t, at) for t in transforms]
    return functools.reduce(jnp.logical_or, wanted, jnp.zeros((), bool))


def is_touched(transforms: Iterable[Any], at: At) -> Array:
    """Whether any is wanted but for plain temperature."""
    return any_wanted([t for t in transforms if t.divisor() is None], at)


def is_reader(transform: Any) -> bool:
    """Whether it reads how likely the committed tokens were."""
    return transform.reads_final_logprob


def no_tokens(at: At) -> tuple[Array, Array]:
    """Tokens and log-probabilities of no position."""
    return jnp.zeros(at.row_N.shape, jnp.int32), jnp.zeros(at.row_N.shape, jnp.float32)


def candidates(logits_NV: Array, divisor_N: Array | None = None) -> tuple[Array, Array]:
    """The largest logits and their ids, of the quotients where there is a divisor."""
    return vocab.largest(logits_NV, min(MAX_CANDIDATES, logits_NV.shape[1]), divisor_N)


def no_candidates(logits_NV: Array) -> tuple[Array, Array]:
    """The same of no position."""
    shape = (logits_NV.shape[0], min(MAX_CANDIDATES, logits_NV.shape[1]))
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)


def run_all(steps: list[tuple[Any, Any]], logits_NV: Array, at: At) -> Array:
    """The logits after the transforms that some row of the chunk wants."""
    if not steps:
        return logits_NV
    wanted = [is_wanted(t, at) for t, _ in steps]

    def run(x_NV):
        for is_wanted, (t, prepared) in zip(wanted, steps, strict=True):
            x_NV = jax.lax.cond(
                is_wanted,
                lambda x, t=t, prepared=prepared: t.apply(prepared, x, at),
                lambda x: x,
                x_NV,
            )
        return x_NV

    return jax.lax.cond(functools.reduce(jnp.logical_or, wanted), run, lambda x: x, logits_NV)
