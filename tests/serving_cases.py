"""A server on a socket of its own, in a thread, for the toy model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import toy_model

from dlm_jax.config import SamplingParams
from dlm_jax.hf import ChatTemplate
from dlm_jax.inference.engine import AsyncEngine, Engine
from dlm_jax.inference.model import Model
from dlm_jax.serving.app import make_app
from dlm_jax.serving.http import Server, listening
from dlm_jax.serving.protocol import Options

SLOTS = 4
CHAT = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", toy_model.TOKENIZER)
MODEL = dataclasses.replace(
    toy_model.MODEL,
    sample=SamplingParams(
        order="left_to_right",
        chain=("bias", "penalties", "temperature", "top_k", "top_p", "min_p"),
        steps=8,
    ),
    chat=CHAT,
)
EOS = MODEL.tokenizer.eos_id
SLOW = {
    "prompt": "A ", "max_tokens": 24, "steps": 4000, "resample": True, "order": "threshold",
    "threshold": 1.0,
}  # fmt: skip
"""A request that takes long."""


class Running:
    """A server that runs.

    Attributes:
      url: of it.
      engine: that it steps.
    """

    def __init__(self, url: str, engine: Engine, server: Server):
        self.url, self.engine, self.server = url, engine, server

    def idle(self, seconds: float = 30) -> bool:
        """Whether nothing runs or waits, at last."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            report = self.engine.report()
            if not report.running and not report.waiting and not self.engine.is_busy:
                return True
            time.sleep(0.01)
        return False


def client_of(running: Running, key: str = "none") -> openai.OpenAI:
    """A client of a server, which tries nothing twice."""
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=120)


@contextlib.contextmanager
def serving(
    model: Model = MODEL, *, drain: int = 10, sizes: tuple[int, ...] = (SLOTS,), **options,
) -> Iterator[Running]:  # fmt: skip
    """A server that listens."""
    engine = Engine(model, sizes=sizes, max_waiting=None)
    sock = listening("127.0.0.1", 0)
    app = make_app(AsyncEngine(engine), Options(name="toy", **options))
    server = Server(app, drain=drain)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, server)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def post(running: Running, path: str, body, **headers) -> httpx.Response:
    """The answer to a request that may be malformed."""
    headers = {"content-type": "application/json"} | headers
    data = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(f"{running.url}{path}", headers=headers, timeout=300, **data)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def choices_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The choices of an answer, or the choice of each event of a stream."""
    assert response.status_code == 200, response.text
    if events := events_of(response):
        return [event["choices"][0] for event in events]
    return response.json()["choices"]


def complete(running: Running, body: dict[str, Any], path: str = "completions") -> str:
    """The text of the first choice for a request."""
    return choices_of(post(running, f"/v1/{path}", body))[0]["text"]


def refusal_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error with which a request was refused."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"] and "\n" not in error["message"]
    return error
