"""Corruption patterns: what they select, and what selected positions show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlm_jax.objectives import corruption

ROWS, POSITIONS = 6, 40
LENGTHS = np.array([40, 40, 40, 25, 1, 0])
GIVEN = np.array([0, 0, 7, 5, 0, 0])
PLACE = np.arange(POSITIONS)[None]
IS_FREE = np.array([(PLACE[0] < n) & (PLACE[0] >= g) for n, g in zip(LENGTHS, GIVEN, strict=True)])
FREE = IS_FREE.sum(1)
RATIO = np.array([0.05, 0.5, 1.0, 0.33, 0.7, 0.5], np.float32)

_sticky = jax.jit(functools.partial(corruption.select_sticky, alone=0.03, beside=0.5))
_spans = jax.jit(corruption.select_spans, static_argnames="count")
SELECTORS = {
    "random": lambda key: corruption.mask_independently(
        key, jnp.asarray(RATIO), jnp.asarray(IS_FREE)
    ),
    "sticky": lambda key: _sticky(key, jnp.asarray(RATIO), jnp.asarray(IS_FREE)),
    "span": lambda key: _spans(key, jnp.asarray(IS_FREE), count=2),
}


def _drawn(name, count=60):
    return np.stack([np.asarray(SELECTORS[name](jax.random.key(seed))) for seed in range(count)])


@pytest.mark.parametrize("name", SELECTORS)
def test_only_free_positions_are_selected(name):
    assert not (_drawn(name, 20) & ~IS_FREE).any()


def test_sticky_selects_exactly_the_share_of_each_row():
    wanted = np.ceil(RATIO.astype(np.float64) * FREE - 1e-3)
    np.testing.assert_array_equal(_drawn("sticky").sum(2), np.tile(wanted, (60, 1)))


def test_sticky_selects_in_clusters_and_random_does_not():
    def neighbours(drawn):
        both = drawn[:, :, 1:] & drawn[:, :, :-1]
        return both[:, 1].sum() / drawn[:, 1].sum()

    # Half of a row selected at random: a selected position has a selected right one half the time.
    assert abs(neighbours(_drawn("random")) - 0.49) < 0.06
    assert neighbours(_drawn("sticky")) > 0.62


def test_spans_are_at_most_as_many_as_asked_and_their_ends_are_uniform():
    drawn = _drawn("span", 300)
    padded = np.pad(drawn, ((0, 0), (0, 0), (1, 0)))
    starts = (padded[:, :, 1:] & ~padded[:, :, :-1]).sum(2)
    # Spans may touch or overlap; a row with a free position has one at least.
    assert ((starts >= (FREE > 0)) & (starts <= 2)).all()
    # Two pairs of sorted uniform ends cover a position at u with chance
    # 4 u (1-u)^3 + 4 u^3 (1-u): one or three of the four ends lie before it.
    u = (np.arange(POSITIONS) + 0.5) / POSITIONS
    expected = 4 * u * (1 - u) ** 3 + 4 * u**3 * (1 - u)
    seen = drawn[:, :2].mean((0, 1))
    # Inclusive ends add up to one position to each side.
    assert (seen >= expected - 0.09).all()
    assert (seen <= expected + 0.16).all()


def test_selected_positions_show_mask_random_or_their_own_and_the_others_nothing_new():
    tokens = jnp.tile(jnp.arange(10), (200, 4))
    is_selected = jnp.tile(jnp.arange(40) % 2 == 0, (200, 1))
    shown = np.asarray(
        corruption.show(
            jax.random.key(0), tokens, is_selected,
            mask_share=0.7, random_share=0.2, mask_id=99, random_ids=(50, 51),
        )
    )  # fmt: skip
    np.testing.assert_array_equal(shown[:, 1::2], tokens[:, 1::2])
    selected, own = shown[:, ::2], np.asarray(tokens)[:, ::2]
    shares = [(selected == 99).mean(), (selected == 50).mean(), (selected == 51).mean(),
              (selected == own).mean()]  # fmt: skip
    # 4000 draws: five standard deviations are at most 0.04.
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.1, 0.1], atol=0.04)
