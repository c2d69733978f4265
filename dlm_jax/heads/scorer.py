"""The head of a sequence scorer: which share of a text is corrupted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dlm_jax.diffusion.losses import Loss
from dlm_jax.diffusion.mixture import MixedExample
from dlm_jax.diffusion.sequence_scores import CorruptedRows, Corrupter, corrupt, scorer_loss
from dlm_jax.heads.head import Head, HeadInputs, Setup

SCORER = "scorer_head"


def corrupter_of(setup: Setup) -> Corrupter:
    """How the texts of a scorer are corrupted."""
    return Corrupter.of(setup.config.objective, setup.text_ids)


def scorer_head(setup: Setup) -> Head | None:
    """The record of a scorer's head; None for a language model.

    It trains together with the trunk, from the first step.
    """
    if setup.config.model.mode != "sequence_scorer":
        return None
    return Head(
        name=SCORER,
        metric="cross_entropy",
        draw=functools.partial(_draw, corrupter=corrupter_of(setup)),
        loss=_loss,
        reads_hidden=False,
        trains_trunk=True,
        joins_main=True,
    )


def _draw(
    example: MixedExample, key: jax.Array, *, corrupter: Corrupter
) -> tuple[CorruptedRows, jax.Array]:
    """(corrupted rows with their shares, number of rows that count)."""
    rows = corrupt(example.batch, key, corrupter)
    return rows, jnp.sum(rows.weight_B)


def _loss(inputs: HeadInputs) -> Loss:
    rows, num_rows = inputs.noise
    return scorer_loss(inputs.network, inputs.params, rows, num_rows)
