"""The HTTP layer: request bodies, errors, event streams, logs in JSON lines, and the socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import hmac
import json
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

import pydantic
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dlm_jax.serving.protocol import ApiError, of_fields, refused, stopping

LOGGER = logging.getLogger("dlm_jax.serving")


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
    names = {
        LOGGER.name: logging.INFO,
        "dlm_jax.inference": logging.WARNING,
        "uvicorn.error": logging.WARNING,
    }
    for name, least in names.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_answer(event: str, **told: Any) -> None:
    """Logs an answer; floats are rounded to four decimals."""
    if LOGGER.isEnabledFor(logging.INFO):
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}
        LOGGER.info(event, extra={"told": shown})


T = TypeVar("T")
M = TypeVar("M", bound=pydantic.BaseModel)

_DEEPEST = 64
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_BODY_SECONDS = 30.0
_BEAT_SECONDS = 15.0
_EVENTS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))


def encoded(value: Any) -> bytes:
    """Encodes a value as ASCII JSON, which can represent any text, including lone surrogates."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def error_response(error: ApiError) -> Json:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status == 415:
        headers["accept-encoding"] = "identity"
    if error.status in (408, 413, 415, 503):
        headers["connection"] = "close"  # the rest of the request body is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(error.body(), error.status, headers)


async def read_body(request: Request, limit: int) -> bytes:
    # Any web page can send other types without a preflight.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"content-type={kind[:40]!r} is not application/json; send this header and JSON",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"content-encoding={encoding[:40]!r} is not supported; send the body unencoded",
            code="unsupported_encoding",
        )
    too_large = ApiError(
        413, f"the body has more than {limit} bytes; send a smaller one", code="too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time; send it faster") from None
    return b"".join(parts)


def parsed(kind: type[M], body: bytes) -> M:
    if _depth(body) > _DEEPEST:
        raise refused(
            f"the body is nested more than {_DEEPEST} levels deep; use fewer levels", None
        )

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
        raise of_fields(error, value) from None


def check_key(request: Request, key: str | None) -> None:
    """Raises ApiError if the request lacks the key. Keys are compared in constant time."""
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digests = [hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (key, given)]
    if not hmac.compare_digest(*digests) or scheme.lower() != "bearer":
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


class OwnHost:
    """Refuses requests whose ``Host``, without the port, is not one of `hosts`.

    A web page whose name resolves to this machine (DNS rebinding) sends its own name.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).lower()
            if host not in self._hosts:
                known = " or ".join(sorted(self._hosts))
                message = f"host={host[:60]!r} is not this server; use {known}"
                app = error_response(ApiError(403, message, code="wrong_host"))
        await app(scope, receive, send)


def _depth(body: bytes) -> int:
    """Returns the nesting depth of lists and objects in a JSON text."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(body):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


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
        raise ApiError(
            504, f"the answer took more than {seconds:g} s; request fewer tokens", code="timeout"
        )
    finally:
        for one in (task, gone):
            one.cancel()
        for one in (task, gone):
            with contextlib.suppress(BaseException):
                await one


