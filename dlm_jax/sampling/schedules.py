"""Ratios that change from a row's first step to its last."""

from __future__ import annotations

import jax
import jax.numpy as jnp

SCHEDULES = {"linear": "linear", "cosine": "cosine"}
"""Schedules, as the choices of a setting."""


def ratio_at(
    start_B: jax.Array, end_B: jax.Array, step_B: jax.Array, steps_B: jax.Array, *, schedule: str
) -> jax.Array:
    """float32 ``[B]`` ratio that changes from `start_B` at the first step to `end_B` at the last.

    With ``t = step / (steps - 1)``, the linear schedule is ``start + (end - start) t``, and the
    cosine schedule is ``end + (start - end) (1 + cos(pi t)) / 2``. With a single step, the ratio is
    `start_B`.

    Raises:
      ValueError: the schedule is not one of `SCHEDULES`.
    """
    share_B = step_B.astype(jnp.float32) / jnp.maximum(steps_B - 1, 1)
    share_B = jnp.minimum(share_B, 1.0)
    if schedule == "linear":
        ratio_B = start_B + (end_B - start_B) * share_B
    elif schedule == "cosine":
        ratio_B = end_B + (start_B - end_B) * 0.5 * (1.0 + jnp.cos(jnp.pi * share_B))
    else:
        known = " or ".join(SCHEDULES)
        raise ValueError(f"schedule={schedule!r} is unknown; use {known}")
    return jnp.where(steps_B <= 1, start_B, ratio_B)
