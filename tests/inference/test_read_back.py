"""Read-back reports the draw that was made from the final logits."""

from __future__ import annotations

import jax
import numpy as np
import transform_cases as tc

from dlm_jax.inference.host import read_back
from dlm_jax.sampling.draw import draw


def test_read_back_reports_token_probability_and_largest_candidates():
    x = tc.logits("banned", 2)
    ids = draw(x, jax.random.split(jax.random.key(0), tc.NUM_POSITIONS))
    report = jax.tree.map(np.asarray, read_back(x, ids, size=5))
    np.testing.assert_array_equal(report.token_N, ids)
    p = np.asarray(jax.nn.softmax(x))[np.arange(tc.NUM_POSITIONS), np.asarray(ids)]
    np.testing.assert_allclose(report.probability_N, p, rtol=1e-5)
    np.testing.assert_array_equal(report.num_candidates_N, np.isfinite(x).sum(-1))
    for n in range(tc.NUM_POSITIONS):
        order = np.argsort(-x[n], kind="stable")[:5]
        np.testing.assert_array_equal(report.top_ids_NK[n], order)
        np.testing.assert_array_equal(report.top_logits_NK[n], x[n, order])


def test_missing_candidates_are_marked():
    x = tc.logits("one_hot", 0)
    report = jax.tree.map(np.asarray, read_back(x, x.argmax(-1), size=3))
    np.testing.assert_array_equal(report.num_candidates_N, 1)
    np.testing.assert_allclose(report.probability_N, 1.0)
    assert np.all(report.top_ids_NK[:, 1:] == tc.VOCAB)
