"""Training losses, each as (sum, weight), divided once after the global reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
from dlm_jax.distributed.activations import on_own_share
from dlm_jax.types import Network, Params

_MAX_LOGITS = 2**24
_MAX_ACCELERATOR_LOGITS = 2**26


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
    """Negative log-probability of each target in nats under the LM head, float32 ``[B, L]``.

    MASK is never a prediction: its logit counts as -inf. Each device reads out its own positions,
    with the parameters of the head gathered once. Logits are computed for a slice of the positions
    at a time, and again in the backward pass, once all of them would be more than 2^24 numbers per
    device (2^26 on accelerators).
    """
    return cross_entropy_of(
        network.readout, params, (hidden_BLD,), targets_BL,
        vocab_size=network.vocab_size, mask_id=mask_id,
    )  # fmt: skip


def cross_entropy_of(
    read: Callable[..., jax.Array],
    params: Params,
    inputs: tuple[jax.Array, ...],
    targets_BL: jax.Array,
    *,
    vocab_size: int,
    mask_id: int,
) -> jax.Array:
    """`cross_entropy` of any head: ``read(params, *inputs) -> logits [N, V]``.

    The inputs are ``[B, L, ...]``.
    """

    def of_share(params: Params, *arrays: jax.Array) -> jax.Array:
        return _in_slices(functools.partial(read, params), arrays, vocab_size, mask_id)

    return on_own_share(of_share, params, (*inputs, targets_BL), kind="losses")


def _in_slices(
    read: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], vocab_size: int, mask_id: int
) -> jax.Array:
    """Negative log-probabilities ``[B, L]`` of one device's inputs and targets."""
    num_rows, num_positions = arrays[-1].shape

    def per_slice(piece: tuple[jax.Array, ...]) -> jax.Array:
        *given, targets = piece
        logits = read(*(x.reshape(-1, *x.shape[2:]) for x in given))
        ids = jnp.arange(logits.shape[1])[None, :]
        logits = jnp.where(ids == mask_id, -jnp.inf, logits)
        chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - chosen).reshape(targets.shape)

    limit = _MAX_LOGITS if platform() == "cpu" else _MAX_ACCELERATOR_LOGITS
    slices = 1
    while num_rows * (num_positions // slices) * vocab_size > limit and slices < num_positions:
        slices = next(n for n in range(slices + 1, num_positions + 1) if num_positions % n == 0)
    if slices == 1:
        return per_slice(arrays)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_rows, slices, -1, *x.shape[2:]), 1, 0)

    nll = jax.lax.map(jax.checkpoint(per_slice), tuple(map(split, arrays)))
    return jnp.moveaxis(nll, 0, 1).reshape(num_rows, num_positions)
