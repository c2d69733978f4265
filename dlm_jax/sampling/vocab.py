"""Passes over the vocabulary axis, block by block, for N positions, and draws of one id for each.

A draw is an exact sample from the float32 softmax, or the argmax, and depends only on the key and
the logits of its position. Programs that take the argmax of logits with Gumbel noise draw from the
same distribution.

XLA's CPU backend does not vectorise a reduction that contains a comparison or a `where`. One such
pass over 256 x 50257 logits takes 20 ms, while accumulating the same function elementwise into
`[N, C]` columns takes 3 ms. On accelerators, sorting and reducing whole rows is faster, with the
same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.devices import platform
from dlm_jax.sampling.positions import place_of_largest

TOLERANCE = 1e-5
"""Relative tolerance: scores and logits that differ by less are treated as equal.

The same number differs by about 3e-7 between shapes, devices and compilers. The error of a sum or
difference is relative to its terms.
"""
_LARGEST = float(jnp.finfo(jnp.float32).max)
_WIDTHS = range(2048, 511, -1)
_USUAL_WIDTH = 1024


def sorts_whole_rows() -> bool:
    """True if whole-row sorts and reductions are fastest on the devices in use."""
    return platform() != "cpu"


@functools.cache
def width_of(vocab_size: int) -> int:
    """Number of columns C of the accumulators: if possible, a divisor of the size of the vocabulary
    (1733 for 50257), because a narrower last block requires another copy of every pass.
    """
    if vocab_size <= _USUAL_WIDTH:
        return vocab_size
    return next((c for c in _WIDTHS if vocab_size % c == 0), _USUAL_WIDTH)


KINDS = {
    "sum": (jnp.add, jnp.sum, 0.0),
    "min": (jnp.minimum, jnp.min, jnp.inf),
    "max": (jnp.maximum, jnp.max, -jnp.inf),
}
Term = Callable[[Any, Array], Array]
"""An elementwise function of logits ``[N, C]`` and their ids ``[1, C]``."""


@dataclass(frozen=True)
class Resident:
    """Logits `[N, V]` in the memory of a kernel, with what functions of this module do to them:
    `reduce`, `sums_of` (`store`, with terms of `reduce`), and `change`, in place.
    """

    shape: tuple[int, int]
    reduce: Callable[..., tuple[Array, ...]]
    store: Callable[..., Callable[..., tuple[Array, ...]]]
    change: Callable[[Term], Resident]


Logits = Array | Resident
"""Logits of the functions that `Pointwise.change` may use."""


def fixed(logits_NV: Any) -> Any:
    """The logits without derivative."""
    return logits_NV if isinstance(logits_NV, Resident) else jax.lax.stop_gradient(logits_NV)


def change(logits_NV: Any, fn: Term) -> Any:
    """The logits after an elementwise function of logits and ids."""
    if isinstance(logits_NV, Resident):
        return logits_NV.change(fn)
    return fn(logits_NV, jnp.arange(logits_NV.shape[1], dtype=jnp.int32)[None])


def reduce_columns(logits_NV: Array, *terms: tuple[str, Term]) -> tuple[Array, ...]:
    """The ``sum``, ``min`` or ``max`` of each term in each column, ``[N, C]``, in one pass.

    Column c has the ids ``c + j C`` in ascending order of j, for `width_of` C.
    """
    (N, V), C = logits_NV.shape, width_of(logits_NV.shape[1])
    num_full, ids_1C = V // C, jnp.arange(C, dtype=jnp.int32)[None]

    def fold(accs: tuple[Array, ...], block_NC: Array, ids_1C: Array) -> tuple[Array, ...]:
        pairs = zip(accs, terms, strict=True)
        return tuple(KINDS[kind][0](acc, term(block_NC, ids_1C)) for acc, (kind, term) in pairs)

    def body(j: Any, accs: tuple[Array, ...]) -> tuple[Array, ...]:
        block_NC = jax.lax.dynamic_slice(logits_NV, (0, j * C), (N, C))
        return fold(accs, block_NC, ids_1C + j * C)

    accs = tuple(jnp.full((N, C), KINDS[kind][2], jnp.float32) for kind, _ in terms)
    accs = body(0, accs) if num_full == 1 else jax.lax.fori_loop(0, num_full, body, accs)
    if rest := V - num_full * C:
        head = tuple(acc_NC[:, :rest] for acc_NC in accs)
        head = fold(head, logits_NV[:, num_full * C :], ids_1C[:, :rest] + num_full * C)
        pairs = zip(accs, head, strict=True)
        accs = tuple(jax.lax.dynamic_update_slice(acc, part, (0, 0)) for acc, part in pairs)
    return accs


def reduce(logits_NV: Logits, *terms: tuple[str, Term]) -> tuple[Array, ...]:
    """The ``sum``, ``min`` or ``max`` ``[N]`` of each term, float32, in one pass."""
    if isinstance(logits_NV, Resident):
        return logits_NV.reduce(*terms)
    if sorts_whole_rows():
        ids_1V = jnp.arange(logits_NV.shape[1], dtype=jnp.int32)[None]
        parts = [term(logits_NV, ids_1V).astype(jnp.float32) for _, term in terms]
    else:
        parts = reduce_columns(logits_NV, *terms)
    return tuple(KINDS[kind][1](x, -1) for (kind, _), x in zip(terms, parts, strict=True))


def sums(logits_NV: Logits, *terms: Term) -> tuple[Array, ...]:
    """The sum ``[N]`` of each term, in one pass."""
    return reduce(logits_NV, *(("sum", term) for term in terms))


def sums_of(logits_NV: Logits, *values: Callable[[Array], Array]) -> Callable[..., Any]:
    """A function ``sums(*terms)`` whose terms get the list of `values` of the logits, and ids.
    Denormal logits are 0, and no value has a derivative.
    """
    if isinstance(logits_NV, Resident):
        stored = logits_NV.store(*(lambda block, fn=fn: fn(flushed(block)) for fn in values))
        return lambda *terms: stored(*(("sum", term) for term in terms))
    seen_NV = flushed(fixed(logits_NV))

    def with_values(term: Callable[[list[Array], Array], Array]) -> Term:
        return lambda block, ids: term([fn(block) for fn in values], ids)

    return lambda *terms: sums(seen_NV, *map(with_values, terms))


def members(logits_NV: Array, column_N: Array) -> tuple[Array, Array]:
    """Logits and ids of one column per position, `[N, M]` each; `-inf` where the id is >= V."""
    V, C = logits_NV.shape[1], width_of(logits_NV.shape[1])
    ids_NM = column_N[:, None] + C * jnp.arange(-(-V // C), dtype=jnp.int32)[None]
    member_NM = _at_ids(logits_NV, jnp.minimum(ids_NM, V - 1))
    return jnp.where(ids_NM < V, member_NM, -jnp.inf), ids_NM


def _at_ids(logits_NV: Array, ids_NK: Array) -> Array:
    """Logits `[N, K]` of ids, which must lie within the vocabulary; a check would cost as much."""
    return jnp.take_along_axis(logits_NV, ids_NK, axis=1, mode="promise_in_bounds")


def maximum(logits_NV: Logits) -> Array:
    """Largest logit `[N]`."""
    if isinstance(logits_NV, Resident):
        return logits_NV.reduce(("max", lambda block, ids: block))[0]
    return logits_NV.max(-1)


def minimum(logits_NV: Logits) -> Array:
    """Smallest finite logit `[N]`; +inf if there is none."""
    return reduce(
        logits_NV, ("min", lambda block, ids: jnp.where(block > -jnp.inf, block, jnp.inf))
    )[0]


def lowest_id(is_wanted: Callable[[Array], Array], logits_NV: Logits) -> Array:
    """Lowest id `[N]` whose logit satisfies an elementwise predicate; V if there is none."""
    V = logits_NV.shape[1]
    lowest_N = reduce(logits_NV, ("min", lambda block, ids: jnp.where(is_wanted(block), ids, V)))[0]
    return lowest_N.astype(jnp.int32)


def _column_max(logits_NV: Array) -> Array:
    return reduce_columns(logits_NV, ("max", lambda block, ids: block))[0]


def argmax(logits_NV: Logits) -> Array:
    """Id `[N]` of the largest logit: the lowest id on ties, 0 where all logits are -inf.

    Logits that differ from the largest by less than `TOLERANCE`, relative to the magnitude of the
    largest (between 1 and 100), are tied with it.
    """
    if isinstance(logits_NV, Resident):
        low_N1 = _lowest_tied(maximum(logits_NV)[:, None])
        return lowest_id(lambda block: block >= low_N1, logits_NV)
    logits_NV = logits_NV.astype(jnp.float32)
    if sorts_whole_rows():
        seen_NV = flushed(logits_NV)
        return place_of_largest(seen_NV >= _lowest_tied(seen_NV.max(-1, keepdims=True)))
    best_NC = _column_max(logits_NV)
    max_N1 = best_NC.max(-1, keepdims=True)
    low_N1 = _lowest_tied(max_N1)
    is_best_NC = best_NC >= low_N1
    member_NM, ids_NM = members(logits_NV, place_of_largest(is_best_NC))
    place_N1 = place_of_largest(member_NM >= low_N1)[:, None]
    id_N = jnp.take_along_axis(ids_NM, place_N1, axis=1)[:, 0]
    is_tied_N = (is_best_NC.sum(-1) > 1) & (max_N1[:, 0] > -jnp.inf)
    # Columns interleave ids, so a tie between columns requires another pass.
    return jax.lax.cond(
        is_tied_N.any(),
        lambda x: jnp.where(is_tied_N, lowest_id(lambda block: block >= low_N1, x), id_N),
        lambda x: id_N,
        logits_NV,
    )


def _lowest_tied(max_N1: Array) -> Array:
    # The magnitude is limited, because a large bias must not mask the difference between two biased
    # ids.
    slack_N1 = TOLERANCE * jnp.clip(jnp.abs(max_N1), 1.0, 100.0)
    return max_N1 - jnp.where(jnp.isfinite(max_N1), slack_N1, 0.0)


def largest(logits_NV: Array, size: int) -> tuple[Array, Array]:
    """The `size` largest logits in descending order and their ids, `[N, size]` each.

    Lower ids come first on ties. Denormals equal 0, as in any XLA comparison on CPU. `size` is
    static and at most V.
    """

    def exact(values_NK: Array, ids_NK: Array) -> tuple[Array, Array]:
        return jnp.where(values_NK == 0, _at_ids(logits_NV, ids_NK), values_NK), ids_NK

    V = logits_NV.shape[1]
    C = width_of(V)
    if V <= 4 * C or sorts_whole_rows():
        return exact(*_top_k(flushed(logits_NV), size))
    best_NC = flushed(_column_max(logits_NV))
    top_NK, column_NK = _top_k(best_NC, size)
    # The largest logits are in the columns with the largest maxima.
    M = -(-V // C)
    # The columns are put in ascending order, so that equal logits keep the order of their ids. A
    # sort would take five times as long.
    ascending_NK = -_top_k(-column_NK.astype(jnp.float32), size)[0].astype(jnp.int32)
    ids_NMK = ascending_NK[:, None, :] + C * jnp.arange(M)[None, :, None]
    ids_NJ = ids_NMK.reshape(logits_NV.shape[0], M * size)
    member_NJ = _at_ids(logits_NV, jnp.minimum(ids_NJ, V - 1))
    member_NJ = jnp.where(ids_NJ < V, flushed(member_NJ), -jnp.inf)
    few_NK, place_NK = _top_k(member_NJ, size)
    few_ids_NK = jnp.take_along_axis(ids_NJ, place_NK, axis=1)
    # If maxima tie at the edge, an excluded column can contain an equal logit with a lower id.
    is_tied_N1 = (best_NC >= top_NK[:, -1:]).sum(-1, keepdims=True) > size

    def of_all(x: Array) -> tuple[Array, Array]:
        values, ids = _top_k(flushed(x), size)
        return jnp.where(is_tied_N1, values, few_NK), jnp.where(is_tied_N1, ids, few_ids_NK)

    return exact(*jax.lax.cond(is_tied_N1.any(), of_all, lambda x: (few_NK, few_ids_NK), logits_NV))


def _top_k(x: Array, size: int) -> tuple[Array, Array]:
    """`lax.top_k` between barriers, without which XLA's CPU backend fuses it and sorts instead."""
    # Each output has its own barrier, because XLA folds a joint barrier into the tuple of top-k,
    # and a later pass of the partitioner then aborts.
    top = jax.lax.top_k(jax.lax.optimization_barrier(x), size)
    return jax.lax.optimization_barrier(top[0]), jax.lax.optimization_barrier(top[1])


