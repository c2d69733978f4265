"""Training losses as pairs (sum, weight), which are divided once after the global reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.devices import mesh_in_use, platform
from dlm_jax.distributed.partitions import on_own_share
from dlm_jax.types import Network, Params, returned

_MAX_LOGITS = 2**24
_MAX_ACCELERATOR_LOGITS = 2**26


class Loss(NamedTuple):
    """A loss as two float32 scalars. ``sum / weight`` is its value in nats per token, or 0 if the
    weight is 0.

    ``figures`` contains additional (sum, weight) pairs, keyed by name, which are used only in
    metrics.
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
    """The output ``[B, L, D]`` of the trunk for a shown canvas whose clean tokens are known.

    In a block-causal model, each block of the shown canvas follows the clean tokens of earlier
    blocks. Other models read only the shown canvas.
    """
    if network.beside_clean is not None:
        return network.beside_clean(params, shown_BL, clean_BL, length_B)
    return network.trunk(params, shown_BL, length_B, None)[0]


def unpredicted(network: Network, mask_id: int) -> int:
    """The id without a probability: MASK, or -1 if all ids have one. See `cross_entropy`."""
    return mask_id if network.predicts_first else -1


def cross_entropy(
    network: Network,
    params: Params,
    inputs: jax.Array | tuple[jax.Array, ...],
    targets_BL: jax.Array,
    *,
    mask_id: int,
    is_read_BL: jax.Array | None = None,
    readout: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Negative log-probability of each target in nats under a head, float32 ``[B, L]``.

    By default, it is the LM head, whose `inputs` are hidden vectors ``[B, L, D]``. MASK is never
    predicted, because its logit is set to -inf, except by the LM head of a network without a
    prediction of the first token, which reads no MASK and was trained without one. Positions are
    processed as in `at_positions`.
    """
    read = network.readout if readout is None else readout
    masked_id = unpredicted(network, mask_id) if readout is None else mask_id

    def nll(params: Params, *arrays: jax.Array) -> jax.Array:
        *inputs, targets = arrays
        logits_NV = read_logits(network, read, masked_id, params, inputs, targets.ndim)
        chosen_N = jnp.take_along_axis(logits_NV, targets.reshape(-1, 1), axis=1)[:, 0]
        return (jax.nn.logsumexp(logits_NV, axis=1) - chosen_N).reshape(targets.shape)

    arrays = (*inputs, targets_BL) if isinstance(inputs, tuple) else (inputs, targets_BL)
    return at_positions(nll, params, arrays, vocab_size=network.vocab_size, is_read_BL=is_read_BL)


def read_logits(
    network: Network,
    readout: Callable[..., jax.Array],
    mask_id: int,
    params: Params,
    inputs: Sequence[jax.Array],
    ndim: int,
) -> jax.Array:
    """The logits ``[N, V]`` of a head for inputs whose first `ndim` axes are positions; that of
    MASK is -inf.
    """
    logits_NV = readout(params, *(x.reshape(-1, *x.shape[ndim:]) for x in inputs))
    shape = math.prod(inputs[0].shape[:ndim]), network.vocab_size
    returned(logits_NV, "Network", "readout", "N, V", shape, jnp.float32)
    is_mask_1V = jnp.arange(logits_NV.shape[1])[None] == mask_id
    return jnp.where(is_mask_1V, -jnp.inf, logits_NV)


def at_positions(
    measure: Callable[..., jax.Array],
    params: Any,
    arrays: tuple[jax.Array, ...],
    *,
    vocab_size: int,
    is_read_BL: jax.Array | None = None,
) -> jax.Array:
    """The values of ``measure(params, *arrays)`` at all positions, ``[B, L]``.

    Positions must be independent of each other. Each device measures its own positions, for which
    the parameters that `measure` reads are gathered once. If there are more than 2^24 logits per
    device (2^26 on accelerators), they are computed in slices of positions and recomputed in the
    backward pass.

    Args:
      measure: returns a float32 value per position, in the shape of the last array, which has one
        or two axes.
      params: a pytree of parameters.
      arrays: arrays ``[B, L, ...]``; the last one is ``[B, L]``.
      vocab_size: number of logits per position.
      is_read_BL: True where the result is needed; None means everywhere. Elsewhere, the result is
        undefined (but not NaN), and is not computed on accelerators.
    """
    # On a CPU, skipping a few positions changes the matrix products to shapes that are slower.
    if is_read_BL is not None and platform() != "cpu":
        arrays, sliced = (*arrays, is_read_BL), _at_read_positions
    else:
        sliced = _in_slices
    if mesh_in_use() is None:
        return sliced(measure, arrays[-1].shape, vocab_size)(params, *arrays)

    def of_share(params: Any, *arrays: jax.Array) -> jax.Array:
        return sliced(measure, arrays[-1].shape, vocab_size)(params, *arrays)

    return on_own_share(of_share, params, arrays, kind="losses")


def _in_slices(
    measure: Callable[..., jax.Array], shape: tuple[int, ...], vocab_size: int
) -> Callable[..., jax.Array]:
    """`measure` for arrays ``[B, L, ...]`` of this shape on one device, in slices of positions."""
    num_rows, num_positions = shape
    limit = _MAX_LOGITS if platform() == "cpu" else _MAX_ACCELERATOR_LOGITS
    slices = 1
    while num_rows * (num_positions // slices) * vocab_size > limit and slices < num_positions:
        slices = next(n for n in range(slices + 1, num_positions + 1) if num_positions % n == 0)
    if slices == 1:
        return measure

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_rows, slices, -1, *x.shape[2:]), 1, 0)

    def in_turn(params: Any, *arrays: jax.Array) -> jax.Array:
        compute = jax.checkpoint(lambda piece: measure(params, *piece))
        values = jax.lax.map(compute, tuple(map(split, arrays)))
        return jnp.moveaxis(values, 0, 1).reshape(shape)

    return in_turn


def _at_read_positions(
    measure: Callable[..., jax.Array], shape: tuple[int, ...], vocab_size: int
) -> Callable[..., jax.Array]:
    """`measure` where the last of the given arrays is True, and 0 elsewhere, on one device.

    Read positions are moved to the front, and slices without read positions are skipped.
    """
    num = shape[0] * shape[1]
    size = min(num, max(8, _MAX_ACCELERATOR_LOGITS // vocab_size // 8 * 8))
    slices = -(-num // size)

    def at_read(params: Any, *given: jax.Array) -> jax.Array:
        *arrays, is_read_BL = given
        order_P = jnp.argsort(~is_read_BL.reshape(-1), stable=True)
        num_read = jnp.sum(is_read_BL)

        def in_front(x: jax.Array) -> jax.Array:
            ordered = _permuted(x.reshape(num, *x.shape[2:]), order_P)
            ordered = jnp.pad(ordered, ((0, slices * size - num), *[(0, 0)] * (ordered.ndim - 1)))
            return ordered.reshape(slices, size, *ordered.shape[1:])

        def one_slice(first: jax.Array, *piece: jax.Array) -> jax.Array:
            return jax.lax.cond(
                first < num_read,
                lambda: measure(params, *piece),
                lambda: jnp.zeros(size, jnp.float32),
            )

        firsts = jnp.arange(slices) * size
        compute = jax.checkpoint(lambda piece: one_slice(*piece))
        values_P = jax.lax.map(compute, (firsts, *map(in_front, arrays))).reshape(-1)[:num]
        # Sorting the indices gives the inverse permutation.
        values_BL = _permuted(values_P, jnp.argsort(order_P)).reshape(shape)
        return jnp.where(is_read_BL, values_BL, 0.0)

    return at_read


@jax.custom_vjp
def _permuted(x_P: jax.Array, order_P: jax.Array) -> jax.Array:
    """``x[order]``, whose gradient is a gather, because a scatter is slow on accelerators."""
    return x_P[order_P]


def _permuted_forward(x_P: jax.Array, order_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_P[order_P], order_P


def _permuted_backward(order_P: jax.Array, g_P: jax.Array) -> tuple[jax.Array, None]:
    return g_P[jnp.argsort(order_P)], None


_permuted.defvjp(_permuted_forward, _permuted_backward)
