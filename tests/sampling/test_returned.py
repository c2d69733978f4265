"""What a network or a rule of one's own returns is checked where it enters, with its name."""

import dataclasses

import jax.numpy as jnp
import pytest
import toy
import toy_model

import dlm_jax
from dlm_jax import rule
from dlm_jax.sampling.positions import hidden, logits


@rule
class OnePerRow(dlm_jax.CommitRule):
    """Forgets the axis of positions."""

    def select(self, state, context, proposal):
        """True for rows instead of positions."""
        return jnp.any(context.is_hole_BL, axis=1), state


@rule
class Ranks(dlm_jax.CommitRule):
    """Measures in whole numbers."""

    def score(self, state_N, logits_NV, drawn):
        """int32."""
        return drawn.logprob_N.astype(jnp.int32), state_N

    def select(self, state, context, proposal):
        """All holes."""
        return context.is_hole_BL, state


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"commit": OnePerRow()}, r"OnePerRow.select returned bool \[\d+\]; return bool \[B, L\]"),
        ({"commit": Ranks()}, r"Ranks.score returned int32 \[\d+\]; return float32 \[N\]"),
    ],
)
def test_a_rule_that_returns_something_else_is_named(settings, said):
    with pytest.raises(ValueError, match=said):
        dlm_jax.generate(toy_model.MODEL, ["A "], gen_length=8, steps=4, **settings)


def _network(**changed):
    return dataclasses.replace(toy.network(), **changed)


def test_a_network_that_returns_something_else_is_named():
    tokens_BL, length_B = jnp.zeros((2, 6), jnp.int32), jnp.full(2, 6)
    flat = _network(trunk=lambda params, tokens, length, cache: (jnp.zeros((2, 16)), cache))
    with pytest.raises(ValueError, match=r"Network.trunk returned float32 \[2, 16\]; return float"):
        hidden(flat, {}, tokens_BL, length_B)
    narrow = _network(readout=lambda params, hidden_ND: hidden_ND.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"readout returned bfloat16 \[3, 16\].* here \[3, 12\]"):
        logits(narrow, {}, jnp.zeros((3, 16)))
