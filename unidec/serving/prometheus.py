"""The server's Prometheus metrics, in a registry per server, so that several servers in one process
do not mix.

Labels have few values: routes are those of `app.py` or "other"; facts about the model are in one
info metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from unidec.version import __version__

_MILLISECONDS = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 2000, 5000)
SECONDS = tuple(one / 1000 for one in _MILLISECONDS)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# a dual-encoder score is a cosine; the sum of all parts is up to about 3
SCORES = tuple(round(0.1 * i, 1) for i in range(-5, 41))


class _Live(NamedTuple):
    collect: Callable[[], Iterable[Any]]


class Metrics:
    """The server's counters; further collectors can be added to `registry`."""

    def __init__(self) -> None:
        disable_created_metrics()  # else a timestamp beside every counter
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        ours: Any = {"namespace": "unidec", "registry": self.registry}
        by_route = ("route", "status")
        self.requests = Counter("requests", "Requests answered", by_route, **ours)
        about = "Time from reading the request headers to writing the response"
        self.request_seconds = Histogram(
            "request_seconds", about, ("route",), buckets=SECONDS, **ours
        )
        about = "Requests answered with an error, by kind"
        self._errors = Counter("errors", about, ("kind",), **ours)
        self.in_flight = Gauge("in_flight_requests", "Requests being answered", **ours)
        self.batch_queries = Histogram("batch_queries", "Queries per batch", buckets=BATCH, **ours)
        about = "The model's time per batch"
        self.batch_seconds = Histogram("batch_seconds", about, buckets=SECONDS, **ours)
        self.queries = Counter("queries", "Queries answered, including from the cache", **ours)
        self.cache_hits = Counter("cache_hits", "Queries answered from the cache", **ours)
        self.cache_misses = Counter("cache_misses", "Queries not in the cache", **ours)
        about = "Score of each query's best label, both heads"
        self.best_score = Histogram("best_score", about, buckets=SCORES, **ours)
        self.empty = Counter("empty_answers", "Queries without any label in their answer", **ours)
        self.tokens = Counter("tokens", "Tokens of queries", **ours)
        about = "Tokens of queries that the tokenizer does not know"
        self.unknown_tokens = Counter("unknown_tokens", about, **ours)

    def error(self, kind: str) -> None:
        """Count an error."""
        self._errors.labels(kind).inc()

    def watch(self, current: Callable[[], Iterable[Any]]) -> None:
        """Add metric families that are read at each scrape."""
        self.registry.register(_Live(current))

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


def model_metrics(engine: Any, queue_queries: int) -> Iterable[Any]:
    """The queue's length and the model that answers.

    Args:
        engine: the current `Engine`; None if no model is loaded.
    """
    yield _gauge("queue_queries", "Queries waiting for the model", queue_queries)
    yield _gauge("ready", "1: a model is loaded", engine is not None)
    if engine is None:
        return
    identity = engine.identity
    facts = {
        "sha256": identity.sha256,
        "name": identity.name or "",
        "version": identity.version or "",
        "alias": identity.alias or "",
        "runtime": engine.runtime,
        "unidec": __version__,
    }
    yield InfoMetricFamily("unidec_model", "The current model", facts)
    yield _gauge("model_labels", "Labels of the current model", engine.bundle.num_labels)


def follow_metrics(state: dict[str, Any]) -> Iterable[Any]:
    """Metrics of a `Follower`, from its `state()`."""
    counts = {"swaps": "Swaps of the serving model", "refusals": "Versions that were refused"}
    for name, about in counts.items():
        yield CounterMetricFamily(f"unidec_follow_{name}", about, value=state[name])
    age = state["looked_seconds_ago"]
    is_up = state["registry"] == "up"
    is_refused = state["refused"] is not None
    yield _gauge("follow_registry_up", "1: the registry responded to the last poll", is_up)
    yield _gauge("follow_refused", "1: the version that the alias names was refused", is_refused)
    if age is not None:
        about = "Seconds since the last poll of the registry"
        yield _gauge("follow_look_age_seconds", about, age)


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"unidec_{name}", about, value=float(value))
