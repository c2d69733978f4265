"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import dlm_jax
from dlm_jax.inference.async_engine import AsyncEngine
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.serving.answers import Answer, Done
from dlm_jax.serving.errors import ApiError, refused, stopping
from dlm_jax.serving.http import (
    Events,
    Json,
    check_key,
    error_response,
    parsed,
    read_body,
    while_connected,
)
from dlm_jax.serving.logs import LOGGER, log_answer
from dlm_jax.serving.metrics import Metrics
from dlm_jax.serving.plan import Limits, Plan
from dlm_jax.serving.planner import SHORT, Planner
from dlm_jax.serving.protocol import Chat, Completion, Infill, Sampled, Tokenize
from dlm_jax.serving.service import Service

S = TypeVar("S", bound=Sampled)

_GONE = 499


@dataclass(frozen=True)
class Options:
    """How a server answers.

    Attributes:
      name: of the model.
      limits: of requests.
      key: that requests must bring; None: none.
      defaults: settings that count where a request gives none.
      length: new tokens of a completion or infill that gives none; None: 16.
      logs_texts: whether prompts and texts are logged.
      warms_up: whether the programs of usual requests are compiled from the start on.
    """

    name: str
    limits: Limits = Limits()
    key: str | None = None
    defaults: dict[str, Any] | None = None
    length: int | None = None
    logs_texts: bool = False
    warms_up: bool = False


def make_app(
    model: Model, engine: Engine, options: Options, *, slots: int, steps_per_call: int = 2
) -> Starlette:
    """The application; it steps the engine while it lives, and closes it at its end.

    Args:
      model: of the engine.
      engine: which nobody else steps.
      options: how it answers.
      slots: rows that the engine runs at once.
      steps_per_call: as of `AsyncEngine`.
    """
    server = _Server(model, AsyncEngine(engine, steps_per_call=steps_per_call), options, slots)
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/metrics", server.kept(server.metrics_text)),
        Route("/v1/models", server.kept(server.models)),
        Route("/v1/models/{name:path}", server.kept(server.models)),
        Route("/v1/completions", server.kept(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.kept(server.chat), methods=["POST"]),
        Route("/v1/infill", server.kept(server.infill), methods=["POST"]),
        Route("/tokenize", server.kept(server.tokenize), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _unknown, Exception: _defect},
    )


