"""Objectives: what is shown, what is asked, and what the weights add up to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.diffusion.corruption import SCHEDULES, LinearSchedule
from dlm_jax.diffusion.objectives import (
    Batch,
    Corruption,
    Mixture,
    at_random_length,
    denoising,
    elbo,
    next_token,
)

ROWS, POSITIONS = 8, 16
RANDOM_IDS = tuple(range(8))
BATCH = Batch(
    jnp.asarray(np.random.default_rng(0).integers(0, 8, (ROWS, POSITIONS)), jnp.int32),
    jnp.array([16, 16, 16, 16, 9, 9, 4, 0]),
    jnp.array([0, 0, 5, 0, 3, 0, 4, 0]),
)
IS_FREE = np.asarray(BATCH.is_free_BL())


def _elbo(schedule="linear"):
    return functools.partial(elbo, schedule=SCHEDULES[schedule](2.0), mask_id=toy.MASK)


def _denoising(**changes):
    return functools.partial(
        denoising, corruption=Corruption(**changes), mask_id=toy.MASK, random_ids=RANDOM_IDS
    )


OBJECTIVES = {
    "elbo": _elbo(),
    "elbo cosine": _elbo("cosine"),
    "denoising": _denoising(),
    "identity": _denoising(identity_targets=True),
    "next token": lambda batch, key: next_token(batch),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_given_and_dead_tokens_are_shown_as_they_are_and_never_asked_for(name):
    task = jax.jit(OBJECTIVES[name])(BATCH, jax.random.key(0))
    np.testing.assert_array_equal(
        np.asarray(task.shown_BL)[~IS_FREE], np.asarray(BATCH.tokens_BL)[~IS_FREE]
    )
    assert not np.asarray(task.weight_BL)[~IS_FREE].any()
    assert np.asarray(task.weight_BL)[IS_FREE].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_weights_of_the_elbo_average_to_one_per_token(schedule):
    draw = jax.jit(jax.vmap(lambda key: _elbo(schedule)(BATCH, key)))
    task = draw(jax.random.split(jax.random.key(1), 3000))
    mean = np.asarray(task.weight_BL)[:, IS_FREE].mean()
    assert mean == pytest.approx(1, abs=0.05)
    np.testing.assert_array_equal(task.total, np.full(3000, IS_FREE.sum()))
    is_masked = np.asarray(task.shown_BL == toy.MASK)
    np.testing.assert_array_equal(is_masked, np.asarray(task.weight_BL) > 0)


def test_denoising_asks_for_what_it_selected_and_divides_by_their_number():
    task = _denoising(patterns=("random",), max_ratio=0.5)(BATCH, jax.random.key(2))
    weight = np.asarray(task.weight_BL)
    assert set(np.unique(weight)) == {0.0, 1.0}
    assert float(task.total) == weight.sum()
    changed = np.asarray(task.shown_BL != BATCH.tokens_BL)
    assert changed.any()
    assert not (changed & (weight == 0)).any()


def test_identity_targets_ask_for_every_free_position():
    task = _denoising(identity_targets=True)(BATCH, jax.random.key(2))
    np.testing.assert_array_equal(task.weight_BL, IS_FREE.astype(np.float32))


def test_every_named_pattern_is_used_and_no_other(monkeypatch):
    import dlm_jax.diffusion.objectives as module

    used = []
    for name in ("random", "sticky"):
        full = f"select_{name}"
        original = getattr(module.patterns, full)
        monkeypatch.setattr(
            module.patterns, full,
            lambda *args, name=name, original=original, **kwargs: (
                used.append(name), original(*args, **kwargs))[1],
        )  # fmt: skip
    _denoising(patterns=("sticky", "span"))(BATCH, jax.random.key(0))
    assert used == ["sticky"]


def _mixture(share=0.25, **fields):
    return Mixture(
        {"elbo": _elbo(), "denoising": _denoising()},
        {"elbo": 1 - share, "denoising": share},
        **fields,
    )


@pytest.mark.parametrize(("share", "rows"), [(0.25, 2), (0.5, 4), (0.9, 7), (0.125, 1)])
def test_every_row_of_a_mixture_has_one_task_and_each_task_its_share_of_rows(share, rows):
    full = Batch(BATCH.tokens_BL, jnp.full(ROWS, POSITIONS), jnp.zeros(ROWS, jnp.int32))
    mixture = _mixture(share)
    seen = np.zeros((2, ROWS), bool)
    for seed in range(8):
        example = mixture.example(full, jax.random.key(seed))
        for number, name in enumerate(("elbo", "denoising")):
            seen[number] |= np.asarray(example.weights[name]).any(1)
    assert not (seen[0] & seen[1]).any()
    assert seen.sum(1).tolist() == [ROWS - rows, rows]


def test_a_mixture_of_one_shows_what_its_objective_shows():
    mixture = Mixture({"elbo": _elbo()}, {"elbo": 1.0})
    example = mixture.example(BATCH, jax.random.key(4))
    np.testing.assert_array_equal(
        np.asarray(example.shown_BL == toy.MASK), np.asarray(example.weights["elbo"]) > 0
    )
    assert float(example.totals["elbo"]) == IS_FREE.sum()


def test_a_share_of_the_batches_is_cut_to_one_uniform_length():
    full = Batch(BATCH.tokens_BL, jnp.full(ROWS, POSITIONS), jnp.zeros(ROWS, jnp.int32))
    cut = jax.jit(
        jax.vmap(lambda key: at_random_length(full, key, share=0.3).length_B)
    )(jax.random.split(jax.random.key(5), 4000))  # fmt: skip
    lengths = np.asarray(cut)
    assert (lengths == lengths[:, :1]).all()
    # A cut to the full length is seen as none: 15 of 16 cuts show.
    assert abs((lengths[:, 0] < POSITIONS).mean() - 0.3 * 15 / 16) < 0.04
    counts = np.bincount(lengths[:, 0], minlength=POSITIONS + 1)[1:POSITIONS]
    expected = 4000 * 0.3 / 16
    # chi-square with 14 degrees of freedom: 42 is exceeded once in 10,000.
    assert ((counts - expected) ** 2 / expected).sum() < 42


def test_cut_batches_are_asked_for_nothing_beyond_their_length():
    mixture = Mixture({"elbo": _elbo()}, {"elbo": 1.0}, random_length_share=1.0)
    example = mixture.example(BATCH, jax.random.key(6))
    length = np.asarray(example.batch.length_B)
    assert length.max() < POSITIONS
    beyond = np.arange(POSITIONS)[None] >= length[:, None]
    assert not np.asarray(example.weights["elbo"])[beyond].any()


def test_the_linear_schedule_is_the_default_of_the_config():
    from dlm_jax.config import ObjectiveConfig

    assert isinstance(SCHEDULES[ObjectiveConfig().schedule](2.0), LinearSchedule)
