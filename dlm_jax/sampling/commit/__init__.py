"""Commit rules, which select the proposed tokens that a step writes into the canvas."""

from collections.abc import Mapping

from dlm_jax.sampling.commit.ancestral import Ancestral
from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    DrawnTokens,
    Proposal,
    certain,
    most,
    most_confident,
    uniform,
)
from dlm_jax.sampling.commit.credit import Credit
from dlm_jax.sampling.commit.dawn import Dawn
from dlm_jax.sampling.commit.dilated import Dilated
from dlm_jax.sampling.commit.frechet import Frechet
from dlm_jax.sampling.commit.hierarchical import Hierarchical
from dlm_jax.sampling.commit.klass import Klass
from dlm_jax.sampling.commit.local_leap import LocalLeap
from dlm_jax.sampling.commit.position_aware import PositionAware
from dlm_jax.sampling.commit.prophet import Prophet
from dlm_jax.sampling.commit.quotas import (
    LargeMargin,
    LeftToRight,
    LowConfidence,
    LowEntropy,
    RandomFilled,
    RandomOrder,
)
from dlm_jax.sampling.commit.slow_fast import SlowFast
from dlm_jax.sampling.commit.sure import EntropyBound, Factor, JointThreshold, Threshold

COMMIT_RULES: Mapping[str, type[CommitRule]] = {
    rule.name: rule
    for rule in (
        LowConfidence, RandomOrder, LeftToRight, LowEntropy, LargeMargin, Threshold, Factor,
        EntropyBound, Ancestral, RandomFilled, JointThreshold,
        Frechet, LocalLeap, Hierarchical, Dilated, PositionAware, Prophet, Klass, Credit, SlowFast,
        Dawn,
    )
}  # fmt: skip
"""Commit rules, keyed by the value of ``order``."""

__all__ = [
    "Ancestral",
    "COMMIT_RULES",
    "CommitContext",
    "CommitRule",
    "Credit",
    "Dawn",
    "Dilated",
    "EntropyBound",
    "Factor",
    "Frechet",
    "Hierarchical",
    "JointThreshold",
    "Klass",
    "LargeMargin",
    "LeftToRight",
    "LocalLeap",
    "LowConfidence",
    "LowEntropy",
    "DrawnTokens",
    "PositionAware",
    "Prophet",
    "Proposal",
    "RandomFilled",
    "RandomOrder",
    "SlowFast",
    "Threshold",
    "certain",
    "most",
    "most_confident",
    "uniform",
]
