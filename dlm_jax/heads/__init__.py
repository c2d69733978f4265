"""The heads of a model, with one file per head."""

from __future__ import annotations

from collections.abc import Callable

from dlm_jax.heads.critic import CRITIC, critic_head
from dlm_jax.heads.head import MAIN, Head, HeadInputs, Setup, Stage, with_own_parameters
from dlm_jax.heads.sampler import SAMPLER, sampler_head
from dlm_jax.heads.scorer import SCORER, scorer_head

HEADS: tuple[Callable[[Setup], Head | None], ...] = (sampler_head, critic_head, scorer_head)
"""Functions that create the record of each head, or return None if the model does not have the
head.

A stage adds the losses of its heads in this order.
"""

__all__ = [
    "CRITIC", "HEADS", "MAIN", "SAMPLER", "SCORER", "Head", "HeadInputs", "Setup", "Stage",
    "critic_head", "sampler_head", "scorer_head", "with_own_parameters",
]  # fmt: skip