def flushed(x: Array) -> Array:
    """`x` with denormals set to 0, which sorts but not all comparisons tell apart from 0."""
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0.0, x)


def ordered(x: Array) -> Array:
    """Positive uint32 numbers in the same order as float32 numbers; -0.0 precedes 0.0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def inverse(divisor_N: Array, logits_NV: Logits) -> Array:
    """The inverse of divisors, whose products with the logits are the quotients."""
    # XLA converts only some divisions by a per-row divisor to products. The barrier makes products
    # of all, so that a quotient is the same in every program.
    inverse_N = 1.0 / divisor_N
    is_array = not isinstance(logits_NV, Resident)
    return jax.lax.optimization_barrier(inverse_N) if is_array else inverse_N


@jax.custom_jvp
def times(logits_NV: Array, scale_N1: Array) -> Array:
    """Products of logits and scales, finite where the logit is finite. With a scale of 1, the
    logits are returned bitwise unchanged; a multiplication would flush denormals.
    """
    product_NV = jnp.clip(logits_NV * scale_N1, -_LARGEST, _LARGEST)
    return jnp.where((logits_NV == -jnp.inf) | (scale_N1 == 1), logits_NV, product_NV)


@times.defjvp
def _slope_of_times(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Slope of `times`; 0 where the product of its arguments is not finite or was clipped."""
    (logits_NV, scale_N1), (change_NV, change_N1) = primals, tangents
    is_free_NV = jnp.abs(logits_NV * scale_N1) <= _LARGEST
    finite_NV = jnp.where(is_free_NV, logits_NV, 0.0)
    slope_NV = change_NV * jnp.where(is_free_NV, scale_N1, 0.0) + finite_NV * change_N1
    return times(logits_NV, scale_N1), slope_NV


