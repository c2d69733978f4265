"""Slots: requests of any number and length in, the same rows out."""

import functools
from collections import deque
from types import SimpleNamespace

import canvases
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from canvases import Row, holes

from dlm_jax.config import SamplingParams
from dlm_jax.inference.request import Request
from dlm_jax.inference.results import texts_of
from dlm_jax.inference.slots import (
    Bucket,
    CompiledLoop,
    Entry,
    Slots,
    Weights,
    slot_count,
)
from dlm_jax.sampling.rules import ModelFacts
from dlm_jax.sampling.state import EDITED
from dlm_jax.types import Status

ROWS = [*canvases.mixed_rows(seed=11, count=5), Row(holes(40, 1, 2), steps=3, seed=9)]
FACTS = ModelFacts(vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,))


def _request(row):
    sample = SamplingParams(
        steps=row.steps, temperature=row.temperature, order="random", chain=("temperature",)
    )
    return Request(np.array(row.tokens, np.int32), sample, row.seed)


def _bucket(rows):
    return Bucket([_request(row) for row in rows], FACTS, 64)


@functools.cache
def _loop():
    return CompiledLoop(canvases.shared_advance())


def _weights():
    return Weights(toy.params())


def _entry(number, row, slot=None):
    return Entry(number=number, request=_request(row), slot=number if slot is None else slot)


def _put(slots, *entries):
    """Puts requests into their slots and returns them by slot."""
    running = {entry.slot: entry for entry in entries}
    slots.put(running)
    return running


def _rows(slots, running):
    """The rows in slots, by slot."""
    return dict(zip(running, slots.rows(list(running.values())), strict=True))


def _slots(rows, num_slots):
    return Slots(_loop(), _weights(), _bucket(rows), num_slots)


def _generate(rows, batch_size=64):
    """The rows from slots that take the next as soon as one has ended."""
    slots = _slots(rows, slot_count(len(rows), batch_size))
    waiting, running, found = deque(enumerate(rows)), {}, {}
    while waiting or running:
        free = [slot for slot in range(slots.num_slots) if slot not in running]
        new = [_entry(*waiting.popleft(), slot) for slot in free[: len(waiting)]]
        running |= _put(slots, *new)
        ended, _, _ = slots.advance(running, 8)
        for entry, row in zip(ended, slots.rows(ended), strict=True):
            found[entry.number] = row
            del running[entry.slot]
    tokenizer = SimpleNamespace(pad_id=toy.PAD, decode=str)
    return texts_of(SimpleNamespace(tokenizer=tokenizer), found)


