"""The sampler head: a hole's token from its hidden vector and its neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.heads import prepare_sampler_inputs, sampler_loss
from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.mixture import MixedExample
from dlm_jax.heads.head import Head, HeadInputs, Setup

SAMPLER = "sampler_head"


def sampler_head(setup: Setup) -> Head | None:
    """The record of the sampler head; None for a model without one.

    Its loss is the plain mean cross-entropy over the positions that some objective supervises.
    """
    if not setup.config.model.add_sampler_head:
        return None
    settings = setup.config.heads
    return Head(
        name=SAMPLER,
        draw=functools.partial(_draw, reveal=settings.sampler_reveal),
        loss=functools.partial(_loss, mask_id=setup.mask_id),
        start=settings.start_sampler_iteration,
        stream=0,
    )


def _draw(example: MixedExample, key: jax.Array, *, reveal: float) -> tuple[jax.Array, jax.Array]:
    """(where a hole shows its true token to its neighbours, number of supervised positions)."""
    chance_BL = jax.random.uniform(key, example.shown_BL.shape)
    num_supervised = jnp.sum(example.is_supervised_BL()).astype(jnp.float32)
    return chance_BL < reveal, num_supervised


def _loss(inputs: HeadInputs, *, mask_id: int) -> Loss:
    example, (is_revealed_BL, num_supervised) = inputs.example, inputs.noise
    network, params = inputs.network, inputs.params
    read = prepare_sampler_inputs(
        network, params, example.shown_BL, example.batch.tokens_BL, inputs.hidden_BLD,
        example.batch.length_B, is_revealed_BL, mask_id=mask_id,
    )  # fmt: skip
    return sampler_loss(
        network, params, read, example.batch.tokens_BL, example.is_supervised_BL(),
        num_supervised, mask_id=mask_id,
    )  # fmt: skip
