"""One step of a block, made by hand, for the tests of commit and remask rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.commit import CommitContext, Proposal


def context(is_hole_BL, *, first=None, step=0, steps=8, seeds=None, **more: Any) -> CommitContext:
    """Rows with keys of their own; whatever is no hole is a token."""
    is_hole_BL = jnp.asarray(is_hole_BL)
    rows = is_hole_BL.shape[0]
    given = {
        "is_hole_BL": is_hole_BL,
        "first_holes_B": jnp.sum(is_hole_BL, axis=1) if first is None else jnp.asarray(first),
        "step_B": jnp.broadcast_to(jnp.asarray(step, jnp.int32), rows),
        "steps_B": jnp.broadcast_to(jnp.asarray(steps, jnp.int32), rows),
        "key_B": jax.vmap(jax.random.key)(jnp.arange(rows) if seeds is None else seeds),
        "is_token_BL": ~is_hole_BL,
    }
    return CommitContext(**given | more)


def proposal(confidence_BL, tokens_BL=None) -> Proposal:
    """Tokens of these confidences; which tokens is for those who ask."""
    zeros_BL = jnp.zeros(confidence_BL.shape, jnp.float32)
    tokens_BL = zeros_BL.astype(jnp.int32) if tokens_BL is None else jnp.asarray(tokens_BL)
    return Proposal(tokens_BL, zeros_BL, zeros_BL, jnp.asarray(confidence_BL))


@jax.jit
def select(rule, now: CommitContext, proposed: Proposal, state=()) -> jax.Array:
    """The positions that a rule commits."""
    return rule.eligible(state, now) & rule.select(state, now, proposed)[0]
