"""The scheduler alone: no device, no arrays, microseconds."""

from typing import NamedTuple

import pytest

from dlm_jax.inference.scheduler import Entry, Queue, Scheduler


class Bucket(NamedTuple):
    key: str


def _scheduler(max_programs=8, loaded=None):
    def load(bucket, size):
        if loaded is not None:
            loaded.append((bucket.key, size))
        return f"{bucket.key} in {size}"

    return Scheduler(load, max_programs=max_programs)


def _next(scheduler):
    """The next queue, as an engine of one process finds it."""
    scheduler.agree(scheduler.counts())
    return scheduler.next()


def _queue(scheduler, name, count, sizes=(1, 2, 4), first=0, is_reserved=False):
    queue = Queue(Bucket(name), sizes, is_reserved=is_reserved)
    for number in range(first, first + count):
        queue.push(Entry(number=number, request=None))
    scheduler.enter(queue)
    return queue


def _numbers(changes):
    return {slot: entry and entry.number for slot, entry in changes.items()}


def test_requests_take_slots_by_priority_and_then_by_number():
    scheduler = _scheduler()
    queue = _queue(scheduler, "a", 3, sizes=(4,))
    queue.push(Entry(number=3, request=None, priority=1))
    assert _next(scheduler) is queue
    assert (queue.program, queue.size) == ("a in 4", 4)
    assert _numbers(queue.admit()) == {0: 3, 1: 0, 2: 1, 3: 2}
    assert [entry.slot for entry in queue.running.values()] == [0, 1, 2, 3]


def test_a_slot_takes_the_next_when_its_row_has_ended():
    scheduler = _scheduler()
    queue = _queue(scheduler, "a", 5, sizes=(2,))
    _next(scheduler)
    queue.admit()
    del queue.running[1]
    assert _numbers(queue.admit()) == {1: 2}
    assert queue.counts() == (2, 2, 0)


def test_queues_are_served_round_robin_and_leave_without_work():
    scheduler = _scheduler()
    first, second = _queue(scheduler, "a", 1), _queue(scheduler, "b", 1)
    assert [_next(scheduler) for _ in range(3)] == [first, second, first]
    first.admit()
    first.running.clear()
    scheduler.agree(scheduler.counts())
    assert first.size is None
    assert [_next(scheduler) for _ in range(2)] == [second, second]


def test_a_cancelled_request_never_begins_and_a_running_one_frees_its_slot():
    scheduler = _scheduler()
    queue = _queue(scheduler, "a", 3, sizes=(1,))
    _next(scheduler)
    (entry,) = queue.admit().values()
    for other in list(queue._waiting)[:1]:
        queue.cancel(other)
    queue.cancel(entry)
    queue.evict(entry)
    assert queue.counts() == (1, 0, 1)
    assert _numbers(queue.admit()) == {0: 2}
    queue.cancel(queue.running[0])
    queue.evict(queue.running[0])
    assert queue.admit() == {0: None}


def test_many_cancelled_requests_do_not_stay_in_the_line():
    queue = _queue(_scheduler(), "a", 1000)
    for entry in sorted(queue._waiting)[1:]:
        queue.cancel(entry)
    assert queue.num_waiting == 1
    assert len(queue._waiting) == 1


def test_a_request_that_has_been_dropped_can_be_cancelled():
    queue = _queue(_scheduler(), "a", 1)
    (entry,) = queue.drop()
    queue.cancel(entry)
    assert entry.is_cancelled and queue.num_waiting == 0


def test_reserved_queues_without_work_leave_a_lone_process():
    scheduler = _scheduler()
    queues = [_queue(scheduler, str(n), n == 0, is_reserved=True) for n in range(100)]
    assert _next(scheduler) is queues[0]
    assert len(scheduler.counts()) == 1
    queues[99].push(Entry(number=1, request=None))
    scheduler.enter(queues[99])
    assert [_next(scheduler) for _ in range(2)] == [queues[0], queues[99]]


def test_a_queue_grows_with_its_requests_and_shrinks_into_a_program_that_is_there():
    loaded = []
    scheduler = _scheduler(loaded=loaded)
    queue = _queue(scheduler, "a", 1)
    _next(scheduler)
    queue.admit()
    for number in range(1, 4):
        queue.push(Entry(number=number, request=None))
    _next(scheduler)
    assert queue.size == 4
    queue.admit()
    for slot in (0, 1):
        del queue.running[slot]
    _next(scheduler)
    assert queue.size == 4, "no program of two slots is there"
    del queue.running[2]
    _next(scheduler)
    assert (queue.size, list(queue.running), loaded) == (1, [0], [("a", 1), ("a", 4)])


def test_the_program_used_longest_ago_goes_and_where_all_are_busy_one_drains():
    loaded = []
    scheduler = _scheduler(max_programs=2, loaded=loaded)
    queues = [_queue(scheduler, name, 2, sizes=(1,), first=10 * n) for n, name in enumerate("abc")]
    for queue in queues[:2]:
        assert _next(scheduler) is queue
        queue.admit()
    assert _next(scheduler) is queues[0], "c has no program"
    assert queues[0].is_draining and not queues[1].is_draining
    queues[0].running.clear()
    assert queues[0].admit() == {}, "a queue that drains takes none"
    assert _next(scheduler) is queues[1]
    assert _next(scheduler) is queues[2]
    assert loaded == [("a", 1), ("b", 1), ("c", 1)]
    assert [(bucket.key, size) for bucket, size in scheduler.programs] == [("b", 1), ("c", 1)]


@pytest.mark.parametrize("own", [0, 2])
def test_processes_that_agree_serve_a_queue_of_which_one_has_nothing(own):
    scheduler = Scheduler(lambda b, n: b.key, max_programs=1, num_processes=2, keeps_reserved=True)
    queue = _queue(scheduler, "a", own, sizes=(4,), is_reserved=True)
    assert scheduler.counts() == [(own, 0, 0)]
    scheduler.agree([(2, 0, 0)])
    assert scheduler.next() is queue and (queue.num_own, queue.num_fills) == (2, 2)
    assert len(queue.admit()) == own
    scheduler.agree([(0, 2, 0)])
    queue.running.clear()
    assert queue.size == 4, "another process may still run rows"
    scheduler.agree([(0, 0, 0)])
    assert (queue.size, scheduler.is_busy, scheduler.next()) == (None, False, None)
    assert scheduler.counts() == [(0, 0, 0)], "a reserved queue stays"


def test_a_queue_runs_in_a_ready_program_of_another_size_or_waits():
    scheduler, ready = _scheduler(), {"a in 1", "a in 2", "b in 4"}
    small, large = _queue(scheduler, "a", 4), _queue(scheduler, "b", 1)
    none = _queue(scheduler, "c", 1)
    scheduler.agree(scheduler.counts())
    assert [scheduler.next(ready.__contains__) for _ in range(2)] == [small, large]
    assert (small.program, large.program) == ("a in 2", "b in 4")
    assert scheduler.next(ready.__contains__) is small
    assert scheduler.missing == [(none, 1, "c in 1"), (small, 4, "a in 4")] and none.size is None
    ready |= {"a in 4", "c in 1"}
    small.admit()
    assert [scheduler.next(ready.__contains__) for _ in range(3)] == [large, none, small]
    assert (small.program, none.program) == ("a in 4", "c in 1")
    assert scheduler.missing == []
