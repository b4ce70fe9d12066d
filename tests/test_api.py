"""The front door: `unidec.fit`, `unidec.load`, `Model` and the scikit-learn estimator."""

from __future__ import annotations

import doctest
import functools
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix, issparse

import unidec
from unidec.config import leaves
from unidec.errors import ArtifactError, ConfigError, DataError


@pytest.fixture(scope="module")
def data(tiny_raw: Any, tiny_bert: Path, helper: Any) -> SimpleNamespace:
    """60 queries and 40 labels as lists, and parameters of a training that takes seconds."""
    params = helper("tiny_training").tiny_params(tiny_bert, **{"optim.epochs": 6})
    relevance = csr_matrix(np.vstack([tiny_raw.relevance[s].toarray() for s in tiny_raw.queries]))
    return SimpleNamespace(
        queries=[t for s in tiny_raw.queries for t in tiny_raw.queries[s]["title"].to_pylist()],
        labels=tiny_raw.labels["title"].to_pylist(),
        pairs=list(zip(*(places.tolist() for places in relevance.nonzero()), strict=True)),
        relevance=relevance, params=dict(leaves(params)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(data: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> unidec.Model:
    folder = tmp_path_factory.mktemp("fit")
    return unidec.fit(data.queries, data.labels, data.pairs, params=data.params, folder=folder)


def test_fit_and_predict(model, data):
    (found,) = model.predict([data.queries[0]], k=3)
    assert len(found) == 3 and all(isinstance(label, unidec.Label) for label in found)
    assert found[0].text == data.labels[int(found[0].uid)]
    assert [label.score for label in found] == sorted((label.score for label in found), reverse=True)
    first = [labels[0].uid for labels in model.predict(data.queries, k=1)]
    hits = sum(str(label) == first[row] for row, label in data.pairs)
    assert hits > len(data.queries) // 4  # 40 labels: chance is one in 40
    only = model.predict([data.queries[0]], k=3, allow=[found[1].uid, found[2].uid])[0]
    assert {label.uid for label in only} == {found[1].uid, found[2].uid}
    assert found[0].uid not in {label.uid for label in model.predict([data.queries[0]], k=3, deny=[found[0].uid])[0]}
    with pytest.raises(DataError, match="list of texts"):
        model.predict("one text")
    with pytest.raises(DataError, match="k is out of range"):
        model.predict(["one text"], k=0)


def test_metrics_are_those_of_the_predictions(model, data):
    got = model.evaluate(data.queries, data.pairs)
    truth = {row: {str(col) for r, col in data.pairs if r == row} for row in range(len(data.queries))}
    rows = [row for row in truth if truth[row]]
    found = model.predict([data.queries[row] for row in rows], k=5)
    hits = [[label.uid in truth[row] for label in labels] for row, labels in zip(rows, found, strict=True)]
    assert got["P@1"] == pytest.approx(100 * np.mean([hit[0] for hit in hits]))
    assert got["P@5"] == pytest.approx(100 * np.mean(hits))
    assert not any(name.startswith("PS") or "/" in name for name in got)
    with pytest.raises(DataError, match="no query has a label"):
        model.evaluate(["text"], [])


def test_explain_save_load_and_change_labels(model, data, tmp_path):
    text = data.queries[0]
    why = model.explain(text, k=2)
    assert why.prediction.labels == [label.uid for label in model.predict([text], k=2)[0]]
    again = unidec.load(model.save(tmp_path / "mine"))
    assert again.predict(data.queries[:5]) == model.predict(data.queries[:5])
    with pytest.raises(ConfigError, match="exists already"):
        model.save(tmp_path / "mine")
    changed = again.change_labels(tmp_path / "changed", add={"new": text}, remove=["3"])
    assert changed.num_labels == model.num_labels == len(data.labels)
    assert "new" in {label.uid for label in changed.predict([text], k=5)[0]}
    with pytest.raises(ConfigError, match="not changed in place"):
        again.change_labels(tmp_path / "mine", remove=["3"])
    with pytest.raises(ArtifactError):
        unidec.load(tmp_path / "nothing")


def test_the_same_data_in_every_form_is_the_same_data(data):
    queries = {str(place): text for place, text in enumerate(data.queries)}
    labels = pd.DataFrame({"id": range(len(data.labels)), "text": data.labels})
    pairs = pd.DataFrame(data.pairs, columns=["query_id", "label_id"])
    given = unidec.api._raw_data(data.queries, data.labels, data.pairs)
    others = (queries, labels, pairs), (data.queries, data.labels, data.relevance > 0)
    for other in (unidec.api._raw_data(*form) for form in others):
        assert other.queries["train"].equals(given.queries["train"]) and other.labels.equals(given.labels)
        assert (other.relevance["train"] != given.relevance["train"]).nnz == 0


@pytest.mark.parametrize(
    ("queries", "labels", "pairs", "words"),
    [
        ("one text", ["a"], [], "list of texts"),
        ([], ["a"], [], "no texts given"),
        (["q", " "], ["a"], [], "missing or empty"),
        (["q"], [None], [], "missing or empty"),
        (["q"], ["a"], [(0, 7)], "unknown label"),
        (["q"], ["a"], [("x", 0)], "unknown query"),
        (["q"], ["a"], np.ones((2, 1)), "wrong shape"),
        (["q"], ["a"], np.array([[-1.0]]), "non-negative"),
        (pd.DataFrame({"name": ["q"]}), ["a"], [], "column `text`"),
        (["q"], ["a"], pd.DataFrame({"query_id": [0]}), "label_id"),
        (pd.DataFrame({"id": [1, 1], "text": ["q", "r"]}), ["a"], [], "not unique"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(queries, labels, pairs, words):
    with pytest.raises(DataError, match=words):
        unidec.fit(queries, labels, pairs)


def test_an_unknown_parameter_is_named():
    with pytest.raises(ConfigError, match=r"optim\.epochs"):
        unidec.fit(["q"], ["a"], [(0, 0)], params={"optim.epoch": 3})


def test_importing_unidec_imports_nothing_heavy():
    code = "import sys, unidec; print(*(n for n in ('numpy', 'torch', 'sklearn', 'pydantic') if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert all(getattr(unidec, name) is not None for name in unidec.__all__)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        unidec.nothing_like_this  # noqa: B018


def test_the_estimator(data, tmp_path):
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError

    estimator = unidec.UniDECClassifier(k=5, params=data.params, folder=str(tmp_path))
    assert clone(estimator).get_params() == estimator.get_params()
    with pytest.raises(NotFittedError):
        estimator.predict(["text"])
    with pytest.raises(DataError, match="wrong shape"):
        estimator.fit(data.queries[:3], data.relevance)
    assert estimator.fit(data.queries, data.relevance, label_texts=data.labels) is estimator
    likely = estimator.predict_proba(data.queries)
    assert issparse(likely) and likely.shape == data.relevance.shape and likely.getnnz(axis=1).max() == 5
    assert ((likely.data > 0) & (likely.data < 1)).all()
    scores = estimator.decision_function(data.queries)
    assert (np.argsort(scores[0].data) == np.argsort(likely[0].data)).all()  # calibration keeps the order
    chosen = estimator.predict(data.queries)
    assert set(np.unique(chosen.data)) <= {1} and (likely.toarray()[chosen.nonzero()] >= 0.5).all()


def test_each_documented_name_has_an_example_that_runs(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save("outputs/bundle")
    shutil.copytree(model.folder.parents[1] / "data" / "dataset", "data/dataset")
    small = {
        "fit": functools.partial(unidec.fit, params=data.params, folder="fit"),
        "UniDECClassifier": functools.partial(unidec.UniDECClassifier, params=data.params, folder="estimator"),
    }
    names = {name: getattr(unidec, name) for name in unidec.__all__ if name != "__version__"}
    given = {"unidec": SimpleNamespace(**(names | small)), "model": model, "queries": data.queries,
             "labels": data.labels, "pairs": data.pairs, "Y": data.relevance}  # fmt: skip
    for name, documented in names.items():
        found = doctest.DocTestParser().get_doctest(documented.__doc__, dict(given), name, None, None)
        assert found.examples, name
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found).failed == 0
