"""Slots: rows of requests as arrays, packed and refilled without another compilation."""

import functools
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
from dlm_jax.inference import slots as slots_module
from dlm_jax.inference.request import Request
from dlm_jax.inference.slots import Bucket, CompiledLoop, Entry, Slots, slot_count
from dlm_jax.sampling.rules import ModelFacts
from dlm_jax.sampling.state import EDITED
from dlm_jax.types import Status

ROWS = [*canvases.mixed_rows(seed=11, count=5), Row(holes(40, 1, 2), steps=3, seed=9)]
FACTS = ModelFacts(vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,))
CHAIN = ("temperature",)


@functools.cache
def _loop():
    return CompiledLoop(canvases.shared_advance())


@pytest.fixture(autouse=True)
def _toy_loop(monkeypatch):
    monkeypatch.setattr(slots_module, "compiled_loop", lambda model, bucket, num_slots: _loop())


def _entry(slot, row):
    sample = SamplingParams(
        steps=row.steps, temperature=row.temperature, order="random", chain=CHAIN
    )
    request = Request(np.array(row.tokens, np.int32), sample, row.seed)
    return Entry(number=slot, request=request, slot=slot)


def _slots(entries, num_slots=8):
    """Slots that run these entries by slot."""
    bucket = Bucket([entry.request for entry in entries.values()], FACTS, 64)
    slots = Slots(SimpleNamespace(params=toy.params()), bucket, num_slots)
    slots.put(entries)
    return slots


def _rows():
    return {slot: _entry(slot, row) for slot, row in enumerate(ROWS)}


def test_calls_tell_the_steps_that_rows_took_and_given_tokens_stay():
    running = _rows()
    slots = _slots(running)
    _, taken_B, counted = slots.advance(running, 3)
    steps = [min(3, row.steps, row.tokens.count(toy.MASK)) for row in ROWS]
    assert taken_B.tolist() == steps + [0] * (8 - len(ROWS))
    assert counted.forwards == sum(steps)
    slots.advance(running, 1000)
    for own, row in zip(ROWS, slots.rows([*running.values()]), strict=True):
        given = np.array(own.tokens)
        assert row.status is Status.DONE and row.tokens.size == given.size
        assert row.tokens[given != toy.MASK].tolist() == given[given != toy.MASK].tolist()
        assert not {*row.tokens[given == toy.MASK].tolist()} & {*toy.BANNED}
        assert (row.committed >= 0).tolist() == (given == toy.MASK).tolist()


def test_a_slot_freezes_what_was_given_and_not_its_draft_and_no_edit_has_a_step():
    sample = SamplingParams(steps=2, order="random", schedule="all", resample=True, chain=CHAIN)
    tokens = np.array([1, 2, 3, toy.MASK, 4], np.int32)
    is_draft = np.array([False, True, True, False, True])
    entry = Entry(number=0, request=Request(tokens, sample, 0, is_draft), slot=1)
    slots = _slots({1: entry}, 2)
    (row,) = slots.rows([entry])
    assert row.is_frozen[[0, 1, 2, 4]].tolist() == [True, False, False, False]
    committed = slots._state.committed_BL.at[1, :3].set(jnp.array([-1, EDITED, 0]))
    slots._state = slots._state._replace(committed_BL=committed)
    (row,) = slots.rows([entry])
    assert row.committed[:3].tolist() == [-1, -1, 0]


def test_a_row_that_is_taken_away_stops_and_rows_move_in_the_middle_of_their_work():
    running = _rows()
    slots = _slots(running)
    slots.advance(running, 1000)
    whole = slots.rows([*running.values()])
    running = _rows()
    slots = _slots(running)
    slots.advance(running, 1)
    slots.put({2: None})
    del running[2]
    assert slots.advance(running, 1)[1][2] == 0
    moves = [4, 1]
    slots = slots.resized(4, moves)
    running = {new: running[old] for new, old in enumerate(moves)}
    for slot, entry in running.items():
        entry.slot = slot
    _, taken_B, counted = slots.advance(running, 1000)
    assert taken_B.tolist() == [max(0, whole[old].steps - 2) for old in moves] + [0, 0]
    assert counted.forwards == taken_B.sum() > 0
    for old, row in zip(moves, slots.rows([*running.values()]), strict=True):
        np.testing.assert_array_equal(row.tokens, whole[old].tokens)
        assert row.steps == whole[old].steps


def test_a_slot_takes_other_requests_without_compiling_whatever_their_number():
    entries = [*_rows().values()]
    slots = _slots({0: entries[0]})
    slots.put({1: entries[1]})
    slots.advance({}, 1)
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
            slots.advance(dict(enumerate(entries[:count])), 2)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(compiled) == 1


def test_slots_come_in_few_sizes():
    assert [slot_count(n, 64) for n in (1, 2, 3, 5, 64, 65, 1000)] == [1, 2, 4, 8, 64, 64, 64]
    assert [slot_count(n, 6) for n in (3, 5, 7)] == [4, 6, 6]
