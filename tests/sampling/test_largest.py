"""The place of the largest value: that of NumPy, with NaN and ties, and nothing left in a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.sampling.positions import place_of_largest

_FLOATS = np.array(
    [
        [1.0, 3.0, 3.0, -2.0],
        [-np.inf, -np.inf, -np.inf, -np.inf],
        [np.inf, 1.0, np.inf, 0.0],
        [5.0, np.nan, 7.0, np.nan],
        [-0.0, 0.0, -0.0, 0.0],
        [-np.inf, -np.inf, -3.0, -np.inf],
    ],
    np.float32,
)


@pytest.mark.parametrize("x", [_FLOATS, _FLOATS > 2, np.zeros((2, 3), bool), np.ones((2, 3), bool)])
def test_the_place_of_the_largest_value_is_that_of_numpy(x):
    jitted = jax.jit(place_of_largest, static_argnums=1)
    for axis in range(x.ndim):
        ours = jitted(jnp.asarray(x), axis)
        assert ours.dtype == jnp.int32
        np.testing.assert_array_equal(ours, np.argmax(x, axis=axis))
    np.testing.assert_array_equal(jax.vmap(place_of_largest)(jnp.asarray(x)), np.argmax(x, axis=1))
