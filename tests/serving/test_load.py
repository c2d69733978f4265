"""A thousand clients at once, many of whom misbehave: no slot is lost, and all are answered."""

import asyncio
import gc
import socket
import tracemalloc

import httpx
import jax
import pytest
from serving_cases import SLOTS, serving

from benchmarks.crowd import BODY, SEEDS, crowd

CLIENTS = 1000


def _answered(running, count: int = CLIENTS) -> None:
    """A crowd comes and goes; all are told what they must be told."""
    found = asyncio.run(crowd(running.url, count))
    # One whose body is refused before it is read may find the connection closed.
    errors = [e for e in found if isinstance(e, BaseException)]
    assert all(isinstance(e, httpx.WriteError | httpx.ReadError) for e in errors), errors
    assert len(errors) <= count // 10
    texts: dict[int, set[str]] = {}
    for one in found:
        if isinstance(one, tuple):
            texts.setdefault(one[0], set()).add(one[1])
    assert len(texts) == SEEDS and all(len(same) == 1 for same in texts.values())
    assert running.idle(60)


def _held() -> tuple[int, int]:
    """Bytes of Python's objects, arrays of NumPy included, and of the arrays on devices."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], sum(leaf.nbytes for leaf in jax.live_arrays())


@pytest.mark.slow
def test_a_thousand_clients_are_answered_and_neither_slots_nor_memory_are_lost():
    with serving() as running:
        _answered(running, 200)
        tracemalloc.start()
        try:
            _answered(running)  # what is traced from here on had no past
            before = _held()
            _answered(running)
            grown, arrays = (now - then for now, then in zip(_held(), before, strict=True))
        finally:
            tracemalloc.stop()
        # 40 bytes a client: less than the smallest object that one could leave behind.
        assert grown < 40 * CLIENTS and arrays <= 0
        report = running.engine.report()
        assert report.running == report.waiting == 0
        answer = httpx.post(f"{running.url}/v1/completions", json=BODY | {"n": SLOTS}, timeout=60)
        assert len(answer.json()["choices"]) == SLOTS
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))):
            pass
