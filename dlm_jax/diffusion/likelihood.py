"""What a text costs under the model: its negative log-likelihood, or an upper bound on it.

With given tokens it is the conditional likelihood of the rest: given tokens are always shown and
never counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit

from dlm_jax.diffusion.corruption import mask_exactly
from dlm_jax.diffusion.losses import cross_entropy, hidden_of
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.types import Network, Params


class Bound(NamedTuple):
    """Per row: the bound in nats for the whole row, and its variance over the draws of masks.

    ``variance_B`` is that of the mean over the draws; it is NaN for a single draw.
    """

    nats_B: jax.Array
    variance_B: jax.Array


class Parts(NamedTuple):
    """The cost of whole rows, and what of it falls to their text: their tokens that are not EOS."""

    whole: Bound
    text: Bound


def bound_at(
    network: Network, params: Params, batch: Batch, is_masked_BL: jax.Array, *, mask_id: int
) -> jax.Array:
    """Bound in nats ``[B]`` at given masks: ``free / count`` times the cross-entropy they hide.

    Averaged over counts uniform on 1..free and sets uniform of that count, this is the negative
    ELBO of masked diffusion for every noise schedule, which is also the mean over all orders of
    revealing one token at a time (Ou et al. 2024, theorem 2; LLaDA, Nie et al. 2025, equation 6).
    Rows without a masked position get 0. Of a block-causal model, the sum of `block_bounds_at`.
    """
    nll_BL = _hidden_nll(network, params, batch, is_masked_BL, mask_id=mask_id)
    return _weighed(network, batch, is_masked_BL, nll_BL)


def _weighed(
    network: Network, batch: Batch, is_masked_BL: jax.Array, nll_BL: jax.Array
) -> jax.Array:
    """Bound in nats ``[B]`` from the cross-entropy of what masks hide, or of some of it."""
    if network.block_length:
        return jnp.sum(_weighed_blocks(network, batch, is_masked_BL, nll_BL), axis=1)
    count_B = jnp.maximum(jnp.sum(is_masked_BL, axis=1), 1)
    num_free_B = jnp.sum(batch.is_free_BL(), axis=1)
    return jnp.sum(nll_BL, axis=1) * num_free_B / count_B


def block_bounds_at(
    network: Network, params: Params, batch: Batch, is_masked_BL: jax.Array, *, mask_id: int
) -> jax.Array:
    """Bound in nats of each block of a block-causal model given those before it, ``[B, blocks]``.

    At given masks, ``free / count`` times the cross-entropy that they hide in the block: averaged
    over counts uniform on 1..free of the block and sets uniform of that count, the mean over all
    orders of revealing the block's tokens one at a time, behind the true ones before it. All blocks
    take one call of the trunk.
    """
    nll_BL = _hidden_nll(network, params, batch, is_masked_BL, mask_id=mask_id)
    return _weighed_blocks(network, batch, is_masked_BL, nll_BL)


def _weighed_blocks(
    network: Network, batch: Batch, is_masked_BL: jax.Array, nll_BL: jax.Array
) -> jax.Array:
    nll_BN, count_BN, free_BN = (
        jnp.sum(in_blocks(x_BL, network.block_length), axis=2)
        for x_BL in (nll_BL, is_masked_BL, batch.is_free_BL())
    )
    return nll_BN * free_BN / jnp.maximum(count_BN, 1)


def in_blocks(x_BL: jax.Array, block_length: int) -> jax.Array:
    """Rows cut into blocks, ``[B, blocks, block_length]``, with 0 or False behind their end."""
    padded_BP = jnp.pad(x_BL, ((0, 0), (0, -x_BL.shape[1] % block_length)))
    return padded_BP.reshape(x_BL.shape[0], -1, block_length)


def _hidden_nll(
    network: Network, params: Params, batch: Batch, is_masked_BL: jax.Array, *, mask_id: int
) -> jax.Array:
    """Cross-entropy of what masks hide, in nats; 0 elsewhere."""
    shown_BL = jnp.where(is_masked_BL, mask_id, batch.tokens_BL)
    hidden_BLD = hidden_of(network, params, shown_BL, batch.tokens_BL, batch.length_B)
    nll_BL = cross_entropy(
        network, params, hidden_BLD, batch.tokens_BL, mask_id=mask_id, is_read_BL=is_masked_BL
    )
    return jnp.where(is_masked_BL, nll_BL, 0.0)


def bound(
    network: Network,
    params: Params,
    batch: Batch,
    key: jax.Array,
    *,
    mask_id: int,
    num_draws: int = 1,
) -> Bound:
    """Unbiased estimate of each row's bound, from `num_draws` masks per row.

    The masked counts are stratified over rows and draws, so that even one draw per row covers all
    noise levels; in a block-causal model, those of the blocks are, which take the place of rows.
    """
    everywhere_BL = jnp.ones(batch.tokens_BL.shape, bool)
    return _estimates(
        network, params, batch, key, [everywhere_BL], mask_id=mask_id, num_draws=num_draws
    )[0]


def bound_parts(
    network: Network,
    params: Params,
    batch: Batch,
    key: jax.Array,
    *,
    mask_id: int,
    eos_id: int,
    num_draws: int = 1,
) -> Parts:
    """The estimate of `bound`, and the part of it that falls to tokens other than EOS.

    A row's bound is a sum over its positions: each one's cross-entropy wherever it is hidden. What
    the text costs is what its positions add, the EOS behind it hidden as often as they are.
    """
    counted = [jnp.ones(batch.tokens_BL.shape, bool), batch.tokens_BL != eos_id]
    return Parts(
        *_estimates(network, params, batch, key, counted, mask_id=mask_id, num_draws=num_draws)
    )


def _estimates(
    network: Network,
    params: Params,
    batch: Batch,
    key: jax.Array,
    counted: Sequence[jax.Array],
    *,
    mask_id: int,
    num_draws: int,
) -> list[Bound]:
    """The estimate of `bound` for the positions alone that each ``[B, L]`` of `counted` marks."""
    is_free_BL = batch.is_free_BL()
    shape, unit = is_free_BL.shape, network.block_length
    if unit:
        is_free_BL = in_blocks(is_free_BL, unit).reshape(-1, unit)
    num_free_B = jnp.sum(is_free_BL, axis=1)
    num_rows = is_free_BL.shape[0]
    offset_key, mask_key = jax.random.split(key)
    strata = jnp.arange(num_rows * num_draws).reshape(num_draws, num_rows)
    spread = (jax.random.uniform(offset_key) + strata / strata.size) % 1.0

    def one_draw(carry: None, piece: tuple[jax.Array, jax.Array]) -> tuple[None, list[jax.Array]]:
        index, level_B = piece
        count_B = 1 + jnp.floor(level_B * num_free_B).astype(jnp.int32)
        is_masked_BL = mask_exactly(
            jax.random.fold_in(mask_key, index), jnp.minimum(count_B, num_free_B), is_free_BL
        )
        is_masked_BL = is_masked_BL.reshape(shape[0], -1)[:, : shape[1]]
        nll_BL = _hidden_nll(network, params, batch, is_masked_BL, mask_id=mask_id)
        some = [jnp.where(is_counted_BL, nll_BL, 0.0) for is_counted_BL in counted]
        return carry, [_weighed(network, batch, is_masked_BL, part_BL) for part_BL in some]

    def mean(nats_SB: jax.Array) -> Bound:
        if num_draws == 1:
            return Bound(nats_SB[0], jnp.full(shape[0], jnp.nan))
        return Bound(jnp.mean(nats_SB, axis=0), jnp.var(nats_SB, axis=0, ddof=1) / num_draws)

    _, parts = jax.lax.scan(one_draw, None, (jnp.arange(num_draws), spread))
    return [mean(nats_SB) for nats_SB in parts]


def causal_parts(
    network: Network, params: Params, batch: Batch, *, mask_id: int, eos_id: int
) -> Parts:
    """`causal_nll` of the rows, and the part of it that falls to tokens other than EOS."""
    nll_BL = _causal_nll(network, params, batch, mask_id=mask_id)
    none_B = jnp.zeros(nll_BL.shape[0], nll_BL.dtype)
    is_text_BL = batch.tokens_BL != eos_id
    return Parts(
        Bound(jnp.sum(nll_BL, axis=1), none_B),
        Bound(jnp.sum(jnp.where(is_text_BL, nll_BL, 0.0), axis=1), none_B),
    )


def causal_nll(network: Network, params: Params, batch: Batch, *, mask_id: int) -> jax.Array:
    """Exact negative log-likelihood in nats ``[B]`` of each row's free tokens, causal models."""
    return jnp.sum(_causal_nll(network, params, batch, mask_id=mask_id), axis=1)


