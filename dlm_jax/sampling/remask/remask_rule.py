"""Remask rules: they choose the committed tokens that become holes again after a step.

A rule is a frozen pytree like a commit rule. The loop calls it after every step of a block except
the last, with the block's unfrozen tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import CommitContext
from dlm_jax.settings import Rule, SettingError


class RemaskContext(NamedTuple):
    """The tokens that may be remasked, after a step's commits.

    Attributes:
      step: the context of the commit rule, from before its commits.
      is_open_BL: True at the block's unfrozen tokens, in rows that continue.
      is_fresh_BL: True at the tokens that this step committed.
      num_free_B: int32, the block's live unfrozen positions, holes included.
      probability_BL: float32, probability of each token under the clean logits it was drawn from;
        of a draft's token, which was never proposed, under those of the last forward, and so of
        every token that this step did not commit if the rule `rereads`.
      wrong_BL: float32 probability that each token is wrong, by the critic on the canvas with its
        candidates in the holes; None if the rule does not read it.
      key_B: this step's key of each row, for the rule alone.
    """

    step: CommitContext
    is_open_BL: jax.Array
    is_fresh_BL: jax.Array
    num_free_B: jax.Array
    probability_BL: jax.Array
    wrong_BL: jax.Array | None
    key_B: jax.Array


class RemaskRule(Rule):
    """Chooses the tokens that become MASK again; only `select` is required."""

    required: ClassVar[tuple[str, ...]] = ("select",)

    rereads: ClassVar[bool] = False
    """Whether each forward scores the block's tokens again, as they stand."""

    reads_critic: bool = False
    """Whether `select` reads ``context.wrong_BL``, which costs a forward; static."""

    @classmethod
    def is_used(cls, row: Any) -> bool:
        """True: a remask rule is activated by its name."""
        return True

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        """Raises for a rule that reads a critic if the model has none."""
        if cls.reads_critic and not facts.has_critic:
            raise SettingError(
                "remask",
                cls.name,
                "needs a critic head, which this model lacks",
                "train one with model.add_critic_head",
            )

    def is_active(self) -> jax.Array:
        """True ``[B]`` for the rows that use it: by default, all of them."""
        return jnp.ones(jax.tree.leaves(self)[0].shape[0], bool)

    def goes_on(self) -> jax.Array:
        """True ``[B]`` where a block without holes stays current until its last step."""
        return jnp.zeros_like(self.is_active())

    def select(self, context: RemaskContext) -> jax.Array:
        """True at the positions to remask, ``[B, L]``; positions that are not open are ignored."""
        raise NotImplementedError

    @classmethod
    def check_trace(cls, row: Any) -> None:
        if cls.log_chance is RemaskRule.log_chance:
            raise SettingError(
                "remask", cls.name, "has no trace: its log_chance() is not known",
                "define it, or use remask='none'",
            )  # fmt: skip

    def log_chance(self, context: RemaskContext, is_chosen_BL: jax.Array) -> jax.Array:
        """Log-probability ``[B]`` of having chosen these, as `CommitRule.log_chance`."""
        raise NotImplementedError