def _assert_same(ours, theirs):
    assert ours.status == theirs.status
    for name in ("tokens", "lengths", "steps", "forwards", "committed"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_groups_of_rows_give_what_all_at_once_do():
    whole = _generate(ROWS)
    _assert_same(_generate(ROWS, batch_size=4), whole)
    backwards = _generate(ROWS[::-1], batch_size=4)
    np.testing.assert_array_equal(backwards.tokens[::-1], whole.tokens)


def test_results_are_in_order_and_keep_what_was_given():
    result = _generate(ROWS)
    assert result.tokens.shape == (len(ROWS), 64)
    assert result.lengths.tolist() == [len(row.tokens) for row in ROWS]
    assert set(result.status) == {Status.DONE}
    for row, tokens, committed in zip(ROWS, result.tokens, result.committed, strict=True):
        given = np.array(row.tokens)
        live = tokens[: given.size]
        assert live[given != toy.MASK].tolist() == given[given != toy.MASK].tolist()
        assert not set(live[given == toy.MASK].tolist()) & set(toy.BANNED)
        assert (tokens[given.size :] == toy.PAD).all()
        assert (committed[: given.size] >= 0).tolist() == (given == toy.MASK).tolist()


def test_calls_tell_the_steps_that_rows_took_and_the_tokens_that_they_wrote():
    slots = _slots(ROWS, 8)
    running = _put(slots, *map(_entry, *zip(*enumerate(ROWS), strict=True)))
    _, taken_B, counted = slots.advance(running, 3)
    steps = [min(3, row.steps, row.tokens.count(toy.MASK)) for row in ROWS]
    assert taken_B.tolist() == steps + [0] * (8 - len(ROWS))
    assert counted.forwards == sum(steps)
    rows = _rows(slots, running)
    assert slots.num_committed([*running]) == sum(row.num_generated for row in rows.values())
    ended, _, _ = slots.advance(running, 1000)
    rows = _rows(slots, running)
    assert [entry.slot for entry in ended] == [
        slot for slot, row in rows.items() if row.status == Status.DONE
    ]
    assert slots.num_committed([*running]) == sum(row.tokens.count(toy.MASK) for row in ROWS)
    left = [slot for slot in running if slot not in (0, 2)]
    assert slots.num_committed(left) == sum(ROWS[n].tokens.count(toy.MASK) for n in left)


def test_a_slot_freezes_what_was_given_and_not_its_draft_and_no_edit_has_a_step():
    sample = SamplingParams(
        steps=2, order="random", schedule="all", resample=True, chain=("temperature",)
    )
    tokens = np.array([1, 2, 3, toy.MASK, 4], np.int32)
    is_draft = np.array([False, True, True, False, True])
    request = Request(tokens, sample, 0, is_draft)
    slots = Slots(_loop(), _weights(), Bucket([request], FACTS, 64), 2)
    running = _put(slots, Entry(number=0, request=request, slot=1))
    (row,) = slots.rows([*running.values()])
    assert row.is_frozen[[0, 1, 2, 4]].tolist() == [True, False, False, False]
    committed = slots._state.committed_BL.at[1, :3].set(jnp.array([-1, EDITED, 0]))
    slots._state = slots._state._replace(committed_BL=committed)
    (row,) = slots.rows([*running.values()])
    assert row.committed[:3].tolist() == [-1, -1, 0]


def test_a_row_that_is_taken_away_stops_and_leaves_the_others_as_they_are():
    slots = _slots(ROWS, 8)
    running = _put(slots, *map(_entry, *zip(*enumerate(ROWS), strict=True)))
    slots.advance(running, 1)
    slots.put({2: None})
    del running[2]
    assert slots.advance(running, 1000)[1][2] == 0
    whole = _generate(ROWS)
    for slot, row in _rows(slots, running).items():
        np.testing.assert_array_equal(row.tokens, whole.tokens[slot, : row.tokens.size])


def test_rows_move_into_other_slots_in_the_middle_of_their_work():
    slots = _slots(ROWS[:3], 8)
    places = (1, 4, 6)
    running = _put(slots, *map(_entry, range(3), ROWS, places))
    slots.advance(running, 2)
    before = _rows(slots, running)
    slots = slots.resized(_loop(), 4, places)
    for number, entry in enumerate(running.values()):
        entry.slot = number
    running = dict(enumerate(running.values()))
    for ours, theirs in zip(_rows(slots, running).values(), before.values(), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert (ours.steps, ours.seconds > theirs.seconds) == (theirs.steps, True)
    slots.advance(running, 1000)
    whole = _generate(ROWS)
    for slot, row in _rows(slots, running).items():
        np.testing.assert_array_equal(row.tokens, whole.tokens[slot, : row.tokens.size])
        assert row.steps == whole.steps[slot]


def test_batches_of_other_rows_compile_nothing_new():
    _generate(ROWS)
    before = list(canvases.shared_advance().compiled)
    _generate([Row(holes(5, 3), steps=2, seed=4)] * 7)
    assert canvases.shared_advance().compiled == before


def test_a_slot_takes_other_requests_without_compiling_whatever_their_number():
    slots = _slots(ROWS, 8)
    entries = [_entry(number, row) for number, row in enumerate(ROWS)]
    slots.put({0: entries[0]})
    slots.put({1: entries[1]})
    compiled = []

    def note(event, seconds, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.jit(lambda x: x + len(compiled))(0)
        assert len(compiled) == 1
        for count in (1, 2, 3, 5, 6):
            slots.put(dict(enumerate(entries[:count])))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(compiled) == 1


def test_slots_come_in_few_sizes():
    assert [slot_count(n, 64) for n in (1, 2, 3, 5, 64, 65, 1000)] == [1, 2, 4, 8, 64, 64, 64]
    assert [slot_count(n, 6) for n in (3, 5, 7)] == [4, 6, 6]