async def _gone(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


class Events(Response):
    """A stream of server-sent events that ends with ``[DONE]`` or an error object.

    While no event is sent, a comment is sent every 15 s, so that no proxy closes the connection.
    The ``type`` of an event, if present, is the event's name, as in ``/v1/responses``.

    Args:
      run: coroutine function that calls its argument to send each event.
      ended: called at the end with the status: 200, 499 for a disconnected client, or the status of
        the error.
      seconds: time limit.
      spent: seconds of the limit that have passed.
      ends_with_done: whether ``[DONE]`` is sent at the end.
    """

    def __init__(
        self,
        run: Callable[[Callable[[dict[str, Any]], Awaitable[None]]], Coroutine[Any, Any, None]],
        ended: Callable[[int], None],
        seconds: float,
        *,
        spent: float = 0.0,
        ends_with_done: bool = True,
    ):
        super().__init__(status_code=200)
        self._run, self._ended, self._seconds, self._spent = run, ended, seconds, spent
        self._last = b"data: [DONE]\n\n" if ends_with_done else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        written = time.monotonic()

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal written
            written = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def emit(event: dict[str, Any]) -> None:
            name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
            await write(name + b"data: " + encoded(event) + b"\n\n")

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
            await write(self._last, more=False)

        status = 499
        try:
            await while_connected(receive, self._seconds, whole(), spent=self._spent)
            status = 200
        except ClientDisconnect:
            pass  # the client has disconnected
        except (ApiError, asyncio.CancelledError) as error:
            told = error if isinstance(error, ApiError) else stopping()
            status = told.status
            # Do not wait long for a client that does not read.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await emit(told.body())
                    await write(b"", more=False)
        finally:
            self._ended(status)


_REQUEST_SECONDS = 20.0
"""Time limit in seconds for the next request on a connection, up to the end of its headers."""

_STALL_SECONDS = 60.0
"""Time limit in seconds for a client that reads nothing of its answer."""

_ACCEPTS = 16
"""Number of connections that are accepted before other events are handled."""

_BACKLOG = 2048
_RESERVE = 128
"""Number of descriptors that are kept for files and for the routes in `_ALWAYS`."""

_MOST_CONNECTIONS = 1 << 16
_ALWAYS = ("/health", "/ping", "/version")


def most_connections() -> int:
    """Returns the number of connections for which there are descriptors, without the reserve."""
    try:
        import resource
    except ImportError:  # the system has no such limit
        return _MOST_CONNECTIONS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(limit // 2, limit - _RESERVE))


_Protocol: Any = AutoHTTPProtocol


class _Connection(_Protocol):
    """A connection that is closed if its next request or its reader takes too long.

    Args:
      incomplete: connections without a complete request, oldest first. The oldest is closed if
        there are more than `most` connections.
      most: maximum number of connections. Half of the reserve is used beyond it, for `_ALWAYS`.
    """

    def __init__(self, incomplete: dict[_Connection, None], most: int, **options: Any):
        super().__init__(**options)
        self._incomplete, self._most = incomplete, most
        self._waits: asyncio.TimerHandle | None = None
        self._stalls: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._most:
            oldest = next(iter(self._incomplete), None)
            if oldest is not None:
                oldest.abort()
            elif len(self.connections) > self._most + _RESERVE // 2:
                transport.abort()
                return
        self._note()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._incomplete.pop(self, None)
        for timer in (self._waits, self._stalls):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalls = self.loop.call_later(_STALL_SECONDS, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalls is not None:
            self._stalls.cancel()

    def abort(self) -> None:
        self._incomplete.pop(self, None)
        self.transport.abort()

    def _note(self) -> None:
        """Notes whether the connection has a request, and whether it is complete."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        has_request = not (cycle is None or cycle.response_complete)
        if not (cycle is None or cycle.response_complete or cycle.more_body):
            self._incomplete.pop(self, None)
        else:
            self._incomplete.setdefault(self)
        if has_request and self._waits is not None:
            self._waits.cancel()
            self._waits = None
        elif not has_request and self._waits is None:
            self._waits = self.loop.call_later(_REQUEST_SECONDS, self.abort)


def _limited(app: ASGIApp, is_full: Callable[[], bool]) -> ASGIApp:
    """Wraps an application that answers only the routes in `_ALWAYS` while it is full."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_full() and scope["path"] not in _ALWAYS:
            full = ApiError(
                503, "the server has too many connections; try again later", code="overloaded"
            )
            await error_response(full)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


class _LoopErrors:
    """Handles errors of the event loop. A lack of descriptors is logged once in ten seconds."""

    def __init__(self) -> None:
        self._logged = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged > 10:
            self._logged = time.monotonic()
            LOGGER.error("no descriptor is free for a connection; raise the limit (ulimit -n)")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_LAST_WORDS = 5.0
"""Time limit in seconds for sending errors to clients whose requests were cancelled."""


class Server(uvicorn.Server):
    """A server on a socket. When stopped, it rejects new requests and finishes running requests.

    A signal or ``should_exit`` stops the server; a second signal ends the process at once. After a
    stop, running requests have `drain` seconds to finish. `listens` is called when the server
    accepts requests on its socket, which is from `listening`.

    There are at most as many connections as there are descriptors, without a reserve. If a new
    connection exceeds this number, the oldest one without a complete request is closed. If there is
    none, the new connection can only ask for the health.
    """

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        *,
        drain: float,
        listens: Callable[[], None] = lambda: None,
    ):
        most = most_connections()
        made: Any = functools.partial(_Connection, {}, most)
        config = uvicorn.Config(
            _limited(app, lambda: len(self.server_state.connections) > most),
            http=made,
            backlog=_ACCEPTS,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(drain)),
        )
        super().__init__(config)
        self._sock, self._listens = sock, listens

    def answer(self) -> None:
        """Runs the server until it is stopped."""
        asyncio.run(self.serve(sockets=[self._sock]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_LoopErrors())
        await super().startup(sockets)
        self._sock.listen(_BACKLOG)  # asyncio has set the number of accepts
        if not self.should_exit:
            self._listens()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Rejects new requests and returns when all running requests have an answer or an error."""
        await super().shutdown(sockets)
        tasks = set(self.server_state.tasks)
        if tasks and not self.force_exit:
            await asyncio.wait(tasks, timeout=_LAST_WORDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
        for number in _SIGNALS:
            # The default handler also ends a process whose main thread is busy. It has no effect in
            # the first process of a container.
            signal.signal(number, _exit if os.getpid() == 1 else signal.SIG_DFL)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals that stop the server and does not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit(sig: int, frame: FrameType | None) -> None:
    os._exit(128 + sig)


def listening(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=found[0][0], backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port} is not available ({error.strerror or error}); choose "
            f"another"
        ) from None
