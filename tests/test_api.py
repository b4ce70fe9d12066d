"""The front door: `unidec.fit`, `unidec.load`, `Model` and the scikit-learn estimator."""

from __future__ import annotations

import doctest
import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from helpers.tiny_training import tiny_params
from scipy.sparse import csr_matrix, issparse

import unidec
from unidec.bundle.answer import LabelQuery
from unidec.config import leaves
from unidec.errors import ArtifactError, ConfigError, DataError
from unidec.ranking.ranker import Calibration


@pytest.fixture(scope="module")
def data(tiny_raw: Any, tiny_bert: Path) -> SimpleNamespace:
    """60 queries and 40 labels as lists, and parameters of a training that takes seconds."""
    params = tiny_params(tiny_bert, **{"optim.epochs": 6})
    relevance = csr_matrix(np.vstack([tiny_raw.relevance[s].toarray() for s in tiny_raw.queries]))
    return SimpleNamespace(
        queries=[t for s in tiny_raw.queries for t in tiny_raw.queries[s]["title"].to_pylist()],
        labels=tiny_raw.labels["title"].to_pylist(),
        pairs=list(zip(*(places.tolist() for places in relevance.nonzero()), strict=True)),
        relevance=relevance,
        params=dict(leaves(params)),
    )


@pytest.fixture(scope="module")
def model(data: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> unidec.Model:
    folder = tmp_path_factory.mktemp("fit")
    return unidec.fit(
        data.queries,
        data.labels,
        data.pairs,
        params=data.params,
        folder=folder,
    )


def best_label(model, query):
    return model.predict([query], 1)[0][0]


def test_fit_and_predict(model, data):
    (found,) = model.predict([data.queries[0]], k=3)
    assert len(found) == 3
    assert all(isinstance(label, unidec.Label) for label in found)
    expected = data.labels[int(found[0].uid)]
    assert found[0].text == expected
    assert [label.score for label in found] == sorted(
        (label.score for label in found), reverse=True
    )
    first = [labels[0].uid for labels in model.predict(data.queries, k=1)]
    hits = sum(str(label) == first[row] for row, label in data.pairs)
    assert hits > len(data.queries) // 4  # 40 labels: chance is one in 40
    only = model.predict([data.queries[0]], k=3, allow=[found[1].uid, found[2].uid])[0]
    uids = {label.uid for label in only}
    assert uids == {found[1].uid, found[2].uid}
    assert found[0].uid not in {
        label.uid for label in model.predict([data.queries[0]], k=3, deny=[found[0].uid])[0]
    }
    with pytest.raises(DataError, match="list of texts"):
        model.predict("one text")
    with pytest.raises(DataError, match="k is out of range"):
        model.predict(["one text"], k=0)


def test_metrics_are_those_of_the_predictions(model, data):
    got = model.evaluate(data.queries, data.pairs)
    truth = {
        row: {str(col) for r, col in data.pairs if r == row} for row in range(len(data.queries))
    }
    rows = [row for row in truth if truth[row]]
    found = model.predict([data.queries[row] for row in rows], k=5)
    hits = [
        [label.uid in truth[row] for label in labels]
        for row, labels in zip(rows, found, strict=True)
    ]
    assert got["P@1"] == pytest.approx(100 * np.mean([hit[0] for hit in hits]))
    expected = 100 * np.mean(hits)
    assert got["P@5"] == pytest.approx(expected)
    assert {"P@5", "nDCG@5", "R@100", "MRR"} <= got.keys()
    assert not any("/" in name for name in got)
    assert ("PSP@5" in got) == (model._answerer.bundle.neighbours is not None)
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


def test_data_that_cannot_be_trained_on_is_named():
    with pytest.raises(DataError, match="relevance that is not a positive number"):
        unidec.fit(["q"], ["a"], [(0, 0, -1)])
    with pytest.raises(DataError, match="no training query has a label"):
        unidec.fit(["q"], ["a"], [])
    with pytest.raises(DataError, match="expected a list of texts"):
        unidec.UniDECClassifier().fit(pd.DataFrame({"text": ["q"]}), np.ones((1, 1)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "nope"}, ["recipe: no such recipe", "unidec-long"]),
        ({"recipe": 3}, ["recipe: wrong value", "a valid string"]),
        ({"params": {"optim.epoch": 3}}, ["optim.epoch: unknown key", "nearest: optim.epochs"]),
        (
            {"params": {"pool": {"beta": 0}, "pool.eta": "x"}},
            ["pool: not a section", "pool.eta: wrong value"],
        ),
        ({"params": {"loss.de": "infonce", "loss.reduction": "psl"}}, ["fix: loss.reduction: pol"]),
    ],
)
def test_errors_in_python_speak_of_arguments_not_of_options(options, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        unidec.fit(
            ["a text"],
            ["a label"],
            [(0, 0)],
            folder=tmp_path / "work",
            **options,
        )
    said = str(error.value)
    assert all(word in said for word in words), said
    assert "--" not in said
    assert "params.yaml" not in said
    assert "(" not in said.partition("expected")[0]


def test_a_runtime_that_does_not_exist(model, tmp_path):
    with pytest.raises(
        ConfigError, match=r"runtime: no such runtime\n  got: cuda\n  expected: auto, torch, onnx"
    ):
        unidec.load(model.folder, runtime="cuda")
    with pytest.raises(ArtifactError, match="fix: check the path, or write it: unidec index build"):
        unidec.load(tmp_path / "nothing")


def test_an_unknown_parameter_is_named():
    with pytest.raises(ConfigError, match=r"optim\.epochs"):
        unidec.fit(["q"], ["a"], [(0, 0)], params={"optim.epoch": 3})


def test_importing_unidec_imports_nothing_heavy():
    code = (
        "import sys, unidec; print(*(n for n in ('numpy', 'torch', 'sklearn', 'pydantic') if n "
        "in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
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
    assert (
        issparse(likely)
        and likely.shape == data.relevance.shape
        and likely.getnnz(axis=1).max() == 5
    )
    assert ((likely.data > 0) & (likely.data < 1)).all()
    scores = estimator.decision_function(data.queries)
    # calibration keeps the order
    assert (np.argsort(scores[0].data) == np.argsort(likely[0].data)).all()
    chosen = estimator.predict(data.queries)
    assert set(np.unique(chosen.data)) <= {1}
    assert (likely.toarray()[chosen.nonzero()] >= 0.5).all()


def test_each_documented_name_has_an_example_that_runs(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save("outputs/bundle")
    shutil.copytree(model.folder.parents[1] / "data" / "dataset", "data/dataset")
    small = {
        "fit": functools.partial(unidec.fit, params=data.params, folder="fit"),
        "UniDECClassifier": functools.partial(
            unidec.UniDECClassifier, params=data.params, folder="estimator"
        ),
    }
    names = {name: getattr(unidec, name) for name in unidec.__all__ if name != "__version__"}
    given = {
        "unidec": SimpleNamespace(**(names | small)),
        "model": model,
        "queries": data.queries,
        "labels": data.labels,
        "pairs": data.pairs,
        "Y": data.relevance,
    }
    for name, documented in names.items():
        found = doctest.DocTestParser().get_doctest(
            documented.__doc__, dict(given), name, None, None
        )
        assert found.examples, name
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found).failed == 0


SMALL = {"optim.epochs": 1}
START = """
import gc, json, os, sys, tempfile
import unidec
given = json.loads(sys.stdin.read())
def fit():
    pairs = [tuple(pair) for pair in given["pairs"]]
    return unidec.fit(given["queries"], given["labels"], pairs, params=given["params"])
def left(): return sorted(os.listdir(tempfile.gettempdir()))
"""


def in_python(
    python: list[str], code: str, data: SimpleNamespace, folder: Path, **variables: str
) -> str:
    """Output of code after START, with an empty folder for temporary files."""
    given = {
        "queries": data.queries,
        "labels": data.labels,
        "pairs": data.pairs,
        "params": data.params | SMALL,
    }
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [*python, "-c", START + code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "tmp")} | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_removes_its_own_folder_when_closed_or_collected_or_at_exit(
    data, tmp_path, warm_python
):
    code = """
with fit() as model:
    [name] = left()
    inside = sorted(os.listdir(os.path.join(tempfile.gettempdir(), name)))
    assert inside == ["bundle"], inside
    kept = model.save("kept")
assert left() == [], left()
model = fit()
changed = model.change_labels("changed", remove=["3"])
answer = model.predict(given["queries"], 3)
model.close(), model.close()
assert left() == [] and "closed" in repr(model)
assert len(unidec.load(kept).predict(given["queries"])) == 60
assert len(changed.predict(given["queries"])) == 60
model = fit()
other = __import__("copy").copy(model)
del model
gc.collect()
assert left() and other.predict(given["queries"], 3) == answer
del other
gc.collect()
assert left() == [], left()
model = fit()
if os.fork() == 0:
    sys.exit()  # does not remove the folder of its parent
os.wait()
assert left()
print("at exit")
"""
    assert in_python(warm_python, code, data, tmp_path) == "at exit\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "kept", "tmp"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_fit_that_fails_leaves_nothing(data, tmp_path, warm_python):
    code = """
given["params"]["optim.epochs"] = 2
given["params"]["optim.lr_clf"] = 1e30
try:
    fit()
except unidec.errors.UnidecError as error:
    print(type(error).__name__)
gc.collect()
assert left() == [], left()
"""
    assert in_python(warm_python, code, data, tmp_path) == "TrainingError\n"


def test_fits_in_threads_are_those_of_one_thread_and_change_nothing_of_the_process(data, tmp_path):
    def fit(folder: Path | None) -> list[list[unidec.Label]]:
        given = {"params": data.params | SMALL, "folder": folder}
        return unidec.fit(data.queries, data.labels, data.pairs, **given).predict(data.queries, 3)

    alone = fit(None)
    torch.manual_seed(5)
    folder = os.getcwd()
    environment = dict(os.environ)
    state = torch.get_rng_state()
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(fit, [None, tmp_path / "one", tmp_path / "two"]))
    assert together == [alone] * 3
    assert (
        os.getcwd() == folder
        and dict(os.environ) == environment
        and torch.equal(torch.get_rng_state(), state)
    )


