"""Sections of params.yaml: the label index, the choice of a champion, and serving it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from unidec.config.index_spec import IndexSpec
from unidec.config.section import (
    BelowOne,
    Conflict,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Section,
    matching,
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

    decides = ("index",)

    factory: str = "auto"
    """faiss factory string: Flat (exact), PQx4, HNSW32 or "IVF,PQx4" (docs/bundles.md); auto: by
    the number of labels; `unidec index tune` measures recall and speed
    """
    search: str = ""
    """faiss search settings, such as "nprobe=32,k_factor_rf=8" or efSearch=200; others have
    defaults
    """
    space: Literal["both", "de", "clf"] = "both"
    """which head's vectors are searched"""
    width: CountOrZero = 0
    """leading dimensions of each head's vectors that are served, one of loss.widths; 0: all
    """
    clf_weight: Positive | Literal["auto"] = 1.0
    """weight of the classifier's score; auto: tuned on validation"""
    clf_normalize: bool = True
    """true: the classifier's cosine (the paper); false: its raw score"""
    clf_prior: NonNegative = 0.0
    """how many training queries a row's prediction from the label's text counts as; 0: none"""
    knn_weight: NonNegative | Literal["auto"] = 0.0
    """weight of votes of similar training queries; 0: no votes"""
    knn_neighbours: Count = 100
    """number of most similar training queries that vote"""
    knn_by: Literal["model", "words"] = "model"
    """similarity of queries: model vectors, or TF-IDF of words"""
    knn_head: CountOrZero = 0
    """with fusion: first tokens of a text (title) also compared separately; 0: none"""
    fusion: bool = False
    """rank by a small network, trained on the validation split and used if better; requires both
    heads
    """
    objective: Literal["nDCG@5", "P@1", "PSP@5", "R@100"] = "nDCG@5"
    """validation metric that tuning maximises"""

    def conflicts(self) -> Iterator[Conflict]:
        try:
            IndexSpec.parse(self.factory, self.search)
        except ConfigError as error:
            yield Conflict(str(error.where), error.what, str(error.expected))

    @property
    def fuses(self) -> bool:
        """Whether labels are ranked by the fusion, which requires both heads."""
        return self.fusion and self.space == "both"


class Retrain(Section):
    """Which model a retraining starts from, and what it does after training."""

    start: Literal["auto", "warm", "cold"] = "auto"
    """warm: the champion; cold: from scratch; auto: warm if possible (docs/retraining.md)"""
    cold_every: CountOrZero = 10
    """with start auto: number of warm starts in a row before a cold one; 0: only the first is cold
    """
    promote: bool = True
    """promote a challenger that passes the gate"""
    push: bool = False
    """run `dvc push` at the end"""
    commit: Literal["none", "commit", "tag"] = "none"
    """commit dvc.lock and metrics to git; tag: also tag them"""


class Bound(NamedTuple):
    """A limit of a time or a size, as a multiple of the champion's and by itself; 0: none."""

    ratio: float
    own: float


def _in_unit(unit: str) -> BeforeValidator:
    """Refuses a bound in another form than "2x", "30 <unit>", "2x, 30 <unit>" or "off"."""
    number = r"\d+(\.\d+)?"
    return matching(
        rf"off|{number}x|({number}x, )?{number} {unit}",
        "bound",
        f'a multiple of the champion\'s, as in "2x", a limit, as in "30 {unit}", or both: '
        f'"2x, 30 {unit}"; or off',
    )


LoadBound = Annotated[str, _in_unit("s")]
LatencyBound = Annotated[str, _in_unit("ms")]
SizeBound = Annotated[str, _in_unit("MB")]


