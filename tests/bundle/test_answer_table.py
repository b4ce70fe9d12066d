"""Tables of queries to tables of answers, against a loop over single requests."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from helpers.tiny_bundle import UIDS, write_tiny_bundle

from unidec.bundle import answer
from unidec.bundle.answer import Answerer, LabelQuery
from unidec.bundle.bundle import Bundle
from unidec.errors import ArtifactError, DataError

TEXTS = ["red car", "old blue boat", "xyz", "big green house", "red car"]


@pytest.fixture(autouse=True)
def _stub(stub_model):
    """Every bundle here is of the stub model."""


@pytest.mark.parametrize(
    "told",
    [
        {"k": 3},
        {"k": 4, "deny": ["L0", "L3", "none"]},
        {"k": 4, "allow": ["L2", "L7", "L11"], "min_score": 0.2},
        {"k": 12, "head": "clf", "min_score": 1e9},
        {"k": 2, "head": "de"},
    ],
)
def test_a_row_for_each_label_of_each_query(rng, tmp_path, monkeypatch, told) -> None:
    monkeypatch.setattr(answer, "BATCH", 2)
    write_tiny_bundle(tmp_path / "b", rng)
    answers = Answerer.open(tmp_path / "b", "torch")
    got = answers.table(pd.DataFrame({"id": range(5), "query": TEXTS}), **told)
    rows = []
    for text in TEXTS:
        options = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        [one] = answers.answer([LabelQuery(text, **options)])
        rows += [
            (text, rank + 1, *row)
            for rank, row in enumerate(zip(one.labels, one.titles, one.scores, strict=True))
        ]
    assert list(got.columns) == ["query", "rank", "label", "title", "score"]
    assert got["rank"].dtype == np.int64
    assert got["score"].dtype == np.float64
    expected = pd.DataFrame(rows, columns=got.columns)
    assert len(got) == len(expected)
    assert got["label"].tolist() == expected["label"].tolist()
    assert (
        got[["query", "rank", "title"]].values.tolist()
        == expected[["query", "rank", "title"]].values.tolist()
    )
    np.testing.assert_allclose(got["score"], expected["score"].astype(float), rtol=1e-5)
    if "allow" in told:
        assert set(got["label"]) <= set(told["allow"])


def test_it_is_the_bundles_own_table(rng, tmp_path) -> None:
    write_tiny_bundle(tmp_path / "b", rng, votes=True)
    frame = pd.DataFrame({"text": TEXTS})
    answers = Answerer.open(tmp_path / "b", "torch")
    got = answers.table(frame)
    expected = Bundle.load(tmp_path / "b").predict_table(TEXTS).to_pandas()
    columns = ["query", "rank", "label", "title"]
    assert got[columns].values.tolist() == expected[columns].values.tolist()
    assert len(got) == 25
    np.testing.assert_allclose(got["score"], expected["score"], rtol=1e-5)
    assert len(answers.table(frame, allow=[], k=12)) == 5 * len(UIDS)  # empty: all


def test_no_queries_and_what_is_no_query(rng, tmp_path) -> None:
    write_tiny_bundle(tmp_path / "b", rng)
    answers = Answerer.open(tmp_path / "b", "torch")
    empty = answers.table(pd.DataFrame({"query": []}))
    assert len(empty) == 0
    assert empty["rank"].dtype == np.int64
    with pytest.raises(DataError, match="request 1"):
        answers.table(pd.DataFrame({"query": ["a", None]}))
    with pytest.raises(DataError, match="column"):
        answers.table(pd.DataFrame({"question": ["a"]}))
    with pytest.raises(DataError, match="head"):
        answers.table(pd.DataFrame({"query": ["a"]}), head="tail")
    with pytest.raises(ArtifactError):
        Answerer.open(tmp_path / "nowhere")
