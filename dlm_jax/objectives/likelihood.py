"""The negative log-likelihood of a text under the model, or an upper bound on it.

With given tokens, the likelihood of the other tokens is conditional on the given tokens. Given
tokens are always visible and never counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.objectives.corruption import LINEAR, mask_exactly
from dlm_jax.objectives.forward_process import Process, noised_at, process_costs
from dlm_jax.objectives.losses import (
    at_positions,
    cross_entropy,
    hidden_of,
    read_logits,
    unpredicted,
)
from dlm_jax.objectives.objective import Batch
from dlm_jax.types import Network, Params

# Multiples of an irrational number, modulo 1, are spread evenly over [0, 1). Rows use multiples of
# the golden ratio, and the blocks of a row use multiples of the square root of 2. In units of 2^-32
# they wrap around exactly.
_BETWEEN_ROWS, _BETWEEN_BLOCKS = 0x9E3779B9, 0x6A09E667


class Costs(NamedTuple):
    """The cost in nats of the free tokens in each row, and its variance due to the mask draws.

    The text fields exclude EOS. Variances are 0 for exact likelihoods and NaN for a single draw.
    """

    nats_B: Any
    variance_B: Any
    text_nats_B: Any
    text_variance_B: Any


def first_scored(network: Network, given_N: np.ndarray) -> np.ndarray:
    """The index of the first scored position of each row, int ``[N]``: behind the given tokens, and
    behind the first token if the network does not predict it.
    """
    return np.maximum(given_N, 0 if network.predicts_first else 1)


def num_scored(network: Network, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """The number of scored tokens of each row, int ``[N]``, from its ``length`` and ``given``."""
    return np.maximum(rows["length"] - first_scored(network, rows["given"]), 0)


def costs(
    network: Network,
    params: Params,
    batch: Batch,
    number_B: jax.Array,
    key: jax.Array,
    *,
    is_causal: bool,
    mask_id: int,
    eos_id: int,
    num_draws: int = 1,
    process: Process | None = None,
) -> Costs:
    """The cost of each row: exact for a causal model, otherwise an unbiased estimate of the bound.

    The bound of a row is the weighted sum of the cross-entropy over its hidden positions
    (`bound_at`); for processes other than the masked one, it is that of `process_elbo`, and a draw
    consists of a time of the linear schedule and the noise at that time. The cost of the text is
    the same sum over positions of text, without EOS.

    The masks of a row depend only on the key and the index of the row in the data set,
    `number_B`. Mask counts are stratified over the `num_draws` draws of a row and spread evenly
    over consecutive rows, so even one draw per row covers all noise levels. In a block-causal
    model this applies to blocks instead of rows. A `process` of None means the masked process.
    """
    is_text_BL = batch.tokens_BL != eos_id
    if is_causal:
        nll_BL = causal_nll(network, params, batch, mask_id=mask_id)
        none_B = jnp.zeros(nll_BL.shape[0], nll_BL.dtype)
        text_B = jnp.sum(jnp.where(is_text_BL, nll_BL, 0.0), axis=1)
        return Costs(jnp.sum(nll_BL, axis=1), none_B, text_B, none_B)
    is_free_BNU = in_blocks(batch.is_free_BL(), network.block_length)
    (num_rows, num_blocks, size), num_positions = is_free_BNU.shape, batch.tokens_BL.shape[1]
    key_B = jax.vmap(functools.partial(jax.random.fold_in, key))(number_B)
    block_1N = jnp.arange(num_blocks, dtype=jnp.uint32)[None]
    # Levels in [0, 1), spread evenly over consecutive rows and blocks.
    place_BN = (
        jax.random.bits(key, (1, 1), jnp.uint32)
        + number_B.astype(jnp.uint32)[:, None] * jnp.uint32(_BETWEEN_ROWS)
        + block_1N * jnp.uint32(_BETWEEN_BLOCKS)
    )
    level_BN = place_BN.astype(jnp.float32) / 2.0**32
    free_BN = jnp.sum(is_free_BNU, axis=2)

    def hidden(
        block: jax.Array, key: jax.Array, count: jax.Array, is_free_U: jax.Array
    ) -> jax.Array:
        return mask_exactly(jax.random.fold_in(key, block), count[None], is_free_U[None])[0]

    hidden_BN = jax.vmap(jax.vmap(hidden, in_axes=(0, None, 0, 0)))

    def one_draw(carry: None, draw: jax.Array) -> tuple[None, list[jax.Array]]:
        share_BN = (level_BN + draw / num_draws) % 1.0
        count_BN = jnp.minimum(1 + jnp.floor(share_BN * free_BN).astype(jnp.int32), free_BN)
        drawn_B = jax.vmap(lambda key: jax.random.fold_in(key, draw))(key_B)
        if process is not None and not process.is_masked:
            t_BL = jnp.repeat(1.0 - share_BN, size, axis=1)[:, :num_positions]
            noised = noised_at(process, batch, drawn_B, t_BL, schedule=LINEAR)
            cost_BL = process_costs(process, network, params, noised)
            text_BL = jnp.where(is_text_BL, cost_BL, 0.0)
            return carry, [jnp.sum(part_BL, axis=1) for part_BL in (cost_BL, text_BL)]
        block_BN = jnp.broadcast_to(block_1N, (num_rows, num_blocks))
        is_masked_BNU = hidden_BN(block_BN, drawn_B, count_BN, is_free_BNU)
        is_masked_BL = is_masked_BNU.reshape(num_rows, -1)[:, :num_positions]
        nll_BL = hidden_nll(network, params, batch, is_masked_BL, mask_id=mask_id)
        text_BL = jnp.where(is_text_BL, nll_BL, 0.0)
        return carry, [
            jnp.sum(_weighed(network, batch, is_masked_BL, part_BL), axis=1)
            for part_BL in (nll_BL, text_BL)
        ]

    def mean(nats_SB: jax.Array) -> tuple[jax.Array, jax.Array]:
        if num_draws == 1:
            return nats_SB[0], jnp.full(num_rows, jnp.nan)
        return jnp.mean(nats_SB, axis=0), jnp.var(nats_SB, axis=0, ddof=1) / num_draws

    _, (whole_SB, text_SB) = jax.lax.scan(one_draw, None, jnp.arange(num_draws))
    return Costs(*mean(whole_SB), *mean(text_SB))


def bound_at(
    network: Network, params: Params, batch: Batch, is_masked_BL: jax.Array, *, mask_id: int
) -> jax.Array:
    """The bound of each block in nats for the given masks, ``[B, blocks]``. Without blocks, a row
    is one block.

    The bound of a block is ``free / count`` times the cross-entropy of its hidden tokens. Averaged
    over counts that are uniform on 1..free and over uniform sets of that size, the bound is the
    negative ELBO of masked diffusion for every noise schedule. The average is also the mean cost
    over all orders in which one token is revealed at a time (Ou et al. 2024, theorem 2; LLaDA, Nie
    et al. 2025, equation 6). In a block-causal model, each block is conditioned on the true tokens
    before it, and one call to the trunk covers all blocks. A block without a masked position has a
    cost of 0.
    """
    nll_BL = hidden_nll(network, params, batch, is_masked_BL, mask_id=mask_id)
    return _weighed(network, batch, is_masked_BL, nll_BL)


def _weighed(
    network: Network, batch: Batch, is_masked_BL: jax.Array, nll_BL: jax.Array
) -> jax.Array:
    nll_BN, count_BN, free_BN = (
        jnp.sum(in_blocks(x_BL, network.block_length), axis=2)
        for x_BL in (nll_BL, is_masked_BL, batch.is_free_BL())
    )
    return nll_BN * free_BN / jnp.maximum(count_BN, 1)


def causal_nll(network: Network, params: Params, batch: Batch, *, mask_id: int) -> jax.Array:
    """Exact negative log-likelihood in nats ``[B, L]`` of each free token given those before it,
    for a causal model; 0 elsewhere, and at the first token of a row if it is not predicted.
    """
    hidden_BLD, _ = network.trunk(params, batch.tokens_BL, batch.length_B, None)
    nll_BL = cross_entropy(network, params, hidden_BLD, batch.tokens_BL, mask_id=mask_id)
    batch = batch if network.predicts_first else batch.with_first_given()
    return jnp.where(batch.is_free_BL(), nll_BL, 0.0)


def causal_costs(
    network: Network, params: Params, batch: Batch, *, mask_id: int
) -> tuple[jax.Array, jax.Array]:
    """The cost of each free token in nats under a causal model, and whether the token is the most
    likely one, each ``[B, L]``; 0 and True elsewhere. In a tie, the lowest id is the most likely.
    """
    masked_id = unpredicted(network, mask_id)

    def signed(params: Params, hidden_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        # Negative where another token is more likely, where the cost is never 0.
        target_N, ndim = targets_BL.reshape(-1), targets_BL.ndim
        logits_NV = read_logits(network, network.readout, masked_id, params, [hidden_BLD], ndim)
        chosen_N = jnp.take_along_axis(logits_NV, target_N[:, None], axis=1)[:, 0]
        nll_N = jax.nn.logsumexp(logits_NV, axis=1) - chosen_N
        is_top_N = jnp.argmax(logits_NV, axis=1) == target_N
        return jnp.where(is_top_N, nll_N, -nll_N).reshape(targets_BL.shape)

    batch = batch if network.predicts_first else batch.with_first_given()
    hidden_BLD, _ = network.trunk(params, batch.tokens_BL, batch.length_B, None)
    arrays = hidden_BLD, batch.tokens_BL
    cost_BL = at_positions(signed, params, arrays, vocab_size=network.vocab_size)
    cost_BL = jnp.where(batch.is_free_BL(), cost_BL, 0.0)
    return jnp.abs(cost_BL), cost_BL >= 0


def in_blocks(x_BL: jax.Array, block_length: int) -> jax.Array:
    """Rows split into blocks, ``[B, blocks, block_length]``, padded with 0 or False.

    If the block length is 0, a row is one block.
    """
    unit = block_length or x_BL.shape[1]
    padded_BP = jnp.pad(x_BL, ((0, 0), (0, -x_BL.shape[1] % unit)))
    return padded_BP.reshape(x_BL.shape[0], -1, unit)


def hidden_nll(
    network: Network, params: Params, batch: Batch, is_masked_BL: jax.Array, *, mask_id: int
) -> jax.Array:
    """Cross-entropy of masked tokens, in nats ``[B, L]``; 0 elsewhere."""
    shown_BL = jnp.where(is_masked_BL, mask_id, batch.tokens_BL)
    hidden_BLD = hidden_of(network, params, shown_BL, batch.tokens_BL, batch.length_B)
    nll_BL = cross_entropy(
        network, params, hidden_BLD, batch.tokens_BL, mask_id=mask_id, is_read_BL=is_masked_BL
    )
    return jnp.where(is_masked_BL, nll_BL, 0.0)


def ratio_and_error(nats_N: np.ndarray, tokens_N: np.ndarray) -> tuple[float, float]:
    """The mean cost in nats per token over all rows, and its standard error. Rows are treated as
    independent.

    `tokens_N` can count characters or other units instead. Rows without tokens are ignored. The
    error is NaN for a single row.
    """
    total, num_rows = float(tokens_N.sum()), int((tokens_N > 0).sum())
    ratio = float(nats_N.sum()) / total
    if num_rows < 2:
        return ratio, math.nan
    squares = ((nats_N - ratio * tokens_N) ** 2).sum() * num_rows / (num_rows - 1)
    return ratio, float(np.sqrt(squares)) / total


def half_width(error: float, count: int) -> float:
    """The half-width of the 95% confidence interval (Student's t) of a mean of `count` values with
    the standard error `error`.

    The half-width is NaN for fewer than two values.
    """
    # Imported here, because importing SciPy takes a tenth of a second.
    from scipy.special import stdtrit

    return error * float(stdtrit(count - 1, 0.975)) if count > 1 else math.nan


def plus_minus(half: float, digits: int = 4) -> str:
    """Formats the half-width of an interval, such as ``' +- 0.0500'``; empty for NaN."""
    return "" if math.isnan(half) else f" +- {half:.{digits}f}"
