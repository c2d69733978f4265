"""A commit rule that rewrites what it wrote: holes and written tokens have a threshold each."""

from __future__ import annotations

from typing import Any

import jax

from dlm_jax.sampling.commit.parallel import (
    THRESHOLD,
    THRESHOLD_ABOVE,
    THRESHOLD_LEAST,
    passes,
)
from dlm_jax.sampling.commit.protocol import CommitContext, CommitRule, Proposal, exceeds, most
from dlm_jax.sampling.commit.quotas import CONFIDENCE, Measure
from dlm_jax.settings import Setting, per_row, rule, static

REWRITE_THRESHOLD = Setting(
    "rewrite_threshold", 0.9,
    "order=joint_threshold: a written token of the block gives way to another of a confidence "
    "above this, in [0, 1]", low=0.0, high=1.0, activates=False,
)  # fmt: skip
REWRITE_STEPS = Setting(
    "rewrite_steps", 16,
    "order=joint_threshold: steps that a block without holes takes at most while it is rewritten",
    low=0, activates=False,
)  # fmt: skip


@rule
class JointThreshold(CommitRule):
    """Commits sure holes, and rewrites tokens of the block where another one is sure enough.

    A block goes on without holes until a step rewrites nothing, or for some steps (LLaDA2.1, Bie et
    al. 2026, "token-to-token editing"). What was given is never rewritten, nor what stands in
    blocks before.

    Attributes:
      threshold_B: float32 in [0, 1], of holes.
      is_above_B: True where the threshold itself is not enough for a hole.
      least_B: int32, holes that commit where fewer are sure: the surest.
      rewrite_B: float32 in [0, 1], above which another token replaces a written one.
      patience_B: int32 steps without a hole.
      confidence: what both are compared with.
    """

    rewrites = True

    threshold_B: jax.Array = per_row(THRESHOLD)
    is_above_B: jax.Array = per_row(THRESHOLD_ABOVE)
    least_B: jax.Array = per_row(THRESHOLD_LEAST)
    rewrite_B: jax.Array = per_row(REWRITE_THRESHOLD)
    patience_B: jax.Array = per_row(REWRITE_STEPS)
    confidence: Measure = static(CONFIDENCE)

    @classmethod
    def check(cls, row: Any) -> None:
        """Refuses to open blocks beside one that may still be rewritten."""
        if row.open_blocks > 1:
            raise ValueError(
                f"open_blocks={row.open_blocks} leaves a block behind once it has no holes, and "
                "order='joint_threshold' would still rewrite it; use open_blocks=1"
            )

    def measure(self, logits_NV: jax.Array, logprob_N: jax.Array) -> jax.Array:
        """What `confidence` says."""
        return self.confidence(logits_NV, logprob_N)

    def patience(self) -> jax.Array:
        """Steps of a block without holes."""
        return self.patience_B

    def select(self, context: CommitContext, proposal: Proposal) -> jax.Array:
        """The sure holes and the surest, and written tokens that another one replaces."""
        surest_BL, written_BL = proposal.confidence_BL, context.written_BL
        assert written_BL is not None, "the rule rewrites"
        is_sure_BL = passes(surest_BL, self.threshold_B, self.is_above_B)
        least_BL = most(surest_BL, context.is_hole_BL, self.least_B, context.preference_BL)
        is_better_BL = exceeds(surest_BL, self.rewrite_B[:, None])
        is_better_BL &= proposal.tokens_BL != written_BL
        return (context.is_hole_BL & is_sure_BL) | least_BL | ((written_BL >= 0) & is_better_BL)
