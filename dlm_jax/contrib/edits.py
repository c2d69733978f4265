"""Edit rules in addition to the built-in ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dlm_jax import rule
from dlm_jax.sampling import may_be_led
from dlm_jax.sampling.edits import EditContext, Uncertainty


def leads(context: EditContext) -> jax.Array:
    """float32 ``[B, L]``: at g + 1, the lead of the most likely token over the current one.

    The lead is ``max_v p(g + 1, v) - p(g + 1, x_g+1)``, because a token missing before position g +
    1 belongs at g + 1. The score is 0 at holes and frozen positions, and where the most likely
    token equals the right neighbour, which indicates a deletion. A high score at position 0 means
    that the model predicts a different first token. Unlike `gap_scores`, this score is low where
    the model is merely uncertain, and it selects only one of the two gaps next to a wrong token.
    The score requires models trained on misprinted text (`dlm_jax.objectives.objective`), which
    predict the correct token at each position.
    """
    assert context.best_BL is not None
    lead_BL = jnp.exp(context.best_BL) - jnp.exp(context.own_BL)
    return jnp.where(may_be_led(context), jnp.maximum(lead_BL, 0.0), 0.0)


@rule
class Lead(Uncertainty):
    """Inserts a token where another token is more likely than the current one. Deletions are
    selected as in `Uncertainty`.

    This rule requires a model trained to proofread.
    """

    about = (
        "probability of the most likely token minus that of the token after the gap, for models "
        "trained to proofread"
    )
    needs = ("likeliest",)

    def score(self, context: EditContext) -> tuple[jax.Array, jax.Array]:
        return leads(context).at[:, 0].set(0.0), super().score(context)[1]
