"""Sections of params.yaml: the label index, the choice of a champion, and serving it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from unidec.config.index_spec import IndexSpec
from unidec.config.section import (
    BelowOne,
    Conflict,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Result,
    Section,
    Share,
    key,
)
from unidec.errors import ConfigError
from unidec.metric_names import metric_names


def _known_metric(name: str) -> str:
    known = metric_names()
    if name not in known:
        expected = " or ".join(f"'{one}'" for one in known)
        text = "a metric of outputs/metrics.json, such as nDCG@5, PSP@3, coverage@10 or tail/R@100"
        raise PydanticCustomError("metric", "{text}", {"text": text, "expected": expected})
    return name


Metric = Annotated[str, AfterValidator(_known_metric)]


class Index(Section):
    """The label index, and how the scores of both heads are combined."""

    decides: ClassVar[tuple[Result, ...]] = ("index",)

    factory: str = key(
        "Flat",
        'faiss factory string: Flat (exact), PQx4, HNSW32 or "IVF,PQx4" (docs/bundles.md); '
        "`unidec index tune` measures recall and speed",
    )
    search: str = key(
        "",
        'faiss search settings, such as "nprobe=32,k_factor_rf=8" or efSearch=200; those left '
        "out are chosen",
    )
    space: Literal["both", "de", "clf"] = key("both", "which head's vectors are searched")
    clf_weight: Positive | Literal["auto"] = key(
        1.0, "weight of the classifier's score; auto: tuned on validation"
    )
    clf_normalize: bool = key(
        True, "true: the classifier's cosine (the paper); false: its raw score"
    )
    knn_weight: NonNegative | Literal["auto"] = key(
        0.0, "weight of votes of similar training queries; 0: no votes"
    )
    knn_neighbours: Count = key(100, "number of most similar training queries that vote")
    knn_by: Literal["model", "words"] = key(
        "model", "similarity of queries: model vectors, or TF-IDF of words"
    )
    knn_head: CountOrZero = key(
        0, "with fusion: first tokens of a text (title) also compared separately; 0: none"
    )
    fusion: bool = key(
        False,
        "rank by a small network, trained on the validation split and used if better; "
        "requires both heads",
    )
    objective: Literal["nDCG@5", "P@1", "PSP@5", "R@100"] = key(
        "nDCG@5", "validation metric that tuning maximises"
    )

    def conflicts(self) -> Iterator[Conflict]:
        try:
            IndexSpec.parse(self.factory, self.search)
        except ConfigError as error:
            yield Conflict(str(error.where), error.what, str(error.expected))
        if self.fuses and self.knn_by != "words":
            yield Conflict(
                "index.fusion index.knn_by",
                "the fusion requires the votes by words",
                "index.knn_by: words, or index.fusion: false",
            )
        if self.knn_head and not self.fuses:
            yield Conflict(
                "index.knn_head index.fusion", "only the fusion uses it", "index.knn_head: 0"
            )

    @property
    def fuses(self) -> bool:
        """Whether labels are ranked by the fusion, which requires both heads."""
        return self.fusion and self.space == "both"


class Retrain(Section):
    """Which model a retraining starts from, and what it does after training."""

    start: Literal["auto", "warm", "cold"] = key(
        "auto", "warm: the champion; cold: from scratch; auto: see cold_every"
    )
    cold_every: CountOrZero = key(
        10, "start auto: warm starts in a row before a cold one; 0: only the first is cold"
    )
    promote: bool = key(True, "promote a challenger that passes the gate")
    push: bool = key(False, "run `dvc push` at the end")
    commit: Literal["none", "commit", "tag"] = key(
        "none", "commit dvc.lock and metrics to git; tag: also tag them"
    )


class Gate(Section):
    """Requirements that a challenger must meet to become champion, on the test split."""

    metric: Metric = key("nDCG@5", "metric in which the challenger must lead")
    margin: float = key(0.0, "required lead over the champion, in percentage points")
    confidence: BelowOne = key(
        0.9, "required confidence of that lead, by a paired bootstrap; 0: not required"
    )
    tolerance: NonNegative = key(
        0.5, "maximum loss in each metric of gate.guarded, in percentage points"
    )
    guarded: list[Metric] = key(
        ["P@1", "PSP@5", "tail/R@10", "coverage@5"], "metrics to which gate.tolerance applies"
    )
    max_latency_ms: NonNegative = key(
        0.0, "maximum p95 latency of single queries, in a fresh process; 0: no limit"
    )
    max_latency_ratio: NonNegative = key(
        2.0, "maximum p95 processor time, relative to the champion's; 0: no limit"
    )
    max_megabytes: NonNegative = key(0.0, "maximum size of the bundle; 0: no limit")
    max_size_ratio: NonNegative = key(
        1.5, "maximum size of the bundle, as a multiple of the champion's; 0: no limit"
    )
    max_load_seconds: NonNegative = key(
        0.0, "maximum time until a fresh process answers; 0: no limit"
    )
    max_load_ratio: NonNegative = key(
        2.0, "maximum processor time to load, relative to the champion's; 0: no limit"
    )
    probes: Count = key(64, "number of queries that a fresh process must answer")
    allow_dirty: bool = key(
        False, "also promote versions of which git does not say that all changes were committed"
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.confidence > 0 and "coverage@" in self.metric:
            yield Conflict(
                "gate.confidence gate.metric",
                "coverage has no value per query, so its confidence cannot be bootstrapped",
                "gate.confidence: 0, or another gate.metric with coverage among gate.guarded",
            )


class Drift(Section):
    """How far data, or a window of served queries, may drift from the data that the champion was
    trained on.
    """

    warn_change: NonNegative = key(
        0.1, "relative change of a count, a length or a share that triggers a warning"
    )
    stop_change: NonNegative = key(0.5, "relative change that stops a retraining")
    warn_distance: Share = key(
        0.1, "Jensen-Shannon distance between two distributions that triggers a warning"
    )
    stop_distance: Share = key(0.5, "Jensen-Shannon distance that stops a retraining")
    warn_shift: NonNegative = key(
        0.2, "shift of a window's mean embedding that warns, in deviations of single queries"
    )
    warn_low_score: Share = key(
        0.2, "share of a window's queries with a low top score that triggers a warning"
    )
    low_score_quantile: Annotated[float, Field(gt=0, lt=1)] = key(
        0.05,
        "a top score is low if it is below this quantile of the validation queries' top scores",
    )
    min_window: Count = key(
        200, "minimum number of queries in a window; smaller windows are not checked"
    )


class Serve(Section):
    """Address, limits and behaviour of `unidec serve`."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0: all, then set an API key")
    port: Annotated[int, Field(ge=0, le=65535)] = key(8080, "port to listen on; 0: any free one")
    hosts: list[str] = key(
        [],
        "accepted names in the Host header, besides IP addresses and localhost; empty: no "
        "further names when listening on 127.0.0.1 without an API key, otherwise any",
    )
    max_body_bytes: Count = key(1_000_000, "maximum size of a request body, in bytes")
    max_queries: Count = key(256, "maximum queries per request")
    max_query_chars: Count = key(8000, "maximum characters per query")
    max_k: Count = key(100, "maximum labels per query")
    max_filter_labels: Count = key(
        10_000, "maximum length of a request's list of allowed or denied labels"
    )
    max_connections: Count = key(
        1024, "maximum requests in progress; further ones are answered with 503 and Retry-After"
    )
    queue_queries: Count = key(
        1024, "maximum queries in the queue; further ones are answered with 503 and Retry-After"
    )
    timeout_seconds: Positive = key(
        5.0, "maximum time that a request waits; then it is answered with 503"
    )
    batch_queries: Count = key(32, "maximum queries that the model answers in one batch")
    batch_wait_ms: NonNegative = key(
        0.0,
        "how long an idle model waits for more queries after a batch of several; a single "
        "query never waits. With 0, "
        "queries gather only while the model is busy, which is as fast on a CPU; on a GPU 1 "
        "or 2 may be faster",
    )
    runtime: Literal["auto", "torch", "onnx", "onnx-int8"] = key(
        "auto",
        "runtime of the query encoder; auto: the fastest without loss of quality (docs/serving.md)",
    )
    threads: CountOrZero = key(0, "threads of encoder and search; 0: all of the machine")
    cache_queries: CountOrZero = key(
        10_000, "number of answers cached for repeated queries; 0: none"
    )
    follow_seconds: NonNegative = key(
        10.0, "seconds between polls of the model alias in the registry; 0: no polling"
    )
    keep_previous: bool = key(
        True, "keep the previous model in memory, so that a rollback takes effect at once"
    )
    api_key_env: str = key(
        "UNIDEC_API_KEY", "environment variable that holds the API key; unset: no key required"
    )
    feedback: Annotated[str, Field(pattern=r"(^|\.jsonl)$")] = key(
        "",
        "file (.jsonl) to which the page's buttons `relevant` and `not relevant` append; "
        "empty: no buttons",
    )
    feedback_bytes: Count = key(
        10_000_000, "maximum size of that file in bytes; beyond it, feedback is rejected"
    )


class Tracking(Section):
    """Names of runs and models in MLflow; the environment variable MLFLOW_TRACKING_URI sets the
    tracking server.
    """

    experiment: Annotated[str, Field(pattern=r"^\S(.*\S)?$")] = key(
        "unidec", "name of the MLflow experiment"
    )
    model_name: Annotated[str, Field(pattern=r"^\w([\w. -]*\w)?$")] = key(
        "unidec", "name of the registered model"
    )
