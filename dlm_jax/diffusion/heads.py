"""What the sampler head and the critic are shown, and what they must predict (pure functions)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.losses import Loss, cross_entropy_of
from dlm_jax.types import Network, Params

SAMPLER_HEAD = "sampler_head"


class SamplerInputs(NamedTuple):
    """What the sampler head sees at each position; no gradient flows into any of it.

    Attributes:
      left_BLCD: embeddings of the ``C`` positions to the left, nearest first; zero vectors where
        there is no neighbour.
      hidden_BLD: the trunk's hidden vectors.
      right_BLCD: as `left_BLCD`, to the right.
    """

    left_BLCD: jax.Array
    hidden_BLD: jax.Array
    right_BLCD: jax.Array


def prepare_sampler_inputs(
    network: Network,
    params: Params,
    shown_BL: jax.Array,
    tokens_BL: jax.Array,
    hidden_BLD: jax.Array,
    length_B: jax.Array,
    is_revealed_BL: jax.Array,
    *,
    mask_id: int,
) -> SamplerInputs:
    """Inputs of the sampler head at every position of a batch.

    Neighbours come from what the trunk was shown. MASK, PAD and positions outside the row are none,
    unless they are revealed: then the true token is the neighbour, as when a wave has filled it.

    Args:
      network: with a sampler head.
      params: its parameters.
      shown_BL: int32 canvas that the trunk read.
      tokens_BL: int32 true tokens.
      hidden_BLD: what the trunk returned.
      length_B: int32 live tokens.
      is_revealed_BL: True where a hole shows its true token to its neighbours.
      mask_id: the id of MASK.
    """
    num_positions = shown_BL.shape[1]
    place_1L = jnp.arange(num_positions)[None]
    is_hole_BL = shown_BL == mask_id
    is_seen_BL = (~is_hole_BL | is_revealed_BL) & (place_1L < length_B[:, None])
    ids_BL = jnp.where(is_hole_BL, tokens_BL, shown_BL)
    vector_BLD = network.embed(jax.lax.stop_gradient(params), ids_BL)
    vector_BLD = jnp.where(is_seen_BL[:, :, None], vector_BLD, 0.0)

    def moved(offset: int) -> jax.Array:
        index_1L = place_1L + offset
        is_inside_1L = (index_1L >= 0) & (index_1L < num_positions)
        return jnp.where(is_inside_1L[:, :, None], jnp.roll(vector_BLD, -offset, axis=1), 0.0)

    reach = range(1, network.sampler_context + 1)
    inputs = SamplerInputs(
        left_BLCD=jnp.stack([moved(-offset) for offset in reach], axis=2),
        hidden_BLD=hidden_BLD,
        right_BLCD=jnp.stack([moved(offset) for offset in reach], axis=2),
    )
    return jax.lax.stop_gradient(inputs)


def sampler_loss(
    network: Network,
    params: Params,
    inputs: SamplerInputs,
    targets_BL: jax.Array,
    is_supervised_BL: jax.Array,
    total: jax.Array,
    *,
    mask_id: int,
) -> Loss:
    """Mean cross-entropy (nats) of the sampler head over the supervised positions, unweighted.

    Only the head's own parameters get a gradient: the LM head that reads its features is stopped.
    `total` is the number of supervised positions of the whole batch.
    """
    assert network.sampler_readout is not None
    params = jax.lax.stop_gradient(params) | {SAMPLER_HEAD: params[SAMPLER_HEAD]}
    nll_BL = cross_entropy_of(
        network.sampler_readout,
        params,
        tuple(inputs),
        targets_BL,
        vocab_size=network.vocab_size,
        mask_id=mask_id,
        is_read_BL=is_supervised_BL,
    )
    return Loss(jnp.sum(jnp.where(is_supervised_BL, nll_BL, 0.0)), total)


class CriticTargets(NamedTuple):
    """What the critic must predict.

    Attributes:
      filled_BL: int32 canvas, its holes filled.
      is_wrong_BL: True where the filled token is not the true one.
      is_judged_BL: True at the positions that count.
    """

    filled_BL: jax.Array
    is_wrong_BL: jax.Array
    is_judged_BL: jax.Array


def critic_positions(
    shown_BL: jax.Array,
    length_B: jax.Array,
    is_supervised_BL: jax.Array,
    *,
    mask_id: int,
    masked_only: bool,
) -> tuple[jax.Array, jax.Array]:
    """(holes that are filled, positions that the critic judges), True ``[B, L]`` each.

    It judges the supervised holes, and unless `masked_only` the live positions that
    are not supervised, where the text is right.
    """
    is_live_BL = jnp.arange(shown_BL.shape[1])[None] < length_B[:, None]
    is_hole_BL = (shown_BL == mask_id) & is_supervised_BL
    is_plain_BL = is_live_BL & ~is_supervised_BL & (shown_BL != mask_id)
    return is_hole_BL, is_hole_BL if masked_only else is_hole_BL | is_plain_BL


def critic_targets(
    shown_BL: jax.Array,
    tokens_BL: jax.Array,
    candidates_BL: jax.Array,
    is_hole_BL: jax.Array,
    is_judged_BL: jax.Array,
) -> CriticTargets:
    """The canvas with the candidates in its holes, and where that went wrong."""
    filled_BL = jnp.where(is_hole_BL, candidates_BL, shown_BL)
    is_wrong_BL = is_hole_BL & (filled_BL != tokens_BL)
    return jax.lax.stop_gradient(CriticTargets(filled_BL, is_wrong_BL, is_judged_BL))


def critic_loss(
    network: Network, params: Params, targets: CriticTargets, length_B: jax.Array, total: jax.Array
) -> Loss:
    """Binary cross-entropy (nats) over the judged positions, after a trunk pass of its own.

    Gradients flow into the trunk. `total` is the number of judged positions of the whole batch.
    """
    assert network.critic is not None
    hidden_BLD, _ = network.trunk(params, targets.filled_BL, length_B, None)
    logit_P = network.critic(params, hidden_BLD.reshape(-1, hidden_BLD.shape[-1]))
    logit_BL = logit_P.reshape(targets.filled_BL.shape)
    # -log sigmoid(x) where wrong, -log sigmoid(-x) where right.
    loss_BL = jax.nn.softplus(jnp.where(targets.is_wrong_BL, -logit_BL, logit_BL))
    return Loss(jnp.sum(jnp.where(targets.is_judged_BL, loss_BL, 0.0)), total)
