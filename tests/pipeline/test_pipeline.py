"""All stages in a row on a slice of lf-debian: what each writes, what it says, and what it does
when run again.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.dense_votes import dense_votes
from helpers.tiny_training import tiny_params
from scipy.sparse import csr_matrix

from unidec import pipeline
from unidec.bundle.bundle import Bundle
from unidec.config import Params, recorded
from unidec.data.dataset import XMCDataset
from unidec.data.json_file import read_json_lines
from unidec.data.storage import folder_sha256, read_manifest
from unidec.errors import ConfigError
from unidec.evaluation.metrics import by_query
from unidec.metric_names import headline
from unidec.model.unidec import UniDEC
from unidec.pipeline import indexing, paths
from unidec.pipeline.evaluation import BY_INDEX
from unidec.pipeline.ranking import (
    CLF_WEIGHTS,
    KNN_WEIGHTS,
    Ranking,
    training_neighbours,
    tuned_blend,
)
from unidec.pipeline.training import Run
from unidec.ranking.calibration import fit_calibration
from unidec.ranking.heads import Heads, PairScores
from unidec.ranking.index import LabelIndex
from unidec.ranking.ranker import Ranker, Voting
from unidec.tracking.run import RUN_TAGS, Tracker
from unidec.training.fit import fit

pytestmark = pytest.mark.timeout(240)
TIMES = ("seconds", "texts_per_s", "tokens_per_s")


def write_elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """These outputs of the stages lie in a folder of their own."""
    for name in names:
        elsewhere = folder / getattr(paths, name).name
        monkeypatch.setitem(paths.RELATIVE, name, str(elsewhere))


def run_data_stages(params: Params) -> dict:
    return {
        name: getattr(pipeline, name)(params)
        for name in ("ingest", "tokens", "propensity", "label_graph")
    }


def run_rounds(run: Run) -> dict[str, list[dict]]:
    """Trains a run; the reports of its phases."""
    results: dict[str, list[dict]] = {
        name: [] for name in ("cluster", "mine", "train round", "validate")
    }

    def phase(name: str, number: int, work: Callable[[], dict]) -> dict:
        assert number == len(results[name]) + 1
        results[name].append(work())
        return results[name][-1]

    fit(run, phase)
    return results


@pytest.fixture
def done(in_work: SimpleNamespace, request: pytest.FixtureRequest) -> SimpleNamespace:
    """Everything from raw files to metrics, once for all tests of this file; `results`: what each
    stage returned.
    """
    if not hasattr(in_work, "results"):
        request.getfixturevalue("drawn")
        params = in_work.params()
        results = run_data_stages(params)
        run = pipeline.start_run(params)
        in_work.folder_of_run = run.folder
        in_work.begun = (run.epoch, run.finished, run.num_rounds)
        results |= run_rounds(run)
        results["export"] = run.export()
        results["index"] = pipeline.index(params)
        results["evaluate"] = pipeline.evaluate(params)
        in_work.results = results
    return in_work


def test_data_stages(done: SimpleNamespace) -> None:
    results = done.results
    expected = {
        "train": 1900,
        "validation": 100,
        "test": 500,
    }
    assert {key: results["ingest"][key] for key in ("train", "validation", "test")} == expected
    dataset = XMCDataset.open(paths.DATASET)
    assert (
        results["ingest"]["num_labels"] == dataset.num_labels
        and results["ingest"]["sha256"] == dataset.sha256
    )
    for which, size in (("queries", 2500), ("labels", dataset.num_labels)):
        tokens = paths.open_tokens(which)
        assert len(tokens) == size
        assert results["tokens"][f"{which}_texts"] == size
        assert results["tokens"][f"{which}_tokens"] == len(tokens.ids)
        assert tokens.max_length == 16 and tokens.meta["text"] == "title"
    assert (
        sum(results["propensity"][f"{name}_labels"] for name in ("tail", "torso", "head"))
        == dataset.num_labels
    )
    assert results["propensity"]["a"] == 0.55
    assert results["propensity"]["b"] == 1.5
    assert (
        results["label_graph"]["labels"] == dataset.num_labels
        and results["label_graph"]["edges"] > 0
    )
    json.dumps(pipeline.plain(results))  # what a stage says can be passed between tasks


def test_rounds(done: SimpleNamespace) -> None:
    refreshes = done.results["mine"]
    rounds = done.results["validate"]
    run = done.folder_of_run
    assert run.parent == paths.RUNS
    assert len(run.name) == 16
    assert done.begun == (0, False, 2)
    assert [r["epoch"] for r in refreshes] == [0, 1]
    assert all(
        r["clusters"] == 8 and r["mine_queries"] == 1900 and r["refresh_seconds"] > 0
        for r in refreshes
    )
    expected = [
        (1, 1, False, 8),
        (2, 2, True, 8),
    ]
    assert [(r.round, r.epoch, r.finished, r.steps) for r in rounds] == expected
    assert rounds[1].validation["P@1"] > 5  # 4,497 labels: chance is 0.1
    kept = read_json_lines(run / "rounds.jsonl")
    assert [(line["round"], line["epoch"]) for line in kept] == [(1, 1), (2, 2)]
    assert kept[1]["validation"] == rounds[1].validation
    assert kept[1]["refresh"]["epoch"] == 1
    steps = [line["step"] for line in read_json_lines(run / "history.jsonl")]
    assert steps == [0, 10]


def test_started_again_it_is_finished(done: SimpleNamespace) -> None:
    run_id = Tracker.resume(done.folder_of_run).run_id
    again = pipeline.start_run(done.params())
    assert again.lines == [f"run {again.folder.name} is trained: 2 epochs, 16 steps"]
    assert (again.folder, again.epoch, again.step, again.finished) == (
        done.folder_of_run,
        2,
        16,
        True,
    )
    # no second MLflow run
    assert run_id is not None
    assert Tracker.resume(again.folder).run_id == run_id


def test_exported_model_is_the_runs(done: SimpleNamespace) -> None:
    run = done.folder_of_run
    assert done.results["export"] == str(paths.MODEL)
    assert read_manifest(paths.MODEL, "model", 1)["meta"] == {
        "run": run.name,
        "seen": {"text": "title", "complete": True},
    }
    for name in ("history.jsonl", "rounds.jsonl"):
        assert (paths.MODEL / name).read_bytes() == (run / name).read_bytes()
    model = UniDEC.load(paths.MODEL)
    trainer = pipeline.training.open_trainer(done.params(), run)
    state = trainer.model.state_dict()
    assert all(
        np.array_equal(value.numpy(), state[name].numpy())
        for name, value in model.state_dict().items()
    )
    assert model.params == recorded(done.params().model_dump(mode="json"))


def test_bundle_and_index(done: SimpleNamespace) -> None:
    bundle = Bundle.load(paths.BUNDLE)
    results = done.results["index"]
    assert results.clf_weight in CLF_WEIGHTS and bundle.info.clf_weight == results.clf_weight
    assert bundle.num_labels == results.labels == XMCDataset.open(paths.DATASET).num_labels
    assert not list(paths.BUNDLE.rglob("*.jsonl"))
    # the tuned weight is the best on the validation split, by metrics computed one weight after the
    # other; of equal scores (the tiny tokenizer reads some titles alike) the smaller row comes
    # first
    ranking = Ranking.of_model(
        bundle.model, XMCDataset.open(paths.DATASET), "validation", "fp32", bundle.vectors
    )
    scored = {}
    for weight in CLF_WEIGHTS:
        heads = Heads(ranking.vectors, "both", True, weight)
        score_NL = (
            heads.queries(ranking.encoded.de_BD, ranking.encoded.clf_BD) @ heads.take(slice(None)).T
        )
        score_NL[ranking.filter_pairs.nonzero()] = -np.inf
        best_NL = np.argsort(-score_NL.round(6), axis=1, kind="stable")
        scored[weight] = ranking.metrics_of(best_NL[:, :100])["nDCG@5"]
    assert scored[results.clf_weight] == max(scored.values())
    expected = max(scored.values())
    assert results.validation["nDCG@5"] == pytest.approx(expected)
    assert not results.calibrated and bundle.info.calibration is None, (
        "too few of the ten best labels are relevant"
    )


def test_evaluation(done: SimpleNamespace) -> None:
    metrics = json.loads(paths.METRICS.read_text())
    test = metrics["test"]
    assert test["num_queries"] == 500
    assert all(
        0 <= value <= 100 for name, value in test.items() if not name.endswith("num_queries")
    )
    assert test["P@1"] > 5
    assert test["R@100"] > test["R@10"] > 0
    assert test["P@1"] >= test["P@5"]
    # a flat index is exact but for labels of the same score: the tiny tokenizer reads some titles
    # alike
    assert metrics["index"]["recall@10"] > 99.8
    assert metrics["index"]["recall@100"] > 99.8
    assert {"de", "clf"} <= metrics.keys()
    assert max(metrics["de"]["P@1"], metrics["clf"]["P@1"]) > 3
    assert done.results["evaluate"].metrics["P@1"] == test["P@1"]
    page = paths.REPORT.read_text()
    assert (
        "Against the better TF-IDF baseline of each metric, on 500 test queries, the model gains "
        in page
    )
    assert done.results["evaluate"].against_baselines in unescape(page)
    assert (
        metrics["baselines"].keys() == {"knn", "mix"}
        and 10 < metrics["baselines"]["mix"]["P@1"] < 100
    )
    assert 'id="calibration"' not in page  # too few relevant predictions for probabilities
    assert f"{metrics['baselines']['mix']['P@1']:.2f}" in page
    assert "TF-IDF kNN + label match" in page
    assert {file.name for file in paths.PLOTS.iterdir()} >= {
        "training.csv",
        "validation.csv",
        "at_k.csv",
        "groups.csv",
    }


def test_predictions_are_the_bundles_answers_without_filtered_pairs(done: SimpleNamespace) -> None:
    table = pq.read_table(paths.PREDICTIONS).to_pylist()
    dataset = XMCDataset.open(paths.DATASET)
    bundle = Bundle.load(paths.BUNDLE)
    rows = dataset.rows("test")
    assert [line["query_row"] for line in table] == rows.tolist()
    assert [line["query"] for line in table] == dataset.query_uids(rows)
    uids = dataset.label_uids()
    hits = same = 0
    for line, row in zip(table[:40], rows[:40], strict=True):
        filtered = dataset.filter_pairs[row].indices.tolist()
        assert not set(filtered) & set(line["labels"])
        assert len(line["labels"]) == 100
        assert len(set(line["labels"])) == 100
        assert line["scores"] == sorted(line["scores"], reverse=True)
        (answer,) = bundle.predict(
            dataset.query_texts([row]), k=5, exclude=[[uids[label] for label in filtered]]
        )
        same += answer.labels == [uids[label] for label in line["labels"][:5]]
        expected = line["scores"][:5]
        np.testing.assert_allclose(answer.scores, expected, rtol=1e-4, atol=1e-5)
        hits += line["labels"][0] in dataset.relevance[row].indices
    assert hits > 0 and same > 30  # all but ties


def test_tracking_knows_the_run(done: SimpleNamespace) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{done.folder}/mlflow.db")
    run = client.get_run(Tracker.resume(done.folder_of_run).run_id)
    assert run.data.params["pool.beta"] == "2"
    assert run.data.params["encoder.name"] == "bert"
    expected = done.results["evaluate"].metrics["P@1"]
    assert run.data.metrics["test/P_at_1"] == expected
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "training/loss")]
    assert steps == [0, 10]
    assert len(client.get_metric_history(run.info.run_id, "validation/P_at_1")) == 2
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "metrics.json", "plots"} <= names


def test_a_trial_logs_the_same_data_as_any_run(
    done: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial works in a folder below runs/own/, has the data's absolute path and no dvc.lock
    beside it.
    """
    from unidec.tracking.store import open_client

    client = open_client(f"sqlite:///{done.folder}/mlflow.db")
    trial = tmp_path / "runs" / "own" / "0123456789ab"
    logged = []
    for folder, data in (
        (tmp_path, "./raw/"),
        (trial, str(tmp_path / "raw")),
    ):
        shutil.copytree(done.folder / "data", folder / "data")
        shutil.copytree(done.folder / "bert", folder / "bert")
        monkeypatch.chdir(folder)
        if folder == tmp_path:
            lock = {"stages": {"ingest": {"outs": [{"path": "data/dataset", "md5": "0a.dir"}]}}}
            Path("dvc.lock").write_text(json.dumps(lock))
        else:
            # as `dvc exp run` and `dvc queue` set it
            monkeypatch.setenv("DVC_EXP_NAME", "brave-fox")
        begun = pipeline.start_run(
            done.params(**{"data.path": data, "tracking.experiment": "trials"})
        )
        run = client.get_run(Tracker.resume(begun.folder).run_id)
        (used,) = run.inputs.dataset_inputs
        logged.append((run.data.params, used.dataset.name, used.dataset.digest))
        assert run.data.tags.get("dvc.data/dataset") == ("0a.dir" if folder == tmp_path else None)
        assert run.data.tags.get("dvc_experiment") == (None if folder == tmp_path else "brave-fox")
        assert run.info.run_name.endswith("brave-fox") == (folder != tmp_path)
    assert logged[0] == logged[1]
    assert "data.path" not in logged[0][0]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({RUN_TAGS: '{"trial": "optim.epochs=3"}'}, "trial optim.epochs=3"),
        ({"DVC_STAGE": "train"}, "dvc repro"),
        ({"DVC_STAGE": "train", "DVC_EXP_NAME": "brave-fox"}, "brave-fox"),
        ({}, "raw both"),
    ],
)
def test_a_run_is_named_after_what_trained_it(
    done: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: str,
) -> None:
    for name in ("data", "bert"):
        shutil.copytree(done.folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    begun = pipeline.start_run(done.params(**{"tracking.experiment": "names"}))
    name = Tracker.resume(begun.folder).run_name
    assert words in name
    assert ("trial" in name, "repro" in name) == (
        "trial" in words,
        "repro" in words,
    )


def test_index_and_evaluation_again_write_the_same(done: SimpleNamespace) -> None:
    metrics = paths.METRICS.read_bytes()
    bundle = folder_sha256(paths.BUNDLE)
    table = paths.PREDICTIONS.read_bytes()
    assert pipeline.index(done.params()) == done.results["index"]
    assert folder_sha256(paths.BUNDLE) == bundle
    pipeline.evaluate(done.params())
    assert paths.METRICS.read_bytes() == metrics
    assert paths.PREDICTIONS.read_bytes() == table


def test_data_stages_again_write_the_same(done: SimpleNamespace) -> None:
    folders = (
        paths.DATASET,
        paths.TOKENS / "queries",
        paths.TOKENS / "labels",
        paths.PROPENSITY,
        paths.LABEL_GRAPH,
    )
    before = [folder_sha256(folder) for folder in folders]
    run_data_stages(done.params())
    assert [folder_sha256(folder) for folder in folders] == before


def test_a_round_cut_off_before_its_record_is_repeated_without_doubles(
    done: SimpleNamespace,
) -> None:
    """Records of a later epoch than the checkpoint's belong to a run that was cut off: they are
    written once.
    """
    params = done.params(seed=8)
    started = pipeline.start_run(params)
    run = started.folder
    started.cluster(), started.mine(), started.train_round(), started.validate()
    started.close()
    (run / "rounds.jsonl").open("a").close()
    first = read_json_lines(run / "rounds.jsonl")
    with open(run / "rounds.jsonl", "a") as file:
        file.write(json.dumps({"epoch": 2, "round": 2, "of": "a run that was cut off"}) + "\n")
    with open(run / "history.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "loss": 0.0}) + "\n")
    started.cluster(), started.mine(), started.train_round(), started.validate()
    kept = read_json_lines(run / "rounds.jsonl")
    assert kept[0] == first[0]
    assert [line["epoch"] for line in kept] == [1, 2]
    assert "of" not in kept[1]
    steps = [line["step"] for line in read_json_lines(run / "history.jsonl")]
    assert steps == [0, 10]


@pytest.fixture
def lossy_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An index that never finds the best label of a query; results are written elsewhere."""
    write_elsewhere(monkeypatch, tmp_path, "METRICS", "PLOTS", "PREDICTIONS", "REPORT")
    search = LabelIndex.search

    def lossy(
        index: LabelIndex, queries: Any, k: int, rescore: int = 0, excluded: Any = None
    ) -> Any:
        scores, rows = search(index, queries, k + 1, rescore, excluded)
        return scores[:, 1:], rows[:, 1:]

    monkeypatch.setattr(LabelIndex, "search", lossy)


def test_figures_are_exact_on_the_trainings_device_whatever_the_index_loses(
    done: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before = json.loads(paths.METRICS.read_text())
    request.getfixturevalue("lossy_index")
    load = Bundle.load
    devices = []

    def loaded(path: Path, **given: Any) -> Bundle:
        devices.append(given["device"])
        return load(path, **given | {"device": "cpu"})

    monkeypatch.setattr(Bundle, "load", loaded)
    monkeypatch.setattr(
        "unidec.pipeline.evaluation.choose_device", lambda device: f"that of {device}"
    )
    pipeline.evaluate(done.params())
    after = json.loads(paths.METRICS.read_text())
    assert devices == ["that of cpu"]
    assert after["test"] == before["test"]
    assert after["de"] == before["de"]
    assert after["index"]["lost/P@1"] > 2 > abs(before["index"]["lost/P@1"])
    assert after["index"]["recall@10"] < 95 < before["index"]["recall@10"]


def test_too_many_pairs_for_an_exact_search_are_ranked_by_the_index(
    done: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before = json.loads(paths.METRICS.read_text())
    request.getfixturevalue("lossy_index")
    pairs = before["test"]["num_queries"] * Bundle.load(paths.BUNDLE).num_labels
    for most in (pairs, pairs - 1):
        monkeypatch.setattr("unidec.pipeline.evaluation.MOST_PAIRS", most)
        warnings = pipeline.evaluate(done.params()).warnings
        after = json.loads(paths.METRICS.read_text())
        is_exact = most == pairs
        assert (after["test"] == before["test"]) is is_exact
        assert (BY_INDEX in warnings) is not is_exact
        assert ({"de", "clf"} <= after.keys()) is is_exact
        lost = before["test"]["P@1"] - after["test"]["P@1"]
        assert lost == pytest.approx(0 if is_exact else after["index"]["lost/P@1"])
        assert after["index"]["lost/P@1"] > 2
        assert after["index"]["recall@10"] < 95


@pytest.fixture
def other_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What follows writes elsewhere than `done` did."""
    write_elsewhere(
        monkeypatch, tmp_path, "MODEL", "BUNDLE", "METRICS", "PLOTS", "PREDICTIONS", "REPORT"
    )


@pytest.mark.usefixtures("other_outputs")
def test_a_frozen_transformer_is_computed_once_for_all_stages(done: SimpleNamespace) -> None:
    before = set(paths.CACHE.glob("*"))
    params = done.params(**{"encoder.kind": "both", "optim.epochs": 1})
    run = pipeline.start_run(params)
    fit(run)
    made = set(paths.CACHE.glob("*")) - before
    assert sorted(folder.name.split("-")[0] for folder in made) == ["vectors"] * 2
    run.export()
    pipeline.index(params)
    assert pipeline.evaluate(params).metrics["P@1"] > 1
    assert set(paths.CACHE.glob("*")) - before == made


@pytest.mark.usefixtures("other_outputs")
@pytest.mark.parametrize("heads", ["de", pytest.param("clf", marks=pytest.mark.slow)])
def test_a_head_alone_goes_through(done: SimpleNamespace, heads: str) -> None:
    params = done.params(
        **{
            "model.heads": heads,
            "optim.epochs": 1,
            "index.clf_weight": 1.0,
            "index.clf_normalize": False,
            "index.factory": "HNSW32",
            "model.clf_bias": heads == "clf",
            "loss.clf_bce": 0.0 if heads == "de" else 0.1,
            "index.knn_weight": 0.3,
        }
    )
    run = pipeline.start_run(params)
    fit(run)
    run.export()
    pipeline.index(params)
    metrics = pipeline.evaluate(params).metrics
    result = json.loads(paths.METRICS.read_text())
    assert run.finished and 1 < metrics["P@1"] < 100
    assert result["index"]["recall@10"] > 90
    assert not {"de", "clf"} & result.keys()
    assert {"heads", "knn"} <= result.keys()
    assert Bundle.load(paths.BUNDLE).info.knn.space == heads
    assert result["knn"]["P@1"] > 1


@pytest.fixture
def other_bundle(done: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model of `done`, all that follows elsewhere."""
    write_elsewhere(monkeypatch, tmp_path, "BUNDLE", "METRICS", "PLOTS", "PREDICTIONS", "REPORT")


def dense_ndcg(bundle: Bundle, split: Any, clf_weight: float, knn_weight: float) -> float:
    """nDCG@5 of a split with every label of every query scored, in double precision."""
    dataset = XMCDataset.open(paths.DATASET)
    info = bundle.info
    ranking = Ranking.of_model(bundle.model, dataset, split, "fp32", bundle.vectors)
    heads = bundle.ranker.heads.weighted(clf_weight)
    query = heads.queries(ranking.encoded.de_BD, ranking.encoded.clf_BD).astype(float)
    score_NL = query @ heads.take(slice(None)).astype(float).T
    if knn_weight:
        score_NL += knn_weight * dense_votes(
            bundle.neighbours.votes(ranking.encoded.de_BD, info.knn.neighbours)
        )
    score_NL[ranking.filter_pairs.nonzero()] = -np.inf
    best = np.argsort(-score_NL, axis=1, kind="stable")[:, :5]
    found, _ = by_query(best, ranking.truth, ["nDCG@5"], np.ones(ranking.truth.shape[1]))["nDCG@5"]
    return 100 * float(found.mean())


@pytest.mark.usefixtures("other_bundle")
def test_votes_are_tuned_with_the_classifiers_weight_on_validation(done: SimpleNamespace) -> None:
    params = done.params(**{"index.knn_weight": "auto", "index.knn_neighbours": 20})
    results = pipeline.index(params)
    bundle = Bundle.load(paths.BUNDLE)
    dataset = XMCDataset.open(paths.DATASET)
    info = bundle.info
    tried = bundle.info.card["tuning"]
    assert info.knn is not None
    assert results.knn_weight == info.knn.weight in KNN_WEIGHTS
    best = max(tried, key=lambda line: line["nDCG@5"])
    assert best["nDCG@5"] == results.validation["nDCG@5"]
    assert results.validation["nDCG@5"] == info.metrics["validation"]["nDCG@5"]
    chosen = {"clf_weight": info.clf_weight, "knn_weight": info.knn.weight}
    assert any(
        line["nDCG@5"] == best["nDCG@5"] and chosen.items() <= line.items() for line in tried
    )
    # neither weight can be bettered alone
    knn_weights = {line["knn_weight"] for line in tried if line["clf_weight"] == info.clf_weight}
    assert knn_weights == set(KNN_WEIGHTS)
    clf_weights = {line["clf_weight"] for line in tried if line["knn_weight"] == info.knn.weight}
    assert clf_weights == set(CLF_WEIGHTS)
    # better than the heads alone, and what a dense computation says of the votes of training
    # queries alone
    every = bundle.neighbours
    bundle.neighbours = training_neighbours(bundle.model, dataset, "fp32")
    assert results.validation["nDCG@5"] > done.results["index"].validation["nDCG@5"]
    for line in (best, tried[0], tried[-1]):
        dense = dense_ndcg(bundle, "validation", line["clf_weight"], line["knn_weight"])
        # ties: the tiny tokenizer reads some titles alike
        assert line["nDCG@5"] == pytest.approx(dense, abs=0.3)
    bundle.neighbours = every
    # training queries vote, and at last those of the validation split; no others, and no filtered
    # pair
    rows = np.concatenate([dataset.rows("train"), dataset.rows("validation")])
    assert bundle.neighbours.uids.to_pylist() == dataset.query_uids(rows)
    assert bundle.neighbours.titles.to_pylist() == dataset.query_texts(rows)
    voting = bundle.neighbours.labels_ML > 0
    assert (
        (voting != (dataset.relevance[rows] > 0)).nnz
        == voting.multiply(dataset.filter_pairs[rows]).nnz
        == 0
    )
    altered = copy.copy(dataset)
    relevant = dataset.relevance.toarray() > 0
    altered.filter_pairs = csr_matrix(relevant & (relevant.cumsum(axis=1) == 1))
    # all but each query's first label
    left = training_neighbours(bundle.model, altered, "fp32").labels_ML
    of_training = voting[: left.shape[0]]
    assert left.nnz == of_training.nnz - (of_training.getnnz(axis=1) > 0).sum()
    before = folder_sha256(paths.BUNDLE)
    assert pipeline.index(params) == results
    assert folder_sha256(paths.BUNDLE) == before


@pytest.mark.usefixtures("other_bundle")
def test_probabilities_are_measured_on_the_answers_to_validation_queries(
    done: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # of the ten best labels too few are relevant here
    monkeypatch.setattr(indexing, "CALIBRATED", 100)
    assert (
        pipeline.index(done.params()).calibrated
        and "no probabilities" not in capsys.readouterr().err
    )
    bundle = Bundle.load(paths.BUNDLE)
    ranking = Ranking.of_model(
        bundle.model, XMCDataset.open(paths.DATASET), "validation", "fp32", bundle.vectors
    )
    found = bundle.ranker.rank(ranking.encoded, 100, ranking.excluded)
    relevant = [
        [label in row.indices for label in best]
        for row, best in zip(ranking.truth, found.rows, strict=True)
    ]
    again = fit_calibration(found.scores, np.array(relevant))
    at = np.linspace(found.scores.min(), found.scores.max(), 50)
    assert again is not None
    assert bundle.info.calibration is not None
    assert len(again.scores) > 1
    np.testing.assert_allclose(bundle.info.calibration.of(at), again.of(at), atol=0.02)  # ties
    monkeypatch.setattr(indexing, "CALIBRATED", 1)
    assert not pipeline.index(done.params()).calibrated
    assert "no probabilities: fewer than 50 " in capsys.readouterr().err


@pytest.mark.usefixtures("other_bundle")
def test_a_fusion_ranks_where_it_gains_on_queries_that_it_has_not_seen(
    done: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(indexing, "CALIBRATED", 100)
    # too little for a blend
    votes = {"index.knn_by": "words", "index.knn_weight": 0.05, "index.knn_neighbours": 20}
    blend = pipeline.index(done.params(**votes))
    params = done.params(**votes | {"index.fusion": True, "index.knn_head": 3})
    monkeypatch.setattr("unidec.pipeline.ranking.LEAST_QUERIES", 10**6)
    assert pipeline.index(params) == blend
    assert "no fusion" in capsys.readouterr().err
    assert Bundle.load(paths.BUNDLE).info.fusion is None
    monkeypatch.setattr("unidec.pipeline.ranking.LEAST_QUERIES", 20)
    # it gains as surely in a third of the steps
    monkeypatch.setattr("unidec.ranking.fusion_fit.MOST_STEPS", 25)
    monkeypatch.setattr("unidec.ranking.fusion_fit.WORD_STEPS", 50)
    perfect = dict.fromkeys(blend.validation, 100.0)
    with monkeypatch.context() as patch:
        patch.setattr(
            indexing, "tuned_blend", lambda *given: replace(tuned_blend(*given), metrics=perfect)
        )
        assert not pipeline.index(params).fusion
    assert "without one 100.00; the weighted sum of the scores ranks" in capsys.readouterr().err
    results = pipeline.index(params)
    bundle = Bundle.load(paths.BUNDLE)
    assert results.fusion and results.calibrated and bundle.info.fusion is not None
    gain = results.validation["nDCG@5"] - blend.validation["nDCG@5"]
    expected = bundle.info.fusion.gain["nDCG@5"]
    assert gain == pytest.approx(expected, abs=1e-3)
    assert gain > 0
    told = bundle.info.card["fusion"]
    (chosen,) = (row for row in told["by_tail"] if row["tail"] == bundle.info.fusion.tail)
    assert (
        chosen["nDCG@5"]
        == results.validation["nDCG@5"]
        >= max(row["nDCG@5"] for row in told["by_tail"]) - 0.1
    )
    before = folder_sha256(paths.BUNDLE)
    assert pipeline.index(params) == results
    assert folder_sha256(paths.BUNDLE) == before
    # the bundle ranks the test split by it, and the profile has the scores that it gives to queries
    # that do not vote
    dataset = XMCDataset.open(paths.DATASET)
    info = bundle.info
    voters = training_neighbours(bundle.model, dataset, "fp32", by="words", word_head=3)
    ranker = Ranker(
        bundle.ranker.heads,
        bundle.index,
        replace(bundle.ranker.voting, neighbours=voters),
        info.fusion,
    )
    quantiles = bundle.info.card["profile"]["served"]["score_quantiles"]
    ranking = Ranking.of_model(bundle.model, dataset, "validation", "fp32", bundle.vectors)
    found = ranker.rank(ranking.with_words(voters.words).encoded, 1)
    assert bundle.neighbours.num_queries == voters.num_queries + len(ranking.rows)
    assert [quantiles[0], quantiles[-1]] == pytest.approx(
        [found.scores.min(), found.scores.max()], rel=1e-3
    )
    pipeline.evaluate(params)
    result = json.loads(paths.METRICS.read_text())
    assert result["test"]["nDCG@5"] != result["heads"]["nDCG@5"]
    assert result["index"]["recall@10"] > 90
    page = paths.REPORT.read_text()
    assert "Expected calibration error" in page
    assert "Frequent against rare labels" in page and "score = logit" in page


@pytest.mark.usefixtures("other_bundle")
def test_the_evaluation_tells_what_votes_add(done: SimpleNamespace) -> None:
    params = done.params(
        **{"index.knn_weight": 0.5, "index.clf_weight": done.results["index"].clf_weight}
    )
    assert pipeline.index(params).knn_weight == 0.5
    pipeline.evaluate(params)
    result = json.loads(paths.METRICS.read_text())
    bundle = Bundle.load(paths.BUNDLE)
    dataset = XMCDataset.open(paths.DATASET)
    without = json.loads((done.folder / "outputs" / "metrics.json").read_text())
    assert result["index"]["knn_weight"] == 0.5
    assert without["index"]["knn_weight"] == 0
    assert not {"heads", "knn"} & without.keys()
    # without votes as in a bundle that has none; with them, as the dense computation says
    assert result["heads"] == pytest.approx(headline(without["test"]), abs=0.2)
    assert result["de"] == without["de"]
    assert result["clf"] == without["clf"]
    dense = dense_ndcg(bundle, "test", bundle.info.clf_weight, 0.5)
    assert result["test"]["nDCG@5"] == pytest.approx(dense, abs=0.3)
    assert result["test"]["nDCG@5"] != result["heads"]["nDCG@5"] != result["knn"]["nDCG@5"]
    assert 1 < result["knn"]["P@1"] < 100
    # the file holds the bundle's own answers, filtered pairs removed
    uids = dataset.label_uids()
    for line in pq.read_table(paths.PREDICTIONS).to_pylist()[:40]:
        filtered = dataset.filter_pairs[line["query_row"]].indices.tolist()
        assert not set(filtered) & set(line["labels"])
        assert len(set(line["labels"])) == 100
        exclude = [[uids[label] for label in filtered]]
        (answer,) = bundle.predict(dataset.query_texts([line["query_row"]]), k=5, exclude=exclude)
        expected = line["scores"][:5]
        np.testing.assert_allclose(answer.scores, expected, rtol=1e-3, atol=1e-4)
    from mlflow import MlflowClient

    run = MlflowClient(f"sqlite:///{done.folder}/mlflow.db").get_run(
        Tracker.resume(done.folder_of_run).run_id
    )
    assert run.data.metrics["knn/P_at_1"] == result["knn"]["P@1"]
    assert run.data.metrics["heads/P_at_1"] == result["heads"]["P@1"]


@pytest.mark.usefixtures("other_bundle")
def test_votes_that_do_not_help_are_left_out(
    done: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unidec.pipeline.ranking.KNN_WEIGHTS", (0.0, 1e9))
    monkeypatch.setattr(
        Voting,
        "votes",
        lambda self, encoded: PairScores.none((len(encoded), self.neighbours.num_labels)),
    )
    results = pipeline.index(done.params(**{"index.knn_weight": "auto"}))
    bundle = Bundle.load(paths.BUNDLE)
    assert results.knn_weight == 0
    assert results.clf_weight == done.results["index"].clf_weight
    assert bundle.neighbours is None and bundle.info.card["tuning"]


def test_a_bag_reads_longer_texts_than_its_transformer(
    tiny_dataset, tiny_bert, tmp_path, monkeypatch
):
    """It has the transformer's tokens only; the transformer itself, with 64 positions, is refused
    before tokenising.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_dataset.path, paths.DATASET)
    params = tiny_params(tiny_bert, **{"encoder.kind": "bag", "tokens.max_length": 65})
    assert pipeline.tokens(params)["queries_texts"] == tiny_dataset.num_queries
    transformer = params.model_copy(
        update={"encoder": params.encoder.model_copy(update={"kind": "both"})}
    )
    with pytest.raises(ConfigError, match="reads at most 64 tokens"):
        pipeline.tokens(transformer)
