"""Truncations: transforms that set all but some candidates to -inf.

Each keeps at least `min_keep` candidates of a position (all, when there are fewer); among equals
the lowest ids stay. The semantics are those of llama.cpp's host samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.cuts import keeps_prefix
from dlm_jax.sampling.transforms.protocol import At, LogitTransform, is_steered
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, rule

MAX_CANDIDATES = 64
"""Rows whose top-k is at most this go on with their candidates alone, not the vocabulary."""

MIN_KEEP = Setting(
    "min_keep", 1, "candidates that every truncation keeps, in [1, 64]",
    low=1, high=MAX_CANDIDATES, remedy="use 1", activates=False,
)  # fmt: skip
TOP_K = Setting("top_k", 0, "candidates to keep; <= 0 is off")
TOP_P = Setting(
    "top_p", 1.0, "nucleus mass in (0, 1]; 1 is off",
    low=ABOVE_ZERO, high=1.0, remedy="use 1.0 to turn it off",
)  # fmt: skip
SAMPLER_TOP_P = Setting(
    "sampler_top_p", 0.0,
    "top_p: of what a sampler head draws; 0 is that of the others, 1 is off", low=0.0, high=1.0,
)  # fmt: skip
TYPICAL_P = Setting(
    "typical_p", 1.0, "typical mass in (0, 1]; 1 is off",
    low=ABOVE_ZERO, high=1.0, remedy="use 1.0 to turn it off",
)  # fmt: skip
MIN_P = Setting(
    "min_p", 0.0, "fraction of the best probability in [0, 1]; 0 is off",
    low=0.0, high=1.0, remedy="use 0.0 to turn it off",
)  # fmt: skip
TOP_N_SIGMA = Setting(
    "top_n_sigma", 0.0, "deviations below the best logit; <= 0 is off", remedy="use 0.0"
)


class Truncation(LogitTransform):
    """A transform that mirostat replaces, and that treats equal logits alike."""

    ignores_ids = True

    @classmethod
    def yields(cls, row: Any) -> bool:
        """Mirostat replaces it."""
        return is_steered(row)


@rule
class TopK(Truncation):
    """Keeps the `max(k, min_keep)` largest logits; k <= 0 is off, k above V keeps all."""

    k_B: Array = per_row(TOP_K)
    min_keep_B: Array = per_row(MIN_KEEP)

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> TopK:
        """The k of each row, no more than there are ids."""
        packed = super().columns(rows, facts)
        return replace(packed, k_B=np.clip(packed.k_B, 0, np.int32(facts.vocab_size)))

    def is_active(self) -> Array:
        """True where k > 0."""
        return self.k_B > 0

    def count(self) -> Array:
        """Candidates that each row keeps, 0 where it keeps all."""
        return jnp.where(self.k_B > 0, jnp.maximum(self.k_B, self.min_keep_B), 0)

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits with all but the largest at -inf."""
        count_N = self.count()[at.row_N]
        return keep_largest(logits_NV, jnp.where(count_N > 0, count_N, logits_NV.shape[1]))


