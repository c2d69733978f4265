"""The engine: requests at any time, each row as if it were alone, every ticket out once."""

import dataclasses
import threading

import engine_cases
import jax.numpy as jnp
import numpy as np
import pytest
from engine_cases import MODEL, SLOTS, alone, request, same_row
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_jax
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.request import make_requests
from dlm_jax.types import Status

COUNT = 40
SUBMIT = st.tuples(st.just("submit"), st.integers(0, COUNT - 1))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 9))
STEP = st.tuples(st.just("step"), st.integers(0, 9))
SCHEDULES = st.lists(st.one_of(SUBMIT, SUBMIT, CANCEL, STEP), max_size=30)


def _all(engine):
    """Every row that comes out, by number; none twice."""
    found = {}
    for row in engine.run():
        assert row.number not in found
        found[row.number] = row
    return found


@settings(deadline=None, max_examples=60)
@given(SCHEDULES)
def test_any_schedule_does_what_a_plain_model_of_the_engine_does(schedule):
    plain = engine_cases.PlainEngine(SLOTS)
    numbers = {}
    with Engine(MODEL, sizes=(SLOTS,)) as engine:

        def step(num_steps):
            expected = plain.step(num_steps)
            finished = engine.step(num_steps)
            assert {row.number: (row.status, row.steps) for row in finished} == expected
            for row in finished:
                whole = alone(numbers[row.number])
                if row.status is Status.DONE:
                    assert same_row(row, whole)
                else:
                    n = row.steps
                    assert sorted(row.committed[row.committed >= 0]) == list(range(n))
                    is_there = row.committed >= 0
                    assert (row.tokens[is_there] == whole.tokens[is_there]).all()
            report = engine.report()
            assert report.waiting == sum(map(len, plain.waiting.values()))
            assert report.running == sum(map(len, plain.running.values()))

        for what, value in schedule:
            if what == "submit":
                wants = request(value).sample.steps
                number = plain.submit(wants, value % 2)
                numbers[number] = value
                assert engine.submit(request(value)) == number
            elif what == "step":
                step(value)
            elif plain.live():
                number = plain.live()[value % len(plain.live())]
                plain.cancel(number)
                engine.cancel(number)
        while engine.is_busy:
            step(8)
        assert not plain.order


def test_sizes_follow_the_number_of_requests_and_rows_move_along():
    with Engine(MODEL, sizes=(1, SLOTS)) as engine:
        engine.submit(request(6))
        engine.step(2)
        assert engine.report().slots == 1
        engine.submit(request(4))
        engine.submit(request(8))
        engine.step(1)
        assert engine.report().slots == SLOTS
        found = _all(engine)
        assert len(engine.report().programs) == 2
        assert engine.report().slots == 0
    for number, value in enumerate((6, 4, 8)):
        assert found[number].tokens.tolist() == alone(value).tokens.tolist()
        np.testing.assert_allclose(found[number].logprobs, alone(value).logprobs, rtol=1e-4)


def test_a_run_reads_no_more_than_may_wait_and_any_number_in_all():
    taken = 0

    def many():
        nonlocal taken
        for number in range(30):
            taken += 1
            yield request(number)

    with Engine(MODEL, sizes=(SLOTS,), max_waiting=3) as engine:
        found = {}
        for row in engine.run(many()):
            found[row.number] = row
            # Two kinds of two slots, three that wait.
            assert taken <= len(found) + 3 + 2 * SLOTS
        assert engine.report().rows == 30
    assert all(same_row(found[number], alone(number)) for number in range(30))


def test_processes_that_share_programs_read_in_step_and_run_their_own_requests():
    requests = [request(number) for number in range(12)]
    own = [one if number % 3 else None for number, one in enumerate(requests)]
    with Engine(MODEL, sizes=(SLOTS,), max_waiting=3) as engine:
        engine._is_together = True  # with no other process, the totals are its own
        engine.reserve(requests, is_part=True)
        rows = {row.number: row for row in engine.run(own)}
        assert not engine.is_busy
        with pytest.raises(ValueError, match="several processes cannot cancel requests"):
            engine.cancel(0)
    assert sorted(rows) == [number for number, one in enumerate(own) if one is not None]
    assert all(same_row(row, alone(number)) for number, row in rows.items())


def test_a_watched_row_is_shown_before_its_first_step_and_after_every_turn():
    with Engine(MODEL, sizes=(SLOTS,)) as engine:
        number = engine.submit(request(6), is_watched=True)
        other = engine.submit(request(4))
        rows = list(engine.run())
    shown = [row for row in rows if row.status is Status.RUNNING]
    ended = {row.number: row for row in rows if row.status is not Status.RUNNING}
    assert {row.number for row in shown} == {number}
    assert [row.steps for row in shown] == list(range(request(6).sample.steps))
    assert same_row(ended[number], alone(6)) and same_row(ended[other], alone(4))


def test_kinds_of_requests_take_turns():
    with Engine(MODEL, sizes=(SLOTS,)) as engine:
        for number in (6, 3):
            engine.submit(request(number), is_watched=True)
        shown = [[row.number for row in engine.step(1)] for _ in range(6)]
    assert shown == [[0], [1]] * 3


# Only its own row ends


