"""Packing of sampling settings, one per row, into the chain of logit transforms they describe.

`seeds/per_row_sampler.md` 4.1: parameters are per row from day one. Everything is checked here,
before tracing; two batches of the same size whose biases fit the same bucket share a program.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.config.sampling import DEFAULT_CHAIN, SamplingParams, check_chain
from dlm_jax.sampling import transforms as tf

_SMALLEST_BUCKET = 8


def pack(
    params: Sequence[SamplingParams],
    *,
    vocab_size: int,
    banned_ids: Iterable[int] = (),
    eos_ids: Iterable[int] = (),
    chain: Sequence[str] = DEFAULT_CHAIN,
) -> tf.Chain:
    """The chain of `params`, one row each, behind a ban of `banned_ids`.

    Bans (also those of `ignore_eos` and of a bias of -inf) come first whatever the order, so that
    no truncation can leave a row with banned candidates only. An id of `banned_ids` that also ends
    generation stays allowed, unless the row ignores it. A greedy row skips temperature, XTC and
    mirostat; a mirostat row skips the truncations and XTC.

    Args:
      params: settings of each row.
      vocab_size: number of logits.
      banned_ids: ids never proposed: MASK, PAD, BOS, padding of the vocabulary.
      eos_ids: ids that end a generation. When there are none, `ignore_eos` warns and is off.
      chain: names out of `DEFAULT_CHAIN` in any order.

    Raises:
      ValueError: with the row, for an id outside the vocabulary, a row that may draw nothing, or a
        setting whose sampler the chain lacks; an unknown or repeated name.
    """
    names = tuple(chain)
    bans = check(params, vocab_size=vocab_size, banned_ids=banned_ids, eos_ids=eos_ids, chain=names)
    biases = [[pair for pair in p.bias_pairs if pair[1] != -math.inf] for p in params]
    parts: list[tuple[str, Any]] = [("bans", _bias_transform(bans, vocab_size))]
    rows = _Rows(tuple(params), vocab_size, biases)
    for name in names:
        parts.extend((name, transform) for transform in _BUILDERS[name](rows))
    return tf.chain(*(t for _, t in parts), names=tuple(name for name, _ in parts))


def check(
    params: Sequence[SamplingParams],
    *,
    vocab_size: int,
    banned_ids: Iterable[int] = (),
    eos_ids: Iterable[int] = (),
    chain: Sequence[str] = DEFAULT_CHAIN,
) -> list[list[tuple[int, float]]]:
    """Ids that each row may not propose, with a bias of -inf; everything `pack` refuses is refused.

    Arguments and errors are those of `pack`.
    """
    check_chain(chain)
    if not params:
        raise ValueError("params is empty; give one SamplingParams per row")
    _check_used(params, tuple(chain))
    eos = frozenset(int(token) for token in eos_ids)
    banned = frozenset(int(token) for token in banned_ids) - eos
    _check_ids("banned_ids", banned, vocab_size)
    _check_ids("eos_ids", eos, vocab_size)
    if not eos and any(p.ignore_eos for p in params):
        warnings.warn("ignore_eos is off: the vocabulary has no EOS token", stacklevel=3)
    bans = []
    for row, p in enumerate(params):
        _check_ids(f"row {row}: logit_bias", (token for token, _ in p.bias_pairs), vocab_size)
        _check_ids(f"row {row}: dry_breakers", p.dry_breakers, vocab_size)
        ban = banned | {token for token, bias in p.bias_pairs if bias == -math.inf}
        ban |= eos if p.ignore_eos else frozenset()
        if len(ban) >= vocab_size:
            raise ValueError(f"row {row}: all {vocab_size} tokens are banned; allow at least one")
        bans.append([(token, -math.inf) for token in sorted(ban)])
    return bans


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Settings as columns."""

    params: tuple[SamplingParams, ...]
    vocab_size: int
    biases: list[list[tuple[int, float]]]

    def real(self, name: str) -> Array:
        return jnp.asarray(np.array([getattr(p, name) for p in self.params], np.float32))

    def integer(self, name: str) -> Array:
        return jnp.asarray(np.array([getattr(p, name) for p in self.params], np.int32))

    def real_or(self, name: str, neutral: float, *, unless: str) -> Array:
        """The setting, but neutral where the row's property `unless` says that it is replaced."""
        values = [neutral if _SKIPS[unless](p) else getattr(p, name) for p in self.params]
        return jnp.asarray(np.array(values, np.float32))


_SKIPS: dict[str, Callable[[SamplingParams], bool]] = {
    "steered": lambda p: p.mirostat > 0 and not p.is_greedy,
    "greedy or steered": lambda p: p.mirostat > 0 or p.is_greedy,
    "dynamic": lambda p: p.dynatemp_range > 0 and not p.is_greedy,
    "plain": lambda p: p.dynatemp_range == 0 or p.is_greedy,
}


def _temperature(rows: _Rows) -> tuple[Any, ...]:
    last_B = jnp.where(rows.real("temperature_end") < 0, rows.real("temperature"),
                       rows.real("temperature_end"))  # fmt: skip
    is_dynamic_B = jnp.asarray([_SKIPS["dynamic"](p) for p in rows.params])
    dynamic = tf.DynamicTemperature(
        temperature_B=rows.real_or("temperature", 1.0, unless="plain"),
        delta_B=rows.real_or("dynatemp_range", 0.0, unless="plain"),
        exponent_B=rows.real("dynatemp_exponent"),
        last_B=jnp.where(is_dynamic_B, last_B, 1.0),
    )
    plain_B = rows.real_or("temperature", 1.0, unless="dynamic")
    return tf.Temperature(plain_B, jnp.where(is_dynamic_B, 1.0, last_B)), dynamic


