"""Commit rules, which select the proposed tokens that a step writes into the canvas."""

from collections.abc import Mapping

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
from dlm_jax.sampling.commit.orders import (
    Ancestral,
    EntropyBound,
    JointThreshold,
    LargeMargin,
    LeftToRight,
    LowConfidence,
    LowEntropy,
    RandomFilled,
    RandomOrder,
    Threshold,
)

COMMIT_RULES: Mapping[str, type[CommitRule]] = {
    rule.name: rule
    for rule in (
        LowConfidence,
        RandomOrder,
        LeftToRight,
        LowEntropy,
        LargeMargin,
        Threshold,
        EntropyBound,
        Ancestral,
        RandomFilled,
        JointThreshold,
    )
}
"""Commit rules, keyed by the value of ``order``."""

__all__ = [
    "Ancestral",
    "COMMIT_RULES",
    "CommitContext",
    "CommitRule",
    "DrawnTokens",
    "EntropyBound",
    "JointThreshold",
    "LargeMargin",
    "LeftToRight",
    "LowConfidence",
    "LowEntropy",
    "Proposal",
    "RandomFilled",
    "RandomOrder",
    "Threshold",
    "certain",
    "most",
    "most_confident",
    "uniform",
]
