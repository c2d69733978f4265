"""The HTTP application: routes, their rows, and Prometheus metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import dlm_jax
from dlm_jax import AsyncEngine, Counters, Engine, Request, Row, Status
from dlm_jax.inference.results import TextReader
from dlm_jax.serving.answer import Answer, Done
from dlm_jax.serving.http import (
    LOGGER,
    Emit,
    Events,
    Json,
    check_key,
    error_response,
    log_answer,
    parsed,
    read_body,
    stopping,
    while_connected,
)
from dlm_jax.serving.protocol import (
    ApiError,
    Chat,
    Completion,
    Infill,
    Options,
    Planner,
    SamplingFields,
    refused,
)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics(prometheus_client.registry.Collector):
    """The metrics of a server; those of the engine are collected at each scrape."""

    def __init__(self, engine: Engine):
        self._engine, self._registry = engine, prometheus_client.CollectorRegistry()
        names = {"registry": self._registry, "namespace": "dlm_jax"}
        self.requests = prometheus_client.Counter(
            "requests", "Requests answered.", ("route", "status"), **names
        )
        self.seconds = prometheus_client.Histogram(
            "request_seconds", "Seconds per answer.", ("route",), buckets=_SECONDS, **names
        )
        self.waited = prometheus_client.Histogram(
            "waited_seconds", "Seconds that a row waited in the queue.", buckets=_SECONDS, **names
        )
        self.tokens = prometheus_client.Counter(
            "tokens", "Prompt and generated tokens.", ("kind",), **names
        )
        self._registry.register(self)

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        report = self._engine.report()
        gauges = {
            "rows_running": ("Running rows.", report.running),
            "rows_waiting": ("Rows waiting for a slot.", report.waiting),
            "slots": ("Slots of the running programs.", report.slots),
            "programs": ("Compiled programs in the cache.", len(report.programs)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"dlm_jax_{name}", text, value)
        counts = {"rows": "Finished rows.", "steps": "Steps of rows.", **Counters.helps()}
        for name, text in counts.items():
            value = getattr(report if name in ("rows", "steps") else report.counters, name)
            yield CounterMetricFamily(f"dlm_jax_{name}", text, value)


class _Group(asyncio.TaskGroup):
    """A task group that raises its first error instead of an exception group."""

    async def __aexit__(self, *exception: Any) -> bool | None:
        try:
            return await super().__aexit__(*exception)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


def _check(row: Row) -> None:
    if row.status is Status.FAILED:
        raise ApiError(500, f"the row failed: {row.error}", code="failed")
    if row.status is Status.NON_FINITE:
        raise ApiError(500, "the model's logits are not finite", code="non_finite")
    if row.status is Status.CANCELLED:
        raise ApiError(503, "the server is shutting down", code="cancelled")


_GONE = 499
_THREADS = 8
"""Number of requests that are converted to rows at the same time."""

T = TypeVar("T")
_END_POINTS: dict[str, type[SamplingFields]] = {
    fields.route: fields for fields in (Completion, Chat, Infill)
}


def make_app(engine: AsyncEngine, options: Options) -> Starlette:
    """Creates the application, which runs the engine, and closes it at the end."""
    server = _Server(engine, options)
    routes = [
        Route("/health", server.health),
        Route("/metrics", server.kept(server.metrics_text)),
        Route("/v1/models", server.kept(server.models)),
        Route("/v1/models/{name:path}", server.kept(server.models)),
        *(
            Route(path, server.kept(functools.partial(server.texts, fields)), methods=["POST"])
            for path, fields in _END_POINTS.items()
        ),
    ]
    hosts = list(options.hosts) or ["*"]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
        lifespan=server.lifespan,
        exception_handlers={HTTPException: _unknown, Exception: _defect},
    )


class _Server:
    """The handlers of the routes, and the rows that run for them."""

    def __init__(self, engine: AsyncEngine, options: Options):
        self._model, self._engine, self._options = engine.engine.model, engine, options
        self._planner = Planner(self._model, options)
        self._num_rows, self._capacity = 0, engine.engine.sizes[-1] + options.max_waiting
        self._metrics = Metrics(engine.engine)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="requests")
        self._began, self._is_warm, self._is_ending = int(time.time()), False, False

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Runs the engine while programs for common requests are compiled in a thread."""
        async with self._engine:
            warming = asyncio.create_task(asyncio.to_thread(self._warm_up))
            try:
                yield
            finally:
                self._threads.shutdown(wait=False, cancel_futures=True)
                self._is_ending = True  # a compilation cannot be interrupted
                await warming

    def _warm_up(self) -> None:
        """Compiles the programs of ordinary requests, those of lone requests first."""
        if not self._options.warms_up:
            return
        engine, usual, is_warm = self._engine.engine, list(self._planner.usual()), True
        for num_rows in engine.sizes:
            for request in usual:
                if self._is_ending:
                    return
                try:
                    engine.warm_up(request, num_rows=num_rows)
                except Exception:  # requests that need this program will report the error
                    LOGGER.exception("warm up")
                    is_warm = False
        self._is_warm = is_warm

    def kept(
        self, answer: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Wraps a handler in a route that checks the key, counts requests, and returns errors as
        objects.
        """

        async def route(request: HttpRequest) -> Response:
            began = time.perf_counter()
            try:
                check_key(request, self._options.key)
                response = await answer(request)
            except ApiError as error:
                response = error_response(error)
            except RecursionError:
                response = error_response(refused("the body is nested too deeply", None))
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except asyncio.CancelledError:  # the grace period is over; answer with an error
                response = error_response(stopping())
            if not isinstance(response, Events):
                self._count(request.url.path, response.status_code, began)
            return response

        return route

    async def health(self, request: HttpRequest) -> Response:
        is_fine = self._engine.is_running
        body: dict[str, Any] = {
            "status": "ok" if is_fine else "failed",
            "model": self._options.name,
        }
        body |= {"version": dlm_jax.__version__, "is_warm": self._is_warm}
        return Json(body, 200 if is_fine else 503)

    async def metrics_text(self, request: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        """Returns the model object, or a list that contains it."""
        name = request.path_params.get("name")
        told = {
            "id": self._options.name,
            "object": "model",
            "created": self._began,
            "owned_by": "dlm_jax",
            "max_model_len": self._model.max_length,
        }
        if name is None:
            return Json({"object": "list", "data": [told]})
        self._planner.check_model(name)
        return Json(told)

    async def texts(self, fields: type[SamplingFields], request: HttpRequest) -> Response:
        body = await read_body(request)
        path, began = request.url.path, time.perf_counter()
        seconds = self._options.max_seconds
        # A structure can take seconds to compile.
        with self._admitted(1):
            planning = self._run(lambda: self._planner.answer(parsed(fields, body)))
            answer = await while_connected(request.receive, seconds, planning)
        if answer.asked.stream:
            return self._events(answer, path, began)
        with self._admitted(len(answer.requests)):
            work, spent = self._texts(answer), time.perf_counter() - began
            done = await while_connected(request.receive, seconds, work, spent=spent)
        self._tell(path, answer, done, began)
        return Json(answer.whole(done))

    async def _run(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def _events(self, answer: Answer, path: str, began: float) -> Response:
        admission = contextlib.ExitStack()
        admission.enter_context(self._admitted(len(answer.requests)))

        async def run(emit: Emit) -> None:
            self._tell(path, answer, await self._texts(answer, emit), began)

        def ended(status: int) -> None:
            admission.close()
            self._count(path, status, began)

        spent = time.perf_counter() - began
        return Events(run, ended, self._options.max_seconds, spent)

    def _count(self, path: str, status: int, began: float) -> None:
        route = path if not path.startswith("/v1/models/") else "/v1/models"
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(time.perf_counter() - began)
        log_answer("answer", route=route, status=status, seconds=time.perf_counter() - began)

    def _tell(self, path: str, answer: Answer, done: list[Done], began: float) -> None:
        usage = answer.usage(done)
        for kind in ("prompt", "completion"):
            self._metrics.tokens.labels(kind).inc(usage[f"{kind}_tokens"])
        for one in done:
            self._metrics.waited.observe(one.row.waited)
        waited = max(one.row.waited for one in done)
        log_answer(
            "done",
            id=answer.id,
            route=path,
            seconds=time.perf_counter() - began,
            waited=waited,
            is_stream=bool(answer.asked.stream),
            choices=len(done),
            **usage,
        )

    @contextlib.contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        """Reserves `count` rows within the context."""
        if self._num_rows + count > self._capacity:
            raise ApiError(
                429,
                f"{self._num_rows} rows are running or waiting, and the limit is {self._capacity}; "
                f"try again later",
                code="overloaded",
            )
        self._num_rows += count
        try:
            yield
        finally:
            self._num_rows -= count

    async def _texts(self, answer: Answer, emit: Emit | None = None) -> list[Done]:
        """Runs the choices of an answer; `emit` sends the events of a stream."""
        if emit is not None:
            for event in answer.begin():
                await emit(event)
        async with _Group() as group:
            tasks = [
                group.create_task(self._text(answer, index, request, emit))
                for index, request in enumerate(answer.requests)
            ]
        done = [task.result() for task in tasks]
        if emit is not None:
            for event in answer.end(done):
                await emit(event)
        return done

    async def _text(self, answer: Answer, index: int, request: Request, emit: Emit | None) -> Done:
        reader = answer.reader(self._model, request)
        if emit is None and not answer.stops and not answer.stop_ids:
            row = await self._engine.row(request)
            _check(row)
            return self._done(answer, request, reader, row)
        async with contextlib.aclosing(self._engine.watch(request)) as rows:
            async for row in rows:
                _check(row)
                pieces = reader.pieces(row)
                is_over = bool(pieces) and pieces[-1].is_last
                done = self._done(answer, request, reader, row) if is_over else None
                if emit is not None:
                    for event in answer.grown(index, row, pieces, done):
                        await emit(event)
                if done is not None:
                    return done
        raise AssertionError("a row that does not end")

    def _done(self, answer: Answer, request: Request, reader: TextReader, row: Row) -> Done:
        """Returns a finished choice. The row can still be running."""
        text, places, is_stopped = reader.whole(row)
        structure: Any = request.sample.structure
        if structure and not structure.accepts(row.tokens[reader.start : places.stop]):
            raise ApiError(500, "the text violates its structure", code="structure")
        if not reader.is_infill and not answer.is_infill:
            return Done(text, row, places, is_stopped, prompt_tokens=reader.start)
        filled = tuple(reader.filled(row))
        infilled = self._model.tokenizer.decode(row.tokens)
        given = int(row.is_frozen.sum())
        return Done(text, row, places, True, filled, infilled, prompt_tokens=given)


async def _unknown(request: HttpRequest, error: Exception) -> Response:
    """Returns the error object for an unknown path or method, with the exception's headers."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    code = HTTPStatus(error.status_code).name.lower()
    response = error_response(ApiError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response


async def _defect(request: HttpRequest, error: Exception) -> Response:
    """Returns the error object for a bug, whose traceback is logged."""
    return error_response(ApiError(500, "internal server error; see the log of the server"))