def exp_columns(logits_NV: Array) -> tuple[Array, Array]:
    """Largest logit `[N]` (0 where all are -inf), and the sum of `exp(logit - max)` in each column,
    `[N, C]`.
    """
    max_N = maximum(logits_NV)
    max_N = jnp.where(max_N == -jnp.inf, 0.0, max_N)
    # TPUs would copy the weights to split their rows.
    if sorts_whole_rows() and platform() != "tpu":
        C = width_of(logits_NV.shape[1])
        weight_NV = jnp.exp(logits_NV - max_N[:, None])
        weight_NV = jnp.pad(weight_NV, ((0, 0), (0, -weight_NV.shape[1] % C)))
        return max_N, weight_NV.reshape(len(max_N), -1, C).sum(1)
    return max_N, reduce_columns(
        logits_NV, ("sum", lambda block, ids: jnp.exp(block - max_N[:, None]))
    )[0]


def exp_sum(logits_NV: Logits) -> tuple[Array, Array]:
    """Largest logit `[N]` (0 where all are -inf), and the sum `[N]` of `exp(logit - max)`."""
    max_N = maximum(logits_NV)
    max_N = jnp.where(max_N == -jnp.inf, 0.0, max_N)
    return max_N, sums(logits_NV, lambda block, ids: jnp.exp(block - max_N[:, None]))[0]


