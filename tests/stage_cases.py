"""Losses of a stage for the tests of training steps."""

from __future__ import annotations

import toy
from jax.sharding import Mesh

from dlm_jax.config import HeadsConfig
from dlm_jax.diffusion.objectives import Mixture
from dlm_jax.training.stages import MAIN, Stage, StagedLoss
from dlm_jax.types import Network


def staged(
    network: Network,
    mixture: Mixture,
    mesh: Mesh,
    groups: tuple[str, ...] = (MAIN,),
    heads: HeadsConfig | None = None,
) -> StagedLoss:
    """The loss of the stage in which these groups train; the model alone by default."""
    return StagedLoss(
        network=network,
        mixture=mixture,
        stage=Stage(frozenset(groups)),
        heads=heads or HeadsConfig(),
        mask_id=toy.MASK,
        banned_ids=toy.BANNED,
        mesh=mesh,
    )
