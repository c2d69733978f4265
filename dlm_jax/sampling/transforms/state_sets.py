"""Sets of states of an automaton, as words of 32 states each: what reductions are quick with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_PLACES = np.arange(32, dtype=np.uint32)


def word_of(state_BS: Array, num_words: int) -> Array:
    """The set of one state as words of 32, ``[B, S, W]``."""
    bit_BS1 = jnp.uint32(1) << (state_BS[:, :, None] % 32).astype(jnp.uint32)
    is_there_BSW = state_BS[:, :, None] // 32 == jnp.arange(num_words)[None, None]
    return jnp.where(is_there_BSW, bit_BS1, jnp.uint32(0))


def packed(is_in_BS: Array) -> Array:
    """Sets of states as words of 32, ``[B, W]``."""
    padded_BP = jnp.pad(is_in_BS, ((0, 0), (0, -is_in_BS.shape[1] % 32)))
    bits_BW32 = padded_BP.reshape(padded_BP.shape[0], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits_BW32 << _PLACES[None, None], axis=2, dtype="uint32")


def any_of(is_in_BS: Array, words_BSW: Array) -> Array:
    """The union of the sets of those that are in, ``[B, W]``."""
    kept_BSW = jnp.where(is_in_BS[:, :, None], words_BSW, jnp.uint32(0))
    return jax.lax.reduce(kept_BSW, jnp.uint32(0), jax.lax.bitwise_or, (1,))


def unpacked(words_BW: Array, num_states: int) -> Array:
    """The sets that `packed` has made words of, bool ``[B, S]``."""
    bits_BWK = (words_BW[:, :, None] >> _PLACES[None, None]) & jnp.uint32(1)
    return bits_BWK.reshape(words_BW.shape[0], -1)[:, :num_states].astype(bool)
