"""Biases agree with float64 oracles written from the formulas."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import transform_cases as tc
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import samplers

from dlm_jax.sampling import transforms as tf


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    kind=st.sampled_from(["normal", "ties", "banned", "one_hot", "equal", "peaked"]),
    seed=st.integers(0, 2**16),
    pairs=st.lists(
        st.tuples(st.integers(0, 38), st.sampled_from([1.5, -2.0, 0.0, -np.inf, 100.0])),
        max_size=8,
    ),
)
def test_bias_adds_up_and_bans(kind, seed, pairs):
    x = tc.logits(kind, seed)
    x[:, 39] = 0.5  # never banned here
    ids = np.full((tc.NUM_ROWS, 8), tc.VOCAB, np.int32)
    values = np.zeros((tc.NUM_ROWS, 8), np.float32)
    for i, (token, bias) in enumerate(pairs):
        ids[1, i], values[1, i] = token, bias
    out = np.asarray(tc.run(tf.LogitBias(jnp.asarray(ids), jnp.asarray(values)), x, tc.at(),
                            tc.context()))  # fmt: skip
    for n, row in enumerate(np.asarray(tc.at().row_N)):
        expected = samplers.logit_bias(x[n], pairs) if row == 1 else x[n]
        np.testing.assert_allclose(out[n], expected, rtol=1e-5, atol=1e-5)
