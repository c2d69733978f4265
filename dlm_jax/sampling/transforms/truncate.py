"""Truncations: transforms that set some candidates to -inf.

Each truncation keeps at least `min_keep` candidates per position, or all if there are fewer. Among
equal values, the lowest ids are kept. The semantics match those of llama.cpp's samplers on the
host. The cuts are exact and computed without sorting the vocabulary (see `_search`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.randomness import salted
from dlm_jax.sampling import vocab
from dlm_jax.sampling.positions import choose
from dlm_jax.sampling.transforms.transform import At, Pointwise, is_greedy, is_steered
from dlm_jax.sampling.vocab import Logits, ordered
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, rule

Elementwise = Callable[..., Array]
Term = Callable[[list[Array], Array], Array]

PASSES = "passes"
"""Scope of the loop over the passes of a search, for estimates of its cost."""

_FEW = 128
_WIDE = 64.0
_XTC_SALT = 0x7863


def keep_prefix(
    logits_NV: Logits,
    *,
    value: Elementwise,
    weight: Elementwise | None,
    top_N: Array,
    mass_N: Array,
    count_N: Array,
) -> Logits:
    """Keeps the tokens after a mass < `mass_N` or after fewer than `count_N` tokens.

    Args:
      logits_NV: float32.
      value: elementwise function of logits by which tokens are ordered, largest first; -inf for
        non-candidates. It has no derivative.
      weight: elementwise mass of a logit, at least 0, without derivative; None for a mass of 1.
      top_N: float32 upper bound on all values.
      mass_N: strict upper bound on the mass before a kept token.
      count_N: float32, number of tokens to keep regardless of mass, at least 1.
    """
    # Sorts and searches have no derivative. Denormals equal 0 in some comparisons on CPU only.
    limits = jax.lax.stop_gradient((top_N, mass_N, count_N))
    if logits_NV.shape[1] <= _FEW:
        seen_NV = vocab.flushed(vocab.fixed(logits_NV))
        weight_NV = jnp.ones_like(seen_NV) if weight is None else weight(seen_NV)
        mass_NV, num_NV = _before_each(value(seen_NV), weight_NV)
        is_kept_NV = (mass_NV < mass_N[:, None]) | (num_NV < count_N[:, None])
        return vocab.change(logits_NV, lambda block, ids: jnp.where(is_kept_NV, block, -jnp.inf))
    values = (value,) if weight is None else (value, weight)
    sums = vocab.sums_of(logits_NV, *values)
    cut_N, last_id_N = _search(logits_NV.shape[1], len(values), sums, *limits)

    def keep(block: Array, ids: Array) -> Array:
        is_kept = _is_up_to(value(vocab.flushed(vocab.fixed(block))), ids, cut_N, last_id_N)
        return jnp.where(is_kept, block, -jnp.inf)

    return vocab.change(logits_NV, keep)


def _is_up_to(value: Array, ids: Array, cut_N: Array, last_id_N: Array) -> Array:
    """True at larger values than the cut, and at values equal to the cut up to an id."""
    cut_N1, last_id_N1 = cut_N[:, None], last_id_N[:, None]
    return (value > cut_N1) | ((value == cut_N1) & (ids <= last_id_N1))


def _before_each(value_NK: Array, weight_NK: Array) -> tuple[Array, Array]:
    """Cumulative mass and count before each of a few tokens.

    The sums are computed by a matrix product, because masked sums are not vectorised on CPU.
    """
    K = value_NK.shape[1]
    is_lower_1KK = jnp.tri(K, K, -1, dtype=bool)[None]
    other_N1K, own_NK1 = value_NK[:, None, :], value_NK[:, :, None]
    is_before_NKK = (other_N1K > own_NK1) | ((other_N1K == own_NK1) & is_lower_1KK)
    summed_NK2 = jnp.stack([weight_NK, jnp.ones_like(weight_NK)], -1)
    before_NK2 = jnp.matmul(
        is_before_NKK.astype(jnp.float32), summed_NK2, precision=jax.lax.Precision.HIGHEST
    )
    return before_NK2[..., 0], before_NK2[..., 1]


class _End(NamedTuple):
    """A key (see `vocab.ordered`) beside the cut, with the count and the mass above it."""

    key_N: Array
    count_N: Array
    mass_N: Array


def _search(
    num_logits: int,
    num_values: int,
    sums: Callable[..., tuple[Array, ...]],
    top_N: Array,
    mass_N: Array,
    count_N: Array,
) -> tuple[Array, Array]:
    """Value at which the prefix ends, and the last id kept among ids with this value.

    A bracket around the value is narrowed until it contains a single token, or tokens with equal
    values. Testing a bound takes one pass over the vocabulary, and about twenty passes suffice.
    A pass `sums(*terms)` gives each term the values and, if `num_values` is 2, weights of a block.
    """
    V = num_logits
    all_key = ordered(jnp.float32(-jnp.inf))
    zero_N = jnp.zeros(count_N.shape, jnp.float32)
    # The lower end starts below -inf, because a search can end at -inf.
    low_key_N = jnp.full(count_N.shape, all_key - 1, jnp.uint32)
    high_key_N = jnp.where(count_N >= V, all_key, ordered(vocab.flushed(top_N)))
    ends = _End(low_key_N, zero_N + (V + 2.0), zero_N + (V + 2.0)), _End(high_key_N, zero_N, zero_N)

    def is_open(low: _End, high: _End) -> Array:
        return (high.key_N - low.key_N > 1) & (low.count_N - high.count_N > 1)

    def narrow(s: tuple[Array, _End, _End]) -> tuple[Array, _End, _End]:
        turn, low, high = s
        key_N = _next_bound(turn, low.key_N, high.key_N)
        bound_N1 = _float(key_N)[:, None]

        def count(block: list[Array], ids: Array) -> Array:
            return jnp.where(block[0] > bound_N1, 1.0, 0.0)

        def mass(block: list[Array], ids: Array) -> Array:
            return jnp.where(block[0] > bound_N1, block[1], 0.0)

        above = sums(*(count, mass)[:num_values])
        tested = _End(key_N, above[0], above[-1])
        is_inside_N = (tested.mass_N < mass_N) | (tested.count_N < count_N)
        is_open_N = is_open(low, high)
        low = choose(is_open_N & ~is_inside_N, tested, low)
        return turn + 1, low, choose(is_open_N & is_inside_N, tested, high)

    with jax.named_scope(PASSES):
        s = jax.lax.while_loop(lambda s: is_open(*s[1:]).any(), narrow, (jnp.int32(0), *ends))
    _, low, high = s
    ties_N = low.count_N - high.count_N
    weight_N = (low.mass_N - high.mass_N) / jnp.maximum(ties_N, 1.0)
    by_mass_N = jnp.ceil((mass_N - high.mass_N) / jnp.where(weight_N > 0, weight_N, 1.0))
    num_N = jnp.clip(jnp.maximum(by_mass_N, count_N - high.count_N), 1.0, ties_N)
    is_single_N = ties_N <= 1
    # If the bracket contains one token, everything above its lower end is kept.
    value_N = _float(jnp.where(is_single_N, low.key_N, high.key_N))
    is_split_N = ~is_single_N & (num_N < ties_N) & (low.key_N >= all_key)

    def last_tie() -> Array:
        """The last of the ids with the value at the cut that are kept."""

        def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low_N, high_N = bounds
            last_N = (low_N + high_N) // 2

            def is_before(block: list[Array], ids: Array) -> Array:
                is_tie_NC = (block[0] == value_N[:, None]) & (ids <= last_N[:, None])
                return jnp.where(is_tie_NC, 1.0, 0.0)

            is_enough_N = sums(is_before)[0] >= num_N
            return jnp.where(is_enough_N, low_N, last_N), jnp.where(is_enough_N, last_N, high_N)

        ends = jnp.full(value_N.shape, -1, jnp.int32), jnp.full(value_N.shape, V - 1, jnp.int32)
        last_N = jax.lax.fori_loop(0, V.bit_length(), halve, ends)[1]
        return jnp.where(is_split_N, last_N, V)

    none_N = jnp.full(value_N.shape, V, jnp.int32)
    last_N = jax.lax.cond(is_split_N.any(), last_tie, lambda: none_N)
    cut_N = jnp.where(high.key_N == all_key, -jnp.inf, value_N)
    return cut_N, jnp.where(is_single_N, -1, last_N)


def _next_bound(turn: Array, low_key_N: Array, high_key_N: Array) -> Array:
    """The key to test next inside each bracket: the middle of its values, or, where values are far
    apart and in every fourth pass, the middle of its keys, which closes any bracket.
    """
    low_N, high_N = _float(low_key_N), _float(high_key_N)
    middle_N = jnp.where(high_N - low_N < _WIDE, 0.5 * (low_N + high_N), high_N - 0.25 * _WIDE)
    middle_N, first_N, last_N = ordered(middle_N), low_key_N + 1, high_key_N - 1
    # TPU kernels compare unsigned numbers, but have no minimum or maximum of them.
    middle_N = jnp.where(middle_N < first_N, first_N, middle_N)
    middle_N = jnp.where(middle_N > last_N, last_N, middle_N)
    half_N = low_key_N + ((high_key_N - low_key_N) >> 1)
    return jnp.where(turn % 4 == 3, half_N, middle_N)


def _float(key: Array) -> Array:
    """The inverse of `ordered`, with denormals as 0."""
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32((1 << 31) - 1), ~key)
    return vocab.flushed(jax.lax.bitcast_convert_type(bits, jnp.float32))


MAX_CANDIDATES = 64
"""Rows with a top-k up to this size run the rest of the chain on their candidates only."""

MIN_KEEP = Setting(
    "min_keep",
    1,
    "minimum number of candidates that a truncation keeps",
    low=1,
    high=MAX_CANDIDATES,
    activates=False,
)


def keep_largest(logits_NV: Logits, count_N: Array) -> Logits:
    """Keeps the `count_N` (at least 1) largest logits and sets all others to -inf; lower ids win
    ties.
    """
    count_N = count_N.astype(jnp.float32)
    return keep_prefix(
        logits_NV,
        value=lambda block: block,
        weight=None,
        top_N=vocab.maximum(vocab.fixed(logits_NV)),
        mass_N=count_N,
        count_N=count_N,
    )


def keep_above(logits_NV: Logits, floor_N: Array, min_keep_N: Array, is_active_N: Array) -> Logits:
    """Sets logits with values below `floor_N` to -inf in active rows, except the `min_keep_N`
    largest.
    """
    (_, V), fixed_NV = logits_NV.shape, vocab.fixed(logits_NV)

    def is_above(block: Array, ids: Array) -> Array:
        return jnp.where((block >= floor_N[:, None]) & (block > -jnp.inf), 1.0, 0.0)

    is_short_N = (vocab.reduce(fixed_NV, ("sum", is_above))[0] < min_keep_N) & is_active_N

    def last_kept() -> tuple[Array, Array]:
        """Value and id of the last of the largest logits."""
        count_N = jnp.where(is_short_N, min_keep_N, V).astype(jnp.float32)
        sums = vocab.sums_of(fixed_NV, lambda block: block)
        return _search(V, 1, sums, vocab.maximum(fixed_NV), count_N, count_N)

    none = jnp.zeros(floor_N.shape, jnp.float32), jnp.zeros(floor_N.shape, jnp.int32)
    last_N, id_N = jax.lax.cond(is_short_N.any(), last_kept, lambda: none)
    cut_N = jnp.where(is_short_N, last_N, jnp.where(is_active_N, floor_N, -jnp.inf))
    cut_N, last_id_N = vocab.flushed(cut_N), jnp.where(is_short_N, id_N, V)

    def keep(block: Array, ids: Array) -> Array:
        return jnp.where(_is_up_to(vocab.flushed(block), ids, cut_N, last_id_N), block, -jnp.inf)

    return vocab.change(logits_NV, keep)


class Truncation(Pointwise, ABC):
    """A truncation that Mirostat replaces."""

    min_keep_B: Array

    @classmethod
    def yields(cls, row: Any) -> bool:
        return is_steered(row)

    def min_count(self, logits_NV: Logits, is_real_N: Array) -> Array:
        """`min_keep` in active rows, and all logits in other rows, which ends a search."""
        is_active_N = self.is_active() & is_real_N
        count_N = jnp.where(is_active_N, self.min_keep_B, logits_NV.shape[1])
        return count_N.astype(jnp.float32)


@rule
class TopK(Truncation):
    """Keeps the `max(k, min_keep)` largest logits; k <= 0 or k >= V keeps all logits."""

    k_B: Array = per_row(
        Setting("top_k", 0, "number of most likely candidates to keep; <= 0 disables it")
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    @classmethod
    def columns(cls, rows: Sequence[Any], facts: Any) -> TopK:
        """The transform with the k of each row, at most the vocabulary size."""
        packed = super().columns(rows, facts)
        return replace(packed, k_B=np.clip(packed.k_B, 0, np.int32(facts.vocab_size)))

    def is_active(self) -> Array:
        return self.k_B > 0

    def count(self) -> Array:
        return jnp.where(self.k_B > 0, jnp.maximum(self.k_B, self.min_keep_B), 0)

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        count_N = self.count()
        return keep_largest(logits_NV, jnp.where(count_N > 0, count_N, logits_NV.shape[1]))


@rule
class TopP(Truncation):
    """Keeps the smallest set of most likely tokens whose mass reaches p; p = 1 disables it.

    A token is dropped if the mass before it is >= p. The most likely token is always kept.
    """

    p_B: Array = per_row(
        Setting(
            "top_p", 1.0, "probability mass of the nucleus; 1 disables it", low=ABOVE_ZERO, high=1.0
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        p_N = self.p_B
        # The set of kept tokens has no derivative.
        max_N, total_N = vocab.exp_sum(vocab.fixed(logits_NV))
        return keep_prefix(
            logits_NV,
            value=lambda block: block,
            weight=lambda block: jnp.exp(block - max_N[:, None]),
            top_N=max_N,
            mass_N=p_N * total_N,
            count_N=self.min_count(logits_NV, is_real_N),
        )


@rule
class TypicalP(Truncation):
    """Keeps the tokens whose surprise is closest to the entropy, up to mass q; q = 1 disables it.

    Tokens are taken in ascending order of `abs(-ln p - H)` until their mass exceeds q.
    Source: Meister et al. 2022, "Locally typical sampling".
    """

    p_B: Array = per_row(
        Setting(
            "typical_p",
            1.0,
            "probability mass of the most typical tokens; 1 disables it",
            low=ABOVE_ZERO,
            high=1.0,
            aliases=("typical", "typ_p"),
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        max_N, total_N = vocab.exp_sum(vocab.fixed(logits_NV))
        log_total_N = jnp.log(total_N)
        _, entropy_N = vocab.count_and_entropy(vocab.fixed(logits_NV))

        def logprob(block: Array) -> Array:
            return block - max_N[:, None] - log_total_N[:, None]

        def typicality(block: Array) -> Array:
            return -jnp.abs(logprob(block) + entropy_N[:, None])

        # A token is kept if the mass before it is <= q, not < q.
        next_key_N = jax.lax.bitcast_convert_type(self.p_B, jnp.int32) + 1
        return keep_prefix(
            logits_NV,
            value=typicality,
            weight=lambda block: jnp.exp(logprob(block)),
            top_N=jnp.zeros_like(max_N),
            mass_N=jax.lax.bitcast_convert_type(next_key_N, jnp.float32),
            count_N=self.min_count(logits_NV, is_real_N),
        )


@rule
class MinP(Truncation):
    """Keeps tokens with `p >= m * max(p)`; m = 0 disables it."""

    p_B: Array = per_row(
        Setting("min_p", 0.0, "minimum probability relative to the largest; 0: off", 0.0, 1.0)
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        is_active_N = self.is_active()
        fraction_N = jnp.where(is_active_N, self.p_B, 1.0)
        floor_N = vocab.maximum(vocab.fixed(logits_NV)) + jnp.log(fraction_N)
        return keep_above(logits_NV, floor_N, self.min_keep_B, is_active_N)


@rule
class TopNSigma(Truncation):
    """Keeps logits `x >= max(x) - n * std(x)`, where std is the population standard deviation over
    the candidates; n <= 0 disables it.

    Source: Tang et al. 2024, "Top-n-sigma: not all logits are you need".
    """

    n_B: Array = per_row(
        Setting(
            "top_n_sigma",
            0.0,
            "maximum standard deviations below the largest logit; <= 0 disables it",
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def is_active(self) -> Array:
        return self.n_B > 0

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        fixed_NV = vocab.fixed(logits_NV)
        half_max_N = vocab.maximum(fixed_NV) * 0.5
        range_N = half_max_N - vocab.minimum(fixed_NV) * 0.5
        range_N = jnp.where(range_N > 0, range_N, 1.0)

        def scaled(block: Array) -> Array:
            # in [-1, 0], so that squares of huge logits do not overflow
            return (block * 0.5 - half_max_N[:, None]) / range_N[:, None]

        def over_candidates(fn: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
            return lambda block, ids: jnp.where(block > -jnp.inf, fn(block), 0.0)

        count_N, total_N = vocab.sums(
            fixed_NV, over_candidates(jnp.ones_like), over_candidates(scaled)
        )
        mean_N = total_N / jnp.maximum(count_N, 1.0)
        (squares_N,) = vocab.sums(
            fixed_NV, over_candidates(lambda block: (scaled(block) - mean_N[:, None]) ** 2)
        )
        deviation_N = jnp.sqrt(squares_N / jnp.maximum(count_N, 1.0))
        floor_N = 2.0 * (half_max_N - self.n_B * deviation_N * range_N)
        return keep_above(logits_NV, floor_N, self.min_keep_B, self.is_active())


@rule
class Xtc(Truncation):
    """With probability P, drops all tokens with `p >= t` except the least likely one.

    The decision is drawn independently for each position, from the position's key. The transform
    has no effect if fewer than two tokens reach t, if fewer than `min_keep` tokens would remain, or
    if P = 0 or t > 0.5.
    """

    probability_B: Array = per_row(
        Setting("xtc_probability", 0.0, "probability that XTC drops top choices", 0.0, 1.0)
    )
    threshold_B: Array = per_row(
        Setting(
            "xtc_threshold",
            0.1,
            "XTC: minimum probability of a top choice; above 0.5 disables it",
            low=ABOVE_ZERO,
            high=1.0,
            activates=False,
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    @classmethod
    def yields(cls, row: Any) -> bool:
        return is_steered(row) or is_greedy(row)

    def is_active(self) -> Array:
        return (self.probability_B > 0) & (self.threshold_B <= 0.5)

    def gather(self, at: At) -> Xtc:
        """The transform of each position, with a probability of 1 or 0, which the key decides."""
        own = super().gather(at)
        uniform_N = jax.vmap(jax.random.uniform)(salted(at.key_N, _XTC_SALT))
        drops_N = own.is_active() & (uniform_N < own.probability_B)
        return replace(own, probability_B=drops_N.astype(jnp.float32))

    def change(self, logits_NV: Logits, is_real_N: Array) -> Logits:
        fixed_NV = vocab.fixed(logits_NV)
        max_N, total_N = vocab.exp_sum(fixed_NV)
        floor_N = max_N + jnp.log(self.threshold_B * total_N)

        def is_top(block: Array) -> Array:
            return block >= floor_N[:, None]

        num_top_N, num_N, least_N = vocab.reduce(
            fixed_NV,
            ("sum", lambda block, ids: is_top(block)),
            ("sum", lambda block, ids: block > -jnp.inf),
            ("min", lambda block, ids: jnp.where(is_top(block), block, jnp.inf)),
        )
        least_N1 = least_N[:, None]
        num_left_N = num_N - num_top_N + 1
        does_drop_N = self.is_active() & (num_top_N >= 2) & (num_left_N >= self.min_keep_B)
        stays_N = vocab.lowest_id(lambda block: block == least_N1, fixed_NV)

        def keep(block: Array, ids: Array) -> Array:
            is_kept = (block < least_N1) | (ids == stays_N[:, None]) | ~does_drop_N[:, None]
            return jnp.where(is_kept, block, -jnp.inf)

        return vocab.change(logits_NV, keep)
