"""Commit rules, which select the proposed tokens that a step writes into the canvas."""

from collections.abc import Mapping

from dlm_jax.sampling.commit.ancestral import Ancestral
from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    CommitRule,
    Proposal,
    RuleMemory,
    Standing,
    certain,
    most,
    uniform,
)
from dlm_jax.sampling.commit.entropy_renoise import EntropyRenoise
from dlm_jax.sampling.commit.posterior import Posterior
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
        EntropyBound, Ancestral, RandomFilled, JointThreshold, Posterior, EntropyRenoise,
    )
}  # fmt: skip
"""Commit rules, keyed by the value of ``order``."""

__all__ = [
    "Ancestral",
    "COMMIT_RULES",
    "CommitContext",
    "CommitRule",
    "EntropyBound",
    "EntropyRenoise",
    "Factor",
    "JointThreshold",
    "LargeMargin",
    "LeftToRight",
    "LowConfidence",
    "LowEntropy",
    "RuleMemory",
    "Posterior",
    "Proposal",
    "RandomFilled",
    "RandomOrder",
    "Standing",
    "Threshold",
    "certain",
    "most",
    "uniform",
]
