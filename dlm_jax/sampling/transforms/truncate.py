"""Truncations: transforms that set some candidates to -inf.

Each truncation keeps at least `min_keep` candidates per position, or all if there are fewer. Among
equal values, the lowest ids are kept. The semantics match those of llama.cpp's samplers on the
host.

The cut is computed exactly, without sorting the vocabulary. A truncation keeps a prefix of the
vocabulary, sorted by some value in descending order, with lower ids first among equals. The value
at the end of the prefix is found by narrowing a bracket until the bracket contains a single token.
Testing a bound takes one pass over the vocabulary, and about fifteen passes suffice. Bounds are
chosen by false position on the logarithm of the mass above the ends of the bracket, or, where false
position is unreliable, by bisection of float32 bit patterns. On CPU, testing several bounds per
pass is not faster, because XLA loops over each accumulator separately.

Where whole-row sorts are fast, the sorted largest values give the ends of a narrow bracket, which
one pass measures. Both methods give exactly the same cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.transform import At, Change, Pointwise, is_steered
from dlm_jax.sampling.vocab import Logits, Resident, ordered
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, rule

Elementwise = Callable[[Array], Array]

_FEW = 128
_NUM_MIDPOINT = 32
_WIDE = 64.0
_NUM_GUESSES = 18
_NUM_LARGEST = 1024


class _Search(NamedTuple):
    """Bracket of the key of the cut, with the mass and count above each end.

    `streak` is positive if the upper end moved last and negative if the lower end did; its
    magnitude is the number of consecutive moves. `turn` is the number of passes.
    """

    low_N: Array
    high_N: Array
    count_low_N: Array
    count_high_N: Array
    mass_low_N: Array
    mass_high_N: Array
    streak_N: Array
    turn: Array

    def is_open(self) -> Array:
        return (self.high_N - self.low_N > 1) & (self.count_low_N - self.count_high_N > 1)


def keeps_prefix(
    logits_NV: Logits,
    *,
    value: Elementwise,
    weight: Elementwise | None,
    top_N: Array,
    mass_N: Array,
    count_N: Array,
) -> Change:
    """Keeps the tokens after a mass < `mass_N` or after fewer than `count_N` tokens.

    Args:
      logits_NV: float32.
      value: elementwise function of a block of logits by which tokens are ordered, largest first;
        -inf for non-candidates.
      weight: elementwise mass of a logit, at least 0; None for a mass of 1.
      top_N: float32 upper bound on all values.
      mass_N: strict upper bound on the mass before a kept token.
      count_N: float32, number of tokens to keep regardless of mass, at least 1.
    """
    if not isinstance(logits_NV, Resident) and logits_NV.shape[1] <= _FEW:
        seen_NV = vocab.flushed(logits_NV)
        weight_NV = jnp.ones_like(seen_NV) if weight is None else weight(seen_NV)
        mass_NV, num_NV = _before_each(value(seen_NV), weight_NV)
        is_kept_NV = (mass_NV < mass_N[:, None]) | (num_NV < count_N[:, None])
        return lambda block, ids: jnp.where(is_kept_NV, block, -jnp.inf)
    cut_N, last_id_N = _search(
        logits_NV, value=value, weight=weight, top_N=top_N, mass_N=mass_N, count_N=count_N
    )
    return _up_to(lambda block: value(vocab.flushed(block)), cut_N, last_id_N)


def _up_to(value: Elementwise, cut_N: Array, last_id_N: Array) -> Change:
    """Keeps tokens with larger values than at the cut, and those at the cut up to an id."""

    def keep(block, ids):
        value_NC = value(block)
        is_tie_kept_NC = (value_NC == cut_N[:, None]) & (ids <= last_id_N[:, None])
        return jnp.where((value_NC > cut_N[:, None]) | is_tie_kept_NC, block, -jnp.inf)

    return keep


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


def _search(
    logits_NV: Logits,
    *,
    value: Elementwise,
    weight: Elementwise | None,
    top_N: Array,
    mass_N: Array,
    count_N: Array,
) -> tuple[Array, Array]:
    """Value at which the prefix ends, and the last id kept among ids with this value."""
    if isinstance(logits_NV, Resident):
        # Values and weights are computed once.
        of_value, of_weight = value, weight
        if of_weight is None:
            logits_NV = logits_NV.stored(lambda block: of_value(vocab.flushed(block)))
            value = lambda block: block  # noqa: E731
        else:
            logits_NV = logits_NV.stored(
                lambda block: of_value(vocab.flushed(block)),
                lambda block: of_weight(vocab.flushed(block)),
            )
            value, weight = (lambda pair: pair[0]), (lambda pair: pair[1])
    else:
        logits_NV = vocab.flushed(logits_NV)
    V = logits_NV.shape[1]
    all_key = ordered(jnp.float32(-jnp.inf))
    # The lower end starts below -inf, because a search can end at -inf.
    low_N = jnp.full(count_N.shape, all_key - 1, jnp.uint32)
    high_N = jnp.where(count_N >= V, all_key, ordered(vocab.flushed(top_N)))
    zero_N = jnp.zeros(count_N.shape, jnp.float32)
    unknown_N = zero_N + (V + 2.0)
    streak_N = jnp.zeros(count_N.shape, jnp.int32)
    search = _Search(low_N, high_N, unknown_N, zero_N, unknown_N, zero_N, streak_N, jnp.int32(0))

    def measure(s: _Search, *keys: Array) -> _Search:
        """The bracket after a pass that tests one or more bounds."""
        terms: list[Callable[[Any, Array], Array]] = []
        for key_N in keys:
            bound_N1 = _float(key_N)[:, None]
            terms.append(lambda x, _, b=bound_N1: jnp.where(value(x) > b, 1.0, 0.0))
            if weight is not None:
                terms.append(lambda x, _, b=bound_N1, w=weight: jnp.where(value(x) > b, w(x), 0.0))
        above = vocab.sums(logits_NV, *terms)
        each = len(above) // len(keys)  # the count alone, or the count and the mass
        for place, key_N in enumerate(keys):
            s = tested(s, key_N, above[place * each], above[place * each + each - 1])
        return s

    def tested(s: _Search, key_N: Array, count_above_N: Array, mass_above_N: Array) -> _Search:
        is_inside_N = (mass_above_N < mass_N) | (count_above_N < count_N)
        is_open_N = s.is_open() & (key_N > s.low_N) & (key_N < s.high_N)
        lifts_N, lowers_N = is_open_N & ~is_inside_N, is_open_N & is_inside_N
        return _Search(
            jnp.where(lifts_N, key_N, s.low_N),
            jnp.where(lowers_N, key_N, s.high_N),
            jnp.where(lifts_N, count_above_N, s.count_low_N),
            jnp.where(lowers_N, count_above_N, s.count_high_N),
            jnp.where(lifts_N, mass_above_N, s.mass_low_N),
            jnp.where(lowers_N, mass_above_N, s.mass_high_N),
            jnp.where(is_inside_N, jnp.maximum(s.streak_N, 0) + 1, jnp.minimum(s.streak_N, 0) - 1),
            s.turn + 1,
        )

    if vocab.sorts_whole_rows() and not isinstance(logits_NV, Resident):
        search = measure(search, *_expected_keys(logits_NV, value, weight, mass_N, count_N))

    def narrow(s: _Search) -> _Search:
        return measure(s, _next_bound(s, mass_N))

    s = jax.lax.while_loop(lambda s: s.is_open().any(), narrow, search)
    # The bracket contains one token, or several tokens with equal values.
    ties_N = s.count_low_N - s.count_high_N
    weight_N = (s.mass_low_N - s.mass_high_N) / jnp.maximum(ties_N, 1.0)
    by_mass_N = jnp.ceil((mass_N - s.mass_high_N) / jnp.where(weight_N > 0, weight_N, 1.0))
    num_N = jnp.clip(jnp.maximum(by_mass_N, count_N - s.count_high_N), 1.0, ties_N)
    is_single_N = ties_N <= 1
    # If the bracket contains one token, everything above its lower end is kept.
    value_N = _float(jnp.where(is_single_N, s.low_N, s.high_N))
    is_split_N = ~is_single_N & (num_N < ties_N) & (s.low_N >= all_key)

    def last_tie() -> Array:
        """The last of the ids with the value at the cut that are kept."""
        if vocab.sorts_whole_rows() and not isinstance(logits_NV, Resident):
            upto_NV = jnp.cumsum(value(logits_NV) == value_N[:, None], axis=1, dtype=jnp.int32)
            return jnp.where(is_split_N, (upto_NV < num_N[:, None]).sum(-1, dtype=jnp.int32), V)

        def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low_N, high_N = bounds
            last_N = (low_N + high_N) // 2

            def is_before(block: Any, ids_1C: Array) -> Array:
                is_tie_NC = (value(block) == value_N[:, None]) & (ids_1C <= last_N[:, None])
                return jnp.where(is_tie_NC, 1.0, 0.0)

            is_enough_N = vocab.sums(logits_NV, is_before)[0] >= num_N
            return jnp.where(is_enough_N, low_N, last_N), jnp.where(is_enough_N, last_N, high_N)

        low_N = jnp.full(value_N.shape, -1, jnp.int32)
        high_N = jnp.full(value_N.shape, V - 1, jnp.int32)
        return jnp.where(
            is_split_N, jax.lax.fori_loop(0, V.bit_length(), halve, (low_N, high_N))[1], V
        )

    none_N = jnp.full(value_N.shape, V, jnp.int32)
    last_N = jax.lax.cond(is_split_N.any(), last_tie, lambda: none_N)
    cut_N = jnp.where(s.high_N == all_key, -jnp.inf, value_N)
    return cut_N, jnp.where(is_single_N, -1, last_N)


def _expected_keys(
    logits_NV: Array,
    value: Elementwise,
    weight: Elementwise | None,
    mass_N: Array,
    count_N: Array,
) -> tuple[Array, Array]:
    """The keys of the largest value after the prefix and of the smallest value in it, from the
    largest values only. Their masses are summed in another order than in a pass.
    """
    size = min(_NUM_LARGEST, logits_NV.shape[1])
    value_NK, ids_NK = jax.lax.top_k(value(logits_NV), size)
    is_inside_NK = jnp.arange(size, dtype=jnp.float32)[None] < count_N[:, None]
    if weight is not None:
        weight_NK = weight(jnp.take_along_axis(logits_NV, ids_NK, axis=1))
        is_inside_NK |= jnp.cumsum(weight_NK, axis=1) - weight_NK < mass_N[:, None]
    num_N1 = jnp.clip(is_inside_NK.sum(-1, keepdims=True), 1, size)
    ends_N2 = jnp.concatenate([jnp.minimum(num_N1, size - 1), num_N1 - 1], axis=1)
    key_N2 = ordered(vocab.flushed(jnp.take_along_axis(value_NK, ends_N2, axis=1)))
    return key_N2[:, 0], key_N2[:, 1]


def _next_bound(s: _Search, mass_N: Array) -> Array:
    """The next key to measure inside each bracket.

    The key is found by false position on the logarithms of the mass above the ends of the bracket.
    The key is shifted past the estimate by half of the expected deviation, so that both ends of the
    bracket move. The weight of an end is halved each time that the end does not move (the
    "Illinois" rule). Where false position is unreliable, the middle value is used. The middle key
    is used for every fourth bound, for wide brackets and in the last passes. It closes any bracket
    in 32 passes, even if many values are equal.
    """
    low_N, high_N = _float(s.low_N), _float(s.high_N)
    first_N, last_N = s.low_N + 1, s.high_N - 1
    half_N = s.low_N + ((s.high_N - s.low_N) >> 1)
    half_N = jnp.where(half_N < first_N, first_N, half_N)
    num_N = s.count_low_N - s.count_high_N
    slack_N = jnp.exp2(-jnp.clip(jnp.abs(s.streak_N) - 1, 0, 3).astype(jnp.float32))
    over_N = jnp.log(s.mass_low_N / mass_N) * jnp.where(s.streak_N > 0, slack_N, 1.0)
    under_N = jnp.log(mass_N / s.mass_high_N) * jnp.where(s.streak_N < 0, slack_N, 1.0)
    past_N = 0.5 / jnp.sqrt(jnp.maximum(num_N, 1.0))
    part_N = over_N / (over_N + under_N) - jnp.sign(s.streak_N) * past_N
    part_N = jnp.clip(part_N, 0.5 * past_N, 1.0 - 0.5 * past_N)
    is_trusted_N = (s.mass_high_N > 0) & (num_N > _NUM_MIDPOINT) & (over_N >= 0) & (under_N > 0)
    guess_N = ordered(low_N + (high_N - low_N) * jnp.where(is_trusted_N, part_N, 0.5))
    is_fit_N = (high_N - low_N < _WIDE) & (s.turn % 4 != 3) & (s.turn < _NUM_GUESSES)
    # TPU kernels compare unsigned numbers, but have no minimum or maximum of them.
    guess_N = jnp.where(guess_N < first_N, first_N, guess_N)
    guess_N = jnp.where(guess_N > last_N, last_N, guess_N)
    return jnp.where(is_fit_N, guess_N, half_N)


def _float(key: Array) -> Array:
    """The inverse of `ordered`, with denormals as 0."""
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32((1 << 31) - 1), ~key)
    return vocab.flushed(jax.lax.bitcast_convert_type(bits, jnp.float32))


MAX_CANDIDATES = 64
"""Rows with a top-k up to this size run the rest of the chain on their candidates only."""

MIN_KEEP = Setting(
    "min_keep",
    1,
    "minimum number of candidates that a truncation keeps, in [1, 64]",
    low=1,
    high=MAX_CANDIDATES,
    remedy="use 1",
    activates=False,
)
SAMPLER_TOP_P = Setting(
    "sampler_top_p",
    0.0,
    "top_p for tokens that a sampler head draws; 0 uses top_p, 1 disables it",
    low=0.0,
    high=1.0,
    is_preset=True,
)


class Truncation(Pointwise):
    """A truncation that does not depend on ids and is replaced by Mirostat."""

    @classmethod
    def yields(cls, row: Any) -> bool:
        return is_steered(row)


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

    def change(self, given: Any, logits_NV: Logits, at: At) -> Change:
        count_N = self.count()[at.row_N]
        return keep_largest(logits_NV, jnp.where(count_N > 0, count_N, logits_NV.shape[1]))


@rule
class TopP(Truncation):
    """Keeps the smallest set of most likely tokens whose mass reaches p; p = 1 disables it.

    A token is dropped if the mass before it is >= p. The most likely token is always kept.
    """

    p_B: Array = per_row(
        Setting(
            "top_p",
            1.0,
            "probability mass of the nucleus, in (0, 1]; 1 disables it",
            low=ABOVE_ZERO,
            high=1.0,
            remedy="use 1.0 to disable it",
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)
    grown_p_B: Array = per_row(
        SAMPLER_TOP_P, column=lambda ps: np.array([p and max(p, 2e-38) for p in ps], np.float32)
    )

    def is_active(self) -> Array:
        return (self.p_B < 1) | (self._grown_p() < 1)

    def _grown_p(self) -> Array:
        """The p for tokens drawn by the sampler head."""
        return jnp.where(self.grown_p_B == 0, self.p_B, self.grown_p_B)

    def change(self, given: Any, logits_NV: Logits, at: At) -> Change:
        p_N = self.p_B[at.row_N]
        if at.is_grown_N is not None:
            p_N = jnp.where(at.is_grown_N, self._grown_p()[at.row_N], p_N)
        # The search is not differentiable, and the set of kept tokens has no derivative anyway.
        seen_NV = vocab.stopped(logits_NV)
        count_N = jnp.where(p_N >= 1, logits_NV.shape[1], _count_or_all(self, logits_NV, at))
        max_N, weight_NC = vocab.exp_columns(seen_NV)
        return keeps_prefix(
            seen_NV,
            value=lambda block: block,
            weight=lambda block: jnp.exp(block - max_N[:, None]),
            top_N=max_N,
            mass_N=p_N * weight_NC.sum(-1),
            count_N=count_N,
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
            "probability mass of the most typical tokens to keep, in (0, 1]; 1 disables it",
            low=ABOVE_ZERO,
            high=1.0,
            remedy="use 1.0 to disable it",
            aliases=("typical", "typ_p"),
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def change(self, given: Any, logits_NV: Logits, at: At) -> Change:
        seen_NV = vocab.stopped(logits_NV)
        max_N, weight_NC = vocab.exp_columns(seen_NV)
        log_total_N = jnp.log(weight_NC.sum(-1))
        _, entropy_N = vocab.count_and_entropy(seen_NV)

        def logprob(block):
            return block - max_N[:, None] - log_total_N[:, None]

        def typicality(block):
            return -jnp.abs(logprob(block) + entropy_N[:, None])

        return keeps_prefix(
            seen_NV,
            value=typicality,
            weight=lambda block: jnp.exp(logprob(block)),
            top_N=jnp.zeros_like(max_N),
            # A token is kept if the mass before it is <= q, not < q.
            mass_N=jnp.nextafter(self.p_B[at.row_N], jnp.inf),
            count_N=_count_or_all(self, logits_NV, at),
        )


@rule
class MinP(Truncation):
    """Keeps tokens with `p >= m * max(p)`; m = 0 disables it."""

    p_B: Array = per_row(
        Setting(
            "min_p",
            0.0,
            "minimum probability of a token as a fraction of the largest, in [0, 1]; 0 disables it",
            low=0.0,
            high=1.0,
            remedy="use 0.0 to disable it",
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def change(self, given: Any, logits_NV: Logits, at: At) -> Change:
        fraction_N = jnp.where(self.is_active(), self.p_B, 1.0)[at.row_N]
        floor_N = vocab.maximum(logits_NV) + jnp.log(fraction_N)
        return keep_above(logits_NV, floor_N, self.min_keep_B[at.row_N], self.is_active()[at.row_N])


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
            "maximum distance below the largest logit, in standard deviations; <= 0 disables it",
            remedy="use 0.0",
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    def is_active(self) -> Array:
        return self.n_B > 0

    def change(self, given: Any, logits_NV: Logits, at: At) -> Change:
        half_max_N = vocab.maximum(logits_NV) * 0.5
        least_N = vocab.minimum(logits_NV)
        range_N = half_max_N - least_N * 0.5
        range_N = jnp.where(range_N > 0, range_N, 1.0)

        def scaled(block: Array) -> Array:
            # in [-1, 0], so that squares of huge logits do not overflow
            return (block * 0.5 - half_max_N[:, None]) / range_N[:, None]

        def over_candidates(fn: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
            return lambda block, ids: jnp.where(block > -jnp.inf, fn(block), 0.0)

        count_N, total_N = vocab.sums(
            logits_NV, over_candidates(jnp.ones_like), over_candidates(scaled)
        )
        mean_N = total_N / jnp.maximum(count_N, 1.0)
        (squares_N,) = vocab.sums(
            logits_NV, over_candidates(lambda block: (scaled(block) - mean_N[:, None]) ** 2)
        )
        deviation_N = jnp.sqrt(squares_N / jnp.maximum(count_N, 1.0))
        floor_N = 2.0 * (half_max_N - self.n_B[at.row_N] * deviation_N * range_N)
        return keep_above(logits_NV, floor_N, self.min_keep_B[at.row_N], self.is_active()[at.row_N])


def keep_largest(logits_NV: Logits, count_N: Array) -> Change:
    """Keeps the `count_N` (at least 1) largest logits and sets all others to -inf; lower ids win
    ties.
    """
    return keeps_prefix(vocab.stopped(logits_NV), **_by_count(logits_NV, count_N))


def _by_count(logits_NV: Logits, count_N: Array) -> dict[str, Any]:
    """The arguments of `keeps_prefix` for the largest logits, each with mass 1."""
    count_N = count_N.astype(jnp.float32)
    top_N = vocab.maximum(vocab.stopped(logits_NV))
    bounds = {"top_N": top_N, "mass_N": count_N, "count_N": count_N}
    return {"value": lambda block: block, "weight": None, **bounds}


def keep_above(logits_NV: Logits, floor_N: Array, min_keep_N: Array, is_active_N: Array) -> Change:
    """Sets logits with values below `floor_N` to -inf in active rows, except the `min_keep_N`
    largest.

    `min_keep_N` is at most `MAX_CANDIDATES`.
    """

    def is_above(block_NC: Array, ids_1C: Array) -> Array:
        is_above_NC = (block_NC >= floor_N[:, None]) & (block_NC > -jnp.inf)
        return jnp.where(is_above_NC, 1.0, 0.0)

    def last_kept() -> tuple[Array, Array]:
        """Value and id of the last of the largest logits."""
        if isinstance(logits_NV, Resident):
            return _search(logits_NV, **_by_count(logits_NV, min_keep_N))
        # Denormals are treated as 0, so that the order is the same as in other passes. Lower ids
        # come first among equals, so the last kept id determines which are kept.
        size = min(MAX_CANDIDATES, logits_NV.shape[1])
        largest_NK = jax.lax.top_k(vocab.flushed(logits_NV), size)
        last_N1 = jnp.clip(min_keep_N, 1, size)[:, None] - 1
        least_N, id_N = (jnp.take_along_axis(x, last_N1, axis=1)[:, 0] for x in largest_NK)
        return least_N, id_N

    is_short_N = (vocab.sums(logits_NV, is_above)[0] < min_keep_N) & is_active_N
    none = jnp.zeros(floor_N.shape, jnp.float32), jnp.zeros(floor_N.shape, jnp.int32)
    last_N, id_N = jax.lax.cond(is_short_N.any(), last_kept, lambda: none)
    cut_N = jnp.where(is_short_N, last_N, jnp.where(is_active_N, floor_N, -jnp.inf))
    return _up_to(
        vocab.flushed, vocab.flushed(cut_N), jnp.where(is_short_N, id_N, logits_NV.shape[1])
    )


def _count_or_all(transform: Any, logits_NV: Logits, at: At) -> Array:
    """`min_keep` in active rows, and the vocabulary size in other rows, which ends the search."""
    is_active_N = (transform.is_active()[at.row_N]) & at.is_real_N
    count_N = jnp.where(is_active_N, transform.min_keep_B[at.row_N], logits_NV.shape[1])
    return count_N.astype(jnp.float32)
