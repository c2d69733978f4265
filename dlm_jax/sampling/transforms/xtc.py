"""XTC: randomly drops all top choices except the least likely one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dlm_jax.randomness import salted
from dlm_jax.sampling import vocab
from dlm_jax.sampling.transforms.transform import At, Change, is_greedy, is_steered
from dlm_jax.sampling.transforms.truncate import MIN_KEEP, Truncation
from dlm_jax.sampling.vocab import Logits
from dlm_jax.settings import ABOVE_ZERO, Setting, per_row, rule

_XTC_SALT = 0x7863


@rule
class Xtc(Truncation):
    """With probability P, drops all tokens with `p >= t` except the least likely one.

    The decision is drawn independently for each position, from the position's key. The transform
    has no effect if fewer than two tokens reach t, if fewer than `min_keep` tokens would remain, or
    if P = 0 or t > 0.5.
    """

    probability_B: Array = per_row(
        Setting(
            "xtc_probability",
            0.0,
            "probability that XTC drops all top choices except the least likely one, in [0, 1]",
            low=0.0,
            high=1.0,
            remedy="use 0.0 to disable it",
        )
    )
    threshold_B: Array = per_row(
        Setting(
            "xtc_threshold",
            0.1,
            "minimum probability of a top choice for XTC; above 0.5 disables it",
            low=ABOVE_ZERO,
            high=1.0,
            remedy="use a value above 0.5 to disable it",
            activates=False,
        )
    )
    min_keep_B: Array = per_row(MIN_KEEP)

    @classmethod
    def yields(cls, row: Any) -> bool:
        return is_steered(row) or is_greedy(row)

    def is_active(self) -> Array:
        return (self.probability_B > 0) & (self.threshold_B <= 0.5)

    def given(self, prepared: Any, logits_NV: Array, at: At) -> Array:
        """The uniform number that decides at each position."""
        return jax.vmap(jax.random.uniform)(salted(at.key_N, _XTC_SALT))

    def change(self, given: Array, logits_NV: Logits, at: At) -> Change:
        max_N, weight_NC = vocab.exp_columns(logits_NV)
        floor_N = max_N + jnp.log(self.threshold_B[at.row_N] * weight_NC.sum(-1))

        def fn(acc, block_NC, ids_1C):
            num_top_NC, num_NC, least_NC = acc
            is_top_NC = block_NC >= floor_N[:, None]
            return (
                num_top_NC + jnp.where(is_top_NC, 1.0, 0.0),
                num_NC + jnp.where(block_NC > -jnp.inf, 1.0, 0.0),
                jnp.minimum(least_NC, jnp.where(is_top_NC, block_NC, jnp.inf)),
            )

        start = tuple(vocab.columns(logits_NV, fill) for fill in (0.0, 0.0, jnp.inf))
        num_top_NC, num_NC, least_NC = vocab.accumulate(fn, start, logits_NV)
        num_top_N, least_N1 = num_top_NC.sum(-1), least_NC.min(-1)[:, None]
        num_left_N = num_NC.sum(-1) - num_top_N + 1
        does_drop_N = (
            self.is_active()[at.row_N]
            & (given < self.probability_B[at.row_N])
            & (num_top_N >= 2)
            & (num_left_N >= self.min_keep_B[at.row_N])
        )
        stays_N = vocab.lowest_id(lambda block: block == least_N1, logits_NV)

        def keep(block, ids):
            is_kept_NC = (block < least_N1) | (ids == stays_N[:, None]) | ~does_drop_N[:, None]
            return jnp.where(is_kept_NC, block, -jnp.inf)

        return keep
