"""Training losses as (sum, weight), divided once after the global reduction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.devices import platform
from dlm_jax.distributed.partitions import on_own_share
from dlm_jax.types import Network, Params

_MAX_LOGITS = 2**24
_MAX_ACCELERATOR_LOGITS = 2**26


class Loss(NamedTuple):
    """A loss as two float32 scalars. ``sum / weight`` is its value in nats per token.

    ``figures`` are further (sum, weight) pairs by name, used only in metrics.
    """

    sum: jax.Array
    weight: jax.Array
    figures: Mapping[str, tuple[jax.Array, jax.Array]] = {}


def hidden_of(
    network: Network,
    params: Params,
    shown_BL: jax.Array,
    clean_BL: jax.Array,
    length_B: jax.Array,
) -> jax.Array:
    """The output ``[B, L, D]`` of the trunk for a shown canvas with known clean tokens.

    A block-causal model reads each shown block after the clean tokens of earlier blocks. Other
    models read the shown canvas.
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
    is_read_BL: jax.Array | None = None,
) -> jax.Array:
    """Negative log-probability of each target in nats under the LM head, float32 ``[B, L]``.

    MASK is never predicted: its logit is -inf. Each device reads out its own positions, and the
    parameters of the head are gathered once. If the logits exceed 2^24 numbers per device (2^26 on
    accelerators), they are computed in slices of positions and recomputed in the backward pass.

    Args:
      network: the model.
      params: its parameters.
      hidden_BLD: the output of the trunk.
      targets_BL: int32 tokens.
      mask_id: the id of MASK.
      is_read_BL: True where the result is needed; None for all positions. Elsewhere the result is
        undefined (but not NaN), and accelerators skip it.
    """
    return cross_entropy_of(
        network.readout, params, (hidden_BLD,), targets_BL,
        vocab_size=network.vocab_size, mask_id=mask_id, is_read_BL=is_read_BL,
    )  # fmt: skip


def cross_entropy_of(
    read: Callable[..., jax.Array],
    params: Params,
    inputs: tuple[jax.Array, ...],
    targets_BL: jax.Array,
    *,
    vocab_size: int,
    mask_id: int,
    is_read_BL: jax.Array | None = None,
) -> jax.Array:
    """`cross_entropy` of any head: ``read(params, *inputs) -> logits [N, V]``.

    The inputs are ``[B, L, ...]``.
    """
    # On a CPU, skipping a few positions costs the fast shapes of its products.
    if platform() == "cpu":
        is_read_BL = None

    def of_share(params: Params, *arrays: jax.Array) -> jax.Array:
        nll = functools.partial(_nll, functools.partial(read, params), mask_id)
        if is_read_BL is None:
            return _in_slices(nll, arrays, vocab_size)
        return at_read_positions(nll, arrays[:-1], arrays[-1], vocab_size=vocab_size)

    asked = () if is_read_BL is None else (is_read_BL,)
    return on_own_share(of_share, params, (*inputs, targets_BL, *asked), kind="losses")


def _nll(read: Callable[..., jax.Array], mask_id: int, *arrays: jax.Array) -> jax.Array:
    """Negative log-probabilities, of the shape of the targets, which come last."""
    *given, targets = arrays
    lead = targets.ndim
    logits = read(*(x.reshape(-1, *x.shape[lead:]) for x in given))
    ids = jnp.arange(logits.shape[1])[None, :]
    logits = jnp.where(ids == mask_id, -jnp.inf, logits)
    chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=1) - chosen).reshape(targets.shape)


def _in_slices(
    nll: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], vocab_size: int
) -> jax.Array:
    """``nll(*arrays)``, ``[B, L]`` on one device, in slices of positions."""
    num_rows, num_positions = arrays[-1].shape
    limit = _MAX_LOGITS if platform() == "cpu" else _MAX_ACCELERATOR_LOGITS
    slices = 1
    while num_rows * (num_positions // slices) * vocab_size > limit and slices < num_positions:
        slices = next(n for n in range(slices + 1, num_positions + 1) if num_positions % n == 0)
    if slices == 1:
        return nll(*arrays)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_rows, slices, -1, *x.shape[2:]), 1, 0)

    compute = jax.checkpoint(lambda piece: nll(*piece))
    found = jax.lax.map(compute, tuple(map(split, arrays)))
    return jnp.moveaxis(found, 0, 1).reshape(num_rows, num_positions)


def at_read_positions(
    nll: Callable[..., jax.Array],
    arrays: tuple[jax.Array, ...],
    is_read_BL: jax.Array,
    *,
    vocab_size: int,
) -> jax.Array:
    """``nll(*arrays)`` at read positions and 0 elsewhere, ``[B, L]`` on one device.

    Read positions are moved to the front, and later slices are skipped.
    """
    num = is_read_BL.size
    size = min(num, max(8, _MAX_ACCELERATOR_LOGITS // vocab_size // 8 * 8))
    slices = -(-num // size)
    order_P = jnp.argsort(~is_read_BL.reshape(-1), stable=True)
    num_read = jnp.sum(is_read_BL)

    def in_front(x: jax.Array) -> jax.Array:
        ordered = _permuted(x.reshape(num, *x.shape[2:]), order_P)
        ordered = jnp.pad(ordered, ((0, slices * size - num), *[(0, 0)] * (ordered.ndim - 1)))
        return ordered.reshape(slices, size, *ordered.shape[1:])

    def one_slice(first: jax.Array, *piece: jax.Array) -> jax.Array:
        return jax.lax.cond(
            first < num_read, lambda: nll(*piece), lambda: jnp.zeros(size, jnp.float32)
        )

    firsts = jnp.arange(slices) * size
    compute = jax.checkpoint(lambda piece: one_slice(*piece))
    found_P = jax.lax.map(compute, (firsts, *map(in_front, arrays))).reshape(-1)[:num]
    # Sorting the places gives the inverse permutation.
    found_BL = _permuted(found_P, jnp.argsort(order_P)).reshape(is_read_BL.shape)
    return jnp.where(is_read_BL, found_BL, 0.0)


@jax.custom_vjp
def _permuted(x_P: jax.Array, order_P: jax.Array) -> jax.Array:
    """``x[order]`` with a gather as its gradient, because a scatter is slow on accelerators."""
    return x_P[order_P]


def _permuted_forward(x_P: jax.Array, order_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_P[order_P], order_P


def _permuted_backward(order_P: jax.Array, g_P: jax.Array) -> tuple[jax.Array, None]:
    return g_P[jnp.argsort(order_P)], None


_permuted.defvjp(_permuted_forward, _permuted_backward)
