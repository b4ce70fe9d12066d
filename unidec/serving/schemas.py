"""Schemas of requests and answers: pydantic checks requests, OpenAPI shows both.

Request models contain the limits of section `serve`, so they are created for each server. Answers
are assembled as bytes, once per query, so that the cache holds bytes, and are not checked again:
their models here are documentation, which tests keep up to date."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from unidec.bundle.bundle_model import evenly_spaced
from unidec.config import Serve
from unidec.data.tokens import is_blank
from unidec.serving.request_error import RequestError, wrong_values
from unidec.version import __version__

if TYPE_CHECKING:
    from unidec.bundle.answer import Explanation, TrainingQuery
    from unidec.bundle.bundle import Bundle
from unidec.ranking.ranker import Prediction

Head = Literal["both", "de", "clf"]
Uid = Annotated[str, Field(min_length=1)]
DEFAULT_K = 5
MAX_KEYS = 50  # of a body
# more than a valid body has, so that a list slightly too long gets an error that names it
_MORE_TOKENS = 4096
_TOKEN = rb'[^"\[{,]*+(?:"(?:[^"\\]++|\\.)*+"|[\[{,])'  # a JSON string, or up to one of [ { ,
NUM_EXAMPLES = 6
LABELS_SHOWN = 10  # of a training query
MAX_TEXT = 500  # characters of an example
NO_WEIGHTS = {"de": 0.0, "clf": 0.0, "knn": 0.0}  # of parts that a score does not have
LIMITS = ("max_k", "max_query_chars", "max_queries", "max_filter_labels")


class RequestBase(BaseModel):
    """Base of all requests; `too_many` matches a body with more values than any valid request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    too_many: ClassVar[re.Pattern[bytes]]


class RequestModels(NamedTuple):
    """Request models of one server; the first two have k, allow, deny, min_score, head and tail."""

    predict: type[RequestBase]
    explain: type[RequestBase]
    feedback: type[RequestBase]


PREDICT_EXAMPLE = {"queries": ["editor for plain text", "a window manager"], "k": 5}
EXPLAIN_EXAMPLE = {"query": "editor for plain text", "k": 5}
FEEDBACK_EXAMPLE = {"query": "editor for plain text", "label": "L7", "relevant": True}


# invisible characters below U+10000 (`tokens.is_blank`): the inside of a character class in
# regular expressions of Python, Rust or ECMAScript
INVISIBLE = (
    r"\x00-\x20\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e"
    r"\u2000-\u200f\u2028-\u202f\u205f-\u2064\u2066-\u206f\u3000\ufeff\ufff9-\ufffb"
)


def request_models(settings: Serve) -> RequestModels:
    """The request models with a server's limits."""
    has_visible: Any = {"pattern": f"[^{INVISIBLE}]"}  # for OpenAPI; `_not_blank` checks
    characters = Field(max_length=settings.max_query_chars, json_schema_extra=has_visible)
    texts = Field(min_length=1, max_length=settings.max_queries, fail_fast=True)
    uids = Field(max_length=settings.max_filter_labels, fail_fast=True)
    tokens = 2 * (settings.max_queries + 2 * settings.max_filter_labels) + _MORE_TOKENS
    Text: TypeAlias = Annotated[str, characters, AfterValidator(_not_blank)]
    Uids: TypeAlias = Annotated[list[Uid], uids]

    class Limited(RequestBase):
        too_many = re.compile(b"(?:%b){%d}+" % (_TOKEN, tokens), re.DOTALL)

    class Options(Limited):
        k: Annotated[int, BeforeValidator(_whole)] = Field(
            min(DEFAULT_K, settings.max_k),
            ge=1,
            le=settings.max_k,
            description="labels per query; fewer if the filters leave fewer",
        )
        allow: Uids | None = Field(
            None,
            description="uids: only these labels may be returned; unknown ones are ignored and "
            "counted",
        )
        deny: Uids = Field([], description="uids: these labels are never returned")
        min_score: float | None = Field(None, description="labels with a lower score are dropped")
        head: Head = Field(
            "both",
            description="rank by both heads (the bundle's ranking), the dual encoder, or the "
            "classifier",
        )
        tail: float = Field(
            0.0,
            ge=-10,
            le=10,
            description="above 0 ranks rare labels higher; only with a learnt fusion",
        )

    class PredictRequest(Options):
        queries: Annotated[list[Text], texts] = Field(description="queries")

    class ExplainRequest(Options):
        query: Text = Field(description="query")

    class FeedbackRequest(Limited):
        query: Text
        label: Uid = Field(description="uid")
        relevant: bool

    return RequestModels(PredictRequest, ExplainRequest, FeedbackRequest)


def _not_blank(text: str) -> str:
    """Reject a text of invisible characters only."""
    if is_blank(text):
        raise PydanticCustomError("blank", "a text that is not blank")
    return text


