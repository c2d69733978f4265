"""Edits inside the loop: against a plain loop over lists, and rows without them never notice."""

import dataclasses
import math

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from canvases import FOREVER, POSITIONS, ROWS, Row
from oracles import edits as oracle

from dlm_jax.config import SamplingParams
from dlm_jax.sampling.commit import RandomOrder
from dlm_jax.sampling.commit.orders import whole_quota
from dlm_jax.sampling.edits import Uncertainty
from dlm_jax.sampling.edits.edit_rule import EditState, read_logprobs
from dlm_jax.sampling.mask_step import editable_positions, propose_step, with_neighbors
from dlm_jax.sampling.params import PRESETS
from dlm_jax.sampling.remask import RemaskRule, Renoise
from dlm_jax.sampling.state import EDITED
from dlm_jax.settings import pytree
from dlm_jax.types import Status

ALL = RandomOrder(whole_quota)
NO_EDITS = {"insert_ratio_start": 0.0, "delete_ratio_start": 0.0}


def _sample(**settings) -> SamplingParams:
    return SamplingParams(**PRESETS["variable_length"] | settings)


def _rule(count: int, **settings) -> Uncertainty:
    return Uncertainty.pack([_sample(**settings)] * count, None)


def _drafts(seed: int, *, length: int = 14, frozen: int = 2, **changes) -> list[Row]:
    """Rows of random text behind a given prompt, all of it to be resampled, without chance."""
    rng = np.random.default_rng(seed)
    given = {"steps": 6, "temperature": 0.0, "resample": True, "capacity": POSITIONS,
             "ties": "lower"} | changes  # fmt: skip
    return [
        Row(
            tokens=tuple(rng.integers(0, 8, length).tolist()),
            is_draft=tuple([False] * frozen + [True] * (length - frozen)),
            seed=index,
            **given,
        )
        for index in range(ROWS)
    ]


def _edits(state) -> EditState:
    assert state.edits is not None
    return state.edits


def _state(rows, **settings):
    return canvases.make_state(rows, ALL, edit=_rule(len(rows), **settings))


def _run(rows, **settings):
    state = _state(rows, **settings)
    return canvases.shared_advance()(toy.params(), state, FOREVER)


def _log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _plain(row: Row, params: oracle.Params, steps: int, put: int, renoises: bool = False):
    """The tokens of the row after every edit and at the end, one list operation at a time.

    With `renoises` every token that was not given becomes a space behind the edits and before the
    forward of a step; the look at the draft comes before all that.
    """
    frozen = [not is_draft for is_draft in row.is_draft]
    cells = oracle.row_from(row.tokens, frozen)
    closest = math.inf
    trail = []
    for step in range(-1, steps):
        if renoises and step >= 0:
            cells = [
                cell if cell.frozen else dataclasses.replace(cell, token=toy.SPACE)
                for cell in cells
            ]
        tokens = [cell.token for cell in cells]
        canvas = np.full(POSITIONS, toy.PAD)
        canvas[: len(tokens)] = tokens
        logits = np.asarray(toy.row_logits(canvas, len(tokens)))
        if step >= 0:
            allowed = logits.copy()
            allowed[:, list(toy.BANNED)] = -np.inf
            best = allowed.argmax(-1)
            cells = [
                cell if cell.frozen else dataclasses.replace(cell, token=int(best[i]))
                for i, cell in enumerate(cells)
            ]
        if step == steps - 1:
            break
        logp = _log_softmax(logits)
        tokens = [cell.token for cell in cells]
        own = [logp[i, token] for i, token in enumerate(tokens)]
        right = [logp[i, token] for i, token in enumerate(tokens[1:])] + [math.nan]
        ratios = {
            name: oracle.ratio_at(getattr(params, name), 0.0, step + 1, steps, "cosine")
            for name in ("insert_ratio", "delete_ratio")
        }
        now = dataclasses.replace(params, **ratios)
        choice = oracle.select(cells, own, right, now, mask=toy.MASK, space=toy.SPACE)
        closest = min(closest, choice.margin)
        cells = oracle.apply(
            cells, choice.inserts, choice.deletes, token=put, capacity=params.capacity
        ).row
        trail.append((len(choice.inserts), len(choice.deletes)))
    return [cell.token for cell in cells], closest, trail


