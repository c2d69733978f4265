"""Exact truncation by search: where to cut an order of the vocabulary, without sorting it.

A truncation keeps a prefix of the vocabulary sorted by some value, largest first, lower ids first
among equals. The value at which it ends is found by searching the bit patterns of float32, four
ways per pass: about ten passes over 50257 logits where a sort costs ten times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab

Elementwise = Callable[[Array], Array]


class Cut(NamedTuple):
    """A prefix: values above `value_N`, and equal ones with ids up to `last_id_N`."""

    value_N: Array
    last_id_N: Array

    def keeps(self, value_NV: Array, ids_1V: Array) -> Array:
        """True where a value belongs to the prefix."""
        above_NV = value_NV > self.value_N[:, None]
        return above_NV | (
            (value_NV == self.value_N[:, None]) & (ids_1V <= self.last_id_N[:, None])
        )


class _Search(NamedTuple):
    """Bracket of the key of the cut, with what lies above each end."""

    low_N: Array
    high_N: Array
    count_low_N: Array
    count_high_N: Array
    mass_low_N: Array
    mass_high_N: Array

    def is_open(self) -> Array:
        return (self.high_N - self.low_N > 1) & (self.count_low_N - self.count_high_N > 1)


def prefix_cut(
    logits_NV: Array,
    *,
    value: Elementwise,
    weight: Elementwise | None,
    mass_N: Array,
    count_N: Array,
) -> Cut:
    """Cut that keeps a token while the mass before it is < `mass_N` or their number < `count_N`.

    Args:
      logits_NV: float32.
      value: elementwise function of a block of logits that orders them; -inf for no candidate.
      weight: elementwise mass of a logit, at least 0; None when only the count matters.
      mass_N: mass that the tokens before a kept token stay below.
      count_N: float32 number of tokens to keep whatever their mass, at least 1.
    """
    zero_N = jnp.zeros_like(count_N)
    low_N = jnp.full(count_N.shape, _key(jnp.float32(-jnp.inf)), jnp.uint32)
    high_N = jnp.full(count_N.shape, _key(jnp.float32(jnp.inf)), jnp.uint32)
    everything = [jnp.full_like(count_N, -jnp.inf)]
    ((mass_all_N, count_all_N),) = _above(logits_NV, everything, value=value, weight=weight)
    keeps_all_N = (mass_all_N < mass_N) | (count_all_N <= count_N)
    high_N = jnp.where(keeps_all_N, low_N, high_N)
    search = _Search(low_N, high_N, count_all_N, zero_N, mass_all_N, zero_N)

    def narrow(s: _Search) -> _Search:
        quarter_N = jnp.maximum((s.high_N - s.low_N) >> 2, 1)
        new = s
        sums = _above(
            logits_NV,
            [_float(jnp.minimum(s.low_N + i * quarter_N, s.high_N)) for i in (1, 2, 3)],
            value=value,
            weight=weight,
        )
        for i, (mass_above_N, count_above_N) in enumerate(sums, start=1):
            key_N = jnp.minimum(s.low_N + i * quarter_N, s.high_N)
            is_inside_N = (mass_above_N < mass_N) | (count_above_N < count_N)
            lifts_N = ~is_inside_N & (key_N > new.low_N)
            lowers_N = is_inside_N & (key_N < new.high_N)
            new = _Search(
                jnp.where(lifts_N, key_N, new.low_N),
                jnp.where(lowers_N, key_N, new.high_N),
                jnp.where(lifts_N, count_above_N, new.count_low_N),
                jnp.where(lowers_N, count_above_N, new.count_high_N),
                jnp.where(lifts_N, mass_above_N, new.mass_low_N),
                jnp.where(lowers_N, mass_above_N, new.mass_high_N),
            )
        is_open_N = s.is_open()
        return jax.tree.map(lambda a, b: jnp.where(is_open_N, a, b), new, s)

    search = jax.lax.while_loop(lambda s: s.is_open().any(), narrow, search)
    cut = _settle_ties(logits_NV, search, value=value, mass_N=mass_N, count_N=count_N)
    return Cut(
        jnp.where(keeps_all_N, -jnp.inf, cut.value_N), jnp.where(keeps_all_N, -1, cut.last_id_N)
    )


def _settle_ties(
    logits_NV: Array, s: _Search, *, value: Elementwise, mass_N: Array, count_N: Array
) -> Cut:
    """The cut inside a bracket that holds one token, or any number of equal ones."""
    V = logits_NV.shape[1]
    ties_N = s.count_low_N - s.count_high_N
    weight_N = (s.mass_low_N - s.mass_high_N) / jnp.maximum(ties_N, 1.0)
    by_mass_N = jnp.ceil((mass_N - s.mass_high_N) / jnp.maximum(weight_N, 1e-38))
    kept_N = jnp.clip(jnp.maximum(by_mass_N, count_N - s.count_high_N), 1.0, ties_N)
    is_single_N = ties_N <= 1
    # one token in the bracket: everything above its lower end stays
    value_N = _float(jnp.where(is_single_N, s.low_N, s.high_N))
    is_split_N = ~is_single_N & (kept_N < ties_N) & (s.high_N > s.low_N)

    def split(x):
        def narrow(_, bounds):
            low_N, high_N = bounds
            middle_N = (low_N + high_N) // 2
            seen_N = _count_ties(x, value, value_N, middle_N)
            return (
                jnp.where(seen_N >= kept_N, low_N, middle_N),
                jnp.where(seen_N >= kept_N, middle_N, high_N),
            )

        low_N = jnp.full(value_N.shape, -1, jnp.int32)
        high_N = jnp.full(value_N.shape, V - 1, jnp.int32)
        last_N = jax.lax.fori_loop(0, V.bit_length(), narrow, (low_N, high_N))[1]
        return jnp.where(is_split_N, last_N, V)

    last_N = jax.lax.cond(
        is_split_N.any(), split, lambda x: jnp.full(value_N.shape, V, jnp.int32), logits_NV
    )
    return Cut(value_N, jnp.where(is_single_N, -1, last_N))


def _above(
    logits_NV: Array, bounds: list[Array], *, value: Elementwise, weight: Elementwise | None
) -> list[tuple[Array, Array]]:
    """Mass and number of the tokens whose value is above each bound."""

    def fn(acc: Any, block_NC: Array, ids_1C: Array) -> Any:
        value_NC = value(block_NC)
        weight_NC = None if weight is None else weight(block_NC)
        new = []
        for bound_N, (mass_NC, count_NC) in zip(bounds, acc, strict=True):
            is_above_NC = value_NC > bound_N[:, None]
            if weight_NC is not None:
                mass_NC = mass_NC + jnp.where(is_above_NC, weight_NC, 0.0)
            new.append((mass_NC, count_NC + jnp.where(is_above_NC, 1.0, 0.0)))
        return new

    zero_NC = vocab.columns(logits_NV, 0.0)
    no_mass = zero_NC[:, :0] if weight is None else zero_NC
    start = [(no_mass, zero_NC)] * len(bounds)
    sums = vocab.accumulate(fn, start, logits_NV)
    return [(mass_NC.sum(-1), count_NC.sum(-1)) for mass_NC, count_NC in sums]


def _count_ties(logits_NV: Array, value: Elementwise, value_N: Array, last_N: Array) -> Array:
    """Number of tokens at the cut with ids up to `last_N`."""

    def fn(count_NC, block_NC, ids_1C):
        is_tie_NC = (value(block_NC) == value_N[:, None]) & (ids_1C <= last_N[:, None])
        return count_NC + jnp.where(is_tie_NC, 1.0, 0.0)

    return vocab.accumulate(fn, vocab.columns(logits_NV, 0.0), logits_NV).sum(-1)


def _key(value: Array) -> Array:
    """uint32 that orders like the float32 it is made of."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _float(key: Array) -> Array:
    """Inverse of `_key`."""
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32((1 << 31) - 1), ~key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