def _causal_nll(network: Network, params: Params, batch: Batch, *, mask_id: int) -> jax.Array:
    """That of each token, ``[B, L]``; 0 at tokens that are given, and beyond the length."""
    hidden_BLD, _ = network.trunk(params, batch.tokens_BL, batch.length_B, None)
    nll_BL = cross_entropy(network, params, hidden_BLD, batch.tokens_BL, mask_id=mask_id)
    return jnp.where(batch.is_free_BL(), nll_BL, 0.0)


def ratio_and_error(nats_N: np.ndarray, tokens_N: np.ndarray) -> tuple[float, float]:
    """Nats per token over all rows, and its standard error, the rows taken as independent.

    The tokens may be characters or another count; rows without any add nothing. The error of a
    single row is NaN.
    """
    total, num_rows = float(tokens_N.sum()), int((tokens_N > 0).sum())
    ratio = float(nats_N.sum()) / total
    if num_rows < 2:
        return ratio, math.nan
    squares = ((nats_N - ratio * tokens_N) ** 2).sum() * num_rows / (num_rows - 1)
    return ratio, float(np.sqrt(squares)) / total


def half_width(error: float, count: int) -> float:
    """Half of the 95% interval (Student's t) of a mean of `count` values, from its standard error.

    NaN for fewer than two values.
    """
    return error * float(stdtrit(count - 1, 0.975)) if count > 1 else math.nan


def plus_minus(half: float, digits: int = 4) -> str:
    """Half of an interval as text behind a figure; empty if it is NaN."""
    return "" if math.isnan(half) else f" +- {half:.{digits}f}"
