"""Hidden vectors and attention maps of a model, on request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dlm_jax.inference.model import Model
from dlm_jax.types import Inside, Network


def inside(model: Model, tokens: Any, lengths: Any = None) -> Inside:
    """Hidden vectors and attention weights of every block for some canvases.

    The maps take ``B E H L^2`` numbers. With a trace, ``inside(model, trace.canvas[:, 0])`` shows
    what the first forward saw; guidance and caches are left out.

    Args:
      model: of a `dlm_jax.Network` that shows it, as those of the package do.
      tokens: int ``[B, L]`` canvases with MASK at holes.
      lengths: int ``[B]`` live positions; None: all.

    Raises:
      ValueError: the network does not show it, or tokens or lengths are out of range.
    """
    if model.network.inside is None:
        raise ValueError("the network does not show its inside; give dlm_jax.Network an `inside`")
    tokens_BL = np.asarray(tokens)
    if tokens_BL.ndim != 2 or not tokens_BL.size or tokens_BL.dtype.kind not in "iu":
        raise ValueError(
            f"tokens has shape {tokens_BL.shape} of {tokens_BL.dtype}; use whole numbers [B, L]"
        )
    vocab_size, (num_rows, num_positions) = model.network.vocab_size, tokens_BL.shape
    if tokens_BL.min() < 0 or tokens_BL.max() >= vocab_size:
        raise ValueError(f"tokens has ids outside the vocabulary; use 0 to {vocab_size - 1}")
    length_B = np.full(num_rows, num_positions) if lengths is None else np.asarray(lengths)
    if length_B.shape != (num_rows,) or length_B.min() < 1 or length_B.max() > num_positions:
        raise ValueError(f"lengths={lengths} is not one of 1 to {num_positions} for each row")
    arrays = tokens_BL.astype(np.int32), length_B.astype(np.int32)
    return _compiled(model.network)(model.params, *arrays)


@functools.lru_cache(maxsize=16)
def _compiled(network: Network) -> Callable[..., Inside]:
    assert network.inside is not None
    return jax.jit(network.inside)