def test_a_row_without_finite_logits_ends_alone():
    letter = MODEL.tokenizer.piece_id("T")

    def broken(params, tokens_BL, length_B, cache):
        hidden_BLD, cache = MODEL.network.trunk(params, tokens_BL, length_B, cache)
        is_bad_B = tokens_BL[:, 0] == letter
        return jnp.where(is_bad_B[:, None, None], jnp.nan, hidden_BLD), cache

    model = dataclasses.replace(MODEL, network=dataclasses.replace(MODEL.network, trunk=broken))
    good, bad = (make_requests(model, prompt, {"gen_length": 4, "steps": 4})[0]
                 for prompt in ("A ", "The "))  # fmt: skip
    with Engine(model, sizes=(SLOTS,)) as engine:
        for one in (good, bad, good, bad, good):
            engine.submit(one)
        rows = _all(engine)
    assert [rows[n].status for n in range(5)] == [
        Status.DONE, Status.NON_FINITE, Status.DONE, Status.NON_FINITE, Status.DONE,
    ]  # fmt: skip
    assert len({rows[n].tokens.tobytes() for n in (0, 2, 4)}) == 1
    assert rows[1].steps == 1 and (rows[1].committed == -1).all()


def test_a_host_sampler_that_raises_ends_its_row_alone():
    def third_fails(candidates):
        if candidates.step == 2:
            raise RuntimeError("out of ideas")
        return candidates.ids[0]

    def first(candidates):
        return candidates.ids[0]

    asked = {"gen_length": 4, "steps": 4}
    fails, works = (make_requests(MODEL, "A ", asked | {"host_sampler": f})[0]
                    for f in (third_fails, first))  # fmt: skip
    with Engine(MODEL, sizes=(SLOTS,)) as engine:
        for one in (works, fails, fails, works):
            engine.submit(one)
        rows = _all(engine)
    assert [rows[n].status for n in range(4)] == [
        Status.DONE, Status.FAILED, Status.FAILED, Status.DONE,
    ]  # fmt: skip
    for number in (1, 2):
        assert str(rows[number].error).endswith("at position 4: RuntimeError: out of ideas")
        assert (rows[number].committed >= 0).sum() == 2
        assert rows[number].tokens[:4].tolist() == rows[0].tokens[:4].tolist()
    with pytest.raises(ValueError, match="out of ideas"):
        dlm_jax.generate(MODEL, ["A "], host_sampler=third_fails, **asked)


def test_a_program_that_fails_takes_the_rows_that_it_ran_and_no_others():
    def refuses(params, tokens_BL, length_B, cache):
        raise RuntimeError("cannot be compiled")

    network = dataclasses.replace(MODEL.network, trunk=refuses)
    model = dataclasses.replace(MODEL, network=network)
    with Engine(model, sizes=(SLOTS,)) as engine:
        for number in range(5):
            engine.submit(request(number))
        engine.submit(request(7))
        engine.cancel(5)
        rows = _all(engine)
    assert [rows[n].status for n in range(6)] == [Status.FAILED] * 5 + [Status.CANCELLED]
    assert "cannot be compiled" in str(rows[0].error)


# Bad input


def test_what_cannot_be_done_is_refused_in_one_line_and_disturbs_nobody():
    with Engine(MODEL, sizes=(SLOTS,), max_waiting=3, canvases=(64,)) as engine:
        running = engine.submit(request(6))
        engine.step(1)
        first = engine.submit(request(4))
        engine.cancel(first)
        for call, said in (
            (lambda: engine.cancel(first), "request 1 neither waits nor runs"),
            (lambda: engine.cancel(9), "request 9 neither waits nor runs"),
            (lambda: engine.step(-1), "num_steps=-1 must be at least 0"),
        ):
            with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
                call()
        for _ in range(3):
            engine.submit(request(4))
        rows = _all(engine)
        assert sorted(rows) == [0, 1, 2, 3, 4]
        assert same_row(rows[running], alone(6))
        with pytest.raises(ValueError, match="^request 0 neither waits nor runs"):
            engine.cancel(running)
    for call in (lambda: engine.submit(request(4)), engine.step, lambda: engine.cancel(running)):
        with pytest.raises(ValueError, match="^the engine is closed; create a new one$"):
            call()
    engine.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0 must be an integer of at least 1"),
        ({"sizes": (4, 0)}, "sizes=0 must be an integer of at least 1"),
        ({"canvases": (64, 0)}, "canvases=0 must be an integer of at least 1"),
        ({"max_waiting": 0}, "max_waiting=0 must be an integer of at least 1"),
        ({"max_candidates": 0}, "max_candidates=0 must be an integer of at least 1"),
    ],
)
def test_an_engine_of_nothing_is_refused(options, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        Engine(MODEL, **options)


def test_requests_may_come_from_other_threads_while_rows_run():
    with Engine(MODEL, sizes=(SLOTS,)) as engine:
        values = {}

        def submit(first):
            for number in range(first, first + 10):
                values[engine.submit(request(number))] = number

        threads = [threading.Thread(target=submit, args=[first]) for first in (0, 10, 20)]
        for thread in threads:
            thread.start()
        found = {}
        while any(thread.is_alive() for thread in threads) or engine.is_busy:
            found |= {row.number: row for row in engine.step()}
    assert sorted(found) == list(range(30))
    assert all(same_row(row, alone(values[number])) for number, row in found.items())
