"""Remask rules, which turn committed tokens into holes again after a step.

A rule is a frozen pytree like a commit rule. The loop calls the rule with the unfrozen tokens of a
block after every step except the last.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import CommitContext, RuleMemory
from dlm_jax.settings import Rule, SettingError, require_head


class RemaskContext(NamedTuple):
    """The tokens that can be remasked, after the commits of a step.

    Attributes:
      step: context of the commit rule, before the commits.
      is_open_BL: True at the unfrozen tokens of the block, in rows that continue.
      is_fresh_BL: True at the tokens that this step committed.
      num_free_B: int32, number of live unfrozen positions of the block, including holes.
      logprob_BL: float32 log-probability in nats of each token under the clean logits that it was
          drawn from. For draft tokens, the logits of the last forward pass are used; if the rule
          `rereads`, they are used for all tokens that this step did not commit.
      wrong_BL: float32 probability that each token is wrong, according to the head that the
        rule reads, for the canvas with candidates in its holes; None if the rule reads no head.
      key_B: random key of each row for this step, used only by the rule.
      memory: state of the rule before this step.
    """

    step: CommitContext
    is_open_BL: jax.Array
    is_fresh_BL: jax.Array
    num_free_B: jax.Array
    logprob_BL: jax.Array
    wrong_BL: jax.Array | None
    key_B: jax.Array
    memory: RuleMemory = RuleMemory()

    @property
    def probability_BL(self) -> jax.Array:
        """float32 probability of each token; see `logprob_BL`."""
        return jnp.exp(self.logprob_BL)


class RemaskRule(Rule):
    """Selects the tokens that become MASK again. Only `select` is required."""

    required: ClassVar[tuple[str, ...]] = ("select",)

    rereads: ClassVar[bool] = False
    """True if each forward pass scores the current tokens of the block again."""

    reads_head: str = ""
    """Name of the head in `Network.heads` whose sigmoid is ``context.wrong_BL``, which costs a
    forward pass; static."""

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """Always True, because the setting ``remask`` selects the rule."""
        return True

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises if the rule reads a head that the model lacks."""
        if cls.reads_head:
            require_head(cls.reads_head, facts, "remask", cls.name)

    def is_active(self) -> jax.Array:
        """True ``[B]`` for the rows that use the rule; all rows by default."""
        return jnp.ones(jax.tree.leaves(self)[0].shape[0], bool)

    def goes_on(self) -> jax.Array:
        """True ``[B]`` where a block without holes stays current until its last step."""
        return jnp.zeros_like(self.is_active())

    def start_memory(self, num_rows: int, num_positions: int) -> RuleMemory:
        """The memory before the first step; empty by default.

        Arrays in ``places`` move with edits. Their values at remasked and at inserted positions
        become those of this method.
        """
        return RuleMemory()

    def remember(self, context: RemaskContext, is_remasked_BL: jax.Array) -> RuleMemory:
        """The memory after a step, given the tokens that the step remasks; unchanged by default.

        Rows that take no step keep their memory.
        """
        return context.memory

    def select(self, context: RemaskContext) -> jax.Array:
        """True at the positions to remask, ``[B, L]``. Positions that are not open are ignored."""
        raise NotImplementedError

    @classmethod
    def check_trace(cls, row: Any) -> None:
        if cls.log_chance is RemaskRule.log_chance:
            raise SettingError(
                "remask", cls.name, "has no trace: it does not define log_chance()",
                "define it, or use remask='none'",
            )  # fmt: skip

    def log_chance(self, context: RemaskContext, is_chosen_BL: jax.Array) -> jax.Array:
        """Log-probability ``[B]`` of this choice, as in `CommitRule.log_chance`."""
        raise NotImplementedError