def max_and_rest(logits_NV: Array, sums: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """Largest logit `[N]` (0 where all are -inf), and the sum of `exp(logit - max)` over all ids
    but the most likely one (all but one of equally likely ids), given the `exp_columns` of the
    logits, if they are known.

    ``log1p(rest)`` is accurate where the most likely id has nearly all of the probability. The sum
    over all ids would round to 1 there.
    """
    max_N, weight_NC = exp_columns(logits_NV) if sums is None else sums
    total_N = weight_NC.sum(-1)
    # If the most likely id outweighs all others together, its column is the heaviest. The barriers
    # separate the comparisons from the reductions, which would otherwise not be vectorised.
    width, peak_N1 = weight_NC.shape[1], weight_NC.max(-1, keepdims=True)
    other_NC = jnp.where(weight_NC < peak_N1, weight_NC, 0.0)
    rest_N = jax.lax.optimization_barrier(other_NC).sum(-1)
    if width < logits_NV.shape[1]:
        place_NC = jnp.where(weight_NC < peak_N1, width - 1, jnp.arange(width, dtype=jnp.int32))
        member_NM, _ = members(logits_NV, jax.lax.optimization_barrier(place_NC).min(-1))
        is_most_NM = member_NM == member_NM.max(-1, keepdims=True)
        weight_NM = jnp.exp(jnp.where(is_most_NM, -jnp.inf, member_NM - max_N[:, None]))
        rest_N += weight_NM.sum(-1)
    return max_N, jnp.where(total_N < 2.0, rest_N, total_N - 1.0)


@jax.custom_jvp
def _p_log_p(logprob: Array) -> Array:
    """``p ln p`` and its derivative in ``ln p``; both are 0 in the limit p = 0."""
    prob = jnp.exp(logprob)
    return jnp.where(prob > 0, prob * logprob, 0.0)


@_p_log_p.defjvp
def _slope_of_p_log_p(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (logprob,), (change,) = primals, tangents
    prob = jnp.exp(logprob)
    slope = jnp.where(prob > 0, prob * (1.0 + logprob), 0.0)
    return _p_log_p(logprob), slope * change


def entropy(logits_NV: Array) -> Array:
    """Entropy `[N]` of the softmax in nats, accurate also where it is close to 0."""
    max_N, rest_N = max_and_rest(logits_NV)

    def gap(block_NC: Array, ids_1C: Array) -> Array:
        gap_NC = max_N[:, None] - block_NC
        return jnp.where(gap_NC < jnp.inf, jnp.exp(-gap_NC) * gap_NC, 0.0)

    (gaps_N,) = sums(logits_NV, gap)
    return jnp.log1p(rest_N) + gaps_N / (1.0 + rest_N)


def count_and_entropy(logits_NV: Logits) -> tuple[Array, Array]:
    """Number of candidates (finite logits) and entropy in nats of their softmax, `[N]` each."""
    max_N, total_N = exp_sum(logits_NV)
    log_total_N = jnp.log(total_N)
    count_N, entropy_N = sums(
        logits_NV,
        lambda block, ids: block > -jnp.inf,
        lambda block, ids: 0.0 - _p_log_p(block - max_N[:, None] - log_total_N[:, None]),
    )
    return count_N, entropy_N


def draw(logits_NV: Array, keys_N: Array) -> Array:
    """Ids `[N]` (int32) drawn from `softmax(logits)`, with one typed key per position.

    Tokens with a float32 probability of 0 are never drawn; if all logits at a position are `-inf`,
    its id is 0. The vocabulary is split into three levels with one uniform number each, because a
    single float32 number does not resolve the far tail.
    """
    return draw_with(logits_NV, noise(keys_N))


def noise(keys_N: Array) -> Array:
    """The noise for `draw_with`: ``[3, N]`` uniform numbers with float32 precision near 0."""
    bits_N6 = jax.vmap(lambda key: jax.random.bits(key, (6,)))(keys_N).astype(jnp.float32)
    return (bits_N6[:, :3] * 2.0**-32 + bits_N6[:, 3:] * 2.0**-64).T


def draw_with(logits_NV: Array, noise: Array, *, weight_NC: Array | None = None) -> Array:
    """The ids that `draw` would return, given the `noise` of the keys and the sums of
    `exp_columns`, if they are known.
    """
    # Never draw from bfloat16 logits, because their tail collapses.
    logits_NV = logits_NV.astype(jnp.float32)
    if weight_NC is None:
        _, weight_NC = exp_columns(logits_NV)
    # Three levels, each with its own uniform number: group of columns, column, member.
    N, C = weight_NC.shape
    size = max(1, round(C**0.5))
    num_groups = -(-C // size)
    weight_NGS = jnp.pad(weight_NC, ((0, 0), (0, num_groups * size - C)))
    weight_NGS = weight_NGS.reshape(N, num_groups, size)
    group_N = _pick(weight_NGS.sum(-1), noise[0])
    weight_NS = jnp.take_along_axis(weight_NGS, group_N[:, None, None], axis=1)[:, 0]
    column_N = group_N * size + _pick(weight_NS, noise[1])
    member_NM, _ = members(logits_NV, column_N)
    # Weights are relative to the maximum of the column, so that not all of them underflow.
    peak_N1 = member_NM.max(-1, keepdims=True)
    weight_NM = jnp.exp(member_NM - jnp.where(peak_N1 == -jnp.inf, 0.0, peak_N1))
    return column_N + C * _pick(weight_NM, noise[2])


def choose_with(
    logits_NV: Array,
    noise: Array,
    is_greedy_N: Array,
    *,
    weight_NC: Array | None = None,
) -> Array:
    """Ids `[N]`: the argmax where `is_greedy_N` is True, and the ids of `draw_with` elsewhere.

    A chunk with only greedy rows skips sampling. A chunk without greedy rows skips the argmax.
    """
    logits_NV = logits_NV.astype(jnp.float32)
    none_N = jnp.zeros(is_greedy_N.shape, jnp.int32)
    # These are new functions in each call, because JAX caches the trace of a branch for the
    # lifetime of its function.
    best_N = jax.lax.cond(is_greedy_N.any(), lambda x: argmax(x), lambda x: none_N, logits_NV)
    drawn_N = jax.lax.cond(
        is_greedy_N.all(),
        lambda x, n: none_N,
        lambda x, n: draw_with(x, n, weight_NC=weight_NC),
        logits_NV,
        noise,
    )
    return jnp.where(is_greedy_N, best_N, drawn_N)


def log_prob(logits_NV: Array, ids_N: Array, sums: tuple[Array, Array] | None = None) -> Array:
    """Log-probability `[N]` in nats of one id per position under `softmax(logits)`, given the
    `exp_columns` of the logits, if they are known. The result is accurate also where the
    probability rounds to 1.
    """
    logits_NV = logits_NV.astype(jnp.float32)
    max_N, rest_N = max_and_rest(logits_NV, sums)
    chosen_N = jnp.take_along_axis(logits_NV, ids_N[:, None], axis=1)[:, 0]
    return chosen_N - max_N - jnp.log1p(rest_N)


def _pick(weight_NK: Array, uniform_N: Array) -> Array:
    """Index `[N]` (int32) drawn in proportion to the weights; never an index with weight 0 unless
    all weights are 0.
    """
    # The largest entry is placed at the end of the unit interval. All other entries are then
    # resolved relative to their sum, so that a tail of mass 1e-9 is drawn in the right proportions.
    heaviest_N = place_of_largest(weight_NK)
    indices_1K = jnp.arange(weight_NK.shape[1], dtype=jnp.int32)[None]
    other_NK = jnp.where(indices_1K == heaviest_N[:, None], 0.0, weight_NK)
    upto_NK = jnp.cumsum(other_NK, axis=-1)
    total_N = upto_NK[:, -1] + weight_NK.max(-1)
    is_hit_NK = (upto_NK > (uniform_N * total_N)[:, None]) & (other_NK > 0)
    first_N = place_of_largest(is_hit_NK)
    return jnp.where(is_hit_NK.any(-1), first_N, heaviest_N)
