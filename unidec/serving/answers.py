"""Predictions as the JSON of the routes, serialised once per query, so that the cache holds bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from unidec.version import __version__

if TYPE_CHECKING:
    from unidec.config import Serve
    from unidec.retrieval.answer import Explanation
    from unidec.retrieval.bundle import Bundle, Prediction

NUM_EXAMPLES = 6
LABELS_SHOWN = 10  # of a training query
MAX_TEXT = 500  # characters of an example
LIMITS = ("max_k", "max_query_chars", "max_queries", "max_filter_labels")


class Answer(NamedTuple):
    """One query's answer, and its figures for the metrics.

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
    return Answer(orjson.dumps(_facts(prediction)), best, prediction.num_tokens, prediction.unknown_tokens)


def predict_json(model: bytes, answers: Sequence[bytes]) -> bytes:
    """The body of POST /predict: the model's JSON, and each query's."""
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
        prediction.labels, prediction.titles, prediction.scores, prediction.probabilities or missing,
        prediction.de_scores or missing, prediction.clf_scores or missing, prediction.knn_scores or missing,
        strict=True,
    )  # fmt: skip
    return {
        "labels": [
            {"uid": uid, "title": title, "score": score, "probability": probability, "de": de, "clf": clf, "knn": knn}
            for uid, title, score, probability, de, clf, knn in rows
        ],
        "unknown_tokens": prediction.unknown_tokens,
        "unknown_filters": prediction.unknown_labels,
    }


def card(bundle: Bundle, settings: Serve) -> dict[str, Any]:
    """What the page shows of a bundle; the server adds model, runtime, api_key and feedback."""
    info = bundle.info
    texts = bundle.titles if bundle.neighbours is None else bundle.neighbours.titles  # queries of the data
    shown = dict.fromkeys((2 * i + 1) * len(texts) // (2 * NUM_EXAMPLES) for i in range(NUM_EXAMPLES) if len(texts))
    weights = {"de": 1.0, "clf": info.clf_weight, "knn": info.knn.weight if info.knn is not None else 0.0}
    if info.space != "both":
        weights["de"], weights["clf"] = float(info.space == "de"), float(info.space == "clf")
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
        "num_neighbours": info.knn.num_queries if info.knn is not None else 0,
        "text": info.text,
        "heads": [name for name in ("de", "clf") if name in info.vectors],
        "space": info.space,
        "weights": weights,
        "fused": info.fusion is not None,
        "metrics": info.metrics,
        "score_quantiles": _at(info.card, "profile", "served", "score_quantiles"),
        "examples": [texts[row].as_py()[:MAX_TEXT] for row in shown],
        "limits": {name: getattr(settings, name) for name in LIMITS},
    }


def _at(facts: Any, *keys: str) -> Any:
    """A value of a bundle's free-form facts; None if missing."""
    for key in keys:
        facts = facts.get(key) if isinstance(facts, dict) else None
    return facts
