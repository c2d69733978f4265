"""Remask rules: which committed tokens become holes again after a step.

A rule is a frozen pytree like a commit rule. The loop asks it after every step of a block but the
last, and offers it the block's unfrozen tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit import View, most
from dlm_jax.sampling.orders import uniform


class Tokens(NamedTuple):
    """The tokens that may be remasked, after a step's commits.

    Attributes:
      is_open_BL: True at the block's unfrozen tokens, in rows that go on.
      is_fresh_BL: True at those that this step committed.
      num_free_B: int32, the block's live unfrozen positions, holes included.
      probability_BL: float32, of each token under the clean logits it was drawn from; of a draft's
        token, which was never proposed, under those of the last forward.
      wrong_BL: float32 probability that each token is wrong, as the critic says of the canvas with
        its candidates in the holes; None where the rule does not ask it.
      key_B: this step's key of each row, for the rule alone.
    """

    is_open_BL: jax.Array
    is_fresh_BL: jax.Array
    num_free_B: jax.Array
    probability_BL: jax.Array
    wrong_BL: jax.Array | None
    key_B: jax.Array


class RemaskRule(Protocol):
    """Chooses what goes back to MASK."""

    @property
    def asks_critic(self) -> bool:
        """Whether it reads `Tokens.wrong_BL`, which costs a forward; a plain attribute will do."""
        ...

    def is_active(self) -> jax.Array:
        """True ``[B]`` for the rows that ask for it."""
        ...

    def goes_on(self) -> jax.Array:
        """True ``[B]`` where a block without holes waits for its last step."""
        ...

    def select(self, view: View, tokens: Tokens) -> jax.Array:
        """True at the positions to remask, ``[B, L]``; those that are not open stay out.

        `view` is that of the step, from before its commits.
        """
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start_B", "end_B", "randomness_B", "is_threshold_B"],
    meta_fields=["asks_critic"],
)
@dataclass(frozen=True)
class Scheduled:
    """Remasks the tokens most likely wrong, fewer from step to step.

    Before step i of N, from 1, ``r = start - (start - end) i / (N - 1)`` of the block's unfrozen
    positions. Wrongness is ``(1 - m) w + m u`` with randomness m and u uniform; w is what the
    critic says, or 1 less the token's probability when it was drawn. By threshold: the tokens of
    wrongness above ``1 - r`` instead; a block where none is, is finished. `seeds/sampler_head.md`
    and DESIGN 6, "Refinement".

    Attributes:
      start_B: float32 ratio, in [0, 1].
      end_B: float32 ratio, in [0, 1]; with `start_B` 0 the row is left alone.
      randomness_B: float32 m, in [0, 1].
      is_threshold_B: True for rows that compare instead of counting.
      asks_critic: whether the critic says what is wrong.
    """

    start_B: jax.Array
    end_B: jax.Array
    randomness_B: jax.Array
    is_threshold_B: jax.Array
    asks_critic: bool = False

    def is_active(self) -> jax.Array:
        """True where a ratio is not 0."""
        return (self.start_B > 0) | (self.end_B > 0)

    def goes_on(self) -> jax.Array:
        """False: what stays unquestioned is finished."""
        return jnp.zeros(self.start_B.shape, bool)

    def select(self, view: View, tokens: Tokens) -> jax.Array:
        """The worst tokens."""
        share_B = (view.step_B + 1).astype(jnp.float32) / jnp.maximum(view.steps_B - 1, 1)
        ratio_B = self.start_B - (self.start_B - self.end_B) * jnp.minimum(share_B, 1.0)
        mix_B1 = self.randomness_B[:, None]
        chance_BL = uniform(tokens.key_B, tokens.is_open_BL.shape[1])
        doubt_BL = 1.0 - tokens.probability_BL if tokens.wrong_BL is None else tokens.wrong_BL
        wrong_BL = (1.0 - mix_B1) * doubt_BL + mix_B1 * chance_BL
        count_B = jnp.floor(ratio_B * tokens.num_free_B + 1e-3).astype(jnp.int32)
        is_worst_BL = most(wrong_BL, tokens.is_open_BL, count_B)
        is_above_BL = wrong_BL > 1.0 - ratio_B[:, None]
        chosen_BL = jnp.where(self.is_threshold_B[:, None], is_above_BL, is_worst_BL)
        return chosen_BL & self.is_active()[:, None]