@pytest.mark.parametrize(
    ("token", "overflow", "target"),
    [("space", "trim", "none"), ("mask", "refuse", "none"), ("space", "refuse", "to_max_new")],
)
def test_the_loop_equals_a_plain_one_that_edits_lists(token, overflow, target):
    settings = {"insert_ratio_start": 0.2, "delete_ratio_start": 0.3, "delete_lambda": 0.5}
    rows = _drafts(5, capacity=16, max_new_tokens=8)
    state = _run(rows, edit_token=token, overflow=overflow, length_target_mode=target, **settings)
    start = oracle.Params(
        insert_ratio=0.2, delete_ratio=0.3, delete_lambda=0.5, trims=overflow == "trim",
        targets_length=target != "none", capacity=16, target=10,
    )  # fmt: skip
    sure, edits = 0, 0
    for row, result in zip(rows, canvases.results(state), strict=True):
        put = toy.SPACE if token == "space" else toy.MASK
        asked = dataclasses.replace(start, target=2 + row.max_new_tokens)
        expected, closest, trail = _plain(row, asked, 6, put)
        edits += sum(map(sum, trail))
        if closest < 30:  # float32 rounding may decide
            continue
        sure += 1
        assert list(result.tokens) == expected
        assert (result.steps, result.forwards) == (6, 7)
    assert sure > ROWS // 2 and edits > 2 * ROWS
    counted = np.asarray(state.counters.insertions + state.counters.deletions).sum()
    assert counted > 2 * ROWS


def test_a_step_edits_then_re_noises_then_looks_then_writes():
    settings = {"insert_ratio_start": 0.2, "delete_ratio_start": 0.3, "renoise_start": 1.0,
                "renoise_end": 1.0}  # fmt: skip
    rows = _drafts(13, capacity=18)
    sample = _sample(**settings)
    state = canvases.make_state(
        rows, ALL, edit=_rule(ROWS, **settings), renoise=Renoise.pack([sample] * ROWS, None)
    )
    state = canvases.shared_advance()(toy.params(), state, FOREVER)
    params = oracle.Params(insert_ratio=0.2, delete_ratio=0.3, capacity=18)
    sure = 0
    for row, result in zip(rows, canvases.results(state), strict=True):
        expected, closest, _ = _plain(row, params, 6, toy.SPACE, renoises=True)
        if closest >= 30:  # else float32 rounding may decide
            sure += 1
            assert list(result.tokens) == expected
    assert sure > ROWS // 2
    counters = state.counters
    assert np.asarray(counters.insertions).all() and np.asarray(counters.deletions).any()


@pytest.mark.parametrize("with_columns", [True, False])
def test_the_snapshot_is_what_the_logits_say_of_the_tokens_after_the_commits(with_columns):
    network = canvases.shared_network()
    if not with_columns:
        network = dataclasses.replace(network, logits_of=None)
    program = canvases.program(network, chunk=5)
    rows = [dataclasses.replace(row, resample=index % 2 == 0)
            for index, row in enumerate(_drafts(1))]  # fmt: skip
    state = _state(rows)
    state = state._replace(edits=_edits(state)._replace(warms_B=jnp.zeros(ROWS, bool)))
    params = toy.params()

    @jax.jit
    def snapshot(state):
        _, seen = propose_step(program, params, state)
        filled = seen.filled
        assert filled.total_BL is not None
        tokens_BL = jnp.where(seen.is_open_BL, filled.proposal.tokens_BL, state.canvas.tokens_BL)
        is_wanted_BL = with_neighbors(editable_positions(state))
        found = read_logprobs(
            program, params, seen.output, filled.total_BL, filled.best_BL, tokens_BL, is_wanted_BL
        )
        return tokens_BL, found, is_wanted_BL

    tokens_BL, found, is_wanted_BL = snapshot(state)
    tokens_BL, is_wanted_BL = np.asarray(tokens_BL), np.asarray(is_wanted_BL)
    logp = _log_softmax(
        toy.logits(canvases.shared_network(), params, state.canvas.tokens_BL, state.canvas.length_B)
    )
    assert is_wanted_BL[:, 2:14].all()
    for row in range(ROWS):
        for place in range(2, 13):
            own, right = tokens_BL[row, place : place + 2]
            for ours, id_ in zip(found, (own, right), strict=True):
                np.testing.assert_allclose(ours[row, place], logp[row, place, id_], atol=2e-5)


def test_edits_that_never_happen_are_the_loop_without_them_bit_for_bit():
    rows = canvases.mixed_rows(3)
    plain = canvases.run(rows, ALL)
    none_B = jnp.zeros(ROWS)
    edit = dataclasses.replace(_rule(ROWS), insert_start_B=none_B, delete_start_B=none_B)
    rows = [dataclasses.replace(row, capacity=POSITIONS) for row in rows]
    state = canvases.make_state(rows, ALL, edit=edit)
    state = canvases.shared_advance()(toy.params(), state, FOREVER)
    assert canvases.results(state) == plain
    assert not np.asarray(state.counters.insertions).any()


