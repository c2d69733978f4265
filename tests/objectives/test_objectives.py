"""Objectives: what is shown, what is asked, and what the weights add up to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.config import ObjectiveConfig
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.objective import (
    Batch,
    Drawn,
    Objective,
    at_random_length,
    denoising,
    draw_all,
    elbo,
    next_token,
    proofreading,
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
        denoising, settings=ObjectiveConfig(**changes), mask_id=toy.MASK, random_ids=RANDOM_IDS
    )


_proofreading = functools.partial(proofreading, max_ratio=0.6, mask_id=toy.MASK)
OBJECTIVES = {
    "elbo": _elbo(),
    "elbo cosine": _elbo("cosine"),
    "denoising": _denoising(),
    "identity": _denoising(identity_targets=True),
    "next token": lambda batch, key: next_token(batch),
    "proofreading": _proofreading,
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_given_and_dead_tokens_are_shown_as_they_are_and_never_asked_for(name):
    task = jax.jit(OBJECTIVES[name])(BATCH, jax.random.key(0))
    # Some rows become shorter or longer.
    is_free = np.asarray(task.batch.is_free_BL())
    np.testing.assert_array_equal(
        np.asarray(task.shown_BL)[~is_free], np.asarray(BATCH.tokens_BL)[~is_free]
    )
    assert not np.asarray(task.weight_BL)[~is_free].any()
    assert np.asarray(task.weight_BL)[is_free].any()


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("over", ["tokens", "rows", "masked"])
def test_a_loss_is_divided_by_what_its_normaliser_says(over, is_weighted):
    example = _elbo()(BATCH, jax.random.key(3), over=over, is_weighted=is_weighted)
    plain = _elbo()(BATCH, jax.random.key(3))
    np.testing.assert_array_equal(example.shown_BL, plain.shown_BL)
    cost = np.random.default_rng(0).random((ROWS, POSITIONS))
    hidden = np.asarray(example.shown_BL == toy.MASK) & IS_FREE
    weight = np.asarray(plain.weight_BL) if is_weighted else hidden.astype(float)
    sums, free = (weight * cost).sum(axis=1), IS_FREE.sum(axis=1)
    wanted = {
        "tokens": sums.sum() / free.sum(),
        "rows": np.mean([s / n for s, n in zip(sums, free, strict=True) if n]),
        "masked": sums.sum() / hidden.sum(),
    }[over]
    found = (np.asarray(example.weight_BL) * cost).sum() / float(example.total)
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_weights_of_the_elbo_average_to_one_per_token(schedule):
    draw = jax.jit(jax.vmap(lambda key: _elbo(schedule)(BATCH, key)))
    task = draw(jax.random.split(jax.random.key(1), 3000))
    mean = np.asarray(task.weight_BL)[:, IS_FREE].mean()
    assert mean == pytest.approx(1, abs=0.05)
    np.testing.assert_array_equal(task.total, np.full(3000, IS_FREE.sum()))
    is_masked = np.asarray(task.shown_BL == toy.MASK)
    np.testing.assert_array_equal(is_masked, np.asarray(task.weight_BL) > 0)


def test_proofreading_asks_for_what_should_stand_at_every_free_position_of_the_new_rows():
    task = jax.jit(_proofreading)(BATCH, jax.random.key(3))
    place = np.arange(POSITIONS)
    moved = 0
    for row, (length, given) in enumerate(zip(BATCH.length_B, BATCH.given_B, strict=True)):
        now = int(task.batch.length_B[row])
        moved += now != length
        is_asked = (place >= given) & (place < now)
        np.testing.assert_array_equal(task.weight_BL[row], is_asked.astype(np.float32))
        for shown in (task.shown_BL, task.batch.tokens_BL):
            np.testing.assert_array_equal(shown[row, :given], BATCH.tokens_BL[row, :given])
    assert moved > 2
    np.testing.assert_array_equal(task.batch.given_B, BATCH.given_B)
    assert float(task.total) == np.asarray(task.weight_BL).sum()


@pytest.mark.parametrize("rows", [0.5, 0.2, 0.0])
def test_proofreading_misprints_up_to_a_share_and_masks_any_share_of_some_rows(monkeypatch, rows):
    import dlm_jax.objectives.objective as module

    ratios = []
    monkeypatch.setattr(
        module, "misprint",
        lambda key, tokens, length, is_free, ratio, kinds: (
            ratios.append(ratio), (tokens + 1, tokens + 2, length))[1],
    )  # fmt: skip
    count = 4000
    none = jnp.zeros(count, jnp.int32)
    batch = Batch(jnp.zeros((count, 9), jnp.int32), none + 9, none + 1)
    task = _proofreading(batch, jax.random.key(4), masked_rows=rows)
    ratio = np.sort(np.asarray(ratios[0]))
    # Kolmogorov: a uniform sample of 4000 is off by more once in 1000.
    np.testing.assert_allclose(ratio, 0.6 * np.arange(1, count + 1) / count, atol=0.6 * 0.031)
    assert ratio[0] > 0 and ratio[-1] <= 0.6
    is_masked = np.asarray(task.shown_BL == toy.MASK)
    assert not is_masked[:, 0].any()
    assert (np.asarray(task.shown_BL)[~is_masked] == 1).all()
    assert (np.asarray(task.batch.tokens_BL) == 2).all()
    # With s uniform, each number of 8 tokens is masked as often as any other.
    share = np.bincount(is_masked.sum(1), minlength=9) / count
    np.testing.assert_allclose(share, [1 - rows + rows / 9] + [rows / 9] * 8, atol=0.02)
    np.testing.assert_allclose(is_masked[:, 1:].mean(0), rows / 2, atol=0.04)


@pytest.mark.parametrize(("share", "rows"), [(0.25, 2), (0.5, 4), (0.9, 7), (0.125, 1)])
def test_every_row_of_a_mixture_has_one_task_and_each_task_its_share_of_rows(share, rows):
    full = Batch(BATCH.tokens_BL, jnp.full(ROWS, POSITIONS), jnp.zeros(ROWS, jnp.int32))
    draws, shares = {"elbo": _elbo(), "denoising": _denoising()}, (1 - share, share)
    mixed = {
        name: Objective(draw, share=own)
        for (name, draw), own in zip(draws.items(), shares, strict=True)
    }
    draw = jax.jit(functools.partial(draw_all, mixed))
    seen = np.zeros((2, ROWS), bool)
    for seed in range(8):
        example = draw(full, jax.random.key(seed))
        for number, name in enumerate(("elbo", "denoising")):
            seen[number] |= np.asarray(example.noise[name][0]).any(1)
    assert not (seen[0] & seen[1]).any()
    assert seen.sum(1).tolist() == [ROWS - rows, rows]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_mixture_asks_for_the_rows_of_a_task_that_moves_them_and_for_no_other_of_them(is_first):
    moved = Batch(BATCH.tokens_BL[:, ::-1], jnp.full(ROWS, 7), jnp.full(ROWS, 2))
    weight_BL = jnp.full((ROWS, POSITIONS), 0.5)
    objectives = {
        "moving": lambda batch, key: Drawn(moved, moved.tokens_BL + 20, weight_BL, jnp.float32(3)),
        "next token": lambda batch, key: next_token(batch),
    }
    names = sorted(objectives, reverse=not is_first)
    mixed = {name: Objective(objectives[name], share=0.5) for name in names}
    example = draw_all(mixed, BATCH, jax.random.key(0))
    is_moved = np.asarray(example.shown_BL[:, 0]) >= 20
    assert is_moved.sum() == ROWS // 2
    for found, new, old in zip(example.batch, moved, BATCH, strict=True):
        np.testing.assert_array_equal(np.asarray(found)[is_moved], np.asarray(new)[is_moved])
        np.testing.assert_array_equal(np.asarray(found)[~is_moved], np.asarray(old)[~is_moved])
    weights, total = example.noise["moving"]
    np.testing.assert_array_equal(weights, weight_BL)
    assert float(total) == 3


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