def test_a_fit_has_as_many_threads_as_usable_cores_even_if_torch_was_loaded_first(
    data, monkeypatch
):
    during = []

    def stopped(*_given, **_named):
        during.append(torch.get_num_threads())
        raise DataError("stopped here")

    before = torch.get_num_threads()
    monkeypatch.setattr("unidec.api.num_threads", lambda: before + 2)
    monkeypatch.setattr("unidec.data.dataset.write_dataset", stopped)
    with pytest.raises(DataError, match="stopped here"):
        unidec.fit(data.queries, data.labels, data.pairs, params=data.params | SMALL)
    assert during == [before + 2]
    assert torch.get_num_threads() == before


def test_a_relative_folder_is_that_of_the_working_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = unidec.fit(
        data.queries, data.labels, data.pairs, params=data.params | SMALL, folder="here"
    )
    monkeypatch.chdir("/")
    assert (
        model.folder == tmp_path / "here" / "outputs" / "bundle"
        and model.predict(data.queries[:1], 1)[0]
    )
    model.close()
    assert (tmp_path / "here" / "outputs" / "bundle").is_dir()


def test_models_and_estimators_are_pickled_whole(model, data, tmp_path):
    joblib.dump((model, best_label(model, data.queries[0])), tmp_path / "model")
    again, label = joblib.load(tmp_path / "model")
    assert again.predict(data.queries, 3) == model.predict(data.queries, 3)
    assert (
        again.folder != model.folder
        and str(len(data.labels)) in repr(again)
        and "memory" in repr(again)
    )
    folder = again.folder
    again.close()
    assert not folder.exists()
    assert label == best_label(model, data.queries[0])
    assert label.probability is None
    estimator = unidec.UniDECClassifier(k=5, params=data.params | SMALL)
    estimator.fit(data.queries, data.relevance, data.labels)
    joblib.dump(estimator, tmp_path / "estimator")
    before = estimator.predict_proba(data.queries).toarray()
    del estimator
    assert (
        joblib.load(tmp_path / "estimator").predict_proba(data.queries).toarray() == before
    ).all()


