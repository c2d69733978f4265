import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.objectives.corruption import (
    SCHEDULES,
    mask_exactly,
    mask_independently,
    stratified_times,
)
from dlm_jax.types import live_positions


def test_every_stratum_gets_exactly_one_time():
    for seed in range(5):
        times = np.sort(np.asarray(stratified_times(jax.random.key(seed), 16)))
        gaps = np.diff(times)
        np.testing.assert_allclose(gaps, 1 / 16, atol=1e-6)
        assert times[0] > 0
        assert times[-1] <= 1


def test_masks_hide_the_asked_share_and_no_dead_position():
    length_B = jnp.array([1000, 500, 0])
    ratio_B = jnp.array([0.25, 0.75, 1.0])
    is_free_BL = live_positions(length_B, 1000).at[0, :100].set(False)
    is_masked = np.asarray(mask_independently(jax.random.key(1), ratio_B, is_free_BL))
    assert not is_masked[0, :100].any()
    assert not is_masked[1, 500:].any()
    assert not is_masked[2].any()
    assert abs(is_masked[0, 100:].mean() - 0.25) < 0.06
    assert abs(is_masked[1, :500].mean() - 0.75) < 0.09


def test_exact_masks_have_the_exact_count_of_live_positions():
    length_B = jnp.array([6, 6, 3, 0])
    count_B = jnp.array([2, 9, 1, 1])
    is_free_BL = live_positions(length_B, 8).at[0, 1].set(False)
    is_masked = np.asarray(mask_exactly(jax.random.key(2), count_B, is_free_BL))
    assert is_masked.sum(1).tolist() == [2, 6, 1, 0]
    assert not is_masked[0, 1]
    assert not is_masked[0, 6:].any()


def test_exact_masks_choose_every_set_equally_often():
    def one(key):
        return mask_exactly(key, jnp.array([2]), jnp.arange(5)[None] < 4)[0]

    drawn = np.asarray(jax.vmap(one)(jax.random.split(jax.random.key(3), 6000)))
    codes = drawn @ (1 << np.arange(5))
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == 6
    # chi-square with 5 degrees of freedom: 25.7 is exceeded once in 10,000.
    assert ((counts - 1000) ** 2 / 1000).sum() < 25.7


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedules_weight_is_the_derivative_of_its_logarithm(name):
    schedule = SCHEDULES[name](3.0)
    t = np.linspace(0.01, 0.999, 500)
    ratio = np.asarray(schedule.masked_ratio(jnp.asarray(t)), np.float64)
    ahead, behind = (
        np.asarray(schedule.masked_ratio(jnp.asarray(t + step)), np.float64)
        for step in (2e-3, -2e-3)
    )
    weight = np.asarray(schedule.weight(jnp.asarray(t)))
    np.testing.assert_allclose(weight, (ahead - behind) / 4e-3 / ratio, rtol=0.05, atol=5e-3)
