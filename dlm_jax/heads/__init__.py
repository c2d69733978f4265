"""The heads of a model, with one file per head."""

from __future__ import annotations

from dlm_jax.heads.critic import CRITIC, CRITIC_HEAD
from dlm_jax.heads.head import MAIN, BuiltInHead, Head, HeadInputs, Stage, with_own_parameters
from dlm_jax.heads.sampler import SAMPLER, SAMPLER_HEAD

HEADS: tuple[BuiltInHead, ...] = (SAMPLER_HEAD, CRITIC_HEAD)
"""The built-in heads, in the order in which they are initialised and their losses are summed."""

__all__ = [
    "CRITIC", "HEADS", "MAIN", "SAMPLER", "BuiltInHead", "Head", "HeadInputs", "Stage",
    "with_own_parameters",
]  # fmt: skip
