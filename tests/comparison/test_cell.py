"""What a child does with its folder, on tiny data and in this process; and what is made of the
results.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import tiny_data
from helpers.raw_files import write_raw
from helpers.tiny_training import TINY

from unidec import pipeline
from unidec.comparison import cell, results, workspace
from unidec.comparison.workspace import Comparison, Step, load_comparison
from unidec.config import by_key_path, nested
from unidec.data.dataset import XMCDataset
from unidec.data.storage import write_json
from unidec.errors import ArtifactError, TrainingError
from unidec.evaluation.metrics import filtered_truth

pytestmark = pytest.mark.timeout(600)
ORDER = ("first", "second", "both heads", "served", "kNN")


def plan(bert: Path, epochs: int = 2) -> dict[str, Any]:
    """A comparison with a cell of each kind."""
    values = {key: value for key, value in TINY.items() if key.split(".")[0] not in _OTHERS}
    for key in (
        "model.heads",
        "index.space",
        "loss.de",
        "loss.clf",
        "loss.clf_bce",
        "loss.reduction",
        "model.clf_init",
    ):
        values.pop(key, None)
    common = nested(
        values | {"encoder.name": str(bert), "optim.epochs": epochs, "run.check_memory": False}
    )
    return {
        "name": "tiny",
        "title": "Tiny",
        "common": common,
        "data": {"d": {"path": "raw", "max_length": 16, "set": {"data.validation_share": 0.1}}},
        "cells": {
            "first": {"recipe": "depsl"},
            "second": {"like": "first", "after": "first", "set": {"pool.gandalf": True}},
            "both heads": {"recipe": "unidec-v2"},
            "served": {"model_of": "both heads", "set": {"index": {"space": "clf"}}},
            "kNN": {"peer": "knn"},
        },
        "groups": {"G": {"base": "first", "cells": ["second"]}},
    }


_OTHERS = ("seed", "tokens", "device")


@pytest.fixture(scope="module")
def project(
    tiny_bert: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SimpleNamespace]:
    """All cells made, in this process."""
    make_raw = tiny_data.make_raw
    folder = tmp_path_factory.mktemp("project")
    write_raw(make_raw(num_train=96, num_test=40), folder / "raw", "xmc-json")
    (folder / "c.yaml").write_text(yaml.safe_dump(plan(tiny_bert), sort_keys=False))
    before = Path.cwd()
    store = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.chdir(folder)
    comparison = opened(folder)
    codes = [make(folder, step) for step in comparison.steps.values()]
    yield SimpleNamespace(folder=folder, comparison=comparison, steps=comparison.steps, codes=codes)
    os.chdir(before)
    if store is None:
        del os.environ["MLFLOW_TRACKING_URI"]
    else:
        os.environ["MLFLOW_TRACKING_URI"] = store


def opened(folder: Path, **overrides: Any) -> Comparison:
    return load_comparison(folder / "c.yaml", overrides, folder / "ws")


def make(folder: Path, step: Step) -> int:
    """What the step's process would do."""
    step.folder.mkdir(parents=True, exist_ok=True)
    write_json(step.folder / "cell.json", dict(step.spec))
    code = cell.main(str(step.folder))
    os.chdir(folder)
    return code


def cell_folder(project: SimpleNamespace, name: str) -> Path:
    return project.steps[f"d/{name}/0"].folder


def result(project: SimpleNamespace, name: str) -> dict[str, Any]:
    return json.loads((cell_folder(project, name) / "result.json").read_text())


def test_every_cell_is_made(project: SimpleNamespace) -> None:
    assert set(project.codes) == {0}
    assert all(step.is_done() for step in project.steps.values())


@pytest.mark.parametrize("name", ORDER)
def test_figures_are_those_of_the_predictions(project: SimpleNamespace, name: str) -> None:
    """P@1 and R@10 counted one query after the other, on the predictions that are kept."""
    made = result(project, name)
    labels = np.load(cell_folder(project, name) / "labels.npy")
    dataset = XMCDataset.open(cell_folder(project, name) / "data" / "dataset")
    rows = dataset.rows("test")
    truth = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows]).toarray()
    filtered = dataset.filter_pairs[rows].toarray() > 0
    assert labels.shape == (40, 100)
    assert labels.dtype == np.int32
    first = recall = 0.0
    for i, row in enumerate(labels):
        found = [label for label in row if label >= 0]
        assert not filtered[i, found].any()
        assert len(set(found)) == len(found) > 0
        first += bool(truth[i, found[0]])
        recall += truth[i, found[:10]].sum() / max(truth[i].sum(), 1)
    expected = 100 * first / 40
    assert made["metrics"]["P@1"] == pytest.approx(expected)
    assert made["metrics"]["R@10"] == pytest.approx(100 * recall / 40)
    assert made["dataset"]["test queries"] == 40
    assert made["lineage"]["threads"] >= "1"
    assert ("P@1" in made["validation"]) == (name != "kNN")