def _penalties(rows: _Rows) -> tuple[Any, ...]:
    transform = tf.Penalties(
        repetition_B=rows.real("repetition_penalty"),
        frequency_B=rows.real("frequency_penalty"),
        presence_B=rows.real("presence_penalty"),
        last_n_B=rows.integer("penalty_last_n"),
        vocab_size=rows.vocab_size,
    )
    return (transform,)


def _dry(rows: _Rows) -> tuple[Any, ...]:
    breakers = [list(p.dry_breakers) for p in rows.params]
    transform = tf.Dry(
        multiplier_B=rows.real("dry_multiplier"),
        base_B=rows.real("dry_base"),
        allowed_length_B=rows.integer("dry_allowed_length"),
        last_n_B=rows.integer("dry_last_n"),
        breakers_BK=jnp.asarray(_padded(breakers, -1, np.int32)),
    )
    return (transform,)


def _top_k(rows: _Rows) -> tuple[Any, ...]:
    k = [0 if _SKIPS["steered"](p) else min(max(p.top_k, 0), rows.vocab_size) for p in rows.params]
    return (tf.TopK(jnp.asarray(np.array(k, np.int32)), rows.integer("min_keep")),)


def _truncation(make: Any, name: str, neutral: float) -> Callable[[_Rows], tuple[Any, ...]]:
    def build(rows: _Rows) -> tuple[Any, ...]:
        values = rows.real_or(name, neutral, unless="steered")
        return (make(values, rows.integer("min_keep")),)

    return build


def _xtc(rows: _Rows) -> tuple[Any, ...]:
    transform = tf.Xtc(
        probability_B=rows.real_or("xtc_probability", 0.0, unless="greedy or steered"),
        threshold_B=rows.real("xtc_threshold"),
        min_keep_B=rows.integer("min_keep"),
    )
    return (transform,)


def _mirostat(rows: _Rows) -> tuple[Any, ...]:
    def is_on(version: int) -> Array:
        return jnp.asarray([p.mirostat == version and not p.is_greedy for p in rows.params])

    shared = (rows.real("mirostat_tau"), rows.real("mirostat_eta"))
    min_keep = rows.integer("min_keep")
    return (
        tf.MirostatV1(*shared, is_on(1), min_keep, vocab_size=rows.vocab_size),
        tf.MirostatV2(*shared, is_on(2), min_keep),
    )


_BUILDERS: dict[str, Callable[[_Rows], tuple[Any, ...]]] = {
    "bias": lambda rows: (_bias_transform(rows.biases, rows.vocab_size),),
    "penalties": _penalties,
    "dry": _dry,
    "temperature": _temperature,
    "top_n_sigma": _truncation(tf.TopNSigma, "top_n_sigma", 0.0),
    "top_k": _top_k,
    "typical_p": _truncation(tf.TypicalP, "typical_p", 1.0),
    "top_p": _truncation(tf.TopP, "top_p", 1.0),
    "min_p": _truncation(tf.MinP, "min_p", 0.0),
    "xtc": _xtc,
    "mirostat": _mirostat,
}

_NEUTRAL = SamplingParams()
_NEEDS: dict[str, tuple[str, ...]] = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier",),
    "temperature": ("temperature", "temperature_end", "dynatemp_range"),
    "xtc": ("xtc_probability",),
    **{name: (name,) for name in ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p")},
    "mirostat": ("mirostat",),
}


def in_use(params: SamplingParams, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the `names` that the settings ask for: the rest of the chain changes nothing.

    For programs that run one kind of row: a shorter chain compiles faster and, neutral transforms
    being the identity, gives the same tokens bit for bit.
    """

    def is_used(name: str) -> bool:
        if name == "bias":
            return any(bias != -math.inf for _, bias in params.bias_pairs)
        return any(
            getattr(params, setting) != getattr(_NEUTRAL, setting) for setting in _NEEDS[name]
        )

    return tuple(name for name in names if is_used(name))


def _check_used(params: Sequence[SamplingParams], names: tuple[str, ...]) -> None:
    for row, p in enumerate(params):
        for name, settings in _NEEDS.items():
            for setting in settings:
                value = getattr(p, setting)
                if name not in names and value != getattr(_NEUTRAL, setting):
                    raise ValueError(
                        f"row {row}: {setting}={value} needs {name!r}, which the chain lacks; "
                        f"add it to the chain or leave {setting} at its default"
                    )
        if "bias" not in names and any(bias != -math.inf for _, bias in p.bias_pairs):
            raise ValueError(f"row {row}: logit_bias needs 'bias', which the chain lacks; add it")


def _check_ids(what: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{what} names id {token}, outside the vocabulary of {vocab_size}; "
                f"use 0 to {vocab_size - 1}"
            )


def _bias_transform(pairs: list[list[tuple[int, float]]], vocab_size: int) -> tf.LogitBias:
    ids = [[token for token, _ in row] for row in pairs]
    values = [[bias for _, bias in row] for row in pairs]
    return tf.LogitBias(
        jnp.asarray(_padded(ids, vocab_size, np.int32)),
        jnp.asarray(_padded(values, 0.0, np.float32)),
    )


def _padded(rows: list[list[Any]], fill: float, dtype: Any) -> np.ndarray:
    """Rows side by side, padded to a power of two so that few widths compile."""
    longest = max(_SMALLEST_BUCKET, max(map(len, rows)))
    table = np.full((len(rows), 1 << (longest - 1).bit_length()), fill, dtype)
    for row, values in enumerate(rows):
        table[row, : len(values)] = values
    return table
