"""A scorer's corruption and its answers: what is shown, which share is wrong, what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.config import ObjectiveConfig
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.heads import scorer
from dlm_jax.heads.scorer import corrupt, scorer_loss, summary
from dlm_jax.model.transformer import build

ROWS, POSITIONS = 16, 24
MIXED = ObjectiveConfig(), tuple(range(8))
# A vocabulary of its own, with more words than the rows of a batch.
PLAIN = ObjectiveConfig(patterns=("random",), max_ratio=0.6), tuple(range(20))
DRAWS = 20


def _mixed_batch() -> Batch:
    """Rows of every length, some with given tokens, one all given, one empty, one with a MASK."""
    tokens_BL = np.random.default_rng(0).integers(0, 8, (ROWS, POSITIONS)).astype(np.int32)
    length_B = np.full(ROWS, POSITIONS, np.int32)
    given_B = np.zeros(ROWS, np.int32)
    length_B[:6], given_B[:6] = [0, 5, 9, 24, 24, 1], [0, 5, 3, 7, 0, 0]
    tokens_BL[8:12, 10:] = toy.EOS
    tokens_BL[12, 3] = toy.MASK
    dead_BL = np.arange(POSITIONS) >= length_B[:, None]
    return Batch(*map(jnp.asarray, (np.where(dead_BL, toy.PAD, tokens_BL), length_B, given_B)))


def _plain_batch(tokens_B1) -> Batch:
    tokens_BL = jnp.broadcast_to(jnp.asarray(tokens_B1, jnp.int32), (ROWS, 64))
    return Batch(tokens_BL, jnp.full(ROWS, 64), jnp.zeros(ROWS, jnp.int32))


BATCH = _mixed_batch()
IS_FREE = np.asarray(BATCH.is_free_BL())
_corrupt = jax.jit(corrupt, static_argnums=(2, 3))


def _asked(batch: Batch, how):
    """Several draws, one above the other."""
    draws = [_corrupt(batch, key, *how) for key in jax.random.split(jax.random.key(3), DRAWS)]
    return jax.tree.map(lambda *columns: np.stack(columns), *jax.device_get(draws))


@functools.cache
def _mixed():
    asked = _asked(BATCH, MIXED)
    return asked, asked.shown_BL != np.asarray(BATCH.tokens_BL)


def test_the_answer_is_the_share_of_free_positions_that_show_another_token():
    asked, is_wrong = _mixed()
    for row, count in enumerate(IS_FREE.sum(1)):
        expected = is_wrong[:, row].sum(1) / max(count, 1)
        np.testing.assert_allclose(asked.share_B[:, row], expected, rtol=1e-6)
        assert (asked.weight_B[:, row] == (count > 0)).all()
        assert count == 0 or 0.1 < asked.share_B[:, row].mean() < 0.9


def test_given_and_dead_tokens_are_shown_as_they_are():
    _, is_wrong = _mixed()
    assert not is_wrong[:, ~IS_FREE].any()
    assert is_wrong[:, IS_FREE].any(0).all()


def test_a_wrong_token_is_never_mask_nor_pad_nor_any_other_special():
    asked, is_wrong = _mixed()
    assert is_wrong.sum() > 500
    assert set(asked.shown_BL[is_wrong]) <= set(MIXED[1])


def test_noise_is_that_of_the_key():
    first, second, other = (
        _corrupt(BATCH, jax.random.key(seed), *MIXED).shown_BL for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


def test_shares_are_spread_evenly_up_to_the_largest():
    # No wrong token can be right here.
    share = np.sort(_asked(_plain_batch(20), PLAIN).share_B.ravel())
    even = (np.arange(share.size) + 0.5) / share.size
    # Kolmogorov and Smirnov's distance at one in a thousand; binomial noise blurs the upper end.
    assert np.abs(np.clip(share / 0.6, 0, 1) - even).max() < 1.95 / share.size**0.5 + 0.05
    assert share.max() < 0.6 + 0.25


def test_the_wrong_tokens_of_half_of_the_rows_are_as_frequent_as_in_the_text():
    # The text has the ids 0 and 1 alone, so any other was drawn from all.
    words = np.random.default_rng(1).integers(0, 2, (ROWS, 64))
    words[:, 32:] = 20
    asked = _asked(_plain_batch(words)._replace(length_B=jnp.full(ROWS, 32)), PLAIN)
    is_drawn = (asked.shown_BL[:, :, :32] > 1).any(2)
    assert 0.35 < is_drawn[asked.share_B > 0.2].mean() < 0.75
    is_wrong = asked.shown_BL != words
    zeros = (asked.shown_BL == 0)[is_wrong & ~is_drawn[:, :, None]]
    assert zeros.size > 500
    assert 0.4 < zeros.mean() < 0.6


def test_tokens_are_lent_by_all_other_rows():
    shown = _asked(_plain_batch(np.arange(ROWS)[:, None]), PLAIN).shown_BL
    is_lent = ~(shown >= ROWS).any(2)
    lenders = {(row, id) for draw, row in np.argwhere(is_lent) for id in shown[draw, row]}
    assert lenders == {(row, id) for row in range(ROWS) for id in range(ROWS)}


def test_no_row_lends_to_itself_unless_it_is_alone():
    def share(tokens, num_rows):
        batch = jax.tree.map(lambda column: column[:num_rows], _plain_batch(tokens))
        asked = _asked(batch, PLAIN)
        return asked.share_B[~(asked.shown_BL >= ROWS).any(2)].mean()

    # The mean of a share that is uniform up to 0.6; half of it if rows lent to themselves too.
    assert 0.22 < share(np.arange(ROWS)[:, None], 2) < 0.4
    assert share(np.arange(ROWS)[:, None], 1) < 0.05


KNOWN = ObjectiveConfig(patterns=("random",)), tuple(range(8))
NETWORK = build(toy.config(mode="sequence_scorer"))
PARAMS = toy.random_params(NETWORK)
_score = jax.jit(functools.partial(scorer.score, NETWORK))


@functools.cache
def _judged():
    """(true shares, shares that the scorer says, its loss, its errors) of one corrupted batch."""

    @jax.jit
    def run(key, same_key):
        asked = corrupt(BATCH, jax.random.fold_in(key, 6), *KNOWN)
        loss = scorer_loss(NETWORK, PARAMS, asked, jnp.float32(7))
        how, random_ids = KNOWN
        errors = scorer.errors(
            NETWORK, PARAMS, BATCH, 6 + jnp.arange(ROWS), same_key, how=how, random_ids=random_ids
        )
        return asked, loss, errors

    asked, loss, errors = jax.device_get(run(jax.random.key(1), jax.random.key(1)))
    logit = np.asarray(_score(PARAMS, asked.shown_BL, asked.length_B), np.float64)
    return np.asarray(asked.share_B, np.float64), 1 / (1 + np.exp(-logit)), loss, errors


def test_the_loss_is_the_cross_entropy_of_the_share_summed_over_rows_that_count():
    s, p, loss, _ = _judged()
    expected = -(s * np.log(p) + (1 - s) * np.log(1 - p))
    counts = IS_FREE.any(1)
    assert 0 < (~counts).sum() < ROWS
    assert loss.sum == pytest.approx(expected[counts].sum(), rel=1e-5)
    assert loss.weight == 7


def test_errors_and_their_summary_are_those_of_numpy():
    share, said, loss, errors = _judged()
    free = IS_FREE.sum(1)
    figures = summary(errors, free)
    share = share[free > 0]
    squared = (said[free > 0] - share) ** 2
    assert figures["squared_error"] == pytest.approx(squared.mean(), rel=1e-5)
    error = squared.std(ddof=1) / len(squared) ** 0.5
    assert figures["standard_error"] == pytest.approx(error, rel=1e-4)
    assert figures["constant_squared_error"] == pytest.approx(share.var())
    assert figures["cross_entropy"] == pytest.approx(float(loss.sum) / len(squared), rel=1e-5)
    assert figures["windows"] == len(squared) == (free > 0).sum()
    assert f"{figures['squared_error']:.5f} +- " in scorer.error_line(figures)


def test_a_rows_score_depends_on_neither_its_neighbours_nor_its_padding():
    is_dead = np.arange(POSITIONS) >= np.asarray(BATCH.length_B)[:, None]
    scores = _score(PARAMS, BATCH.tokens_BL, BATCH.length_B)
    assert np.ptp(scores) > 0.1
    rest = jnp.arange(ROWS)[:, None] > 4
    strangers = jnp.where(rest, 7 - BATCH.tokens_BL % 8, jnp.where(is_dead, 3, BATCH.tokens_BL))
    length_B = jnp.where(rest[:, 0], 24 - BATCH.length_B // 2, BATCH.length_B)
    among = _score(PARAMS, strangers, length_B)
    np.testing.assert_allclose(among[:5], scores[:5], atol=1e-5)
    assert np.abs(among[5:] - scores[5:]).min() > 1e-4
    wider = jnp.pad(strangers, ((0, 0), (0, 9)), constant_values=2)
    np.testing.assert_allclose(_score(PARAMS, wider, length_B), among, atol=1e-5)
