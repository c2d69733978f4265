"""Corruption patterns of denoising: which positions are to be restored, and what they show.

A pattern selects among the free positions of
each row; a selected position then shows MASK, a random token or its own. The last two are what
teaches a model about visible tokens: a pure MASK objective never asks about those.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.corruption import mask_exactly, mask_independently


def select_random(key: jax.Array, ratio_B: jax.Array, is_free_BL: jax.Array) -> jax.Array:
    """True at selected positions, ``[B, L]``: each free one with its row's probability."""
    return mask_independently(key, ratio_B, is_free_BL)


def select_sticky(
    key: jax.Array,
    ratio_B: jax.Array,
    is_free_BL: jax.Array,
    *,
    alone: float,
    beside: float,
) -> jax.Array:
    """True at ``ceil(ratio * free)`` positions of each row, ``[B, L]``, in clusters.

    Rounds over the free positions select each with probability `beside` if a neighbour was selected
    before the round and `alone` (above 0) if not, until the row has enough; what is too many is
    dropped at random.
    """
    num_free_B = jnp.sum(is_free_BL, axis=1)
    wanted_B = jnp.ceil(ratio_B * num_free_B - 1e-3).astype(jnp.int32)
    drop_key, round_key = jax.random.split(key)

    def is_short(is_selected_BL: jax.Array) -> jax.Array:
        return jnp.sum(is_selected_BL, axis=1) < wanted_B

    def one_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, is_selected_BL = carry
        padded = jnp.pad(is_selected_BL, ((0, 0), (1, 1)))
        has_neighbour_BL = padded[:, :-2] | padded[:, 2:]
        chance_BL = jnp.where(has_neighbour_BL, beside, alone)
        uniform_BL = jax.random.uniform(jax.random.fold_in(round_key, number), chance_BL.shape)
        is_new_BL = (uniform_BL < chance_BL) & is_free_BL & is_short(is_selected_BL)[:, None]
        return number + 1, is_selected_BL | is_new_BL

    start = (jnp.zeros((), jnp.int32), jnp.zeros_like(is_free_BL))
    _, is_selected_BL = jax.lax.while_loop(lambda c: jnp.any(is_short(c[1])), one_round, start)
    return mask_exactly(drop_key, wanted_B, is_selected_BL)


def select_spans(key: jax.Array, is_free_BL: jax.Array, *, count: int) -> jax.Array:
    """True in `count` spans of each row's free positions, ``[B, L]``.

    ``2 * count`` sorted uniform positions are the inclusive ends of the spans, in pairs.
    """
    num_free_B1 = jnp.sum(is_free_BL, axis=1, keepdims=True)
    uniform_BE = jax.random.uniform(key, (is_free_BL.shape[0], 2 * count))
    ends_BE = jnp.sort(jnp.floor(uniform_BE * num_free_B1).astype(jnp.int32), axis=1)
    place_BL1 = (jnp.cumsum(is_free_BL, axis=1) - 1)[:, :, None]
    is_inside_BLC = (place_BL1 >= ends_BE[:, None, 0::2]) & (place_BL1 <= ends_BE[:, None, 1::2])
    return jnp.any(is_inside_BLC, axis=2) & is_free_BL


def show(
    key: jax.Array,
    tokens_BL: jax.Array,
    is_selected_BL: jax.Array,
    *,
    mask_share: float,
    random_share: float,
    mask_id: int,
    random_ids: tuple[int, ...],
) -> jax.Array:
    """The canvas ``[B, L]`` with its selected positions corrupted, each on its own.

    `mask_share` of them show MASK, `random_share` one of `random_ids` (uniformly, which may be the
    true one), the rest their own token.
    """
    kind_key, id_key = jax.random.split(key)
    kind_BL = jax.random.uniform(kind_key, tokens_BL.shape)
    choice_BL = jax.random.randint(id_key, tokens_BL.shape, 0, len(random_ids))
    random_BL = jnp.asarray(random_ids, tokens_BL.dtype)[choice_BL]
    corrupted_BL = jnp.where(kind_BL < mask_share + random_share, random_BL, tokens_BL)
    corrupted_BL = jnp.where(kind_BL < mask_share, mask_id, corrupted_BL)
    return jnp.where(is_selected_BL, corrupted_BL, tokens_BL)