def test_a_draft_is_looked_at_once_more_and_holes_are_not():
    rows = _drafts(2)[:4] + [Row(tokens=canvases.holes(9, 1), steps=6)] * 4
    state = _run(rows, insert_ratio_start=0.2)
    assert np.asarray(state.counters.forwards).tolist() == [7] * 4 + [6] * 4
    # Before the first forward nothing is known of holes, but later steps edit what they wrote.
    first = _state(rows, insert_ratio_start=0.2)
    first = canvases.shared_advance()(toy.params(), first, 1)
    assert np.asarray(first.step_B).tolist() == [0] * 4 + [1] * 4
    assert np.asarray(first.counters.insertions)[:4].all()


def test_what_an_edit_put_is_no_context_until_a_step_writes_it():
    state = _state(_drafts(10), insert_ratio_start=0.3, delete_ratio_start=0.0)
    advance, params = canvases.shared_advance(), toy.params()
    looked = advance(params, state, 1)
    put = np.asarray(_edits(looked).inserted_BL)
    is_live = np.arange(POSITIONS)[None] < np.asarray(looked.canvas.length_B)[:, None]
    assert put.sum() > ROWS
    np.testing.assert_array_equal(np.asarray(looked.committed_BL), np.where(put, EDITED, -1))
    seen = jax.jit(propose_step, static_argnums=0)(canvases.program(), params, looked)[1]
    np.testing.assert_array_equal(seen.context.is_visible_BL, is_live & ~put)
    still = put.sum(1)
    wrote = advance(params, looked, 1)
    assert (np.asarray(wrote.committed_BL) == 0).sum() >= still.sum()


@pytree
class Fresh(RemaskRule):
    """Takes back all that the step wrote."""

    is_on_B: jax.Array
    needs = ("steps",)

    def is_active(self):
        return self.is_on_B

    def select(self, state, context):
        return context.is_fresh_BL, state


def test_a_remask_rule_is_told_where_the_tokens_are_after_the_edits():
    edit = _rule(ROWS, insert_ratio_start=0.3, delete_ratio_start=0.0)
    state = canvases.make_state(_drafts(11), ALL, edit=edit, remask=Fresh(jnp.ones(ROWS, bool)))
    state = canvases.shared_advance()(toy.params(), state, 2)
    assert np.asarray(state.step_B).tolist() == [1] * ROWS
    is_free = ~np.asarray(state.canvas.frozen_BL)
    tokens, committed = np.asarray(state.canvas.tokens_BL), np.asarray(state.committed_BL)
    # All that was there was written and taken back; what came in since stands.
    put = committed == EDITED
    assert put.sum() > ROWS
    assert (tokens[is_free & ~put] == toy.MASK).all()
    assert (tokens[put] == toy.SPACE).all()


@pytest.mark.parametrize("overflow", ["trim", "refuse"])
def test_a_row_without_room_says_so_and_keeps_to_its_capacity(overflow):
    rows = _drafts(6, capacity=15)
    rows = rows[:4] + [dataclasses.replace(row, capacity=POSITIONS) for row in rows[4:]]
    settings = {"insert_ratio_start": 0.2, "insert_ratio_end": 0.0, "delete_ratio_start": 0.0}
    state = _run(rows, overflow=overflow, **settings)
    results = canvases.results(state)
    assert [len(result.tokens) for result in results[:4]] == [15] * 4
    assert {Status(result.status) for result in results[:4]} == {Status.CANVAS_FULL}
    assert {Status(result.status) for result in results[4:]} == {Status.DONE}
    assert all(15 < len(result.tokens) < POSITIONS for result in results[4:])
    assert np.asarray(state.counters.lost).astype(bool).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("margin", [0.0, 0.99])
@pytest.mark.parametrize("token", ["space", "mask"])
def test_rows_come_to_the_length_that_they_are_nudged_to(token, margin):
    """From a longer and from a shorter draft, whether or not its tokens are misfits."""
    numbers = [4, 20, 1, 9, 14, 6, 18, 12]
    rows = [dataclasses.replace(row, max_new_tokens=number, steps=12)
            for row, number in zip(_drafts(7), numbers, strict=True)]  # fmt: skip
    settings = {"delete_margin": margin} | NO_EDITS
    state = _run(rows, length_target_mode="to_max_new", edit_token=token, **settings)
    assert np.asarray(state.canvas.length_B).tolist() == [2 + number for number in numbers]
