"""Temperatures agree with float64 oracles written from the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import transform_cases as tc
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import samplers

from dlm_jax.sampling import transforms as tf

TAME = ("normal", "ties", "banned", "one_hot", "equal", "peaked")


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    kind=st.sampled_from(TAME),
    seed=st.integers(0, 2**16),
    value=tc.floats(0.05, 4.0),
    delta=tc.floats(0.0, 3.0).map(lambda d: 0.0 if d < 1e-3 else d),
    exponent=tc.floats(0.25, 3.0),
)
def test_temperatures_divide_by_what_the_oracle_says(kind, seed, value, delta, exponent):
    x = tc.logits(kind, seed)
    plain = np.asarray(tc.run(tf.Temperature(tc.real(value)), x, tc.at(), tc.context()))
    transform = tf.Temperature(tc.real(value), None, tc.real(delta), tc.real(exponent))
    dynamic = np.asarray(tc.run(transform, x, tc.at(), tc.context()))
    for n in range(tc.NUM_POSITIONS):
        np.testing.assert_allclose(plain[n], samplers.temperature(x[n], value), rtol=1e-5)
        divisor = samplers.dynamic_temperature_value(x[n], value, delta, exponent)
        if divisor < 0.01:
            continue  # too cold for float32 entropies
        expected = samplers.dynamic_temperature(x[n], value, delta, exponent)
        np.testing.assert_allclose(dynamic[n], expected, rtol=5e-3 if delta > 0 else 1e-5)


def test_dynamic_temperature_of_zero_leaves_the_best_candidate():
    x = np.full((6, 40), -200.0, np.float32)
    x[:, 7] = 0.0
    transform = tf.Temperature(tc.real(0.5), None, tc.real(0.5), tc.real(1.0))
    out = np.asarray(tc.run(transform, x, tc.at(), tc.context()))
    assert np.all(np.flatnonzero(out[0] > -np.inf) == [7])


@pytest.mark.parametrize("value", [1e-6, 1e6])
def test_temperature_keeps_huge_logits_finite(value):
    x = tc.logits("huge", 0)
    out = np.asarray(tc.run(tf.Temperature(tc.real(value)), x, tc.at(), tc.context()))
    assert np.all(np.isfinite(out))
