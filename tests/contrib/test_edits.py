"""Edit rules of contrib against plain Python."""

import collections
import math

import jax
import numpy as np
from oracles import edits as oracle
from sampling.edits.test_rules import (
    LENGTH,
    MASK,
    ROWS,
    _context,
    _random_batch,
    _row_of,
    _select,
)

from dlm_jax.contrib.edits import Lead, leads


def test_leads_are_those_of_the_likeliest_token_where_no_deletion_is_due():
    rng = np.random.default_rng(11)
    batch = _random_batch(rng)
    shape = batch.cells.tokens_BL.shape
    best = np.maximum(batch.snapshot.own_BL, np.log(rng.random(shape))).astype(np.float32)
    is_due = rng.random(shape) < 0.3
    following = np.roll(batch.cells.tokens_BL, -1, axis=1)
    snapshot = batch.snapshot._replace(best_BL=best, best_id_BL=np.where(is_due, following, -1))
    found = np.asarray(leads(_context(batch.cells, snapshot, batch.params)))
    seen = collections.Counter()
    for row in range(ROWS):
        cells = _row_of(batch.cells, row)
        for place in range(LENGTH):
            expected = 0.0
            if place < len(cells):
                cell = cells[place]
                is_told = not cell.frozen and not oracle.is_hole(cell, MASK)
                behind = cells[place + 1] if place + 1 < len(cells) else None
                goes = behind is not None and not oracle.is_hole(behind, MASK)
                if is_told and not (goes and is_due[row, place]):
                    own = math.exp(batch.snapshot.own_BL[row, place])
                    expected = max(0.0, math.exp(best[row, place]) - own)
            seen[expected > 0] += 1
            np.testing.assert_allclose(found[row, place], expected, atol=1e-6)
    assert min(seen.values()) > 50


def test_a_row_that_goes_by_leads_inserts_at_the_greatest_ones():
    batch = _random_batch(np.random.default_rng(12))
    best = np.zeros(batch.cells.tokens_BL.shape, np.float32)
    ids = np.full(best.shape, -1, np.int32)
    snapshot = batch.snapshot._replace(best_BL=best, best_id_BL=ids)
    ones_B = np.ones(ROWS, np.float32)
    none_B = np.zeros(ROWS, np.int32)
    params = batch.params._replace(
        insert_ratio_B=0.3 * ones_B, cooldown_B=none_B, target_mode_B=none_B
    )
    edits = jax.jit(_select, static_argnums=0)(Lead, batch.cells, snapshot, params)
    # There is no gap in front of the first.
    lead = np.array(leads(_context(batch.cells, snapshot, batch.params)))
    lead[:, 0] = 0.0
    chosen = np.asarray(edits.insert_gap_BL)
    for row in range(ROWS):
        cells = _row_of(batch.cells, row)
        budget = math.floor(0.3 * sum(not cell.frozen for cell in cells) + 1e-3)
        ranked = sorted(range(LENGTH), key=lambda place: (-lead[row, place], place))
        expected = [place for place in ranked if lead[row, place] > 0][:budget]
        assert np.flatnonzero(chosen[row]).tolist() == sorted(expected)
    assert chosen.sum() > ROWS // 2