def test_labels_have_the_probabilities_of_the_server(model, data):
    answerer = model._answerer
    bundle = model._answerer.bundle
    # too few queries
    assert [label.probability for label in model.predict(data.queries[:1], 3)[0]] == [None] * 3
    bundle.info = bundle.info.model_copy(
        update={"calibration": Calibration(scores=[0, 1], probabilities=[0.2, 0.6])}
    )
    try:
        label = best_label(model, data.queries[0])
        (answer,) = answerer.answer([LabelQuery(data.queries[0], 1)])
        assert label.probability == answer.probabilities[0]
        expected = np.interp(label.score, [0, 1], [0.2, 0.6])
        assert answer.probabilities[0] == pytest.approx(expected, abs=1e-6)
        uid, text, score = label
        assert label == (uid, text, score)
        assert f"probability={label.probability}" in repr(label)
        assert (
            model.predict(data.queries[:1], 1, tail=0.5)[0][0].probability is None
            or bundle.ranker.evidence is None
        )
    finally:
        bundle.info = bundle.info.model_copy(update={"calibration": None})


def test_the_estimator_is_scored_without_a_scorer(data, caplog):
    from sklearn.model_selection import cross_val_score

    estimator = unidec.UniDECClassifier(params=data.params | SMALL)
    dense = data.relevance.toarray()  # scikit-learn wants it so
    scores = cross_val_score(
        estimator, data.queries, dense, cv=2, params={"label_texts": data.labels}
    )
    assert scores.shape == (2,)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert "below 50" in caplog.text
    estimator.fit(
        pd.Series(data.queries, index=range(100, 160)),
        data.relevance,
        label_texts=np.array(data.labels),
    )
    truth = data.relevance.toarray() > 0
    first = [int(labels[0].uid) for labels in estimator.model_.predict(data.queries, 1)]
    rows = np.flatnonzero(truth.any(axis=1))
    assert estimator.score(data.queries, data.relevance) == np.mean(
        [truth[row, first[row]] for row in rows]
    )
    assert estimator.calibrated_on_ == "training"


