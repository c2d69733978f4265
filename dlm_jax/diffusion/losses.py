"""Training losses, each as (sum, weight), divided once after the global reduction."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.corruption import (
    LinearSchedule,
    mask_independently,
    stratified_times,
)
from dlm_jax.types import Network, Params

_SMALLEST_TIME = 1e-3
_MAX_LOGITS = 2**24


class Loss(NamedTuple):
    """A loss as two float32 scalars; ``sum / weight`` is its value in nats per token."""

    sum: jax.Array
    weight: jax.Array


def cross_entropy(
    network: Network,
    params: Params,
    hidden_BLD: jax.Array,
    targets_BL: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """Negative log-probability of each target in nats, float32 ``[B, L]``.

    MASK is never a prediction: its logit counts as -inf. Logits are computed for a slice of the
    positions at a time, and again in the backward pass, once all of them would be more than
    2^24 numbers per device.
    """
    num_rows, num_positions, width = hidden_BLD.shape

    def per_slice(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = piece
        logits = network.readout(params, hidden.reshape(-1, width))
        ids = jnp.arange(logits.shape[1])[None, :]
        logits = jnp.where(ids == mask_id, -jnp.inf, logits)
        chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - chosen).reshape(targets.shape)

    limit = _MAX_LOGITS * jax.device_count()
    slices = 1
    while num_rows * (num_positions // slices) * network.vocab_size > limit and (
        slices < num_positions
    ):
        slices = next(n for n in range(slices + 1, num_positions + 1) if num_positions % n == 0)
    if slices == 1:
        return per_slice((hidden_BLD, targets_BL))

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_rows, slices, -1, *x.shape[2:]), 1, 0)

    nll = jax.lax.map(jax.checkpoint(per_slice), (split(hidden_BLD), split(targets_BL)))
    return jnp.moveaxis(nll, 0, 1).reshape(num_rows, num_positions)


def elbo_at(
    network: Network,
    params: Params,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    is_masked_BL: jax.Array,
    weight_B: jax.Array,
    *,
    mask_id: int,
) -> Loss:
    """Masked-diffusion loss at given masks: ``weight_B`` times the cross-entropy they hide.

    The weight of the result is the number of live tokens, so that its expectation over times and
    masks is the negative evidence lower bound in nats per token.
    """
    hidden_BLD, _ = network.trunk(
        params, jnp.where(is_masked_BL, mask_id, tokens_BL), length_B, None
    )
    nll_BL = cross_entropy(network, params, hidden_BLD, tokens_BL, mask_id=mask_id)
    total = jnp.sum(jnp.where(is_masked_BL, weight_B[:, None] * nll_BL, 0.0))
    return Loss(total, jnp.sum(length_B).astype(jnp.float32))


def elbo(
    network: Network,
    params: Params,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    key: jax.Array,
    *,
    mask_id: int,
    schedule: LinearSchedule,
) -> Loss:
    """One-sample estimate of the continuous-time negative ELBO of masked diffusion.

    ``E_t [ -alpha'(t) / (1 - alpha(t)) * sum of the hidden tokens' cross-entropy ]``, with one
    low-discrepancy time per row (Shi et al. 2024, equation 6; Sahoo et al. 2024, equation 11).
    Times below 1e-3 are not drawn; they hold at most that share of the bound.
    """
    time_key, mask_key = jax.random.split(key)
    num_rows, num_positions = tokens_BL.shape
    t_B = stratified_times(time_key, num_rows, smallest=_SMALLEST_TIME)
    is_masked_BL = mask_independently(mask_key, schedule.masked_ratio(t_B), length_B, num_positions)
    return elbo_at(
        network, params, tokens_BL, length_B, is_masked_BL, schedule.weight(t_B), mask_id=mask_id
    )