def test_costs(project: SimpleNamespace) -> None:
    first, both, served, knn = (
        result(project, name) for name in ("first", "both heads", "served", "kNN")
    )
    for made in (first, both):
        for name in (
            "train_seconds",
            "refresh_seconds",
            "total_seconds",
            "cpu_seconds",
            "search_ms",
            "bundle_bytes",
        ):
            assert made["costs"][name] > 0, name
        assert made["costs"]["peak_memory_bytes"] > 50e6
        assert [line["epoch"] for line in made["curve"]] == [2]
    assert both["costs"]["parameters"] - first["costs"]["parameters"] == 32 * 16 + 16 + 40 * 16
    assert served["curve"] == [] and "train_seconds" not in served["costs"]  # it trained nothing
    assert knn["costs"]["train_seconds"] > 0
    assert knn["costs"]["peak_memory_bytes"] > 0
    # the served head's figures are those that the evaluation of both heads has for it
    parts = json.loads(
        (cell_folder(project, "both heads") / "outputs" / "metrics.json").read_text()
    )
    same = served["metrics"].keys() & parts["clf"].keys()
    assert len(same) > 10
    assert all(served["metrics"][name] == pytest.approx(parts["clf"][name]) for name in same)


def test_only_what_is_needed_is_kept(project: SimpleNamespace) -> None:
    for name in ORDER:
        folder = cell_folder(project, name)
        assert not list(folder.glob("runs/*/checkpoints")) and not list(
            folder.glob("runs/*/refresh")
        )
        model = (folder / "outputs" / "model" / "manifest.json").is_file()
        assert model == (name in ("first", "both heads")), name  # others start from it, or serve it
        links = [path for path in folder.rglob("*") if path.is_symlink()]
        assert len(links) >= 4
        assert not any(os.readlink(path).startswith("/") for path in links)
        assert all(path.exists() for path in links if name != "served" or path.name != "model")
    assert (cell_folder(project, "second") / "data" / "label_graph" / "manifest.json").is_file()


def test_a_start_is_taken_over(project: SimpleNamespace) -> None:
    assert result(project, "second")["params"]["encoder.start"] == "data/start"


def test_a_result_names_no_folder_of_this_machine(project: SimpleNamespace) -> None:
    params = result(project, "first")["params"]
    assert "optim.epochs" in params and "data.path" not in params
    assert not [value for value in params.values() if str(value).startswith("/")]


def test_runs_of_mlflow(project: SimpleNamespace) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    for name in ("first", "kNN"):
        made = result(project, name)
        run = client.get_run(made["mlflow_run"])
        assert run.info.status == "FINISHED"
        expected = made["metrics"]["P@1"]
        assert run.data.metrics["test/P_at_1"] == pytest.approx(expected)


# -- the page's input
# -------------------------------------------------------------------------------------------------


def test_page_input(project: SimpleNamespace) -> None:
    found = results.gather(project.comparison)
    tests = results.contrasts(project.comparison, found)
    page = results.page_input(project.comparison, found, tests)
    assert [entry.name for entry in page.cells] == list(ORDER)
    assert not page.failures
    kinds = {entry.name: entry.kind for entry in page.cells}
    assert kinds == dict.fromkeys(ORDER, "recipe") | {"kNN": "peer"}
    cells = {entry.name: entry for entry in page.cells}
    assert (
        cells["second"].settings == {"pool.gandalf": True, "after": "first"}
        and cells["second"].recipe == "depsl"
    )
    assert cells["served"].settings["model of"] == "both heads"
    # a cell that builds on another one is charged for both
    own, before = (result(project, name)["costs"] for name in ("second", "first"))
    costs = cells["second"].runs[0].costs
    for name in ("train_seconds", "refresh_seconds", "total_seconds"):
        expected = own[name] + before[name]
        assert costs[name] == pytest.approx(expected)
    first_line = (
        cells["second"].runs[0].curve[0]["train_seconds"]
        - result(project, "second")["curve"][0]["train_seconds"]
    )
    assert first_line == pytest.approx(before["train_seconds"] + before["refresh_seconds"])
    (tests,) = tests.values()  # of the one data set
    against = {(test.system, test.against) for test in tests}
    assert {(name, "kNN") for name in ORDER if name != "kNN"} | {("second", "first")} == against
    value = next(t for t in tests if (t.system, t.against, t.metric) == ("first", "kNN", "P@1"))
    difference = (
        result(project, "first")["metrics"]["P@1"] - result(project, "kNN")["metrics"]["P@1"]
    )
    assert value.difference == pytest.approx(difference)
    assert 0 < value.p_adjusted <= 1
    lines = results.table(project.comparison).splitlines()
    columns, *rows = (line.split("\t") for line in lines)
    assert [row[1] for row in rows] == list(ORDER)
    assert len(columns) == len(rows[0])


