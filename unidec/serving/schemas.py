"""What requests may hold, and what answers hold: checked by pydantic, shown by OpenAPI.

Requests are read with limits of section `serve`, so their models are made for each server. Answers are written by hand
(`answers.py`) and never checked again: their models here are documentation, and tests hold the two together.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from unidec.sections import Serve
from unidec.serving.errors import RequestError, wrong_values

Head = Literal["both", "de", "clf"]
Uid = Annotated[str, Field(min_length=1)]  # a bound, so that pydantic reads the text: lone surrogates are refused
DEFAULT_K = 5
MAX_KEYS, MAX_OBJECTS = 50, 100  # of one object; in a body, whose right form is one object of few keys
MAX_PARTS = 1000  # lists, objects and keys of a body: no request has ten
LOOKED_AT_FROM = 16_384  # bytes of a body whose parts are counted before it is read: fewer are read in a millisecond


def _whole(value: Any) -> Any:
    """To JSON Schema 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PredictBase(_Strict):
    """Queries, and what all of them ask for."""

    queries: list[str]
    k: int
    allow: list[str] | None
    deny: list[str]
    min_score: float | None
    head: Head


class ExplainBase(_Strict):
    """As `PredictBase`, of one query."""

    query: str
    k: int
    allow: list[str] | None
    deny: list[str]
    min_score: float | None
    head: Head


@dataclass(frozen=True)
class RequestModels:
    """The models of one server."""

    predict: type[PredictBase]
    explain: type[ExplainBase]


PREDICT_EXAMPLE = {"queries": ["editor for plain text", "a window manager"], "k": 5}
EXPLAIN_EXAMPLE = {"query": "editor for plain text", "k": 5}
PREDICT_ANSWER_EXAMPLE: dict[str, Any] = {
    "model": {"sha256": "a807b287425b62ebdd541a8e83d1d01750084ddb89f0cf09d382cdbf50323ff1", "version": "7"},
    "predictions": [
        {
            "labels": [
                {"uid": "vim", "title": "vim: editor", "score": 1.87, "de": 0.61, "clf": 0.9, "knn": None},
                {"uid": "nano", "title": "nano: small editor", "score": 1.52, "de": 0.58, "clf": 0.67, "knn": None},
            ],
            "unknown_tokens": 0,
            "unknown_filters": 0,
        }
    ],
}


def request_models(settings: Serve) -> RequestModels:
    """The models with a server's limits."""
    text: Any = Annotated[str, Field(max_length=settings.max_query_chars, pattern=r"\S")]
    queries: Any = Annotated[list[text], Field(min_length=1, max_length=settings.max_queries, fail_fast=True)]
    uids: Any = Annotated[list[Uid], Field(max_length=settings.max_filter_labels, fail_fast=True)]
    about = {
        "k": "labels for each query; where fewer are left, fewer come back",
        "allow": "uids: only these labels may be returned; unknown ones are ignored and counted",
        "deny": "uids: these labels are never returned",
        "min_score": "labels that score less are left out",
        "head": "which half of the model scores: both (the bundle's own ranking), the dual encoder, or the classifier",
    }
    default_k = min(DEFAULT_K, settings.max_k)
    shared: dict[str, Any] = {
        "k": (
            Annotated[int, Field(ge=1, le=settings.max_k, description=about["k"]), BeforeValidator(_whole)],
            default_k,
        ),
        "allow": (Annotated[uids | None, Field(description=about["allow"])], None),
        "deny": (Annotated[uids, Field(description=about["deny"])], Field(default_factory=list)),
        "min_score": (Annotated[float | None, Field(description=about["min_score"])], None),
        "head": (Annotated[Head, Field(description=about["head"])], "both"),
    }
    of_predict: dict[str, Any] = {"queries": (Annotated[queries, Field(description="texts to label")], ...), **shared}
    of_explain: dict[str, Any] = {"query": (Annotated[text, Field(description="text to label")], ...), **shared}
    predict = create_model("PredictRequest", __base__=PredictBase, __doc__=PredictBase.__doc__, **of_predict)
    explain = create_model("ExplainRequest", __base__=ExplainBase, __doc__=ExplainBase.__doc__, **of_explain)
    return RequestModels(predict, explain)


