"""Re-noise: overwrites some tokens before each forward pass, so that the model rewrites them.

Unlike remasking, re-noise can write a space or a random token, which the model reads as text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit.commit_rule import most, uniform
from dlm_jax.sampling.row import SCHEDULES, check_space, ratio_at
from dlm_jax.settings import Rule, Setting, SettingError, per_row, rule, static

RENOISE_SALT = 0x6E6F6973
RENOISE_TOKENS = ("space", "mask", "random")


@rule
class Renoise(Rule):
    """Overwrites a randomly chosen part of the block's unfrozen tokens."""

    start_B: jax.Array = per_row(
        Setting(
            "renoise_start",
            0.0,
            "re-noise: share of tokens overwritten before the first step",
            low=0.0,
            high=1.0,
        )
    )
    end_B: jax.Array = per_row(
        Setting(
            "renoise_end",
            0.0,
            "re-noise: share of tokens overwritten before the last step",
            low=0.0,
            high=1.0,
        )
    )
    kind_B: jax.Array = per_row(
        Setting(
            "renoise",
            "space",
            "re-noise: token written over other tokens before a forward pass: space, "
            "mask or random",
            choices={name: name for name in RENOISE_TOKENS},
        )
    )
    schedule: str = static(
        Setting(
            "renoise_schedule",
            "cosine",
            "re-noise: linear or cosine interpolation between the two shares",
            choices=SCHEDULES,
        )
    )

    @classmethod
    def is_used(cls, row: Any) -> bool:
        return max(row.renoise_start, row.renoise_end) > 0

    @classmethod
    def check(cls, row: Any) -> None:
        if row.renoise != "mask" and not (row.resample or row.remasks):
            raise ValueError(
                f"re-noise leaves {row.renoise} tokens that no rule rewrites; use renoise='mask', "
                "or resample=True"
            )

    @classmethod
    def check_model(cls, row: Any, facts: Any) -> None:
        if row.renoise == "space":
            check_space("renoise", row, facts, "writes")

    @classmethod
    def check_trace(cls, row: Any) -> None:
        raise SettingError(
            "renoise_start",
            row.renoise_start,
            "has no trace, because it writes tokens that are not drawn",
            "use renoise_start=0 and renoise_end=0, and remask instead",
        )

    def is_active(self) -> jax.Array:
        return (self.start_B > 0) | (self.end_B > 0)

    def ratio(self, step_B: jax.Array, steps_B: jax.Array) -> jax.Array:
        """float32 ``[B]``, the fraction of tokens overwritten before the step with this index."""
        return ratio_at(self.start_B, self.end_B, step_B, steps_B, schedule=self.schedule)

    def write(
        self,
        tokens_BL: jax.Array,
        is_free_BL: jax.Array,
        ratio_B: jax.Array,
        key_B: jax.Array,
        *,
        mask_id: int,
        space_id: int,
        is_text: Callable[[], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """The tokens that are written before the forward pass of a step, and where.

        `is_free_BL` is True at the unfrozen positions of the block, in rows that take the step.
        `is_text` returns an array ``[B, V]`` that is True at the ids allowed as random tokens. MASK
        is used in rows without such ids.
        """
        is_token_BL = is_free_BL & (tokens_BL != mask_id)
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
