"""Predictions as the JSON of the routes: written once for each query, so that the cache keeps bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from unidec.version import __version__

if TYPE_CHECKING:
    from unidec.retrieval.answer import Explanation
    from unidec.retrieval.bundle import Bundle, Prediction
    from unidec.sections import Serve

NUM_EXAMPLES = 6
LABELS_SHOWN = 10  # of a training query
MAX_TEXT, MAX_FACTS, MAX_QUANTILES, LARGEST = 500, 200, 1001, 2.0**53  # of a card


class Answer(NamedTuple):
    """One query's answer, and what the metrics need of it.

    Attributes:
        json: {"labels", "unknown_tokens", "unknown_filters"}.
        best: score of the best label; None where there is none.
        num_tokens, unknown_tokens: of the query.
    """

    json: bytes
    best: float | None
    num_tokens: int
    unknown_tokens: int


def answer_of(prediction: Prediction) -> Answer:
    """The answer to one query."""
    best = prediction.scores[0] if prediction.scores else None
    return Answer(orjson.dumps(_facts(prediction)), best, prediction.num_tokens, prediction.unknown_tokens)


def predict_json(model: bytes, answers: Sequence[bytes]) -> bytes:
    """The body of POST /predict: the model's JSON, and that of each query."""
    return b'{"model":%b,"predictions":[%b]}' % (model, b",".join(answers))


def explain_json(model: bytes, explanation: Explanation) -> bytes:
    """The body of POST /explain."""
    facts = _facts(explanation.prediction)
    facts["weights"] = {name: explanation.weights.get(name, 0.0) for name in ("de", "clf", "knn")}
    facts["nearest"] = [
        {
            "uid": near.uid, "title": near.title, "cosine": near.cosine, "vote": near.vote,
            "labels": [{"uid": uid, "title": title} for uid, title in near.labels[:LABELS_SHOWN]],
        }
        for near in explanation.neighbours or ()
    ]  # fmt: skip
    facts["tokens"] = [
        {"piece": token.text, "unknown": token.unknown} for token in explanation.tokens if not token.special
    ]
    facts["truncated"] = explanation.cut
    return b'{"model":%b,%b' % (model, orjson.dumps(facts)[1:])


def _facts(prediction: Prediction) -> dict[str, Any]:
    missing: list[None] = [None] * len(prediction.labels)
    rows = zip(
        prediction.labels, prediction.titles, prediction.scores, prediction.de_scores or missing,
        prediction.clf_scores or missing, prediction.knn_scores or missing, strict=True,
    )  # fmt: skip
    return {
        "labels": [
            {"uid": uid, "title": title, "score": score, "de": de, "clf": clf, "knn": knn}
            for uid, title, score, de, clf, knn in rows
        ],
        "unknown_tokens": prediction.unknown_tokens,
        "unknown_filters": prediction.unknown_labels,
    }


def card(bundle: Bundle, settings: Serve) -> dict[str, Any]:
    """What the page shows of a bundle, without what the server adds: model, runtime, api_key.

    A bundle may hold anything under `card`, `metrics`, `params` and `dataset`: values of another type are left out,
    and everything is bounded.
    """
    info = bundle.info
    profile = _object(info.card.get("profile"))
    shown = dict.fromkeys((2 * i + 1) * bundle.num_labels // (2 * NUM_EXAMPLES) for i in range(NUM_EXAMPLES))
    weights = {"de": 1.0, "clf": info.clf_weight, "knn": info.knn.weight if info.knn is not None else 0.0}
    if info.space != "both":
        weights["de"], weights["clf"] = float(info.space == "de"), float(info.space == "clf")
    splits = [(split, _numbers(values)) for split, values in info.metrics.items() if len(split) <= MAX_TEXT]
    limits = ("max_k", "max_query_chars", "max_queries", "max_filter_labels")
    return {
        "unidec": __version__,
        "index": {"kind": info.index_kind, "width": info.width},
        "encoder": _text(_object(info.params.get("encoder")).get("name")),
        "recipe": _text(info.params.get("recipe")),
        "data": {
            "name": _text(info.dataset.get("name")),
            "sha256": _text(info.dataset.get("sha256")),
            "rows": _numbers(profile.get("rows")) or None,
        },
        "num_labels": bundle.num_labels,
        "num_neighbours": info.knn.num_queries if info.knn is not None else 0,
        "text": info.text[:MAX_TEXT],
        "heads": [name for name in ("de", "clf") if name in info.vectors],
        "space": info.space,
        "weights": weights,
        "metrics": {split: numbers for split, numbers in splits[:MAX_FACTS] if numbers},
        "score_quantiles": _quantiles(_object(profile.get("served")).get("score_quantiles")),
        "examples": [bundle.titles[row].as_py()[:MAX_TEXT] for row in shown],
        "limits": {name: getattr(settings, name) for name in limits},
    }


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) and value else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST  # no NaN either


def _numbers(values: object) -> dict[str, float]:
    numbers = {name: value for name, value in _object(values).items() if _is_number(value) and len(name) <= MAX_TEXT}
    return dict(list(numbers.items())[:MAX_FACTS])


def _quantiles(values: object) -> list[float] | None:
    is_list = isinstance(values, list) and 2 <= len(values) <= MAX_QUANTILES and all(map(_is_number, values))
    return values if is_list else None  # type: ignore[return-value]