class Gate(Section):
    """Requirements that a challenger must meet to become champion, on the test split."""

    metric: Metric = "nDCG@5"
    """metric in which the challenger must lead"""
    margin: float = 0.0
    """required lead over the champion, in percentage points"""
    confidence: BelowOne = 0.9
    """required confidence of that lead, by a paired bootstrap; 0: not required"""
    tolerance: NonNegative = 0.5
    """maximum loss in each metric of gate.guarded, in percentage points"""
    guarded: list[Metric] = ["P@1", "PSP@5", "tail/R@10", "coverage@5"]
    """metrics to which gate.tolerance applies"""
    max_load: LoadBound = "2x"
    """maximum time until a fresh process answers: processor time as a multiple of the champion's
    (2x), seconds (60 s), both (2x, 60 s), or off
    """
    max_latency: LatencyBound = "2x"
    """maximum p95 of single queries: processor time as a multiple of the champion's (2x), latency
    (30 ms), both (2x, 30 ms), or off
    """
    max_size: SizeBound = "1.5x"
    """maximum size of the bundle: as a multiple of the champion's (1.5x), on disk (900 MB), both
    (1.5x, 900 MB), or off
    """
    probes: Count = 64
    """number of queries that a fresh process must answer"""
    allow_dirty: bool = False
    """also promote versions with uncommitted changes, or if git does not respond"""

    def bound(self, name: str) -> Bound:
        """The bound of one of the keys `max_...`."""
        ratio = own = 0.0
        for part in getattr(self, name).split(", "):
            if part.endswith("x"):
                ratio = float(part.removesuffix("x"))
            elif part != "off":
                own = float(part.partition(" ")[0])
        return Bound(ratio, own)

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

    warn: NonNegative = 0.1
    """largest change without a warning: relative change of a count, length or share, or
    Jensen-Shannon distance of two distributions
    """
    stop: NonNegative = 0.5
    """largest such change that does not stop a retraining"""
    min_window: Count = 200
    """minimum number of queries in a window; smaller windows are not checked"""


class Serve(Section):
    """Address, limits and behaviour of `unidec serve`."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0: all, then set an API key"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """port to listen on; 0: any free one"""
    hosts: list[str] = []
    """accepted names in the Host header, besides IP addresses and localhost; empty: no further
    names when listening on 127.0.0.1 without an API key, otherwise any
    """
    max_body_bytes: Count = 1_000_000
    """maximum size of a request body, in bytes"""
    max_queries: Count = 256
    """maximum queries per request"""
    max_query_chars: Count = 8000
    """maximum characters per query"""
    max_k: Count = 100
    """maximum labels per query"""
    max_filter_labels: Count = 10_000
    """maximum length of a request's list of allowed or denied labels"""
    max_connections: Count = 1024
    """maximum requests in progress; further ones are answered with 503 and Retry-After"""
    queue_queries: Count = 1024
    """maximum queries in the queue; further ones are answered with 503 and Retry-After"""
    timeout_seconds: Positive = 5.0
    """maximum time that a request waits; then it is answered with 503"""
    batch_queries: Count = 32
    """maximum queries that the model answers in one batch"""
    batch_wait_ms: NonNegative = 0.0
    """how long an idle model waits for more queries after a batch of several; a single query never
    waits. With 0, batches form only while the model is busy, which is as fast on a CPU; on a GPU 1
    or 2 may be faster
    """
    runtime: Literal["auto", "torch", "onnx", "onnx-int8"] = "auto"
    """runtime of the query encoder; auto: the fastest without loss of quality (docs/serving.md)"""
    threads: CountOrZero = 0
    """threads of encoder and search; 0: all usable cores, or fewer where that is faster"""
    cache_queries: CountOrZero = 10_000
    """number of answers cached for repeated queries; 0: none"""
    follow_seconds: NonNegative = 10.0
    """seconds between polls of the model alias in the registry; 0: no polling"""
    keep_previous: bool = True
    """keep the previous model in memory, so that a rollback takes effect at once"""
    api_key_env: str = "UNIDEC_API_KEY"
    """environment variable that holds the API key; unset: no key required"""
    feedback: Annotated[str, Field(pattern=r"(^|\.jsonl)$")] = ""
    """file (.jsonl) to which the page's buttons `relevant` and `not relevant` append; empty: no
    buttons
    """
    feedback_bytes: Count = 10_000_000
    """maximum size of that file in bytes; beyond it, feedback is rejected"""


class Tracking(Section):
    """Names of runs and models in MLflow; the environment variable MLFLOW_TRACKING_URI sets the
    tracking server.
    """

    experiment: Annotated[str, Field(pattern=r"^\S(.*\S)?$")] = "unidec"
    """name of the MLflow experiment"""
    model_name: Annotated[str, Field(pattern=r"^\w([\w. -]*\w)?$")] = "unidec"
    """name of the registered model"""