def body_schema(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """`requestBody` of OpenAPI."""
    schema = model.model_json_schema() | {"examples": [example]}
    return {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}


def read_json(body: bytes) -> Any:
    """A request's JSON.

    Raises:
        RequestError: 400: not UTF-8, not JSON, NaN or Infinity, a key that stands twice, too deep, or more lists,
            objects or keys than any request has (making each of 300,000 would hold up all others).
    """
    if len(body) > LOOKED_AT_FROM and _has_many_parts(body):
        got = f"more than {MAX_PARTS} lists, objects and keys"
        raise _broken("the body is not a request: more parts than any has", "body", got)
    num_objects = 0

    def one(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_objects
        num_objects += 1
        if num_objects > MAX_OBJECTS or len(pairs) > MAX_KEYS:
            raise ValueError("more objects or keys than any request has")
        return _once(pairs)

    collects = gc.isenabled()
    gc.disable()  # 330,000 empty lists fit into a body: looking for circles among them takes longer than reading them
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=one, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _broken("the body is not UTF-8", f"byte {error.start}", "", "UTF-8") from error
    except json.JSONDecodeError as error:
        got = error.doc[error.pos : error.pos + 20] or "its end"
        raise _broken(
            f"the body is not JSON: {error.msg}", f"line {error.lineno}, column {error.colno}", got
        ) from error
    except RecursionError as error:
        raise _broken("JSON within JSON, too deep", "body", "") from error
    except ValueError as error:  # of the hooks; or an integer of more digits than Python reads
        raise _broken("the body is not JSON that can be read", "body", str(error)) from error
    finally:
        if collects:
            gc.enable()


def _has_many_parts(body: bytes) -> bool:
    """Whether JSON holds more than `MAX_PARTS` lists, objects and keys: brackets, braces and colons outside of strings;
    without reading it."""
    marks = b"[{:"
    if sum(body.count(mark) for mark in marks) <= MAX_PARTS:
        return False  # few, strings included: the usual case
    if b"\\" in body:
        body = body.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    num_parts, num_quotes = 0, 0
    for start in range(0, len(body), LOOKED_AT_FROM):
        byte_N = np.frombuffer(body[start : start + LOOKED_AT_FROM], dtype=np.uint8)
        quotes = np.flatnonzero(byte_N == ord('"'))
        places = np.flatnonzero((byte_N == marks[0]) | (byte_N == marks[1]) | (byte_N == marks[2]))
        num_parts += int(((np.searchsorted(quotes, places) + num_quotes) % 2 == 0).sum())
        num_quotes += len(quotes)
        if num_parts > MAX_PARTS:
            return True
    return False


def check(model: Any, value: Any) -> Any:
    """The request as an instance of its model.

    Raises:
        RequestError: 422: what does not fit.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise wrong_values(error.errors(include_url=False)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {json.dumps(twice)} stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _broken(what: str, where: str, got: str, expected: str = 'JSON such as {"queries": ["a text"]}') -> RequestError:
    fix = "send JSON of /openapi.json"
    return RequestError(400, "broken_json", what, where=where, got=got, expected=expected, fix=fix)


# -- answers -------------------------------------------------------------------------------------------------------


class _Answer(BaseModel):
    """Documentation of an answer; a key more than these would be a mistake."""

    model_config = ConfigDict(extra="forbid")


class Error(_Answer):
    """Why a request was not answered; what is not known is an empty string."""

    what: str
    where: str
    got: str
    expected: str
    fix: str


class ErrorAnswer(_Answer):
    """Every answer that is not 2xx."""

    error: Error


class Model(_Answer):
    """Which bundle answered."""

    sha256: str
    version: str | None


class Label(_Answer):
    """A label and its score; parts that the bundle does not have are null."""

    uid: str
    title: str
    score: float
    de: float | None = Field(description="the dual encoder's own score, before its weight")
    clf: float | None = Field(description="the classifier's own score, before its weight")
    knn: float | None = Field(description="votes of similar training queries, before their weight")


class QueryAnswer(_Answer):
    """The labels of one query, best first."""

    labels: list[Label]
    unknown_tokens: int = Field(description="tokens that the tokenizer does not know")
    unknown_filters: int = Field(description="allowed and denied uids that no label has")


class PredictAnswer(_Answer):
    """One entry for each query, in their order."""

    model_config = ConfigDict(json_schema_extra={"examples": [PREDICT_ANSWER_EXAMPLE]})

    model: Model
    predictions: list[QueryAnswer]


class LabelName(_Answer):
    """A label."""

    uid: str
    title: str


class LabelAnswer(LabelName):
    """A label, and its row in the bundle."""

    row: int


class LabelsAnswer(_Answer):
    """Labels whose uid or title begins so, then those with a word that does."""

    labels: list[LabelName]
    more: bool


class NearQuery(_Answer):
    """A training query near this one."""

    uid: str
    title: str
    cosine: float
    vote: float | None
    labels: list[LabelName]


class Token(_Answer):
    """A piece of the query as the tokenizer cuts it."""

    piece: str
    unknown: bool


class ExplainAnswer(QueryAnswer):
    """The labels, and where their scores come from: score = the sum of weight x part."""

    model: Model
    weights: dict[str, float]
    nearest: list[NearQuery]
    tokens: list[Token]
    truncated: bool = Field(description="the text was longer than the encoder reads")


class Identity(Model):
    """A bundle and where it comes from; of a folder only the hashes are known."""

    name: str | None
    alias: str | None
    data: str | None


class Index(_Answer):
    """The label index."""

    kind: str
    width: int


class VersionAnswer(_Answer):
    """What answers now."""

    model: Identity
    previous: Identity | None
    unidec: str
    runtime: str
    index: Index
    num_labels: int
    follow: dict[str, Any] | None


class ReadyAnswer(_Answer):
    """Whether a model answers."""

    ready: bool
    model: Identity | None
    follow: dict[str, Any] | None


class NotReadyAnswer(ErrorAnswer, ReadyAnswer):
    """No model answers yet, and how its loading goes; or a file of the one that answers was edited."""


class AliveAnswer(_Answer):
    """The process answers."""

    status: str


class ReloadAnswer(_Answer):
    """What follows the registry, which looks now."""

    follow: dict[str, Any]


class DataCard(_Answer):
    """The data set of a bundle: rows of each split, labels and pairs where the bundle says."""

    name: str | None
    sha256: str | None
    rows: dict[str, float] | None


class CardAnswer(_Answer):
    """What the page shows of a bundle."""

    model: Identity
    unidec: str
    runtime: str
    index: Index
    encoder: str | None
    recipe: str | None
    data: DataCard
    num_labels: int
    num_neighbours: int
    text: str
    heads: list[str]
    space: str
    weights: dict[str, float]
    metrics: dict[str, dict[str, float]]
    score_quantiles: list[float] | None
    examples: list[str]
    limits: dict[str, int]
    api_key: bool
