"""The sampler head, which predicts the token in a hole from its hidden vector and neighbours."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.losses import Loss, cross_entropy_of, divergence, hidden_of
from dlm_jax.diffusion.objectives import MixedExample
from dlm_jax.heads.head import Head, HeadInputs, Setup
from dlm_jax.types import Network, Params

SAMPLER = "sampler_head"


def sampler_head(setup: Setup) -> Head | None:
    """The record of the sampler head, or None for a model without one.

    The loss is the plain mean cross-entropy over all supervised positions, of which a fraction
    ``heads.sampler_trunk_share`` is replaced by the divergence from the trunk (`trunk_loss`).
    """
    if not setup.config.model.add_sampler_head:
        return None
    settings, mask_id = setup.config.heads, setup.mask_id
    is_masked = setup.config.objective.noise_process.is_masked
    share = settings.sampler_trunk_share

    def is_asked_BL(example: MixedExample, is_revealed_BL: jax.Array) -> jax.Array:
        """True at holes where the trunk's prediction given the revealed holes is used."""
        is_hole_BL = (example.shown_BL == mask_id) & ~is_revealed_BL
        return is_hole_BL & example.is_supervised_BL()

    def draw(example: MixedExample, key: jax.Array) -> tuple[jax.Array, ...]:
        """The holes revealed to their neighbours, the number of supervised positions, and (if used)
        the number of holes in the divergence.
        """
        is_revealed_BL = jax.random.uniform(key, example.shown_BL.shape) < settings.sampler_reveal
        num_supervised = jnp.sum(example.is_supervised_BL()).astype(jnp.float32)
        if not share:
            return is_revealed_BL, num_supervised
        num_asked = jnp.sum(is_asked_BL(example, is_revealed_BL)).astype(jnp.float32)
        return is_revealed_BL, num_supervised, num_asked

    def loss(inputs: HeadInputs) -> Loss:
        example, (is_revealed_BL, num_supervised, *num_asked) = inputs.example, inputs.noise
        network, params, tokens_BL = inputs.network, inputs.params, example.batch.tokens_BL
        read = prepare_sampler_inputs(
            network, params, example.shown_BL, tokens_BL, inputs.hidden_BLD,
            example.batch.length_B, is_revealed_BL, mask_id=mask_id,
            is_noised_BL=None if is_masked else example.is_supervised_BL(),
        )  # fmt: skip
        plain = sampler_loss(
            network, params, read, tokens_BL, example.is_supervised_BL(), num_supervised,
            mask_id=mask_id,
        )  # fmt: skip
        if not share:
            return plain
        taught = trunk_loss(
            network, params, read, example.shown_BL, tokens_BL, example.batch.length_B,
            is_revealed_BL, is_asked_BL(example, is_revealed_BL), num_asked[0], mask_id=mask_id,
        )  # fmt: skip
        # Both losses are means. The second sum is rescaled to the weight of the first, so that
        # their combination is a mean too.
        scale = num_supervised / jnp.maximum(taught.weight, 1.0)
        return Loss((1.0 - share) * plain.sum + share * scale * taught.sum, num_supervised)

    return Head(
        name=SAMPLER, draw=draw, loss=loss, start=settings.start_sampler_iteration, stream=0
    )


