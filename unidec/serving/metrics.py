"""What the server counts, for Prometheus: in a registry of its own, so that several servers in one process do not mix.

Labels have few values: routes are those of `app.py` or "other", a model's facts stand in one info metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

from unidec import __version__

if TYPE_CHECKING:
    from unidec.serving.service import Engine

SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCORES = tuple(round(0.1 * i, 1) for i in range(-5, 41))  # de is a cosine; with the classifier and votes up to 3 or so

Row = tuple[str, int]


class Metrics:
    """The server's own figures; `registry` takes more.

    Attributes:
        registry: what /metrics shows.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # a time beside every counter: twice the lines, and nobody reads them
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        kept: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("unidec_requests", "Requests answered", ["route", "status"], **kept)
        self._seconds = Histogram(
            "unidec_request_seconds", "From head read to answer written", ["route"], buckets=SECONDS, **kept
        )
        self._errors = Counter("unidec_errors", "Requests answered with an error, by kind", ["kind"], **kept)
        self.in_flight = Gauge("unidec_in_flight_requests", "Requests being answered", **kept)
        self.batch_queries = Histogram("unidec_batch_queries", "Queries answered together", buckets=BATCH, **kept)
        self.batch_seconds = Histogram("unidec_batch_seconds", "The model's time for them", buckets=SECONDS, **kept)
        self.queries = Counter("unidec_queries", "Queries answered, also from the cache", **kept)
        self.cache_hits = Counter("unidec_cache_hits", "Queries answered from the cache", **kept)
        self.cache_misses = Counter("unidec_cache_misses", "Queries that the cache did not hold", **kept)
        self.best_score = Histogram(
            "unidec_best_score", "Score of each query's best label, both heads", buckets=SCORES, **kept
        )
        self.empty = Counter("unidec_empty_answers", "Queries without any label in their answer", **kept)
        self.tokens = Counter("unidec_tokens", "Tokens of queries", **kept)
        self.unknown_tokens = Counter("unidec_unknown_tokens", "Those that the tokenizer does not know", **kept)
        self.dropped = Counter(
            "unidec_dropped_queries", "Queries not answered: the client went, or time was up", **kept
        )
        self._of_route: dict[Row, tuple[Any, Any]] = {}

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        key = (route, status)
        if (found := self._of_route.get(key)) is None:  # `labels` costs more than the counting
            found = self._of_route[key] = (self._requests.labels(route, str(status)), self._seconds.labels(route))
        found[0].inc()
        found[1].observe(seconds)

    def error(self, kind: str) -> None:
        """Count an error."""
        self._errors.labels(kind).inc()

    def watch(self, queue: Callable[[], int], engine: Callable[[], Engine | None]) -> None:
        """Show the queue's length and the model that answers, as they are when somebody looks."""
        self.registry.register(_Now(queue, engine))

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Now:
    """Figures that are read, not counted."""

    def __init__(self, queue: Callable[[], int], engine: Callable[[], Engine | None]) -> None:
        self.queue, self.engine = queue, engine

    def collect(self) -> Iterable[Any]:
        engine = self.engine()
        yield GaugeMetricFamily("unidec_queue_queries", "Queries that wait for the model", self.queue())
        yield GaugeMetricFamily("unidec_ready", "1: a model answers", float(engine is not None))
        if engine is None:
            return
        identity = engine.identity
        facts = {"sha256": identity.sha256, "runtime": engine.runtime, "unidec": __version__}
        facts |= {name: getattr(identity, name) or "" for name in ("name", "version", "alias")}
        yield InfoMetricFamily("unidec_model", "What answers", facts)
        yield GaugeMetricFamily("unidec_model_labels", "Labels it knows", engine.bundle.num_labels)