@rule
class TopP(Truncation):
    """Keeps the smallest set of most likely tokens whose mass reaches p; p = 1 is off.

    A token goes where the mass of those before it is >= p; the most likely always stays.
    """

    p_B: Array = per_row(TOP_P)
    min_keep_B: Array = per_row(MIN_KEEP)
    grown_p_B: Array = per_row(
        SAMPLER_TOP_P, column=lambda ps: np.array([p and max(p, 2e-38) for p in ps], np.float32)
    )

    def is_active(self) -> Array:
        """True where p < 1, or that of the sampler head is."""
        return (self.p_B < 1) | (self._grown_p() < 1)

    def _grown_p(self) -> Array:
        """The p of tokens that the sampler head draws."""
        return jnp.where(self.grown_p_B == 0, self.p_B, self.grown_p_B)

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits with all but the nucleus at -inf."""
        p_N = self.p_B[at.row_N]
        if at.is_grown_N is not None:
            p_N = jnp.where(at.is_grown_N, self._grown_p()[at.row_N], p_N)
        is_off_N = p_N >= 1
        count_N = jnp.where(is_off_N, logits_NV.shape[1], _count_or_all(self, logits_NV, at))
        max_N, weight_NC = vocab.exp_columns(logits_NV)
        is_kept_NV = keeps_prefix(
            logits_NV,
            value=lambda block: block,
            weight=lambda block: jnp.exp(block - max_N[:, None]),
            top_N=max_N,
            mass_N=p_N * weight_NC.sum(-1),
            count_N=count_N,
        )
        return jnp.where(is_kept_NV | is_off_N[:, None], logits_NV, -jnp.inf)


@rule
class TypicalP(Truncation):
    """Keeps the tokens whose surprise is closest to the entropy, up to mass q; q = 1 is off.

    Tokens are taken in ascending order of `abs(-ln p - H)` until their mass exceeds q.
    Source: Meister et al. 2022, "Locally typical sampling".
    """

    p_B: Array = per_row(TYPICAL_P)
    min_keep_B: Array = per_row(MIN_KEEP)

    def is_active(self) -> Array:
        """True where q < 1."""
        return self.p_B < 1

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits with all but the typical set at -inf."""
        max_N, weight_NC = vocab.exp_columns(logits_NV)
        log_total_N = jnp.log(weight_NC.sum(-1))
        _, entropy_N = vocab.count_and_entropy(logits_NV)

        def logprob(block):
            return block - max_N[:, None] - log_total_N[:, None]

        def typicality(block):
            return -jnp.abs(logprob(block) + entropy_N[:, None])

        is_kept_NV = keeps_prefix(
            logits_NV,
            value=typicality,
            weight=lambda block: jnp.exp(logprob(block)),
            top_N=jnp.zeros_like(max_N),
            # a token stays while the mass before it is <= q, not < q
            mass_N=jnp.nextafter(self.p_B[at.row_N], jnp.inf),
            count_N=_count_or_all(self, logits_NV, at),
        )
        return masked(is_kept_NV, logits_NV, self, at)


