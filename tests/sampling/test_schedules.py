"""Ratios that move from step to step, against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import edits as oracle

from dlm_jax.sampling.program import ratio_at


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_ratios_follow_their_schedule(schedule):
    cases = [(s, n, a, b) for n in (1, 2, 7) for s in range(n) for a, b in ((0.4, 0.1), (0, 1))]
    step, steps, start, end = (np.array(x) for x in zip(*cases, strict=True))
    got = ratio_at(
        jnp.asarray(start, jnp.float32), jnp.asarray(end, jnp.float32), jnp.asarray(step),
        jnp.asarray(steps), schedule=schedule,
    )  # fmt: skip
    want = [oracle.ratio_at(a, b, s, n, schedule) for s, n, a, b in cases]
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert float(got[0]) == np.float32(0.4), "a lone step has the start"
