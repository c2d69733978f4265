"""What may commit alone, and what a rule with two thresholds takes and rewrites."""

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.sampling.commit import CommitContext, JointThreshold, Proposal, Threshold
from dlm_jax.sampling.commit.commit_rule import log_odds_of

RNG = np.random.default_rng(3)
ROWS, LENGTH = 60, 12


def _context(is_hole_BL, written_BL=None):
    is_hole_BL = jnp.asarray(is_hole_BL)
    ones_B = jnp.ones(len(is_hole_BL), jnp.int32)
    keys_B = jax.vmap(jax.random.key)(jnp.arange(len(is_hole_BL)))
    return CommitContext(
        is_hole_BL, ones_B, 0 * ones_B, 8 * ones_B, keys_B, ~is_hole_BL, written_BL
    )


def _proposal(tokens_BL, confidence_BL):
    zeros_BL = jnp.zeros(confidence_BL.shape, jnp.float32)
    return Proposal(jnp.asarray(tokens_BL), zeros_BL, zeros_BL, log_odds_of(confidence_BL))


def test_a_hole_at_a_multiple_commits_alone_and_the_others_wait_for_it():
    is_hole = RNG.random((ROWS, LENGTH)) < 0.5
    sure = RNG.random((ROWS, LENGTH)).astype(np.float32)
    unit = np.arange(ROWS) % 5
    rule = Threshold(
        jnp.full(ROWS, 0.4), jnp.full(ROWS, True), jnp.ones(ROWS, jnp.int32),
        jnp.asarray(unit, jnp.int32),
    )  # fmt: skip
    context = _context(is_hole)
    open_BL = np.asarray(rule.eligible((), context))
    chosen = np.asarray(
        rule.select((), context, _proposal(np.zeros_like(is_hole, np.int32), sure))[0]
    )
    for row in range(ROWS):
        holes = np.flatnonzero(is_hole[row]).tolist()
        alone = [place for place in holes if unit[row] and place % unit[row] == 0][:1]
        assert np.flatnonzero(open_BL[row]).tolist() == (alone or holes)
        wanted = {place for place in holes if sure[row, place] > 0.4}
        wanted = wanted or set(sorted(holes, key=lambda place: -sure[row, place])[:1])
        assert set(np.flatnonzero(chosen[row])) == (set(alone) or wanted)


def test_written_tokens_give_way_to_another_that_is_sure_enough_and_given_ones_do_not():
    kind = RNG.integers(0, 3, (ROWS, LENGTH))  # hole, written, given
    written = np.where(kind == 1, RNG.integers(0, 3, kind.shape), -1).astype(np.int32)
    tokens = RNG.integers(0, 3, kind.shape).astype(np.int32)
    sure = RNG.random(kind.shape).astype(np.float32)
    rule = JointThreshold(
        jnp.full(ROWS, 0.7), jnp.full(ROWS, True), jnp.ones(ROWS, jnp.int32),
        jnp.zeros(ROWS, jnp.int32), rewrite_B=jnp.full(ROWS, 0.5),
        rewrites=jnp.full(ROWS, 4, jnp.int32),
    )  # fmt: skip
    context = _context(kind == 0, jnp.asarray(written))
    chosen = np.asarray(rule.select((), context, _proposal(tokens, sure))[0])
    for row in range(ROWS):
        holes = np.flatnonzero(kind[row] == 0)
        wanted = {place for place in holes if sure[row, place] > 0.7}
        wanted = wanted or set(sorted(holes, key=lambda place: -sure[row, place])[:1])
        wanted |= {
            place for place in np.flatnonzero(kind[row] == 1)
            if sure[row, place] > 0.5 and tokens[row, place] != written[row, place]
        }  # fmt: skip
        assert set(np.flatnonzero(chosen[row])) == wanted
