"""Penalties and DRY agree with float64 oracles written from the formulas."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import transform_cases as tc
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import samplers

from dlm_jax.config import SamplingParams
from dlm_jax.sampling import transforms as tf
from dlm_jax.sampling.rules import ModelFacts

number = tc.floats(-2.0, 2.0)


def seen_by(scene: tf.Context, row: int) -> tuple[list[int], list[bool], list[int]]:
    """Tokens, visibility and commit order of a row, as the oracles take them."""
    columns = (scene.tokens_BL, scene.is_visible_BL, scene.order_BL)
    tokens, is_visible, order = (np.asarray(column)[row].tolist() for column in columns)
    return tokens, is_visible, order


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    kind=st.sampled_from(["normal", "ties", "banned"]),
    seed=st.integers(0, 2**16),
    repetition=tc.floats(0.25, 4.0),
    frequency=number,
    presence=number,
    last_n=st.tuples(*[st.integers(-1, 14)] * 3),
)
def test_penalties_agree_with_the_oracle(kind, seed, repetition, frequency, presence, last_n):
    x, scene, place = tc.logits(kind, seed), tc.context(seed), tc.at()
    transform = tf.Penalties(
        tc.real(repetition), tc.real(frequency), tc.real(presence), tc.whole(*last_n),
        vocab_size=tc.VOCAB,
    )  # fmt: skip
    out = np.asarray(tc.run(transform, x, place, scene))
    for n, row in enumerate(np.asarray(place.row_N)):
        expected = samplers.penalties(
            x[n],
            samplers.context_in_commit_order(*seen_by(scene, row)),
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            last_n=last_n[row],
        )
        np.testing.assert_allclose(out[n], expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    kind=st.sampled_from(["normal", "ties", "banned"]),
    seed=st.integers(0, 2**16),
    multiplier=tc.floats(0.0, 2.0),
    base=tc.floats(1.0, 3.0),
    allowed=st.tuples(*[st.integers(1, 4)] * 3),
    breakers=st.sampled_from([(), (0,), (1, 2)]),
)
def test_dry_agrees_with_the_oracle(kind, seed, multiplier, base, allowed, breakers):
    x, scene, place = tc.logits(kind, seed), tc.context(seed), tc.at()
    table = np.full((tc.NUM_ROWS, 2), -1, np.int32)
    table[:, : len(breakers)] = breakers
    transform = tf.Dry(
        tc.real(multiplier), tc.real(base), tc.whole(*allowed), jnp.asarray(table),
    )  # fmt: skip
    out = np.asarray(tc.run(transform, x, place, scene))
    for n, row in enumerate(np.asarray(place.row_N)):
        tokens, is_visible, _ = seen_by(scene, row)
        run = samplers.run_left_of(tokens, is_visible, int(place.index_N[n]))
        expected = samplers.dry(
            x[n],
            run,
            multiplier=multiplier,
            base=base,
            allowed_length=allowed[row],
            breakers=breakers,
        )
        np.testing.assert_allclose(out[n], expected, rtol=1e-4, atol=1e-4)


def test_dry_penalty_of_a_very_long_repetition_stays_finite():
    L = 400
    scene = tf.Context(
        jnp.zeros((3, L), jnp.int32), jnp.zeros((3, L), jnp.int32), jnp.ones((3, L), bool),
        jnp.full(3, L),
    )  # fmt: skip
    breakers = jnp.full((3, 2), -1, jnp.int32)
    transform = tf.Dry(tc.real(1.0), tc.real(3.0), tc.whole(1), breakers)
    place = tc.at(index_N=jnp.full(6, L - 1))
    out = np.asarray(tc.run(transform, tc.logits("normal", 0), place, scene))
    assert np.all(np.isfinite(out)) and np.all(out[:, 0] < -1e37)


def test_penalties_count_all_of_a_row_unless_told_otherwise():
    rows = [SamplingParams(repetition_penalty=1.3)] * 3
    transform = tf.Penalties.pack(rows, ModelFacts(vocab_size=9))
    assert np.asarray(transform.last_n_B).tolist() == [-1] * 3
