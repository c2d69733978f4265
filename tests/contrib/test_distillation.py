"""The loss of a teacher's steps, beside formulas in NumPy."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerable import LENGTH, LETTERS, MASK, NETWORK, PARAMS, log_law

from dlm_jax.contrib.distillation import chances, draw, draws, loss, walk
from dlm_jax.training import Batch

BANNED = tuple(id_ for id_ in range(enumerable.V) if id_ not in LETTERS)
ROWS = 4096
EMPTY = (MASK,) * LENGTH
STUDENT = {"table": PARAMS["table"][:, :, ::-1] * 0.7, "beside": PARAMS["beside"]}


def _batch(rows: int = ROWS) -> Batch:
    tokens_BL = jnp.zeros((rows, LENGTH), jnp.int32)
    return Batch(tokens_BL, jnp.full(rows, LENGTH), jnp.zeros(rows, jnp.int32))


def _taught(teacher: Any, noise: Any) -> jax.Array:
    return walk(
        NETWORK, teacher, noise["shown"], noise["length"], noise["chance"], noise["draws"],
        mask_id=MASK, banned_ids=BANNED,
    )[1]  # fmt: skip


@functools.cache
def _walked(steps: int):
    key = jax.random.key(3)
    shown_BL = jnp.full((ROWS, LENGTH), MASK)
    chance_BK = jnp.broadcast_to(1.0 / (steps - jnp.arange(steps)), (ROWS, steps))
    run = jax.jit(functools.partial(walk, NETWORK, mask_id=MASK, banned_ids=BANNED))
    return run(
        PARAMS, shown_BL, jnp.full(ROWS, LENGTH), chance_BK, draws(key, shown_BL, steps=steps)
    )


def test_a_walk_of_two_steps_writes_the_texts_of_its_law():
    """Each position is written in the first step with probability 1/2, else in the second."""
    law = dict.fromkeys(enumerable.TEXTS, 0.0)
    first = np.exp(log_law(PARAMS, EMPTY, LETTERS))
    for chosen in itertools.product((False, True), repeat=LENGTH):
        for text in enumerable.TEXTS:
            after = tuple(t if c else MASK for t, c in zip(text, chosen, strict=True))
            second = np.exp(log_law(PARAMS, after, LETTERS))
            law[text] += 0.5**LENGTH * np.prod(
                [(first if c else second)[i, text[i]] for i, c in enumerate(chosen)]
            )
    tokens = np.asarray(_walked(2)[0])
    assert set(np.unique(tokens)) == set(LETTERS)
    for text, share in law.items():
        found = float((tokens == np.array(text)).all(1).mean())
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / ROWS), text


def test_the_chances_of_a_walk_are_those_of_ancestral_steps():
    found = np.asarray(chances(jnp.array([1.0, 0.3, 0.1]), 4, 2))
    wanted = [[0.125, 0.125 / 0.875], [0.125 / 0.3, 0.125 / 0.175], [1.0, 1.0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def _kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    is_text_V = np.arange(enumerable.V) != MASK
    log_p, log_q = log_p[:, is_text_V], log_q[:, is_text_V]
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def test_the_expected_loss_of_sdtt_is_that_of_its_formula():
    """At time 1 with steps of 1/2: positions of the teacher's first step, then the others."""
    noise = draw(_batch(), jax.random.key(0), steps=2, teacher_steps=2, mask_id=MASK)
    full_BL = jnp.full((ROWS, LENGTH), MASK)
    noise |= {"shown": full_BL, "is_hidden": full_BL == MASK}
    noise |= {"chance": chances(jnp.ones(ROWS), 2, 2), "total": jnp.float32(ROWS * LENGTH)}

    @jax.jit
    def run(params: Any) -> Any:
        return loss(NETWORK, params, PARAMS, noise, _taught(PARAMS, noise), mask_id=MASK)

    student = log_law(STUDENT, EMPTY)
    first, letters = log_law(PARAMS, EMPTY), np.exp(log_law(PARAMS, EMPTY, LETTERS))
    wanted = 0.0
    for chosen in itertools.product((False, True), repeat=LENGTH):
        weight = np.prod([0.25 if c else 0.75 for c in chosen])
        places = [i for i in range(LENGTH) if chosen[i]]
        for tokens in itertools.product(LETTERS, repeat=len(places)):
            put = dict(zip(places, tokens, strict=True))
            after = tuple(put.get(i, MASK) for i in range(LENGTH))
            target = np.where(np.array(chosen)[:, None], first, log_law(PARAMS, after))
            share = weight * np.prod([letters[i, token] for i, token in put.items()])
            wanted += share * _kl(target, student).mean()
    found = run(STUDENT)
    assert float(found.sum / found.weight) == pytest.approx(wanted, abs=0.01)
    gradient = jax.jit(jax.grad(lambda params: run(params).sum))(STUDENT)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_hole_that_no_step_fills_is_taught_by_the_last_step():
    """The teacher's vectors are its readout's input, so they give the law of the canvas."""
    shown_BL = jnp.full((8, LENGTH), MASK)
    # Only the first position is ever written: the draws of the others are not below the chance.
    draws_BKL2 = jnp.full((8, 2, LENGTH, 2), 0.9).at[:, 0, 0, 0].set(0.1)
    tokens_BL, hidden_BLD = walk(
        NETWORK, PARAMS, shown_BL, jnp.full(8, LENGTH), jnp.full((8, 2), 0.5), draws_BKL2,
        mask_id=MASK, banned_ids=BANNED,
    )  # fmt: skip
    assert (np.asarray(tokens_BL)[:, 1:] == MASK).all() and (tokens_BL[:, 0] != MASK).all()
    expected_BLD = NETWORK.trunk(PARAMS, tokens_BL, jnp.full(8, LENGTH), None)[0]
    np.testing.assert_array_equal(hidden_BLD[:, 1:], expected_BLD[:, 1:])