@rule
class MinP(Truncation):
    """Keeps tokens with `p >= m * max(p)`; m = 0 is off."""

    p_B: Array = per_row(MIN_P)
    min_keep_B: Array = per_row(MIN_KEEP)

    def is_active(self) -> Array:
        """True where m > 0."""
        return self.p_B > 0

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits with all tokens below the fraction of the best at -inf."""
        fraction_N = jnp.where(self.is_active(), self.p_B, 1.0)[at.row_N]
        floor_N = logits_NV.max(-1) + jnp.log(fraction_N)
        return keep_above(logits_NV, floor_N, self.min_keep_B[at.row_N], self.is_active()[at.row_N])


@rule
class TopNSigma(Truncation):
    """Keeps `x >= max(x) - n * std(x)`, population std over the candidates; n <= 0 is off.

    Source: Tang et al. 2024, "Top-n-sigma: not all logits are you need".
    """

    n_B: Array = per_row(TOP_N_SIGMA)
    min_keep_B: Array = per_row(MIN_KEEP)

    def is_active(self) -> Array:
        """True where n > 0."""
        return self.n_B > 0

    def apply(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """Logits with all tokens below n deviations from the best at -inf."""
        half_max_N, range_N = _half_range(logits_NV)

        def scaled(block):
            # in [-1, 0], so that squares of huge logits do not overflow
            return (block * 0.5 - half_max_N[:, None]) / range_N[:, None]

        count_N, total_N = _sums(logits_NV, scaled)
        mean_N = total_N / jnp.maximum(count_N, 1.0)
        _, squares_N = _sums(logits_NV, lambda block: (scaled(block) - mean_N[:, None]) ** 2)
        deviation_N = jnp.sqrt(squares_N / jnp.maximum(count_N, 1.0))
        floor_N = 2.0 * (half_max_N - self.n_B[at.row_N] * deviation_N * range_N)
        return keep_above(logits_NV, floor_N, self.min_keep_B[at.row_N], self.is_active()[at.row_N])


def keep_largest(logits_NV: Array, count_N: Array) -> Array:
    """Logits with all but the `count` (at least 1) largest at -inf, lower ids first on ties."""
    is_kept_NV = keeps_prefix(
        logits_NV,
        value=lambda block: block,
        weight=None,
        top_N=logits_NV.max(-1),
        mass_N=jnp.zeros(count_N.shape, jnp.float32),
        count_N=count_N.astype(jnp.float32),
    )
    return jnp.where(is_kept_NV, logits_NV, -jnp.inf)


def keep_above(logits_NV: Array, floor_N: Array, min_keep_N: Array, is_active_N: Array) -> Array:
    """Logits with those below `floor` at -inf where active, but the `min_keep` largest stay.

    `min_keep` is at most `MAX_CANDIDATES`.
    """

    def fn(acc_NC, block_NC, ids_1C):
        is_above_NC = (block_NC >= floor_N[:, None]) & (block_NC > -jnp.inf)
        return acc_NC + jnp.where(is_above_NC, 1.0, 0.0)

    count_N = vocab.accumulate(fn, vocab.columns(logits_NV, 0.0), logits_NV).sum(-1)
    is_short_N = (count_N < min_keep_N) & is_active_N

    size = min(MAX_CANDIDATES, logits_NV.shape[1])

    def keep_few(x_NV):
        # The order of the rest of the algebra, where denormals count as 0.
        seen_NV = vocab.flushed(x_NV)
        seen_NK, ids_NK = jax.lax.top_k(seen_NV, size)
        # Lower ids come first among equals, so the last that stays tells which of them do.
        last_N1 = jnp.clip(min_keep_N, 1, size)[:, None] - 1
        least_N1, id_N1 = (jnp.take_along_axis(x, last_N1, axis=1) for x in (seen_NK, ids_NK))
        ids_1V = jnp.arange(x_NV.shape[1], dtype=jnp.int32)[None]
        stays_NV = (seen_NV > least_N1) | ((seen_NV == least_N1) & (ids_1V <= id_N1))
        return jnp.where(stays_NV | ~is_short_N[:, None], x_NV, -jnp.inf)

    kept_NV = jax.lax.cond(is_short_N.any(), keep_few, lambda x: x, logits_NV)
    is_kept_NV = (logits_NV >= floor_N[:, None]) | (~is_active_N | is_short_N)[:, None]
    return jnp.where(is_kept_NV, kept_NV, -jnp.inf)


def _sums(logits_NV: Array, fn: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Number of candidates and the sum of `fn` over them, `[N]` each."""

    def step(acc, block_NC, ids_1C):
        count_NC, sum_NC = acc
        is_candidate_NC = block_NC > -jnp.inf
        return (
            count_NC + jnp.where(is_candidate_NC, 1.0, 0.0),
            sum_NC + jnp.where(is_candidate_NC, fn(block_NC), 0.0),
        )

    start = vocab.columns(logits_NV, 0.0), vocab.columns(logits_NV, 0.0)
    count_NC, sum_NC = vocab.accumulate(step, start, logits_NV)
    return count_NC.sum(-1), sum_NC.sum(-1)


def _half_range(logits_NV: Array) -> tuple[Array, Array]:
    """Half the largest logit, and half the range of the candidates (1 where they are equal)."""

    def fn(least_NC, block_NC, ids_1C):
        return jnp.minimum(least_NC, jnp.where(block_NC > -jnp.inf, block_NC, jnp.inf))

    half_max_N = logits_NV.max(-1) * 0.5
    least_NC = vocab.accumulate(fn, vocab.columns(logits_NV, jnp.inf), logits_NV)
    range_N = half_max_N - least_NC.min(-1) * 0.5
    return half_max_N, jnp.where(range_N > 0, range_N, 1.0)


def _count_or_all(transform: Any, logits_NV: Array, at: At) -> Array:
    """`min_keep` of active rows, the whole vocabulary of others, which ends their search."""
    is_active_N = (transform.is_active()[at.row_N]) & at.is_real_N
    count_N = jnp.where(is_active_N, transform.min_keep_B[at.row_N], logits_NV.shape[1])
    return count_N.astype(jnp.float32)


def masked(is_kept_NV: Array, logits_NV: Array, transform: Any, at: At) -> Array:
    """Logits with what is not kept at -inf, in rows where the transform is active."""
    is_off_N1 = ~transform.is_active()[at.row_N][:, None]
    return jnp.where(is_kept_NV | is_off_N1, logits_NV, -jnp.inf)