class SamplerInputs(NamedTuple):
    """Inputs of the sampler head at each position, without gradients.

    Attributes:
      left_BLCD: embeddings of the ``C`` positions to the left, nearest first; zero vectors for
          missing neighbours.
      hidden_BLD: the trunk's hidden vectors.
      right_BLCD: like `left_BLCD`, but for the positions to the right.
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
    is_noised_BL: jax.Array | None = None,
) -> SamplerInputs:
    """Inputs of the sampler head at every position of a batch.

    Neighbours are tokens on the shown canvas. MASK, PAD and positions outside the row do not count
    as neighbours. A revealed position shows its true token, as if a wave had filled it.

    Args:
      network: network with a sampler head.
      params: the network's parameters.
      shown_BL: int32 canvas that the trunk read.
      tokens_BL: int32 true tokens.
      hidden_BLD: the output of the trunk.
      length_B: int32, number of live tokens in each row.
      is_revealed_BL: True where a hole shows its true token to its neighbours.
      mask_id: the id of MASK.
      is_noised_BL: True where a token may be noise. A revealed one is replaced by the true token,
        as if a step had renewed it.
    """
    num_positions = shown_BL.shape[1]
    place_1L = jnp.arange(num_positions)[None]
    is_hole_BL = shown_BL == mask_id
    is_seen_BL = (~is_hole_BL | is_revealed_BL) & (place_1L < length_B[:, None])
    is_true_BL = is_hole_BL
    if is_noised_BL is not None:
        is_true_BL = is_hole_BL | (is_noised_BL & is_revealed_BL)
    ids_BL = jnp.where(is_true_BL, tokens_BL, shown_BL)
    vector_BLD = network.embed(jax.lax.stop_gradient(params), ids_BL)
    vector_BLD = jnp.where(is_seen_BL[:, :, None], vector_BLD, 0.0)

    def beside(offset: int) -> jax.Array:
        index_1L = place_1L + offset
        is_inside_1L = (index_1L >= 0) & (index_1L < num_positions)
        return jnp.where(is_inside_1L[:, :, None], jnp.roll(vector_BLD, -offset, axis=1), 0.0)

    reach = range(1, network.sampler_context + 1)
    inputs = SamplerInputs(
        left_BLCD=jnp.stack([beside(-offset) for offset in reach], axis=2),
        hidden_BLD=hidden_BLD,
        right_BLCD=jnp.stack([beside(offset) for offset in reach], axis=2),
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

    Only the parameters of this head get a gradient. The LM head, which reads the features of this
    head, does not. `total` is the number of supervised positions in the whole batch.
    """
    assert network.sampler_readout is not None
    params = jax.lax.stop_gradient(params) | {SAMPLER: params[SAMPLER]}
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


def trunk_loss(
    network: Network,
    params: Params,
    inputs: SamplerInputs,
    shown_BL: jax.Array,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    is_revealed_BL: jax.Array,
    is_asked_BL: jax.Array,
    total: jax.Array,
    *,
    mask_id: int,
) -> Loss:
    """Mean divergence (nats) of the sampler head from the trunk's one-at-a-time distribution.

    The divergence is ``KL( p_trunk(x_i | z, x_R) || p_head(x_i | h_i(z), x_{R beside i}) )`` for
    the canvas z and the revealed tokens x_R. The trunk runs once more, with the revealed tokens
    shown. As in ADJUST (Bansal & Sanghavi 2025), the head is trained to match the distribution that
    results from sampling one position at a time.

    Args:
      network: network with a sampler head.
      params: all parameters; only those of the head get a gradient.
      inputs: inputs of the head, from `prepare_sampler_inputs`.
      shown_BL: int32 canvas z.
      tokens_BL: int32 true tokens.
      length_B: int32, number of live tokens in each row.
      is_revealed_BL: True where a hole shows its true token to its neighbours.
      is_asked_BL: True at the holes in the loss; none of them is revealed.
      total: number of holes in the loss, in the whole batch.
      mask_id: the id of MASK.
    """
    assert network.sampler_readout is not None
    frozen = jax.lax.stop_gradient(params)
    seen_BL = jnp.where(is_revealed_BL & (shown_BL == mask_id), tokens_BL, shown_BL)
    hidden_BLD = jax.lax.stop_gradient(hidden_of(network, frozen, seen_BL, tokens_BL, length_B))
    nats_BL = divergence(
        (network.readout, network.sampler_readout), (frozen, frozen | {SAMPLER: params[SAMPLER]}),
        ((hidden_BLD,), tuple(inputs)), is_asked_BL,
        vocab_size=network.vocab_size, mask_id=mask_id,
    )  # fmt: skip
    return Loss(jnp.sum(jnp.where(is_asked_BL, nats_BL, 0.0)), total)
