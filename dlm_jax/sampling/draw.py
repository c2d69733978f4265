"""Draws one token id per position: an exact sample from the float32 softmax, or the argmax.

The token at a position depends only on its own key and logits. Programs that take the argmax of
logits with Gumbel noise draw from the same distribution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.sampling import vocab
from dlm_jax.sampling.positions import place_of_largest


def argmax(logits_NV: Array) -> Array:
    """Ids `[N]` (int32) of the largest logits: the lowest id on ties, 0 where all logits are -inf.

    Logits that differ only by rounding are treated as ties (see `vocab.TOLERANCE`).
    """
    return vocab.argmax(logits_NV.astype(jnp.float32), vocab.TOLERANCE)


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
    `vocab.exp_columns`, if they are known.
    """
    # Never draw from bfloat16 logits, because their tail collapses.
    logits_NV = logits_NV.astype(jnp.float32)
    if weight_NC is None:
        _, weight_NC = vocab.exp_columns(logits_NV)
    # Three levels, each with its own uniform number: group of columns, column, member.
    N, C = weight_NC.shape
    size = max(1, round(C**0.5))
    num_groups = -(-C // size)
    weight_NGS = jnp.pad(weight_NC, ((0, 0), (0, num_groups * size - C)))
    weight_NGS = weight_NGS.reshape(N, num_groups, size)
    group_N = _pick(weight_NGS.sum(-1), noise[0])
    weight_NS = jnp.take_along_axis(weight_NGS, group_N[:, None, None], axis=1)[:, 0]
    column_N = group_N * size + _pick(weight_NS, noise[1])
    member_NM, _ = vocab.members(logits_NV, column_N)
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
    `vocab.exp_columns` of the logits, if they are known. The result is accurate also where the
    probability rounds to 1.
    """
    logits_NV = logits_NV.astype(jnp.float32)
    max_N, rest_N = vocab.max_and_rest(logits_NV, sums)
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