def _whole(value: Any) -> Any:
    """Accept 5.0 as an integer, as JSON Schema does."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def parse_request(model: Any, body: bytes) -> Any:
    """A request's body as an instance of `model`.

    Raises:
        RequestError: 400: not UTF-8, not JSON, nested too deep, too many values, or NaN; 422: the
            body does not match the model.
    """
    # takes a millisecond; parsing 300,000 lists would take a hundred, and 20 MB
    if model.too_many.match(body):
        raise _broken("the body has too many values", "body", f"{len(body)} bytes")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _broken(
            f"the body is not JSON: {error.msg}",
            f"line {error.lineno}, column {error.colno}",
            error.doc[error.pos : error.pos + 20],
        ) from None
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise _broken("the body has too many keys", "body", f"{len(value)} keys")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise wrong_values(error.errors(include_url=False)) from None


def _broken(what: str, where: str, got: str) -> RequestError:
    return RequestError(
        400,
        "broken_json",
        what,
        where=where,
        got=got,
        expected='JSON such as {"queries": ["a text"]}',
        fix="send a body as described in GET /openapi.json",
    )


class _Answer(BaseModel):
    """Documents an answer; other keys are an error."""

    model_config = ConfigDict(extra="forbid")


class Error(_Answer):
    what: str
    where: str
    got: str
    expected: str
    fix: str


class Model(_Answer):
    """Which bundle answered."""

    sha256: str
    version: str | None


class Label(_Answer):
    """A label and its score; parts that the bundle does not have are null."""

    uid: str
    title: str
    score: float
    probability: float | None = Field(
        description="probability that the label is relevant, by its score, as measured on the "
        "validation split; null if the bundle does not have it, with another `head` than both, "
        "or with a `tail`"
    )
    de: float | None = Field(description="the dual encoder's own score, before its weight")
    clf: float | None = Field(description="the classifier's own score, before its weight")
    knn: float | None = Field(description="votes of similar training queries, before their weight")


class QueryAnswer(_Answer):
    """The labels of one query, best first."""

    labels: list[Label]
    unknown_tokens: int = Field(description="tokens that the tokenizer does not know")
    unknown_filters: int = Field(description="allowed and denied uids that no label has")


class PredictAnswer(_Answer):
    """One entry per query, in the order of the request."""

    model: Model
    predictions: list[QueryAnswer]


class ErrorAnswer(_Answer):
    """Every answer of the application that is not 2xx; unknown parts are empty strings."""

    error: Error


Facts = dict[str, Any]  # all other answers: docs/serving.md


class Answer(NamedTuple):
    """The answer to one query, and its figures for the metrics.

    Attributes:
        json: {"labels", "unknown_tokens", "unknown_filters"}.
        best: score of the best label; None if there is no label.
        num_tokens, unknown_tokens: of the query.
    """

    json: bytes
    best: float | None
    num_tokens: int
    unknown_tokens: int


def answer_of(prediction: Prediction) -> Answer:
    """The answer to one query."""
    best = prediction.scores[0] if prediction.scores else None
    return Answer(
        orjson.dumps(_facts(prediction)), best, prediction.num_tokens, prediction.unknown_tokens
    )


def predict_json(model: bytes, answers: Sequence[bytes]) -> bytes:
    """The body of POST /predict, from the JSON of the model and of each query's answer."""
    return b'{"model":%b,"predictions":[%b]}' % (model, b",".join(answers))


def explain_json(model: bytes, explanation: Explanation) -> bytes:
    """The body of POST /explain."""
    facts = _facts(explanation.prediction)
    facts["weights"] = NO_WEIGHTS | explanation.weights
    facts["nearest"] = [_near(near) for near in explanation.neighbours or ()]
    facts["tokens"] = [
        {"piece": token.text, "unknown": token.unknown}
        for token in explanation.tokens
        if not token.special
    ]
    facts["truncated"] = explanation.cut
    return b'{"model":%b,%b' % (model, orjson.dumps(facts)[1:])


def _near(near: TrainingQuery) -> dict[str, Any]:
    labels = [{"uid": uid, "title": title} for uid, title in near.labels[:LABELS_SHOWN]]
    return asdict(near) | {"labels": labels}


def _facts(prediction: Prediction) -> dict[str, Any]:
    missing: list[None] = [None] * len(prediction.labels)
    columns = {
        "uid": prediction.labels,
        "title": prediction.titles,
        "score": prediction.scores,
        "probability": prediction.probabilities or missing,
        "de": prediction.de_scores or missing,
        "clf": prediction.clf_scores or missing,
        "knn": prediction.knn_scores or missing,
    }
    rows = zip(*columns.values(), strict=True)
    return {
        "labels": [dict(zip(columns, row, strict=True)) for row in rows],
        "unknown_tokens": prediction.unknown_tokens,
        "unknown_filters": prediction.unknown_labels,
    }


def card(bundle: Bundle, settings: Serve) -> dict[str, Any]:
    """Facts about a bundle for the page; the server adds model, runtime, api_key and feedback."""
    info = bundle.info
    # queries of the data
    texts = bundle.titles if bundle.neighbours is None else bundle.neighbours.titles
    return {
        "unidec": __version__,
        "index": {"kind": info.index_kind, "width": info.width},
        "encoder": _at(info.params, "encoder", "name"),
        "recipe": _at(info.params, "recipe"),
        "data": {
            "name": _at(info.dataset, "name"),
            "sha256": _at(info.dataset, "sha256"),
            "rows": _at(info.card, "profile", "rows"),
        },
        "num_labels": bundle.num_labels,
        "num_neighbours": info.knn.num_queries if info.knn else 0,
        "text": info.text,
        "heads": [name for name in ("de", "clf") if name in info.vectors],
        "space": info.space,
        "weights": NO_WEIGHTS | info.weights(),
        "fused": info.fusion is not None,
        "metrics": info.metrics,
        "score_quantiles": _at(info.card, "profile", "served", "score_quantiles"),
        "examples": [text[:MAX_TEXT] for text in evenly_spaced(texts, NUM_EXAMPLES)],
        "limits": {name: getattr(settings, name) for name in LIMITS},
    }


def _at(facts: Any, *keys: str) -> Any:
    """A value in a bundle's free-form facts; None if missing."""
    for key in keys:
        facts = facts.get(key) if isinstance(facts, dict) else None
    return facts
