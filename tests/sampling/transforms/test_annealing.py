"""A temperature that moves from step to step."""

import dataclasses

import canvases
import jax.numpy as jnp
import numpy as np
import toy
from canvases import ROWS, Row, holes
from oracles.rules import annealed_temperature

from dlm_jax.sampling.state import step_chain, visible_context
from dlm_jax.sampling.transforms import Temperature, chain


def _state(rows, last):
    state = canvases.make_state(rows, canvases.RANDOM)
    bans = canvases.make_chain([1.0] * ROWS).transforms[0]
    first_B = jnp.array([row.temperature for row in rows])
    moving = Temperature(first_B, end_B=jnp.array(last, jnp.float32))
    chained = chain(bans, moving)
    rules = state.rules._replace(chain=chained)
    chain_state = chained.start(visible_context(state, mask_id=toy.MASK))
    return state._replace(rules=rules, chain_state=chain_state)


def test_temperature_goes_evenly_to_the_last_step_or_the_last_hole():
    sizes = [(9, 5), (5, 9), (1, 4), (9, 1), (12, 12), (3, 3), (8, 2), (2, 8)]
    rows = [Row(holes(number, 1), steps, seed=3, temperature=1.5) for number, steps in sizes]
    last = [0.5, 0.0, 0.3, 0.3, 2.5, 1.5, 0.2, 0.4]
    state = _state(rows, last)
    seen = [[] for _ in rows]
    for _ in range(12):
        now = step_chain(state).transforms[1].temperature_B
        for slot in np.flatnonzero(np.asarray(state.status_B) == 0):
            seen[slot].append(float(now[slot]))
        state = canvases.shared_advance()(toy.params(), state, 1)
    for row, end, temperatures in zip(rows, last, seen, strict=True):
        span = min(row.steps, row.tokens.count(toy.MASK))
        expected = [annealed_temperature(1.5, end, step, span) for step in range(span)]
        np.testing.assert_allclose(temperatures, expected, rtol=1e-5, atol=1e-6)


def test_a_last_temperature_equal_to_the_first_is_none_bit_for_bit():
    rows = [dataclasses.replace(row, temperature=0.3 + 0.2 * i)
            for i, row in enumerate(canvases.mixed_rows(1))]  # fmt: skip
    state = _state(rows, [row.temperature for row in rows])
    state = canvases.shared_advance()(toy.params(), state, canvases.FOREVER)
    assert canvases.results(state) == canvases.run(rows, canvases.RANDOM)


def test_a_row_that_cools_to_zero_takes_the_likeliest_at_its_last_step():
    rows = [Row(holes(6, 2), steps=2, temperature=1e6, seed=seed) for seed in range(ROWS)]
    state = _state(rows, [0.0] * ROWS)
    state = canvases.shared_advance()(toy.params(), state, 1)
    before = np.asarray(state.canvas.tokens_BL).copy()
    state = canvases.shared_advance()(toy.params(), state, 1)
    for row, after in zip(before, np.asarray(state.canvas.tokens_BL), strict=True):
        logits = np.array(toy.row_logits(row, 7))
        logits[:, list(toy.BANNED)] = -np.inf
        is_hole = row[:7] == toy.MASK
        assert after[:7][is_hole].tolist() == logits[:7].argmax(1)[is_hole].tolist()
