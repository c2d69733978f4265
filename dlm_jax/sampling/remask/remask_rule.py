"""Remask rules, which turn committed tokens into holes again after a step.

A rule is a frozen pytree like a commit rule. The loop calls the rule with the unfrozen tokens of a
block after every step except the last.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import CommitContext, head_of
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


class RemaskRule(Rule):
    """Selects the tokens that become MASK again. Only `select` is required.

    The rule's state is any pytree, as in `CommitRule`.

    Attributes:
      needs: inputs that the rule reads: ``head:NAME``, the sigmoid of a head of the network, which
        costs a forward pass; ``logprobs``, the log-probability of every token of the block in each
        forward pass; ``steps``, all steps of a block, which then stays current without holes. An
        attribute of the class, or a static field.
    """

    required: ClassVar[tuple[str, ...]] = ("select",)
    needs: tuple[str, ...] = ()

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """Always True, because the setting ``remask`` selects the rule."""
        return True

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises if the rule reads a head that the model lacks."""
        if head := head_of(cls.needs):
            require_head(head, facts, "remask", cls.name)

    def is_active(self) -> jax.Array:
        """True ``[B]`` for the rows that use the rule; all rows by default."""
        return jnp.ones(jax.tree.leaves(self)[0].shape[0], bool)

    def init(self, num_rows: int, num_positions: int) -> Any:
        """The state before the first step, as in `CommitRule.init`; empty by default."""
        return ()

    def select(self, state: Any, context: RemaskContext) -> tuple[jax.Array, Any]:
        """True at the positions to remask, ``[B, L]``, and the new state. Positions that are not
        open are ignored. The new state holds in rows that take a step.
        """
        raise NotImplementedError

    @classmethod
    def check_trace(cls, row: Any) -> None:
        if cls.log_prob is RemaskRule.log_prob:
            raise SettingError(
                "remask",
                cls.name,
                "has no trace: it does not define log_prob()",
                "define it, or use remask='none'",
            )

    def log_prob(self, state: Any, context: RemaskContext, is_chosen_BL: jax.Array) -> jax.Array:
        """Log-probability ``[B]`` of this choice, as in `CommitRule.log_prob`."""
        raise NotImplementedError
