"""The state of a rule, and the loop over anyone's step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from dlm_jax.sampling import state as rule_states
from dlm_jax.sampling.positions import gather_state

ROWS, LENGTH = 2, 5


class Both:
    """A state of the positions, and one of the rows."""

    def init(self, num_rows, num_positions):
        return jnp.zeros((num_rows, num_positions, 2)), jnp.ones((num_rows, LENGTH + 1))


def test_a_leaf_of_the_rows_is_not_one_of_the_positions():
    rule = Both()
    state = jnp.arange(20.0).reshape(ROWS, LENGTH, 2), jnp.arange(12.0).reshape(ROWS, LENGTH + 1)
    is_at_BL = jnp.zeros((ROWS, LENGTH), bool).at[1, 2].set(True)
    by_position, by_row = rule_states.reset_state(rule, state, is_at_BL)
    assert np.flatnonzero(np.asarray(by_position != state[0]).any(2)).tolist() == [7]
    assert (np.asarray(by_position[1, 2]) == 0).all() and by_row is state[1]
    places_N = jnp.array([7, 0])
    at_position, at_row = gather_state(state, places_N, LENGTH)
    np.testing.assert_array_equal(at_position, state[0].reshape(10, 2)[places_N])
    np.testing.assert_array_equal(at_row, state[1][jnp.array([1, 0])])


class Countdown(NamedTuple):
    """Numbers that fall to 0."""

    left_B: jax.Array

    @property
    def is_running_B(self):
        return self.left_B > 0


def test_the_loop_runs_any_step_until_its_rows_or_a_limit_end():
    def step(params, state):
        return Countdown(jnp.maximum(state.left_B - params, 0))

    run = jax.jit(lambda *given: dlm_jax.advance(step, 1, Countdown(jnp.array([2, 6])), *given))
    assert run(100).left_B.tolist() == [0, 0]
    assert run(1).left_B.tolist() == [1, 5]
    assert run(100, 1).left_B.tolist() == [0, 4]
