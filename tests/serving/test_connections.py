"""Connections that send half a request, read nothing, or are too many, and streams that wait."""

import asyncio
import contextlib
import errno
import logging
import socket
import time

import httpx
import pytest
from serving_cases import post, serving

from dlm_jax.serving import http
from dlm_jax.serving.protocol import Limits

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
HALF_BODY = HALF_HEAD + b"content-type: application/json\r\ncontent-length: 90\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
SLOW = {"prompt": "A ", "max_tokens": 24, "steps": 4000, "resample": True, "order": "threshold",
        "threshold": 1.0, "stream": True}  # fmt: skip


def _connected(running, data: bytes = b"") -> socket.socket:
    port = int(running.url.rsplit(":", 1)[1])
    link = socket.create_connection(("127.0.0.1", port), timeout=10)
    link.sendall(data)
    return link


def _is_closed(link: socket.socket, seconds: float = 5, drip: bytes = b"") -> bool:
    """Whether the server closes a connection on which `drip` is sent again and again."""
    until = time.monotonic() + seconds
    link.settimeout(0.1)
    while time.monotonic() < until:
        try:
            if drip:
                link.sendall(drip)
            if not link.recv(1 << 16):
                return True
        except TimeoutError:
            pass
        except OSError:
            return True
    return False


@pytest.mark.parametrize("begin", [b"", HALF_HEAD, HEALTH + HALF_HEAD])
def test_a_request_whose_headers_do_not_end_is_closed_in_time(begin, monkeypatch):
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.3)
    with serving() as running, _connected(running, begin) as link:
        assert _is_closed(link, drip=b"x: y\r\n" if begin else b"")


def test_a_body_that_does_not_end_is_refused_in_time_and_closed(monkeypatch):
    monkeypatch.setattr(http, "_BODY_SECONDS", 0.3)
    with serving() as running, _connected(running, HALF_BODY) as link:
        assert b" 408 " in link.recv(1 << 16)
        assert _is_closed(link)


def test_a_client_that_reads_nothing_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(http, "_STALL_SECONDS", 0.3)
    with serving() as running, _connected(running) as link:
        link.settimeout(0.1)
        closed, until = False, time.monotonic() + 20
        while not closed and time.monotonic() < until:
            try:
                link.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 200)
            except TimeoutError:
                pass
            except OSError:
                closed = True
        assert closed


@pytest.mark.parametrize("half", [b"", HALF_HEAD, HALF_BODY])
def test_half_sent_requests_leave_room_for_whole_ones(half, monkeypatch):
    monkeypatch.setattr(http, "most_connections", lambda: 8)
    with serving() as running, contextlib.ExitStack() as links:
        for _ in range(40):
            links.enter_context(_connected(running, half))
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert post(running, "/detokenize", {"tokens": [1]}).status_code == 200
        assert len(running.server.server_state.connections) <= 9


def test_when_requests_take_all_connections_the_health_is_told_and_others_are_refused(monkeypatch):
    monkeypatch.setattr(http, "most_connections", lambda: 2)
    with serving(limits=Limits(seconds=3)) as running, contextlib.ExitStack() as streams:
        for _ in range(2):
            asked = httpx.stream("POST", f"{running.url}/v1/completions", json=SLOW, timeout=60)
            assert streams.enter_context(asked).status_code == 200
        refused = post(running, "/detokenize", {"tokens": [1]})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_a_lack_of_descriptors_is_logged_once_and_other_errors_each_time(caplog):
    async def fail():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(http._LoopErrors())
        for _ in range(1000):
            loop.call_exception_handler({"message": "", "exception": OSError(errno.EMFILE, "")})
        for _ in range(2):
            loop.call_exception_handler({"message": "another error"})

    with caplog.at_level(logging.ERROR):
        asyncio.run(fail())
    assert sum("descriptor" in record.getMessage() for record in caplog.records) == 1
    assert sum("another error" in record.getMessage() for record in caplog.records) == 2


def test_a_stream_that_waits_sends_comments(monkeypatch):
    """A proxy closes a connection on which nothing is sent."""
    monkeypatch.setattr(http, "_BEAT_SECONDS", 0.1)
    with serving(limits=Limits(seconds=1)) as running:
        text = post(running, "/v1/completions", SLOW).text
    *comments, event = [part for part in text.split("\n\n") if part]
    assert len(comments) >= 4 and all(part.startswith(":") for part in comments)
    assert '"code":"timeout"' in event
