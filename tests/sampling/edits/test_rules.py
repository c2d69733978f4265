"""Structural edits against one edit at a time."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from oracles import edits as oracle

from dlm_jax.sampling.edits import EditContext, Edits, Uncertainty
from dlm_jax.sampling.edits.moves import PositionMap, moved, position_map_of
from dlm_jax.sampling.edits.scores import LENGTH_TARGETS, OVERFLOWS

ROWS, LENGTH = 64, 12
PAD, MASK, SPACE = 0, 1, 2


class Cells(NamedTuple):
    """The canvas that edits read or change."""

    tokens_BL: Any
    frozen_BL: Any
    inserted_BL: Any
    mark_BL: Any
    length_B: Any


class Snapshot(NamedTuple):
    """What the last forward pass says of the tokens."""

    own_BL: Any
    right_BL: Any
    best_id_BL: Any = None
    best_BL: Any = None


class Params(NamedTuple):
    """What each row asks for, and where it stands."""

    insert_ratio_B: Any
    delete_ratio_B: Any
    delete_margin_B: Any
    delete_lambda_B: Any
    cooldown_B: Any
    trims_B: Any
    target_mode_B: Any
    capacity_B: Any
    target_B: Any
    step_B: Any
    steps_B: Any


def _context(cells: Cells, snapshot: Snapshot, params: Params) -> EditContext:
    return EditContext(
        **cells._asdict(),
        **snapshot._asdict(),
        is_open_BL=jnp.ones(cells.tokens_BL.shape, bool),
        step_B=params.step_B,
        steps_B=params.steps_B,
        capacity_B=params.capacity_B,
        target_B=params.target_B,
        mask_id=MASK,
        space_id=SPACE,
    )


def _select(rule: type[Uncertainty], cells: Cells, snapshot: Snapshot, params: Params) -> Edits:
    """What a rule of these numbers chooses."""
    context = _context(cells, snapshot, params)
    trim, refuse = map(OVERFLOWS.index, ("trim", "refuse"))
    chosen = rule(
        insert_start_B=params.insert_ratio_B,
        insert_end_B=params.insert_ratio_B,
        delete_start_B=params.delete_ratio_B,
        delete_end_B=params.delete_ratio_B,
        delete_margin_B=params.delete_margin_B,
        lambda_B=params.delete_lambda_B,
        cooldown_B=params.cooldown_B,
        overflow_B=jnp.where(params.trims_B, trim, refuse),
        target_mode_B=params.target_mode_B,
        token_B=jnp.zeros(ROWS, jnp.int32),
    )
    return chosen.select(context, chosen.score(context))


@jax.jit
def _edit(cells, snapshot, params, edit_id_B) -> tuple[Cells, PositionMap, Edits]:
    edits = _select(Uncertainty, cells, snapshot, params)
    position_map = position_map_of(edits, cells.frozen_BL, cells.length_B, params.capacity_B)
    edit_id_BL = jnp.broadcast_to(edit_id_B[:, None], cells.tokens_BL.shape)
    fills = (edit_id_BL, PAD), (False, True), (True, False)
    moves = (moved(position_map, x, *fill) for x, fill in zip(cells[:3], fills, strict=True))
    after = Cells(*moves, position_map.mark_BL, position_map.length_B)
    return after, position_map, Edits(*edits[:2], edit_id_B, edits.refused_B, edits.refused_B)


TO_MAX_NEW = LENGTH_TARGETS.index("to_max_new")


class Batch(NamedTuple):
    cells: Cells
    snapshot: Snapshot
    params: Params
    edit_id_B: np.ndarray


def _random_batch(rng: np.random.Generator) -> Batch:
    """Rows of every kind: prompts and islands, holes, spaces, ties, impossible tokens, no room."""
    shape = (ROWS, LENGTH)
    place = np.arange(LENGTH)[None]
    capacity = rng.integers(1, LENGTH + 1, ROWS)
    length = np.where(rng.random(ROWS) < 0.4, capacity, rng.integers(0, capacity + 1))
    is_live = place < length[:, None]
    tokens = rng.choice([SPACE, MASK, *range(97, 103)], shape, p=[0.2, 0.15, *[0.65 / 6] * 6])
    prompt = rng.integers(0, 5, ROWS) * (rng.random(ROWS) < 0.6)
    frozen = (place < prompt[:, None]) | (rng.random(shape) < rng.choice([0, 0.3], ROWS)[:, None])
    tokens = np.where(frozen & (tokens == MASK), SPACE, tokens)
    fine = rng.random((2, *shape))
    coarse = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], (2, *shape))
    p = np.where(rng.random((ROWS, 1)) < 0.4, coarse, fine)
    p[0] *= rng.choice([1.0, 0.3], (ROWS, 1))
    with np.errstate(divide="ignore"):
        own, right = np.log(p).astype(np.float32)
    off = rng.choice([0, 1], (2, ROWS), p=[0.15, 0.85])
    ratios = rng.choice([0.1, 0.25, 0.5, 1.0, 0.37], (2, ROWS)) * off
    params = Params(
        *ratios.astype(np.float32),
        rng.choice([0.0, 0.02, 0.3], ROWS).astype(np.float32),
        rng.choice([0.0, 0.3, 1.0], ROWS).astype(np.float32),
        rng.choice([0, 0, 1, 2], ROWS).astype(np.int32),
        rng.random(ROWS) < 0.5,
        ((rng.random(ROWS) < 0.5) * TO_MAX_NEW).astype(np.int32),
        *np.array([capacity, rng.integers(0, LENGTH + 4, ROWS)], np.int32),
        *np.array([rng.integers(0, 4, ROWS), rng.integers(4, 6, ROWS)], np.int32),
    )
    cells = Cells(
        np.where(is_live, tokens, PAD).astype(np.int32),
        frozen | ~is_live,
        *((rng.random(shape) < q) & is_live for q in (0.3, 0.15)),
        length.astype(np.int32),
    )
    new_B = rng.choice([SPACE, MASK], ROWS).astype(np.int32)
    return Batch(cells, Snapshot(own, right), params, new_B)


def _row_of(cells: Cells, row: int) -> list[oracle.Cell]:
    return oracle.row_from(*(x[row] for x in cells[:4]), length=cells.length_B[row])


def _asked(params: Params, row: int, length: int) -> oracle.Params:
    asked = {
        f.name: getattr(params, f"{f.name}_B")[row].item()
        for f in dataclasses.fields(oracle.Params)
        if f.name != "targets_length"
    }
    asked["targets_length"] = bool(params.target_mode_B[row])
    asked["target"] = min(asked["target"], asked["capacity"])
    # The oracle lets a row that is nudged to grow spill; the document caps its insertions.
    asked["trims"] &= not (asked["targets_length"] and length < asked["target"])
    return oracle.Params(**asked)


def _without_origin(row: list[oracle.Cell]) -> list[oracle.Cell]:
    return [dataclasses.replace(cell, origin=None) for cell in row]


def _edited(*batch: Any) -> tuple[Cells, PositionMap, Edits]:
    """What the program says, as NumPy arrays."""
    return jax.tree.map(np.asarray, _edit(*batch))


def test_edits_are_those_of_one_at_a_time():
    """Over thousands of rows, and over a second step whose marks and flags are the first's."""
    rng = np.random.default_rng(0)
    seen = collections.Counter[str]()
    for _ in range(24):
        cells, snapshot, params, new_B = _random_batch(rng)
        for _ in range(2):
            after, position_map, edits = _edited(cells, snapshot, params, new_B)
            for row in range(ROWS):
                before = _row_of(cells, row)
                asked = _asked(params, row, len(before))
                choice = oracle.select(
                    before, snapshot.own_BL[row], snapshot.right_BL[row], asked,
                    mask=MASK, space=SPACE,
                )  # fmt: skip
                if choice.margin < 1:
                    continue
                assert set(np.flatnonzero(edits.insert_gap_BL[row])) == choice.inserts
                assert set(np.flatnonzero(edits.delete_BL[row])) == choice.deletes
                assert edits.refused_B[row] == choice.refused
                want = oracle.apply(
                    before, choice.inserts, choice.deletes, token=int(new_B[row]),
                    capacity=asked.capacity,
                )  # fmt: skip
                assert _without_origin(_row_of(after, row)) == _without_origin(want.row)
                assert position_map.trimmed_B[row] == want.trimmed
                seen.update(
                    rows=1, inserts=len(choice.inserts), deletes=len(choice.deletes),
                    trimmed=want.trimmed, refused=choice.refused,
                    both=bool(choice.inserts & choice.deletes),
                )  # fmt: skip
            cells, snapshot = after, _random_batch(rng).snapshot
    assert seen["rows"] > 3000
    assert min(seen["inserts"], seen["deletes"]) > 1000, seen
    assert min(seen["trimmed"], seen["refused"], seen["both"]) > 100, seen


def test_all_of_it_was_one_program():
    """The test above calls it with every kind of row and of parameter."""
    _edit(*_random_batch(np.random.default_rng(4)))
    assert _edit._cache_size() == 1
