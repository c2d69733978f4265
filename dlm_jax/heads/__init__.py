"""The heads of a model, with one file per head."""

from __future__ import annotations

from dlm_jax.heads.critic import CRITIC, CriticHead
from dlm_jax.heads.head import MAIN, BuiltInHead, Head, Stage
from dlm_jax.heads.sampler import SAMPLER, SamplerHead

HEADS: tuple[BuiltInHead, ...] = (SamplerHead(), CriticHead())
"""The built-in heads, in the order in which they are initialised and their losses are summed."""

__all__ = ["CRITIC", "HEADS", "MAIN", "SAMPLER", "BuiltInHead", "Head", "Stage"]
