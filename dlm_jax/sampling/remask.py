"""Remask rules, which turn committed tokens into holes again after a step, and re-noise.

The loop calls a remask rule with the unfrozen tokens of a block after every step except the last.
Re-noise overwrites tokens before a forward pass, so that the model rewrites them. Unlike remasking,
it can write a space or a random token, which the model reads as text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import (
    CommitContext,
    StepRule,
    WithState,
    certain,
    most,
    uniform,
)
from dlm_jax.sampling.program import check_space, ratio_at
from dlm_jax.settings import Rule, Setting, per_row, require, require_head, rule, static

RENOISE_SALT = 0x6E6F6973
RENOISE_TOKENS = ("space", "mask", "random")


class RemaskContext(NamedTuple):
    """The tokens that can be remasked, after the commits of a step.

    Attributes:
      step: context of the commit rule, before the commits.
      is_open_BL: True at the unfrozen tokens of the block, in rows that continue.
      is_fresh_BL: True at the tokens that this step committed.
      num_free_B: int32, number of live unfrozen positions of the block, including holes.
      logprob_BL: float32 log-probability in nats of each token under the clean logits that it was
          drawn from. For draft tokens, the logits of the last forward pass are used; if the rule
          needs ``logprobs``, they are used for all tokens that this step did not commit.
      wrong_BL: float32 probability that each token is wrong, according to the head that the
        rule needs, for the canvas with candidates in its holes; None without such a head.
      key_B: random key of each row for this step, used only by the rule.
    """

    step: CommitContext
    is_open_BL: jax.Array
    is_fresh_BL: jax.Array
    num_free_B: jax.Array
    logprob_BL: jax.Array
    wrong_BL: jax.Array | None
    key_B: jax.Array

    @property
    def probability_BL(self) -> jax.Array:
        """float32 probability of each token; see `logprob_BL`."""
        return jnp.exp(self.logprob_BL)


class RemaskRule(StepRule, ABC):
    """Selects the tokens that become MASK again. Only `select` is required.

    It can need ``head:NAME``, the sigmoid of a head of the network, which costs a forward pass;
    ``logprobs``, the log-probability of every token of the block in each forward pass; and
    ``steps``, all steps of a block, which then stays current without holes.
    """

    @abstractmethod
    def select(self, state: Any, context: RemaskContext) -> WithState:
        """True at the positions to remask, ``[B, L]``, and the new state. Positions that are not
        open are ignored. The new state holds in rows that take a step.
        """

    def log_prob(self, state: Any, context: RemaskContext, is_chosen_BL: jax.Array) -> jax.Array:
        """Log-probability ``[B]`` of this choice, as in `CommitRule.log_prob`."""
        raise NotImplementedError


@rule
class Scheduled(RemaskRule):
    """Remasks the tokens that are most likely wrong, fewer at each step.

    Before step i of N (i >= 1), the fraction ``r = start - (start - end) i / (N - 1)`` of the
    block's unfrozen positions is remasked. Tokens are ranked by the output of the critic, or by 1
    minus the probability that the token had when it was drawn.
    """

    about = "remasks the share of tokens with the highest wrongness"
    log_prob = certain

    start_B: jax.Array = per_row(
        Setting("remask_start", 0.95, "scheduled: initial share of remasked tokens", 0.0, 1.0)
    )
    end_B: jax.Array = per_row(
        Setting("remask_end", 0.05, "scheduled: share before the last step", 0.0, 1.0)
    )
    needs: tuple[str, ...] = static(
        Setting(
            "remask_by",
            "confidence",
            "scheduled: by the probability of the token or by the critic",
            choices={"confidence": (), "critic": ("head:critic",)},
        )
    )

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return max(row.remask_start, row.remask_end) > 0

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if row.remask_by == "critic":
            require_head("critic", facts, "remask_by", "critic", "use remask_by='confidence'")

    def is_active(self) -> jax.Array:
        return (self.start_B > 0) | (self.end_B > 0)

    def select(self, state: Any, context: RemaskContext) -> WithState:
        step = context.step
        share_B = (step.step_B + 1).astype(jnp.float32) / jnp.maximum(step.steps_B - 1, 1)
        ratio_B = self.start_B - (self.start_B - self.end_B) * jnp.minimum(share_B, 1.0)
        count_B = jnp.floor(ratio_B * context.num_free_B + 1e-3).astype(jnp.int32)
        if context.wrong_BL is None:
            score_BL = jnp.log(-jnp.expm1(context.logprob_BL)) - jnp.log(context.probability_BL)
        else:
            # The difference of 1 and the output of the critic is not accurate near 0.
            score_BL = jnp.log(context.wrong_BL)
        is_worst_BL = most(score_BL, context.is_open_BL, count_B, step.preference_BL, 1.0)
        return is_worst_BL & self.is_active()[:, None], state


REMASK_RULES: Mapping[str, type[RemaskRule]] = {Scheduled.name: Scheduled}
"""Remask rules, keyed by the value of ``remask``. The value ``none`` selects no rule."""


@rule
class Renoise(Rule):
    """Overwrites a randomly chosen part of the block's unfrozen tokens."""

    start_B: jax.Array = per_row(
        Setting("renoise_start", 0.0, "re-noise: share at the first step", 0.0, 1.0)
    )
    end_B: jax.Array = per_row(
        Setting("renoise_end", 0.0, "re-noise: share at the last step", 0.0, 1.0)
    )
    kind_B: jax.Array = per_row(
        Setting(
            "renoise",
            "space",
            "re-noise: token written over others",
            choices={name: name for name in RENOISE_TOKENS},
        )
    )

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return max(row.renoise_start, row.renoise_end) > 0

    @classmethod
    def check(cls, row: Any) -> None:
        is_rewritten = row.renoise == "mask" or row.resample or row.remasks
        why = "writes tokens that no rule rewrites"
        require(is_rewritten, "renoise", row.renoise, why, "use renoise='mask', or resample=True")

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if row.renoise == "space":
            check_space("renoise", row, facts, "writes")

    def is_active(self) -> jax.Array:
        return (self.start_B > 0) | (self.end_B > 0)

    def write(
        self,
        tokens_BL: jax.Array,
        is_free_BL: jax.Array,
        step_B: jax.Array,
        steps_B: jax.Array,
        key_B: jax.Array,
        *,
        mask_id: int,
        space_id: int,
        is_text: Callable[[], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """The tokens that are written before the forward pass of a step, and where.

        `is_free_BL` is True at the unfrozen positions of the block, in rows that take the step,
        which has the index `step_B` of `steps_B`. `is_text` returns an array ``[B, V]`` that is
        True at the ids allowed as random tokens. MASK is used in rows without such ids.
        """
        is_token_BL = is_free_BL & (tokens_BL != mask_id)
        ratio_B = ratio_at(self.start_B, self.end_B, step_B, steps_B, schedule="cosine")
        count_B = jnp.floor(ratio_B * jnp.sum(is_token_BL, axis=1) + 1e-3).astype(jnp.int32)
        keys_B2 = jax.vmap(jax.random.split)(key_B)
        num_positions = tokens_BL.shape[1]
        is_hit_BL = most(uniform(keys_B2[:, 0], num_positions), is_token_BL, count_B)
        is_random_B1, is_mask_B1 = (
            self.kind_B[:, None] == RENOISE_TOKENS.index(kind) for kind in ("random", "mask")
        )
        random_BL = jax.lax.cond(
            jnp.any(is_random_B1 & is_hit_BL),
            lambda: random_ids(is_text(), uniform(keys_B2[:, 1], num_positions), mask_id),
            lambda: jnp.full_like(tokens_BL, mask_id),
        )
        new_BL = jnp.where(is_mask_B1, mask_id, space_id)
        new_BL = jnp.where(is_random_B1, random_BL, new_BL)
        return new_BL, is_hit_BL


def random_ids(is_text_BV: jax.Array, uniform_BL: jax.Array, mask_id: int) -> jax.Array:
    """Maps each number in [0, 1) to an allowed id, or to MASK in rows without allowed ids."""
    upto_BV = jnp.cumsum(is_text_BV, axis=1)
    number_B1 = upto_BV[:, -1:]
    nth_BL = jnp.floor(uniform_BL * number_B1).astype(jnp.int32) + 1
    id_BL = jax.vmap(jnp.searchsorted)(upto_BV, nth_BL).astype(jnp.int32)
    return jnp.where(number_B1 > 0, id_BL, mask_id)
