"""What a traced loop keeps of every step: the canvas it saw, what it drew and what it wrote."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Drawn(NamedTuple):
    """How a step drew its candidates, ``[B, L]``; elsewhere the values mean nothing.

    Attributes:
      logprob_BL: float32 log-probability in nats of the candidate under what it was drawn from:
        after the row's chain, by whichever head; 0 in greedy rows.
      entropy_BL: float32 nats, of the clean logits of that head.
      level_BL: int32, for the fill: candidates of lower levels were seen when one was drawn.
    """

    logprob_BL: jax.Array
    entropy_BL: jax.Array
    level_BL: jax.Array


class Records(NamedTuple):
    """The steps of each row, up to ``S`` of them; those that it has not taken are empty.

    Attributes:
      canvas_BSL: int32, what the forward saw.
      tokens_BSL: int32 candidates; -1 where none was drawn.
      is_written_BSL: True where the candidate was committed.
      logprob_BSL: `Drawn.logprob_BL`; 0 where no candidate was drawn, as are the next two.
      entropy_BSL: `Drawn.entropy_BL`.
      confidence_BSL: float32, what the commit rule measured.
      level_BSL: `Drawn.level_BL`.
      choice_BS: float32 log-probability of the positions that were committed and remasked; 0 where
        no chance is in them.
    """

    canvas_BSL: jax.Array
    tokens_BSL: jax.Array
    is_written_BSL: jax.Array
    logprob_BSL: jax.Array
    entropy_BSL: jax.Array
    confidence_BSL: jax.Array
    level_BSL: jax.Array
    choice_BS: jax.Array

    def with_step(self, step_B: jax.Array, steps_B: jax.Array, new: Records) -> Records:
        """The records with those of one step, ``[B, L]`` and ``[B]``, where ``steps_B`` is True."""
        row_B, num_steps = jnp.arange(step_B.shape[0]), self.choice_BS.shape[1]
        place_B = jnp.where(steps_B, step_B, num_steps)
        put = (old.at[row_B, place_B].set(one, mode="drop") for old, one in zip(self, new))
        return Records(*put)


def start_records(tokens_BL: jax.Array, num_steps: int) -> Records:
    """Records of no step, with room for as many."""
    num_rows, num_positions = tokens_BL.shape
    shape = num_rows, num_steps, num_positions
    none, zeros = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    canvas = jnp.broadcast_to(tokens_BL[:, None], shape)
    return Records(
        canvas, none, zeros > 0, zeros, zeros, zeros, none + 1,
        jnp.zeros((num_rows, num_steps), jnp.float32),
    )  # fmt: skip
