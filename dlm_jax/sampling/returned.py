"""What networks and rules return is checked where it enters the loop, while a program is traced.

The checks see shapes and dtypes alone: they cost nothing when a program runs, and add nothing to
it. A function of one's own that returns something else is named, and so is what it should return.
"""

from __future__ import annotations

from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp

from dlm_jax.types import Network, Params

T = TypeVar("T")


def returned(
    value: T, by: Any, method: str, axes: str, shape: tuple[int | None, ...], of: Any
) -> T:
    """`value`, if it is an array of that shape and dtype.

    Args:
      value: what the method returned.
      by: the rule or network whose method it is.
      method: its name.
      axes: their letters, for the message.
      shape: their sizes; None is any.
      of: the dtype, or ``float`` for any of floats.

    Raises:
      ValueError: it is not; the line names the rule and the method.
    """
    try:
        chex.assert_shape([value], shape)
        chex.assert_type([value], of)
    except (AssertionError, TypeError, ValueError):
        kind = "floats" if of is float else jnp.dtype(of).name
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{type(by).__name__}.{method} returned {_spelled(value)}; "
            f"return {kind} [{axes}], here [{sizes}]"
        ) from None
    return value


def _spelled(value: Any) -> str:
    if isinstance(value, jax.Array) or hasattr(value, "dtype"):
        return f"{value.dtype.name} [{', '.join(map(str, value.shape))}]"
    return f"a {type(value).__name__}"


def hidden(
    network: Network, params: Params, tokens_BL: jax.Array, length_B: jax.Array
) -> jax.Array:
    """Hidden vectors ``[B, L, D]`` of a canvas."""
    hidden_BLD = network.trunk(params, tokens_BL, length_B, None)[0]
    return returned(hidden_BLD, network, "trunk", "B, L, D", (*tokens_BL.shape, None), float)


def logits(network: Network, params: Params, hidden_ND: jax.Array) -> jax.Array:
    """Logits ``[N, V]`` of the LM head, float32."""
    shape = (hidden_ND.shape[0], network.vocab_size)
    logits_NV = network.readout(params, hidden_ND)
    return returned(logits_NV, network, "readout", "N, V", shape, jnp.float32)
