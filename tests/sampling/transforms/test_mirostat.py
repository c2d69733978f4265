"""Mirostat agrees with float64 oracles, and steers the surprise to its target."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import transform_cases as tc
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mirostat, near

from dlm_jax.sampling import transforms as tf


class Committed(NamedTuple):
    """The part of a proposal that mirostat reads."""

    final_logprob_BL: np.ndarray
    logprob_BL: np.ndarray


def make(version: int, tau, eta=0.1, min_keep=1, vocab=tc.VOCAB):
    return tf.Mirostat(
        tc.whole(version), tc.real(*tau), tc.real(eta), tc.whole(min_keep), vocab_size=vocab
    )


@pytest.mark.parametrize("version", [1, 2])
@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    kind=st.sampled_from(tc.KINDS),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1, 2, 40, 151]),
    tau=st.tuples(*[tc.floats(0.0, 6.0)] * 3),
    min_keep=st.integers(1, 4),
)
def test_mirostat_keeps_what_the_oracle_keeps(version, kind, seed, size, tau, min_keep):
    x = tc.logits(kind, seed, (tc.NUM_POSITIONS, size))
    transform = make(version, tau, min_keep=min_keep, vocab=size)
    out = np.asarray(tc.run(transform, x, tc.at(), tc.context()))
    oracle = mirostat.v1 if version == 1 else mirostat.v2
    for n, row in enumerate(np.asarray(tc.at().row_N)):
        seen, mu = tc.as_seen(x[n]), 2.0 * float(np.float32(tau[row]))
        expected = oracle(seen, mu, min_keep=min_keep)
        params = {"mirostat": version, "min_keep": min_keep}
        tc.assert_keeps(out[n], x[n], expected, near.undecided("mirostat", seen, params, mu=mu))


def test_candidates_that_fall_as_their_rank_leave_the_limit_of_the_formula():
    """The slope of ``-ln(i + 1)`` is 1, where k tends to ``2**mu / ln V``."""
    x = -np.log(np.arange(1.0, tc.VOCAB + 1)).astype(np.float32)[None].repeat(6, axis=0)
    counts = np.array([2, 5, 9])
    tau = np.log2((counts + 0.5) * math.log(tc.VOCAB)) / 2
    out = np.isfinite(tc.run(make(1, tau), x, tc.at(), tc.context()))
    for kept_V, row in zip(out, np.asarray(tc.at().row_N), strict=True):
        assert np.flatnonzero(kept_V).tolist() == list(range(counts[row]))


@pytest.mark.parametrize("version", [1, 2])
def test_mu_moves_by_the_mean_surprise_of_the_commits_of_a_step(version):
    transform = make(version, (3.0,), eta=0.25)
    state = transform.init(tc.NUM_ROWS)
    np.testing.assert_array_equal(state, [6.0] * 3)
    bits = np.array([[2.0, 4.0, 9.0], [1.0, 1.0, 1.0], [5.0, 5.0, 5.0]], np.float32)
    is_committed = np.array([[1, 1, 0], [0, 0, 0], [0, 0, 1]], bool)
    commit = Committed(-bits * math.log(2), np.zeros_like(bits))
    out = transform.update(state, is_committed, commit)
    np.testing.assert_allclose(out, [6.0, 6.0, 5.5], rtol=1e-6)
