"""The HTTP layer: request bodies, errors, event streams, logs in JSON lines, and the socket."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dlm_jax.serving.protocol import ApiError, of_fields, refused

LOGGER = logging.getLogger("dlm_jax.serving")

T = TypeVar("T")
M = TypeVar("M", bound=pydantic.BaseModel)

_MOST_BYTES = 1 << 20
"""Maximum size of a request."""
_BEAT_SECONDS = 15.0
_EVENTS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))
_CONNECTIONS = 4096
"""Number of connections and requests above which requests are refused."""


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        told |= getattr(record, "told", {})
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


def start_logs() -> None:
    """Starts logging of the server, the engine and uvicorn to standard error as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name, least in ((LOGGER.name, "INFO"), ("dlm_jax.inference", "WARNING"),
                        ("uvicorn.error", "WARNING")):  # fmt: skip
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_answer(event: str, **told: Any) -> None:
    """Logs an answer; floats are rounded to four decimals."""
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}
    LOGGER.info(event, extra={"told": shown})


def encoded(value: Any) -> bytes:
    """Encodes a value as ASCII JSON, which can represent any text, including lone surrogates."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def error_response(error: ApiError) -> Json:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status in (413, 415, 503):
        headers["connection"] = "close"  # the rest of the request body is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(error.body(), error.status, headers)


async def read_body(request: Request) -> bytes:
    # Any web page can send other types without a preflight.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"content-type={kind[:40]!r} is not application/json; send this header and JSON"
        raise ApiError(415, message, code="unsupported_media_type")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            message = f"the body has more than {_MOST_BYTES} bytes; send a smaller one"
            raise ApiError(413, message, code="too_large")
        parts.append(part)
    return b"".join(parts)


def parsed(kind: type[M], body: bytes) -> M:
    """Parses and checks a body.

    Raises:
      ApiError: the body is not a request of this kind.
      RecursionError: the body is nested too deeply.
    """

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not valid JSON")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=constant)
    except ValueError as error:
        raise refused(f"the body is not JSON: {error}", None) from None
    if not isinstance(value, dict):
        raise refused('the body is not an object; write {"prompt": ...}', None)
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise of_fields(error) from None


def check_key(request: Request, key: str | None) -> None:
    """Raises ApiError if the request lacks the key. Keys are compared in constant time."""
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_same = hmac.compare_digest(key.encode(), given.encode("utf-8", "replace"))
    if not is_same or scheme.lower() != "bearer":
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


async def while_connected(
    receive: Receive, seconds: float, work: Coroutine[Any, Any, T], *, spent: float = 0.0
) -> T:
    """Returns the result of `work`, which is cancelled on a disconnect or at the time limit, of
    which `spent` seconds have passed.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        left = max(0.0, seconds - spent)
        await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnect
        message = f"the answer took more than {seconds:g} s; request fewer tokens"
        raise ApiError(504, message, code="timeout")
    finally:
        for one in (task, gone):
            one.cancel()
        for one in (task, gone):
            with contextlib.suppress(BaseException):
                await one


async def _gone(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while True:
        if (await receive())["type"] == "http.disconnect":
            return


Emit = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends an event."""


class Events(Response):
    """A stream of server-sent events that ends with ``[DONE]`` or an error object.

    While no event is sent, a comment is sent every 15 s, so that no proxy closes the connection.

    Args:
      run: coroutine function that calls its argument to send each event.
      ended: called at the end with the status: 200, 499 for a disconnected client, or the status of
        the error.
      seconds: time limit.
      spent: seconds of the limit that have passed.
    """

    def __init__(
        self,
        run: Callable[[Emit], Coroutine[Any, Any, None]],
        ended: Callable[[int], None],
        seconds: float,
        spent: float,
    ):
        super().__init__(status_code=200)
        self._run, self._ended, self._seconds, self._spent = run, ended, seconds, spent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        written = time.monotonic()

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal written
            written = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def emit(event: dict[str, Any]) -> None:
            await write(b"data: " + encoded(event) + b"\n\n")

        async def beat() -> None:
            while True:
                await asyncio.sleep(max(0.0, written + _BEAT_SECONDS - time.monotonic()))
                if time.monotonic() >= written + _BEAT_SECONDS:
                    await write(b": waiting\n\n")

        async def whole() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
            beats = asyncio.create_task(beat())
            try:
                await self._run(emit)
            finally:
                beats.cancel()
            await write(b"data: [DONE]\n\n", more=False)

        status = 499
        try:
            await while_connected(receive, self._seconds, whole(), spent=self._spent)
            status = 200
        except ClientDisconnect:
            pass
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, ApiError):
                told = error
            elif isinstance(error, asyncio.CancelledError):
                told = stopping()
            else:
                LOGGER.exception("a stream failed")
                told = ApiError(500, "internal server error; see the log of the server")
            status = told.status
            # Do not wait long for a client that does not read.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await emit(told.body())
                    await write(b"", more=False)
        finally:
            self._ended(status)


def stopping() -> ApiError:
    """Returns the error for a request that is still running at the end of the grace period."""
    return ApiError(503, "the server is shutting down; try again later", code="stopping")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_LAST_WORDS = 5.0
"""Time limit in seconds for sending errors to clients whose requests were cancelled."""


class Server(uvicorn.Server):
    """A server that rejects new requests and finishes running requests when it is stopped.

    A signal or ``should_exit`` stops the server; a second signal ends the process at once. After a
    stop, running requests have `drain` seconds to finish. `run` takes a socket, as from
    `listening`.
    """

    def __init__(self, app: Starlette, *, drain: int):
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=20,
            timeout_graceful_shutdown=drain,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Rejects new requests and returns when all running requests have an answer or an error."""
        await super().shutdown(sockets)
        tasks = set(self.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server. It does not raise the signal again afterwards, as uvicorn does."""
        self.should_exit = True
        for number in _SIGNALS:  # the default handler also ends a process whose thread is busy
            # The kernel ignores the default handler for process 1 of a container.
            at_once = (lambda sig, _: os._exit(128 + sig)) if os.getpid() == 1 else signal.SIG_DFL
            signal.signal(number, at_once)


def listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=found[0][0], backlog=2048)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(
            f"--host {host} --port {port} is not available ({why}); choose another"
        ) from None
