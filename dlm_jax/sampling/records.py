"""Records of every step of a traced loop: the canvas, the drawn tokens and the commits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Drawn(NamedTuple):
    """Statistics of the draws of a step, ``[B, L]``. Values at positions without a candidate are
    undefined.

    Attributes:
      logprob_BL: float32 log-probability in nats of the candidate under the distribution it was
        drawn from (LM head or sampler head, after the row's chain); 0 in greedy rows.
      entropy_BL: float32 entropy in nats of the clean logits of the head that the candidate was
        drawn from.
      level_BL: int32, order within the fill. A candidate depends on the candidates of lower levels.
    """

    logprob_BL: jax.Array
    entropy_BL: jax.Array
    level_BL: jax.Array


class Records(NamedTuple):
    """Records of up to ``S`` steps per row. Records of steps that were not taken are empty.

    Attributes:
      canvas_BSL: int32, input of the forward pass.
      tokens_BSL: int32 candidates; -1 where no candidate was drawn.
      is_written_BSL: True where the candidate was committed.
      logprob_BSL: `Drawn.logprob_BL`; 0 where no candidate was drawn, as in the next two
        fields.
      entropy_BSL: `Drawn.entropy_BL`.
      confidence_BSL: float32 confidence of the commit rule.
      level_BSL: `Drawn.level_BL`.
      choice_BS: float32 log-probability of choosing the committed and remasked positions; 0 if the
        choice is deterministic.
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
        """Adds the values of one step, ``[B, L]`` and ``[B]``, where ``steps_B`` is True."""
        row_B, num_steps = jnp.arange(step_B.shape[0]), self.choice_BS.shape[1]
        place_B = jnp.where(steps_B, step_B, num_steps)
        put = (
            old.at[row_B, place_B].set(one, mode="drop") for old, one in zip(self, new, strict=True)
        )
        return Records(*put)


def start_records(tokens_BL: jax.Array, num_steps: int) -> Records:
    """Empty records for `num_steps` steps."""
    num_rows, num_positions = tokens_BL.shape
    shape = num_rows, num_steps, num_positions
    none, zeros = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    canvas = jnp.broadcast_to(tokens_BL[:, None], shape)
    return Records(
        canvas, none, zeros > 0, zeros, zeros, zeros, none + 1,
        jnp.zeros((num_rows, num_steps), jnp.float32),
    )  # fmt: skip
