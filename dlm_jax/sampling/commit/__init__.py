"""Commit rules: which of the proposed tokens a step writes into the canvas."""

from collections.abc import Mapping

from dlm_jax.sampling.commit.ancestral import Ancestral
from dlm_jax.sampling.commit.commit_rule import CommitContext, CommitRule, Proposal, most, uniform
from dlm_jax.sampling.commit.quotas import (
    LargeMargin,
    LeftToRight,
    LowConfidence,
    LowEntropy,
    RandomFilled,
    RandomOrder,
)
from dlm_jax.sampling.commit.sure import EntropyBound, Factor, JointThreshold, Threshold

COMMIT_RULES: Mapping[str, type[CommitRule]] = {
    rule.name: rule
    for rule in (
        LowConfidence, RandomOrder, LeftToRight, LowEntropy, LargeMargin, Threshold, Factor,
        EntropyBound, Ancestral, RandomFilled, JointThreshold,
    )
}  # fmt: skip
"""Commit rules by the setting ``order``."""

__all__ = [
    "COMMIT_RULES",
    "Ancestral",
    "CommitContext",
    "CommitRule",
    "EntropyBound",
    "Factor",
    "JointThreshold",
    "LargeMargin",
    "LeftToRight",
    "LowConfidence",
    "LowEntropy",
    "Proposal",
    "RandomFilled",
    "RandomOrder",
    "Threshold",
    "most",
    "uniform",
]
