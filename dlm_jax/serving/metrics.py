"""Figures for Prometheus: requests, tokens, times, and what the engine is at."""

from __future__ import annotations

from collections.abc import Iterable

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dlm_jax.inference.engine import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The figures of one server.

    Attributes:
      requests: answered, by route and status.
      seconds: that answers took, by route.
      first: seconds to the first event of a stream.
      waited: seconds that rows waited for a slot.
      tokens: given and written, by kind.
    """

    def __init__(self, engine: Engine):
        self._registry = prometheus_client.CollectorRegistry()
        names = {"registry": self._registry, "namespace": "dlm_jax"}
        self.requests = prometheus_client.Counter(
            "requests", "Requests answered.", ("route", "status"), **names
        )
        self.seconds = prometheus_client.Histogram(
            "request_seconds", "Time of an answer.", ("route",), buckets=_SECONDS, **names
        )
        self.first = prometheus_client.Histogram(
            "first_event_seconds", "Time to the first event.", buckets=_SECONDS, **names
        )
        self.waited = prometheus_client.Histogram(
            "waited_seconds", "Time of a row in the queue.", buckets=_SECONDS, **names
        )
        self.tokens = prometheus_client.Counter(
            "tokens", "Tokens given and written.", ("kind",), **names
        )
        self._registry.register(_EngineFigures(engine))

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return prometheus_client.generate_latest(self._registry)


class _EngineFigures(prometheus_client.registry.Collector):
    """What the engine is at, read when it is asked for."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        report = self._engine.report()
        gauges = {
            "rows_running": ("Rows that run.", report.running),
            "rows_waiting": ("Rows that wait for a slot.", report.waiting),
            "slots": ("Rows that could run now.", report.slots),
            "programs": ("Compiled programs that are kept.", len(report.programs)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"dlm_jax_{name}", text, value)
        counts = {
            "rows": "Rows that have ended.", "forwards": "Forwards of the model.",
            "steps": "Steps of rows.", "waves": "Waves of wavefront fills.",
            "bootstrapped": "Positions that the LM head drew in wavefront fills.",
            "filled": "Candidates that were drawn.",
        }  # fmt: skip
        for name, text in counts.items():
            value = getattr(report.work, name)
            yield CounterMetricFamily(f"dlm_jax_{name}", text, value)