def test_a_data_set_that_was_not_started_is_only_named(project: SimpleNamespace) -> None:
    values = yaml.safe_load((project.folder / "c.yaml").read_text())
    values["data"]["e"] = {"path": "raw", "max_length": 12}
    (project.folder / "two.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    comparison = load_comparison(project.folder / "two.yaml", {}, project.folder / "ws")
    page = results.page_input(comparison, results.gather(comparison), {})
    assert [task.name for task in page.tasks] == ["d"]
    assert {entry.task for entry in page.cells} == {"d"}
    assert not page.failures and "Not run yet: e." in page.notes
    failed = comparison.steps["e/first/0"]
    failed.folder.mkdir(parents=True)
    write_json(failed.folder / "failure.json", {"what": "no memory"})
    page = results.page_input(comparison, results.gather(comparison), {})
    assert [task.name for task in page.tasks] == ["d", "e"]
    assert "Not run yet: e." not in page.notes
    expected = {
        ("first", "failed"),
        *((name, "not run") for name in ORDER if name != "first"),
    }
    assert {(entry["cell"], entry["state"]) for entry in page.failures} == expected


def test_the_page_is_written(project: SimpleNamespace, drawn: None) -> None:
    page = results.write_report(project.comparison)
    text = page.read_text()
    assert "Tiny" in text
    assert all(name in text for name in ORDER)


def test_the_figures_beside_the_page(project: SimpleNamespace) -> None:
    found = json.loads(
        (results.write_report(project.comparison).parent / "results.json").read_text()
    )
    assert [entry["cell"] for entry in found["cells"]] == list(ORDER)
    assert not found["failures"]
    cells = {entry["cell"]: entry for entry in found["cells"]}
    for name, entry in cells.items():
        own = result(project, name)
        metrics = entry["metrics"]
        expected = {metric: [round(value, 3), None] for metric, value in own["metrics"].items()}
        assert metrics == expected
        assert len(entry["curve"]) == len(own["curve"])
        assert entry["seeds"] == [0]
        # what made them: code and data of each, settings
        assert entry["commits"] == [own["lineage"].get("commit", "")]
        assert entry["settings"] == project.comparison.jobs[f"d/{name}/0"].settings
        assert found["data"][entry["data"]]["sha256"] == own["dataset"]["sha256"]
    assert found["common"] == by_key_path(project.comparison.file.common)
    minutes, percent = cells["first"]["curve"][-1]
    last = result(project, "first")["curve"][-1]
    assert minutes == round(last["work_seconds"] / 60, 3)
    assert percent == round(last["validation"]["nDCG@5"], 3)
    tests = results.contrasts(project.comparison, results.gather(project.comparison))["d"]
    assert [round(test.p_adjusted, 5) for test in tests] == [test["p"] for test in found["tests"]]


def test_results_and_scores_alone_give_the_same_page(
    project: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be kept in git and completed on another machine: without data, predictions and
    models.
    """
    page = json.loads(
        (results.write_report(project.comparison).parent / "results.json").read_text()
    )
    for name in ("result.json", "scores.npz"):
        for file in project.comparison.root.glob(f"cells/*/*/*/{name}"):
            copy = tmp_path / file.relative_to(project.comparison.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    # newer code, of readers too
    monkeypatch.setattr(workspace, "code_sha256", lambda *results: "other")
    elsewhere = load_comparison(project.folder / "c.yaml", folder=tmp_path)
    assert not any(step.is_done() for step in elsewhere.steps.values())
    assert json.loads((results.write_report(elsewhere).parent / "results.json").read_text()) == page
    # scores are those of the predictions
    for path in project.comparison.root.glob("cells/*/*/*/scores.npz"):
        kept = results.read_scores(path)
        path.unlink()
        results.write_report(project.comparison)
        again = results.read_scores(path)
        for metric, both in kept.items():
            assert all(
                np.array_equal(mine, other) for mine, other in zip(both, again[metric], strict=True)
            )
    damaged = next(tmp_path.glob("cells/*/*/*/scores.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"scores.npz: scores cannot be read"):
        results.write_report(elsewhere)


def test_results_of_other_code_are_shown_and_counted(
    project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workspace.code_sha256

    def changed(*results: str) -> str:
        return "other" if "training" in results else real(*results)

    monkeypatch.setattr(workspace, "code_sha256", changed)
    comparison = opened(project.folder)
    found = results.gather(comparison)
    assert len(found) == 5
    page = results.page_input(comparison, found, {})
    assert page.notes == ["4 of 5 results were made by another version of the code."]
    assert not comparison.steps["d/first/0"].is_done()


def test_other_inputs_have_another_folder(project: SimpleNamespace) -> None:
    other = opened(project.folder, **{"pool.beta": 1})
    assert list(results.gather(other)) == ["d/kNN/0"]  # a peer has no such parameter
    assert other.steps["d/second/0"].folder != cell_folder(project, "second")
    # decide nothing
    same = opened(project.folder, **{"run.checkpoint_minutes": 3.0, "device": "cpu"})
    assert all(step.is_done() for step in same.steps.values())


def test_new_raw_data_makes_all_again(
    project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "raw_sha256", lambda path: "other")
    assert not any(step.is_done() for step in opened(project.folder).steps.values())


def test_figures_for_dvc(project: SimpleNamespace, tmp_path: Path) -> None:
    results.write_metrics(tmp_path / "figures" / "knn.json", project.steps["d/kNN/0"])
    figures = json.loads((tmp_path / "figures" / "knn.json").read_text())
    assert figures["run"] == "d/kNN/0"
    expected = result(project, "kNN")["metrics"]["P@1"]
    assert figures["P_at_1"] == pytest.approx(expected, abs=1e-3)


# -- what goes wrong
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def again(project: SimpleNamespace, tmp_path: Path, tiny_bert: Path) -> Iterator[SimpleNamespace]:
    """A comparison of one cell in a folder of its own, its data made."""
    (tmp_path / "raw").symlink_to(project.folder / "raw")
    values = plan(tiny_bert) | {"cells": {"first": {"recipe": "depsl"}}, "groups": {}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    before = Path.cwd()
    os.chdir(tmp_path)
    data, first = opened(tmp_path).steps.values()
    assert make(tmp_path, data) == 0
    yield SimpleNamespace(folder=tmp_path, data=data, first=first)
    os.chdir(before)


def test_cut_off_after_training_it_resumes_there(
    again: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_params: Any) -> None:
        raise TrainingError("the disk is full", where="outputs")

    folder = again.first.folder
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "index", broken)
        assert make(again.folder, again.first) == 5
    assert "the disk is full" in again.first.failure()
    assert list(folder.glob("runs/*/checkpoints/*"))
    assert not again.first.is_done()
    # it is trained already
    monkeypatch.setattr("unidec.training.trainer.Trainer.train_round", None)
    assert make(again.folder, again.first) == 0
    assert again.first.failure() == "" and [
        line["epoch"] for line in again.first.result()["curve"]
    ] == [2]


def test_by_other_code_it_is_rebuilt(again: SimpleNamespace) -> None:
    assert make(again.folder, again.first) == 0
    result = again.first.folder / "result.json"
    left = again.first.folder / "outputs" / "left"
    written = result.stat().st_mtime_ns
    assert make(again.folder, again.first) == 0  # done: nothing happens
    assert result.stat().st_mtime_ns == written
    left.write_text("of the first")
    other = dataclasses.replace(again.first, spec={**again.first.spec, "code": "other"})
    assert not other.is_done()
    assert make(again.folder, other) == 0
    assert result.stat().st_mtime_ns != written
    assert not left.exists()
    assert other.is_done()


def test_results_of_other_code_are_kept_on_request(again: SimpleNamespace) -> None:
    assert make(again.folder, again.first) == 0
    result = again.first.folder / "result.json"
    name = again.first.name

    def kept() -> Step:
        return load_comparison(
            again.folder / "c.yaml", folder=again.folder / "ws", keep_results=True
        ).steps[name]

    result.write_text(json.dumps(json.loads(result.read_text()) | {"code": "other"}))
    assert not opened(again.folder).steps[name].is_done()
    assert kept().is_done()
    result.unlink()
    assert kept().spec == again.first.spec


def test_a_slice_of_the_data(again: SimpleNamespace) -> None:
    text = (
        (again.folder / "c.yaml")
        .read_text()
        .replace("path: raw", "path: raw\n    train: 50\n    test: 7")
    )
    (again.folder / "c.yaml").write_text(text)
    data, _ = opened(again.folder).steps.values()
    assert data.folder != again.data.folder
    assert make(again.folder, data) == 0
    dataset = XMCDataset.open(data.folder / "data" / "dataset")
    assert len(dataset.rows("test")) == 7
    assert len(dataset.rows("train")) + len(dataset.rows("validation")) == 50
    assert (np.diff(dataset.relevance.tocsc().indptr) > 0).all()  # only labels that the slice knows