def test_evaluate_uses_the_test_queries_and_the_trainings_propensities(model, data):
    splits = ["test" if place % 3 else "train" for place in range(len(data.queries))]
    queries = pd.DataFrame({"text": data.queries, "split": splits})
    chosen = [place for place, split in enumerate(splits) if split == "test"]
    texts = {place: data.queries[place] for place in chosen}
    pairs = [pair for pair in data.pairs if pair[0] in texts]
    assert model.evaluate(queries, data.pairs) == model.evaluate(texts, pairs)
    with pytest.raises(DataError, match="no query of the split test"):
        model.evaluate(queries.replace("test", "validation"), data.pairs)
    with pytest.raises(DataError, match="positive number"):
        model.evaluate(data.queries, [(0, 0, -1)])


def test_propensities_are_counted_over_the_training_queries_by_hand(data):
    given = (
        data.params
        | SMALL
        | {"index.knn_weight": 0.5, "data.propensity_a": 0.6, "data.propensity_b": 2.6}
    )
    model = unidec.fit(data.queries, data.labels, data.pairs, params=given)
    num_train = len(data.queries)
    factor = (np.log(num_train) - 1) * (2.6 + 1) ** 0.6
    counts = [sum(label == col for _, col in data.pairs) for label in range(len(data.labels))]
    weights = [1 + factor * (count + 2.6) ** -0.6 for count in counts]
    reached = best = 0.0
    for row, text in enumerate(data.queries):
        relevant = [col for r, col in data.pairs if r == row]
        found = [int(label.uid) for label in model.predict([text], 5)[0]]
        reached += sum(weights[col] for col in found if col in relevant)
        best += sum(sorted((weights[col] for col in relevant), reverse=True)[:5])
    assert model.evaluate(data.queries, data.pairs)["PSP@5"] == pytest.approx(100 * reached / best)


def test_a_forked_child_fits_and_predicts_as_its_parent(data, tmp_path, warm_python):
    code = """
model = fit()
answer = [[list(label) for label in labels] for labels in model.predict(given["queries"], 3)]
child = os.fork()
if child == 0:
    inherited, own = model.predict(given["queries"], 3), fit().predict(given["queries"], 3)
    as_lists = [
        [[list(label) for label in labels] for labels in found] for found in (inherited, own)
    ]
    os._exit(0 if as_lists == [answer, answer] else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    assert in_python(warm_python, code, data, tmp_path) == "0\n"


@pytest.mark.parametrize(
    "texts", [pd.DataFrame({"text": ["q"]}), {"q": "a"}, {"q"}, iter(["q"]), np.array([["q"]])]
)
def test_predict_refuses_what_is_not_a_list(model, texts):
    with pytest.raises(DataError, match="expected a list of texts"):
        model.predict(texts)


def test_contents_that_the_model_does_not_read_are_named(data, tmp_path):
    queries = pd.DataFrame({"text": data.queries, "content": "more"})
    given = queries, data.labels, data.pairs
    with pytest.warns(UserWarning, match=r"does not read the column `content`.*title\+content"):
        unidec.fit(*given, params=data.params | SMALL)
    long = data.params | SMALL | {"tokens.text": "title+content"}
    model = unidec.fit(*given, params=long)
    whole = [f"{text} more" for text in data.queries]
    assert model.evaluate(queries, data.pairs) == model.evaluate(whole, data.pairs)
