"""The clock of compilation: what lies inside counts once, what was compiled before not at all."""

import jax
import jax.numpy as jnp
import pytest

from dlm_jax.cli import common
from dlm_jax.cli.common import CompileClock, compile_clock


def test_stretches_inside_others_count_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    clock = CompileClock()
    for end, seconds in ((2.0, 1.0), (4.0, 1.0), (5.0, 4.5), (9.0, 1.0)):
        now[0] = end
        clock._note("/jax/core/compile/jaxpr_trace_duration", seconds)
    # From 0.5 to 5 with two inside (the first overlaps), and from 8 to 9.
    assert clock.seconds == pytest.approx(5.5)
    clock._note("/jax/checkpoint/write_duration", 3.0)
    assert clock.seconds == pytest.approx(5.5)


def test_a_program_that_is_compiled_already_costs_nothing():
    clock = compile_clock()
    assert compile_clock() is clock
    double = jax.jit(lambda x: jnp.sin(x) * 2)
    ones = jnp.ones(3)
    before = clock.seconds
    double(ones).block_until_ready()
    after = clock.seconds
    assert after > before
    double(ones).block_until_ready()
    assert clock.seconds == after
