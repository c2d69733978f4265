"""Noise rules, which can change every token of a block until the block ends.

A rule is a frozen pytree like a commit rule. A block starts from the rule's first tokens. In each
step, the rule writes a candidate, new noise or the current token at every open position.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax

from dlm_jax.sampling.commit.commit_rule import OrderRule, Proposal
from dlm_jax.settings import SettingError, require_values

_NEEDS: dict[str, tuple[Any, ...]] = {
    "remask": ("none",),
    "cache": ("none", "exact"),
    "guidance": (0.0,),
    "structure": ("",),
}


class NoisyCanvas(NamedTuple):
    """The current canvas, and uniform noise for its positions.

    Attributes:
      tokens_BL: int32 canvas.
      is_mask_BL: True at MASK.
      is_noise_BL: True at tokens whose ids are noise ids of the row. The noise ids of a row are all
        ids that can be written in the row.
      random_BL: int32, one of the row's noise ids per position, drawn uniformly for this step.
      num_ids_B: int32, number of noise ids of the row.
      mask_id: the id of MASK.
    """

    tokens_BL: jax.Array
    is_mask_BL: jax.Array
    is_noise_BL: jax.Array
    random_BL: jax.Array
    num_ids_B: jax.Array
    mask_id: int


class NoiseContext(NamedTuple):
    """The current block of each row at the start of a step.

    Attributes:
      is_open_BL: True at the unfrozen positions of the block in running rows.
      step_B: int32, number of steps taken in the block.
      steps_B: int32, total number of steps for the block, at least 1.
      key_B: random key of each row for this step, used only by the rule.
      noise: the canvas and its noise.
      preference_BL: uint32, priority of each position when scores are tied; see `preferences`.
      wrong_BL: float32 probability that each current token is wrong, according to the head that the
        rule needs; None without such a head.
    """

    is_open_BL: jax.Array
    step_B: jax.Array
    steps_B: jax.Array
    key_B: jax.Array
    noise: NoisyCanvas
    preference_BL: jax.Array | None = None
    wrong_BL: jax.Array | None = None


class NoiseUpdate(NamedTuple):
    """What a step writes.

    Attributes:
      tokens_BL: int32 tokens for the open positions that take no candidate.
      is_candidate_BL: True at the positions that take their candidate.
      is_final_B: True for rows whose block ends with this step; None if all steps are taken.
    """

    tokens_BL: jax.Array
    is_candidate_BL: jax.Array
    is_final_B: jax.Array | None = None


class NoiseRule(OrderRule):
    """Writes every open position of a block in each step. Only `update` is required.

    Attributes:
      fills: the supported values of ``fill``.
    """

    required: ClassVar[tuple[str, ...]] = ("update",)
    fills: ClassVar[tuple[str, ...]] = ("parallel", "auto")

    @classmethod
    def check(cls, row: Any) -> None:
        super().check(row)
        why = f"is not supported with order={cls.name!r}, which can change any token"
        require_values(row, {"fill": cls.fills, **_NEEDS}, why)
        for name, is_on in (("edit", row.edits), ("renoise_start", row.renoises)):
            if is_on:
                raise SettingError(
                    name,
                    getattr(row, name),
                    f"is not supported with order={cls.name!r}",
                    "leave it at its default",
                )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        super().check_model(row, facts)
        if row.cache != "none" and not facts.canvas_length:
            raise SettingError(
                "cache",
                row.cache,
                f"is not supported with order={cls.name!r}, which can change any token",
                "use cache='none'",
            )

    @classmethod
    def check_trace(cls, row: Any) -> None:
        raise SettingError(
            "order",
            cls.name,
            "has no trace: it also writes tokens that are not candidates",
            "leave trace out",
        )

    def init(self, num_rows: int, num_positions: int) -> Any:
        """The state before the first step, as in `CommitRule.init`; empty by default."""
        return ()

    def begin(self, noise: NoisyCanvas, key_B: jax.Array) -> jax.Array:
        """Tokens ``[B, L]`` for the holes of rows before their first step; random tokens by
        default.
        """
        return noise.random_BL

    def score(
        self, state_N: Any, logits_NV: jax.Array, logprob_N: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Scores the current tokens of N positions, float32 ``[N]``, and returns the new state of
        the positions. By default, the score is the log-probability of the token.

        `logits_NV` are those that candidates are drawn from, after all transforms, and `logprob_N`
        is the log-probability of the current token under them: 0 or -inf in greedy rows, which draw
        their argmax with certainty. With a fill that draws jointly, ``proposal.confidence_BL`` is
        instead 1 where the current token is the candidate, and otherwise 0.
        """
        return logprob_N, state_N

    def update(
        self, state: Any, context: NoiseContext, proposal: Proposal
    ) -> tuple[NoiseUpdate, Any]:
        """What the step writes, and the new state."""
        raise NotImplementedError
