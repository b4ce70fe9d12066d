"""Answers as JSON: what is missing is null."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from unidec.config import Serve
from unidec.ranking.ranker import Prediction
from unidec.serving.schemas import answer_of, card, explain_json, predict_json

MODEL = b'{"sha256":"a","version":null}'


def test_a_part_that_the_model_lacks_is_null_and_scores_are_exact() -> None:
    score = 0.10000000149011612  # a float32
    odd = '"\\ \x00\n\u2028 🚗 </script>'
    prediction = Prediction(
        [odd, "b"],
        ["", odd],
        [score, -2.0],
        [score, -2.0],
        [],
        probabilities=[0.75, 0.0],
        num_tokens=4,
        unknown_tokens=1,
    )
    answer = answer_of(prediction)
    found = json.loads(predict_json(MODEL, [answer.json, answer.json]))
    assert found["model"] == {"sha256": "a", "version": None}
    assert len(found["predictions"]) == 2
    first, second = found["predictions"][1]["labels"]
    parts = {"de": score, "clf": None, "knn": None}
    expected = {"uid": odd, "title": "", "score": score, "probability": 0.75, **parts}
    assert first == expected
    assert (second["title"], second["probability"]) == (odd, 0.0)
    assert answer.best == score
    assert answer.num_tokens == 4
    assert answer.unknown_tokens == 1


def test_no_labels_and_no_queries() -> None:
    answer = answer_of(Prediction([], [], [], [], []))
    expected = {"labels": [], "unknown_tokens": 0, "unknown_filters": 0}
    assert json.loads(answer.json) == expected
    assert answer.best is None
    assert json.loads(predict_json(MODEL, [])) == {"model": json.loads(MODEL), "predictions": []}


def test_an_explanation_without_neighbours_or_votes() -> None:
    explanation: Any = SimpleNamespace(
        prediction=Prediction(["a"], ["t"], [1.0], [1.0], []),
        weights={"de": 1.0},
        neighbours=None,
        cut=True,
        tokens=[
            SimpleNamespace(text="[CLS]", unknown=False, special=True),
            SimpleNamespace(text="xyz", unknown=True, special=False),
        ],
    )
    found = json.loads(explain_json(MODEL, explanation))
    assert found["weights"] == {"de": 1.0, "clf": 0.0, "knn": 0.0}
    assert found["nearest"] == []
    assert found["truncated"]
    assert found["tokens"] == [{"piece": "xyz", "unknown": True}]


@pytest.mark.parametrize("num_labels", [1, 3, 6, 7, 100])
@pytest.mark.parametrize(
    "facts", [{}, {"encoder": 1, "profile": [], "metrics": {}}], ids=["none", "odd"]
)
def test_a_card_of_a_bundle_without_facts(facts: dict[str, Any], num_labels: int) -> None:
    info = SimpleNamespace(
        card=facts,
        params=facts,
        metrics={"test": {"P@1": 2}},
        dataset={"name": "x"},
        index_kind="flat",
        width=8,
        text="title",
        vectors={"de": [1, 8]},
        space="de",
        weights=lambda: {"de": 1.0},
        knn=None,
        fusion=None,
    )
    titles = pa.array([f"title {i} {'y' * 9999}" for i in range(num_labels)])
    bundle: Any = SimpleNamespace(info=info, num_labels=num_labels, titles=titles, neighbours=None)
    found = card(bundle, Serve())
    assert found["metrics"]["test"] == {"P@1": 2}
    assert found["weights"] == {
        "de": 1.0,
        "clf": 0.0,
        "knn": 0.0,
    }
    assert 1 <= len(found["examples"]) == min(num_labels, 6), "each once"
    assert found["score_quantiles"] is None and found["data"] == {
        "name": "x",
        "sha256": None,
        "rows": None,
    }
    assert len(json.dumps(found)) < 10_000
    for asked in (["how to", "what is"], []):  # where queries vote, they are the examples
        bundle.neighbours = SimpleNamespace(titles=pa.array(asked, pa.large_string()))
        assert card(bundle, Serve())["examples"] == asked
