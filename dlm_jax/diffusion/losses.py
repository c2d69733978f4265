"""Training losses, each as (sum, weight), divided once after the global reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.types import Network, Params

_MAX_LOGITS = 2**24


class Loss(NamedTuple):
    """A loss as two float32 scalars; ``sum / weight`` is its value in nats per token."""

    sum: jax.Array
    weight: jax.Array


def hidden_of(
    network: Network,
    params: Params,
    shown_BL: jax.Array,
    clean_BL: jax.Array,
    length_B: jax.Array,
) -> jax.Array:
    """What the trunk returns for a shown canvas whose clean tokens are known, ``[B, L, D]``.

    A block-causal model sees of each block what is shown, behind the clean tokens of the blocks
    before it; any other sees what is shown.
    """
    if network.cached is not None and network.cached.beside_clean is not None:
        return network.cached.beside_clean(params, shown_BL, clean_BL, length_B)
    return network.trunk(params, shown_BL, length_B, None)[0]


def cross_entropy(
    network: Network,
    params: Params,
    hidden_BLD: jax.Array,
    targets_BL: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """Negative log-probability of each target in nats under the LM head, float32 ``[B, L]``.

    MASK is never a prediction: its logit counts as -inf. Logits are computed for a slice of the
    positions at a time, and again in the backward pass, once all of them would be more than
    2^24 numbers per device.
    """

    def read(hidden_ND: jax.Array) -> jax.Array:
        return network.readout(params, hidden_ND)

    return cross_entropy_of(
        read, (hidden_BLD,), targets_BL, vocab_size=network.vocab_size, mask_id=mask_id
    )


def cross_entropy_of(
    read: Callable[..., jax.Array],
    inputs: tuple[jax.Array, ...],
    targets_BL: jax.Array,
    *,
    vocab_size: int,
    mask_id: int,
) -> jax.Array:
    """`cross_entropy` of any head: ``read(*inputs) -> logits [N, V]``, inputs ``[B, L, ...]``."""
    num_rows, num_positions = targets_BL.shape

    def per_slice(piece: tuple[jax.Array, ...]) -> jax.Array:
        *given, targets = piece
        logits = read(*(x.reshape(-1, *x.shape[2:]) for x in given))
        ids = jnp.arange(logits.shape[1])[None, :]
        logits = jnp.where(ids == mask_id, -jnp.inf, logits)
        chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - chosen).reshape(targets.shape)

    limit = _MAX_LOGITS * jax.device_count()
    slices = 1
    while num_rows * (num_positions // slices) * vocab_size > limit and (slices < num_positions):
        slices = next(n for n in range(slices + 1, num_positions + 1) if num_positions % n == 0)
    if slices == 1:
        return per_slice((*inputs, targets_BL))

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_rows, slices, -1, *x.shape[2:]), 1, 0)

    nll = jax.lax.map(jax.checkpoint(per_slice), tuple(map(split, (*inputs, targets_BL))))
    return jnp.moveaxis(nll, 0, 1).reshape(num_rows, num_positions)
