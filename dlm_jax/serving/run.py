"""The server as a process: a socket, signals, and an end that lets running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_LAST_WORDS = 5.0
"""Seconds in which clients are told that their requests were ended."""


class Server(uvicorn.Server):
    """A server on a socket; when it is stopped, it takes nothing new, and what runs may finish.

    A signal stops it, or ``should_exit``; a second signal ends it at once.

    Args:
      app: what answers.
      sock: from `listening`.
      drain: seconds that what runs may take once it is stopped.
      listens: called when clients are answered.
    """

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        *,
        drain: float,
        listens: Callable[[], None] = lambda: None,
    ):
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=max(1, round(drain)),
        )  # fmt: skip
        super().__init__(config)
        self._sock, self._listens = sock, listens

    def answer(self) -> None:
        """Returns when it was stopped."""
        asyncio.run(self.serve(sockets=[self._sock]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        if not self.should_exit:
            self._listens()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes nothing new, and returns when all have their answer, an error if it must be."""
        await super().shutdown(sockets)
        tasks = set(self.server_state.tasks)
        if tasks and not self.force_exit:
            await asyncio.wait(tasks, timeout=_LAST_WORDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes the signals that stop the server, and does not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listening(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to.

    Raises:
      ValueError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=found[0][0], backlog=2048)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port} cannot be had ({error.strerror or error}); use another"
        ) from None
