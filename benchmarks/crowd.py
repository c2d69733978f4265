"""Concurrent clients of the server, many of which misbehave, for tests and measurements.

Of every ten clients, one sends settings that are out of range, one sends a body that is not JSON,
and one sends a body that is too large. Two clients disconnect, sometimes in the middle of their
request; two read a stream with pauses, and one reads only after its answer is complete. The
remaining clients behave well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable

import httpx

BODY: dict[str, object] = {"prompt": "A ", "max_tokens": 12, "steps": 12}
HEADERS = {"Content-Type": "application/json"}
SEEDS = 7

Told = tuple[int, str] | None
"""The seed of a request and the received text; None if no text was expected."""

Client = Callable[[httpx.AsyncClient, str, int], Awaitable[Told]]


async def crowd(url: str, count: int) -> list[Told | BaseException]:
    """Runs `count` clients concurrently; returns their results.

    If a request is refused before its body is read, the connection can be closed; the result is
    then an `httpx.WriteError` or `httpx.ReadError`.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        asked = [KINDS[n % len(KINDS)](http, url, n) for n in range(count)]
        return await asyncio.gather(*asked, return_exceptions=True)


async def good(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Sends a request and reads the answer."""
    answer = await http.post(f"{url}/v1/completions", json=BODY | {"seed": number % SEEDS})
    _expect(answer, 200)
    return number % SEEDS, answer.json()["choices"][0]["text"]


async def streamed(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Reads a stream with pauses."""
    text = ""
    body = BODY | {"seed": number % SEEDS, "stream": True}
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            await asyncio.sleep(0.01)
    return number % SEEDS, text


async def unread(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Requests a stream with the smallest receive buffer, and reads it after a pause."""
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    with contextlib.closing(link):
        await loop.sock_connect(link, ("127.0.0.1", _port(url)))
        await loop.sock_sendall(link, _raw(BODY | {"seed": number % SEEDS, "stream": True}))
        await asyncio.sleep(2)
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = await loop.sock_recv(link, 64)
            if not part:
                raise AssertionError(f"a stream ended without [DONE]: {data[-200:]!r}")
            data += part
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return number % SEEDS, "".join(json.loads(x[6:])["choices"][0]["text"] for x in lines)


async def leaves(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Disconnects after half of its request, before its answer, or within a stream."""
    _, writer = await asyncio.open_connection("127.0.0.1", _port(url))
    data = _raw(BODY | {"stream": bool(number % 2), "seed": number % SEEDS})
    writer.write(data if number % 3 else data[:-10])
    await writer.drain()
    await asyncio.sleep(0.02 * (number % 5))
    writer.transport.abort()
    return None


async def malformed(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Sends a setting that is out of range."""
    answer = await http.post(f"{url}/v1/completions", json=BODY | {"temperature": -1})
    _expect(answer, 400, "temperature")
    return None


async def no_json(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Sends a body that is not a request."""
    answer = await http.post(
        f"{url}/v1/completions", content=b"[" * (number % 4000), headers=HEADERS
    )
    _expect(answer, 400)
    return None


async def oversized(http: httpx.AsyncClient, url: str, number: int) -> Told:
    """Sends a body that is too large."""
    answer = await http.post(f"{url}/v1/completions", content=b" " * (2 << 20), headers=HEADERS)
    _expect(answer, 413)
    return None


KINDS: tuple[Client, ...] = (
    good, streamed, leaves, good, malformed, unread, leaves, oversized, streamed, no_json,
)  # fmt: skip


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def _raw(body: dict[str, object]) -> bytes:
    """A request as raw bytes."""
    data = json.dumps(body).encode()
    fields = {"Host": "x", **HEADERS, "Content-Length": len(data)}
    lines = ["POST /v1/completions HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


def _expect(answer: httpx.Response, status: int, param: str | None = None) -> None:
    """Raises AssertionError unless the answer has this status and names `param`."""
    found = answer.status_code
    if found != status:
        raise AssertionError(f"status {found} in place of {status}: {answer.text[:300]}")
    if param is not None and answer.json()["error"]["param"] != param:
        raise AssertionError(f"{param} is not named: {answer.text[:300]}")
