"""What a request asks of the loop itself, and what the loop counts: records with a value a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from dlm_jax.settings import ABOVE_ZERO, FINITE, Rule, Setting, fact, per_row, rule

STEPS = Setting("steps", 128, "denoising steps of one sample", low=1)
BLOCK_LENGTH = Setting(
    "block_length", 0,
    "tokens of a block, which is finished before the next begins; 0: all in one", low=0,
)  # fmt: skip
OPEN_BLOCKS = Setting(
    "open_blocks", 1,
    "blocks that may be worked on at once; the next begins beside the last when that is "
    "open_share done", low=1, high=64,
)  # fmt: skip
OPEN_SHARE = Setting(
    "open_share", 0.5,
    "open_blocks: share of a block's tokens that are written when the next begins, in (0, 1]",
    low=ABOVE_ZERO, high=1.0, activates=False,
)  # fmt: skip
GUIDANCE = Setting(
    "guidance", 0.0,
    "classifier-free guidance towards what was given, >= 0; costs a forward unless 0",
    low=0.0, high=1e6,
)  # fmt: skip
STOP_AT_EOS = Setting(
    "stop_at_eos", False,
    "for rows with edits: a row is done when a finished block holds EOS. Rows without edits always "
    "end when EOS stands before every hole and nothing given follows it",
)  # fmt: skip
RESAMPLE = Setting(
    "resample", False, "every token that was not given is open at every step, as if it were a hole"
)
MAX_NEW_TOKENS = Setting(
    "max_new_tokens", 0,
    "length_target_mode: tokens that were not given; 0: as many as there are at first",
    low=0, high=2**20 - 1,
)  # fmt: skip
TIES = Setting(
    "ties", "key",
    "which of positions that tie within float rounding comes first: one that the seed chooses "
    "(key), or the lower (lower), as in published loops",
    choices={"key": "key", "lower": "lower"},
)  # fmt: skip
_SEED = Setting("seed", 0, "of the row's randomness", low=0, high=FINITE)
_CAPACITY = Setting("capacity", 0, "tokens that edits may grow a row to", low=0)


@rule
class RowParams(Rule):
    """Per-row parameters of the loop itself, ``[B]`` each; what the defaults leave out is off.

    Attributes:
      steps_B: int32, steps allowed, at least 1, and at least one for each block with holes.
      seed_B: uint32, what the row's keys are made of; never changes.
      block_length_B: int32, positions of a block; 0 is all in one.
      open_blocks_B: int32, blocks that may be worked on at once.
      open_share_B: float32 in (0, 1], how much of the last of them is written when the next begins.
      guidance_B: float32 scale of classifier-free guidance; 0 is none.
      stops_at_eos_B: True for rows that are done when their text is whole: EOS stands among tokens
        that will not change, and nothing given follows it. Holes behind it may stay.
      resamples_B: True for rows whose unfrozen tokens are all open, as if they were holes.
      capacity_B: int32, live positions that edits may grow a row to, at most ``L``; less than the
        row has is as many as it has.
      max_new_B: int32, unfrozen tokens that a row's length is steered towards; 0 is as many as it
        has.
      ties_B: int32, place in the choices of `TIES`.
      block_unit: positions of a block of a block-causal model, at whose multiples the row's blocks
        begin; 0: they begin at the first unfrozen position.
    """

    steps_B: jax.Array = per_row(STEPS)
    seed_B: jax.Array = per_row(_SEED, column=lambda rows: np.array(rows, np.uint32))
    block_length_B: jax.Array = per_row(BLOCK_LENGTH)
    open_blocks_B: jax.Array = per_row(OPEN_BLOCKS)
    open_share_B: jax.Array = per_row(OPEN_SHARE)
    guidance_B: jax.Array = per_row(GUIDANCE)
    stops_at_eos_B: jax.Array = per_row(STOP_AT_EOS)
    resamples_B: jax.Array = per_row(RESAMPLE)
    capacity_B: jax.Array = per_row(_CAPACITY)
    max_new_B: jax.Array = per_row(MAX_NEW_TOKENS)
    ties_B: jax.Array = per_row(TIES)
    block_unit: int = fact("block_length", 0)

    @classmethod
    def check(cls, row: Any) -> None:
        """Refuses to wait for an EOS that is banned, and to open blocks beside what may change."""
        if row.open_blocks > 1 and row.refines:
            raise ValueError(
                f"open_blocks={row.open_blocks} leaves a block behind once it has no holes, and "
                "remask, resample, re-noise or edit would still change it; use open_blocks=1"
            )
        if row.stop_at_eos and row.ignore_eos:
            raise ValueError(
                "stop_at_eos means nothing with ignore_eos, which bans EOS; set ignore_eos to false"
            )


ROW_SETTINGS = tuple(s for s in RowParams.settings() if s not in (_SEED, _CAPACITY))
"""The settings of `RowParams` that a request gives by name."""


class Counters(NamedTuple):
    """What the loop counts for each row: int32 ``[B]`` in its state, numbers in results.

    Attributes:
      forwards: of the trunk, that the row has asked for; those of a block are counted as one each.
      positions: live positions that those forwards computed beside a cache; 0 without one, where
        each computes the whole row.
      waves: of the sampler head's fills; 0 where all candidates were drawn in parallel.
      bootstrapped: positions of those fills that the LM head drew, as nothing near was filled.
      filled: candidates drawn in all steps.
      insertions: tokens that edits inserted.
      deletions: tokens that they deleted.
      lost: insertions left out for want of room, and tokens that insertions pushed out.
    """

    forwards: Any = 0
    positions: Any = 0
    waves: Any = 0
    bootstrapped: Any = 0
    filled: Any = 0
    insertions: Any = 0
    deletions: Any = 0
    lost: Any = 0

    def plus(self, more: Counters) -> Counters:
        """With these added."""
        return Counters(*(old + new for old, new in zip(self, more, strict=True)))