class _Server:
    """What the routes share."""

    def __init__(self, model: Model, engine: AsyncEngine, options: Options, slots: int):
        self._options, self._async = options, engine
        planner = Planner(
            model, options.name, options.limits, options.defaults, options.length or SHORT
        )
        self._service = Service(planner, self._async, slots + options.limits.waiting)
        self._metrics = Metrics(engine.engine)
        self._began, self._is_warm, self._is_ending = int(time.time()), False, False
        self._page = resources.files("dlm_jax.serving").joinpath("page.html").read_bytes()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Runs the engine, beside which the programs of usual requests are compiled."""
        async with self._async:
            warming = asyncio.create_task(asyncio.to_thread(self._warm_up))
            try:
                yield
            finally:
                self._is_ending = True  # which a program that is being compiled does not notice
                await warming

    def _warm_up(self) -> None:
        for request in self._service.planner.usual() if self._options.warms_up else ():
            if self._is_ending:
                return
            try:
                self._async.engine.warm_up(request)
            except Exception:  # which those who ask for such a text are told of
                LOGGER.exception("warm up")
        self._is_warm = True

    def kept(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that needs the key, counts, and answers errors with the protocol's object."""

        async def route(request: Request) -> Response:
            began = time.perf_counter()
            try:
                check_key(request, self._options.key)
                response = await answer(request)
            except ApiError as error:
                response = error_response(error)
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except asyncio.CancelledError:  # the time of a stop is up, and this ends as an answer
                response = error_response(stopping())
            if not isinstance(response, Events):
                self._count(request.url.path, response.status_code, began)
            return response

        return route

    async def page(self, request: Request) -> Response:
        """The page that shows a text being denoised."""
        return Response(self._page, media_type="text/html")

    async def health(self, request: Request) -> Response:
        """200 while requests are answered."""
        is_fine = self._async.is_running
        body: dict[str, Any] = {
            "status": "ok" if is_fine else "failed",
            "model": self._options.name,
        }
        body |= {"version": dlm_jax.__version__, "is_warm": self._is_warm}
        return Json(body, 200 if is_fine else 503)

    async def metrics_text(self, request: Request) -> Response:
        """Figures for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The model, alone or in a list."""
        name = request.path_params.get("name")
        told = {
            "id": self._options.name, "object": "model", "created": self._began,
            "owned_by": "dlm_jax", "max_model_len": self._service.model.max_length,
        }  # fmt: skip
        if name is None:
            return Json({"object": "list", "data": [told]})
        if name != self._options.name:
            raise ApiError(404, f"model {name[:100]!r} is not here", "model", "model_not_found")
        return Json(told)

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        asked = parsed(Completion, await self._body(request))
        return await self._answer(request, await _planned(self._service.planner.completion, asked))

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        asked = parsed(Chat, await self._body(request))
        return await self._answer(request, await _planned(self._service.planner.chat, asked))

    async def infill(self, request: Request) -> Response:
        """``POST /v1/infill``."""
        asked = parsed(Infill, await self._body(request))
        return await self._answer(request, await _planned(self._service.planner.infill, asked))

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        asked = parsed(Tokenize, await self._body(request))
        planner = self._service.planner
        planner.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise refused("give prompt, or messages", "prompt")
        if asked.messages is not None:
            ids = planner.turns(asked.messages)
        else:
            try:
                ids = planner.model.tokenizer.encode(asked.prompt or "").tolist()
            except ValueError as error:
                raise refused(f"prompt: {error}", "prompt") from None
        longest = planner.model.max_length
        return Json({"tokens": ids, "count": len(ids), "max_model_len": longest})

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._options.limits.body)

    async def _answer(self, request: Request, plan: Plan) -> Response:
        answer = Answer(plan, self._options.name, self._service.model.tokenizer)
        seconds, began = self._options.limits.seconds, time.perf_counter()
        path = request.url.path
        if plan.is_stream:
            return self._events(plan, answer, path, began)
        with self._service.admitted(plan):
            work = self._service.whole(plan)
            done = await while_connected(request.receive, seconds, work)
        self._tell(path, plan, answer, done, began)
        return Json(answer.whole(done))

    def _events(self, plan: Plan, answer: Answer, path: str, began: float) -> Response:
        admission = contextlib.ExitStack()
        admission.enter_context(self._service.admitted(plan))
        is_first = True

        async def run(emit: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
            async def told(event: dict[str, Any]) -> None:
                nonlocal is_first
                if is_first:
                    self._metrics.first.observe(time.perf_counter() - began)
                    is_first = False
                await emit(event)

            done = await self._service.stream(plan, answer, told)
            self._tell(path, plan, answer, done, began)

        def ended(status: int) -> None:
            admission.close()
            self._count(path, status, began)

        return Events(run, ended, self._options.limits.seconds)

    def _count(self, path: str, status: int, began: float) -> None:
        route = path if not path.startswith("/v1/models/") else "/v1/models"
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(time.perf_counter() - began)
        log_answer("answer", route=route, status=status, seconds=time.perf_counter() - began)

    def _tell(self, path: str, plan: Plan, answer: Answer, done: list[Done], began: float) -> None:
        usage = answer.usage(done)
        for kind in ("prompt", "completion"):
            self._metrics.tokens.labels(kind).inc(usage[f"{kind}_tokens"])
        for one in done:
            self._metrics.waited.observe(one.row.waited)
        texts: dict[str, Any] = {}
        if self._options.logs_texts:
            given = [self._service.model.tokenizer.decode(r.tokens) for r in plan.requests]
            texts = {"prompts": given, "texts": [one.infilled or one.text for one in done]}
        waited = max(one.row.waited for one in done)
        log_answer(
            "done", id=answer.id, route=path, seconds=time.perf_counter() - began, waited=waited,
            is_stream=plan.is_stream, choices=len(done), **usage, **texts,
        )  # fmt: skip


async def _planned(make: Callable[[S], Plan], asked: S) -> Plan:
    """The plan of a request; where an automaton may have to be made, others go on meanwhile."""
    if asked.response_format is None and "structure" not in (asked.model_extra or {}):
        return make(asked)
    return await asyncio.to_thread(make, asked)


async def _unknown(request: Request, error: Exception) -> Response:
    """The error object of a path or method that is not there, with the headers of the status."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    code = HTTPStatus(error.status_code).name.lower()
    response = error_response(ApiError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response


async def _defect(request: Request, error: Exception) -> Response:
    """The error object of a defect, whose traceback is logged."""
    return error_response(ApiError(500, "the server has a defect; its log tells of it"))
