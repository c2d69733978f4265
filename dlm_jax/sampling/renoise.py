"""Re-noise: before each forward some tokens are written over, for the model to write anew.

The schedule beside the edits of `seeds/variable_length_edits.md`, read as in DESIGN 8: unlike
remasking it may leave a space or a random token, which the model takes for text.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.config.generation import RENOISE_TOKENS
from dlm_jax.sampling.commit import most
from dlm_jax.sampling.edits import ratio_at
from dlm_jax.sampling.orders import uniform


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start_B", "end_B", "kind_B"],
    meta_fields=["schedule"],
)
@dataclass(frozen=True)
class Renoise:
    """Writes over a share of the block's unfrozen tokens, uniformly chosen.

    Attributes:
      start_B: float32 share before the first step, in [0, 1].
      end_B: float32 share before the last step, in [0, 1].
      kind_B: int32, place of what is written in `RENOISE_TOKENS`.
      schedule: in between, one of `EDIT_SCHEDULES`.
    """

    start_B: jax.Array
    end_B: jax.Array
    kind_B: jax.Array
    schedule: str = "cosine"

    def is_active(self) -> jax.Array:
        """True ``[B]`` where a share is not 0."""
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
        random_ids: tuple[int, ...],
    ) -> tuple[jax.Array, jax.Array]:
        """The canvas before the forward of a step, and where it was written over.

        Args:
          tokens_BL: int32 canvas.
          is_free_BL: True at the block's unfrozen positions, in rows that take the step.
          step_B: int32, its number.
          steps_B: int32, steps of the row.
          key_B: this step's key of each row, for re-noise alone.
          mask_id: the id of MASK.
          space_id: the id of the space.
          random_ids: ids of which one is written at random.
        """
        ratio_B = ratio_at(self.start_B, self.end_B, step_B, steps_B, schedule=self.schedule)
        is_token_BL = is_free_BL & (tokens_BL != mask_id)
        count_B = jnp.floor(ratio_B * jnp.sum(is_token_BL, axis=1) + 1e-3).astype(jnp.int32)
        keys_B2 = jax.vmap(jax.random.split)(key_B)
        num_positions = tokens_BL.shape[1]
        is_hit_BL = most(uniform(keys_B2[:, 0], num_positions), is_token_BL, count_B)
        choice_BL = jnp.floor(uniform(keys_B2[:, 1], num_positions) * len(random_ids))
        random_BL = jnp.asarray(np.array(random_ids, np.int32))[choice_BL.astype(jnp.int32)]
        kind_B1 = self.kind_B[:, None]
        new_BL = jnp.where(
            kind_B1 == RENOISE_TOKENS.index("random"),
            random_BL,
            jnp.where(kind_B1 == RENOISE_TOKENS.index("mask"), mask_id, space_id),
        )
        return jnp.where(is_hit_BL, new_BL, tokens_BL), is_hit_BL
