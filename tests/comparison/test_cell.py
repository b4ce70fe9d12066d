"""What a child does with its folder, on tiny data and in this process; and what is made of the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from unidec import pipeline
from unidec.comparison import cell, engine, results
from unidec.comparison.plan import load_comparison, nested
from unidec.comparison.workspace import Workspace
from unidec.data.dataset import XMCDataset
from unidec.data.formats import write_raw
from unidec.data.storage import write_json
from unidec.errors import TrainingError
from unidec.evaluation.metrics import filtered_truth
from unidec.training.step_timing import Times

pytestmark = pytest.mark.timeout(240)
ORDER = ("first", "second", "both heads", "served", "kNN")


def plan(bert: Path, helper: Callable[[str], Any], epochs: int = 2) -> dict[str, Any]:
    """A comparison with a cell of each kind."""
    values = {key: value for key, value in helper("tiny_training").TINY.items() if key.split(".")[0] not in _OTHERS}
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
    common = nested(values | {"encoder.name": str(bert), "optim.epochs": epochs, "run.check_memory": False})
    return {
        "name": "tiny", "title": "Tiny", "common": common,
        "data": {"d": {"path": "raw", "max_length": 16, "set": {"data.validation_share": 0.1}}},
        "cells": {
            "first": {"recipe": "depsl"},
            "second": {"like": "first", "after": "first", "set": {"pool.gandalf": True}},
            "both heads": {"recipe": "unidec-v2"},
            "served": {"model_of": "both heads", "set": {"index": {"space": "clf"}}},
            "kNN": {"peer": "knn", "options": {"neighbours": 5}},
        },
        "groups": {"G": {"base": "first", "cells": ["second"]}},
    }  # fmt: skip


_OTHERS = ("seed", "tokens", "device")


@pytest.fixture(scope="module")
def project(
    tiny_bert: Path, helper: Callable[[str], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SimpleNamespace]:  # fmt: skip
    """All cells made, in this process."""
    make_raw = helper("conftest").make_raw
    folder = tmp_path_factory.mktemp("project")
    write_raw(make_raw(num_train=96, num_test=40), folder / "raw", "xmc-json")
    (folder / "c.yaml").write_text(yaml.safe_dump(plan(tiny_bert, helper), sort_keys=False))
    before, store = Path.cwd(), os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    os.chdir(folder)
    workspace = open_workspace(folder)
    codes = {task.key: make(folder, workspace, task.key) for task in workspace.tasks.values()}
    yield SimpleNamespace(folder=folder, workspace=workspace, codes=codes)
    os.chdir(before)
    if store is None:
        del os.environ["MLFLOW_TRACKING_URI"]
    else:
        os.environ["MLFLOW_TRACKING_URI"] = store


def open_workspace(folder: Path, **extra: Any) -> Workspace:
    comparison = load_comparison(folder / "c.yaml", extra)
    return Workspace.of(comparison, comparison.jobs, folder / "ws")


def make(folder: Path, workspace: Workspace, key: str) -> int:
    """What the engine's child would do."""
    task = workspace.tasks[key]
    task.folder.mkdir(parents=True, exist_ok=True)
    write_json(task.folder / "job.json", dict(task.spec))
    code = cell.main(str(task.folder))
    os.chdir(folder)
    return code


def result(project: SimpleNamespace, name: str) -> dict[str, Any]:
    return json.loads((project.workspace.tasks[f"d/{name}/0"].folder / "result.json").read_text())


def data_folder(project: SimpleNamespace) -> Path:
    task = project.workspace.tasks["d/first/0"]
    return project.workspace.tasks[task.needs[0]].folder / "data"


def test_every_cell_is_made(project: SimpleNamespace) -> None:
    assert set(project.codes.values()) == {0}
    assert all(task.is_done() for task in project.workspace.tasks.values())


@pytest.mark.parametrize("name", ORDER)
def test_figures_are_those_of_the_predictions(project: SimpleNamespace, name: str) -> None:
    """P@1 and R@10 counted one query after the other, on the predictions that are kept."""
    made = result(project, name)
    labels = np.load(project.workspace.tasks[f"d/{name}/0"].folder / "labels.npy")
    dataset = XMCDataset.open(data_folder(project) / "dataset")
    rows = dataset.rows("test")
    truth = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows]).toarray()
    filtered = dataset.filter_pairs[rows].toarray() > 0
    assert labels.shape == (40, 100) and labels.dtype == np.int32
    first = recall = 0.0
    for i, row in enumerate(labels):
        found = [label for label in row if label >= 0]
        assert not filtered[i, found].any() and len(set(found)) == len(found) > 0
        first += bool(truth[i, found[0]])
        recall += truth[i, found[:10]].sum() / max(truth[i].sum(), 1)
    assert made["metrics"]["P@1"] == pytest.approx(100 * first / 40)
    assert made["metrics"]["R@10"] == pytest.approx(100 * recall / 40)
    assert made["dataset"]["test"] == 40 and made["machine"]["threads"] >= 1
    assert "P@1" in made["validation"] and made["bins"]


def test_costs(project: SimpleNamespace) -> None:
    first, both, served, knn = (result(project, name) for name in ("first", "both heads", "served", "kNN"))
    for made in (first, both):
        for name in (
            "train_seconds",
            "refresh_seconds",
            "total_seconds",
            "cpu_seconds",
            "encode_ms",
            "bundle_bytes",
        ):
            assert made["costs"][name] > 0, name
        assert made["costs"]["search_ms"] >= 0  # a difference of two times: 0 where other programs held the first up
        assert made["costs"]["peak_memory_bytes"] > 50e6
        assert [line["epoch"] for line in made["curve"]] == [2] and made["history"]
    assert first["costs"]["parameters_heads"] == 32 * 16 + 16 and first["costs"]["parameters_classifier"] == 0
    assert both["costs"]["parameters_heads"] == 2 * (32 * 16 + 16) and both["costs"]["parameters_classifier"] == 40 * 16
    assert first["costs"]["parameters_encoder"] == both["costs"]["parameters_encoder"] > 32 * 20
    assert served["curve"] == [] and "train_seconds" not in served["costs"]  # it trained nothing
    assert knn["costs"]["train_seconds"] > 0 and knn["costs"]["peak_memory_bytes"] > 0
    assert set(both["parts"]) == {"de", "clf"} and first["parts"] == {}
    assert served["metrics"] == pytest.approx(both["metrics"] | _only(served["metrics"], both["parts"]["clf"]))


def _only(metrics: dict[str, float], headline: dict[str, float]) -> dict[str, float]:
    """The served head's figures where the headline has them, so that those must agree; else its own."""
    return {name: headline.get(name, value) for name, value in metrics.items()}


def test_only_what_is_needed_is_kept(project: SimpleNamespace) -> None:
    for name in ORDER:
        folder = project.workspace.tasks[f"d/{name}/0"].folder
        assert not list(folder.glob("runs/*/checkpoints")) and not list(folder.glob("runs/*/refresh"))
        model = (folder / "outputs" / "model" / "manifest.json").is_file()
        assert model == (name in ("first", "both heads")), name  # others start from it, or serve it
        links = [path for path in folder.rglob("*") if path.is_symlink()]
        assert len(links) >= 4 and not any(os.readlink(path).startswith("/") for path in links)
        assert all(path.exists() for path in links if name != "served" or path.name != "model")
    assert (project.workspace.tasks["d/second/0"].folder / "data" / "label_graph" / "manifest.json").is_file()


def test_a_start_is_taken_over(project: SimpleNamespace) -> None:
    assert result(project, "second")["params"]["encoder.start"] == "../../first/0/outputs/model"
    identity = json.loads(next((project.workspace.tasks["d/second/0"].folder / "runs").glob("*/run.json")).read_text())
    assert identity["identity"]["encoder.start"] != '""'


def test_runs_of_mlflow(project: SimpleNamespace) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    for name in ("first", "kNN"):
        made = result(project, name)
        run = client.get_run(made["mlflow_run"])
        assert run.info.status == "FINISHED"
        assert run.data.metrics["test/P_at_1"] == pytest.approx(made["metrics"]["P@1"])


def test_tags_from_outside(
    project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    from mlflow import MlflowClient

    from unidec.tracking.run import RUN_TAGS, Tracker

    parent = Tracker("tags")
    parent_id = parent.start(tmp_path / "parent", {})
    monkeypatch.setenv(RUN_TAGS, json.dumps({"mlflow.parentRunId": parent_id, "mlflow.runName": "d/x/0"}))
    child = Tracker("tags")
    child.start(tmp_path / "child", {}, {"own": "1"}, run_name="other")
    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    run = client.get_run(str(child.run_id))
    assert run.info.run_name == "d/x/0" and run.data.tags["mlflow.parentRunId"] == parent_id
    assert run.data.tags["own"] == "1"


# -- the page's input -------------------------------------------------------------------------------------------------


def test_page_input(project: SimpleNamespace) -> None:
    found = results.gather(project.workspace)
    tests = results.contrasts(project.workspace, found)
    page = results.page_input(project.workspace.comparison, found, tests)
    assert [entry.name for entry in page.cells] == list(ORDER) and not page.failures
    kinds = {entry.name: entry.kind for entry in page.cells}
    assert kinds == dict.fromkeys(ORDER, "recipe") | {"kNN": "peer"}
    cells = {entry.name: entry for entry in page.cells}
    assert cells["second"].settings == {"pool.gandalf": True, "after": "first"} and cells["second"].recipe == "depsl"
    assert cells["served"].settings["model of"] == "both heads"
    # a cell that builds on another one is charged for both
    own, before = (result(project, name)["costs"] for name in ("second", "first"))
    costs = cells["second"].runs[0].costs
    for name in ("train_seconds", "refresh_seconds", "total_seconds"):
        assert costs[name] == pytest.approx(own[name] + before[name])
    first_line = (
        cells["second"].runs[0].curve[0]["train_seconds"] - result(project, "second")["curve"][0]["train_seconds"]
    )
    assert first_line == pytest.approx(before["train_seconds"] + before["refresh_seconds"])
    against = {(test.cell, test.against) for test in tests}
    assert {(name, "kNN") for name in ORDER if name != "kNN"} | {("second", "first")} == against
    value = next(t for t in tests if (t.cell, t.against, t.metric) == ("first", "kNN", "P@1"))
    difference = result(project, "first")["metrics"]["P@1"] - result(project, "kNN")["metrics"]["P@1"]
    assert value.difference == pytest.approx(difference) and 0 < value.p_value <= 1
    columns, rows = results.table(page)
    assert [row[1] for row in rows] == list(ORDER) and len(columns) == len(rows[0])


def test_page_and_summary_are_written(project: SimpleNamespace, tmp_path: Path) -> None:
    from unidec.comparison.command import report

    page = report(project.workspace.comparison, project.workspace.root)
    text = page.read_text()
    assert "Tiny" in text and all(name in text for name in ORDER)
    summary = json.loads((page.parent / "summary.json").read_text())
    entry = next(entry for entry in summary["cells"] if entry["cell"] == "first")
    assert entry["metrics"]["P@1"] == {"mean": result(project, "first")["metrics"]["P@1"], "spread": None, "count": 1}


def test_results_of_other_code_are_shown_and_said(project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from unidec.comparison import workspace

    monkeypatch.setattr(workspace, "code_sha256", lambda parts: "other" if "model" in parts else "same")
    other = Workspace("", project.workspace.root)  # type: ignore[arg-type]
    other = Workspace(project.workspace.comparison, project.workspace.root, dict(project.workspace.tasks))
    task = other.tasks["d/first/0"]
    changed = {**task.spec, "identity": {**task.spec["identity"], "code": '"other"'}}
    other.tasks["d/first/0"] = type(task)(task.key, task.folder, changed, task.needs, task.makes, task.job)
    found = {entry.job.cell: entry for entry in results.gather(other)}
    assert found["first"].other_code and not found["both heads"].other_code
    page = results.page_input(other.comparison, list(found.values()))
    assert any("another version of the code" in note for note in page.notes)
    assert not other.tasks["d/first/0"].is_done() and other.tasks["d/first/0"].is_done(("code",))


def test_results_of_other_parameters_are_not_shown(project: SimpleNamespace) -> None:
    other = open_workspace(project.folder, **{"pool.beta": 1})
    found = {entry.job.cell: entry for entry in results.gather(other)}
    assert found["first"].result is None and found["kNN"].result is not None  # a peer has no such parameter
    failure = found["first"].failure
    assert failure is not None and failure.state == "not run" and "other parameters" in failure.reason


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def again(project: SimpleNamespace, tmp_path: Path, tiny_bert: Path, helper: Callable[[str], Any]) -> SimpleNamespace:
    """A comparison of one cell in a folder of its own, its data made."""
    folder = tmp_path
    (folder / "raw").symlink_to(project.folder / "raw")
    values = plan(tiny_bert, helper) | {"cells": {"first": {"recipe": "depsl"}}, "groups": {}}
    (folder / "c.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    before = Path.cwd()
    os.chdir(folder)
    workspace = open_workspace(folder)
    data = next(key for key in workspace.tasks if key.startswith("data"))
    assert make(folder, workspace, data) == 0
    yield SimpleNamespace(folder=folder, workspace=workspace)
    os.chdir(before)


def test_cut_off_after_training_it_goes_on_there(again: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(_params: Any) -> None:
        raise TrainingError("the disk is full", where="outputs")

    folder = again.workspace.tasks["d/first/0"].folder
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "index", broken)
        assert make(again.folder, again.workspace, "d/first/0") == 5
    assert "the disk is full" in json.loads((folder / "failure.json").read_text())["what"]
    assert engine.last_words(again.workspace.tasks["d/first/0"]) == "no log"  # nobody caught what it printed
    checkpoints = list(folder.glob("runs/*/checkpoints/*"))
    assert checkpoints and not (folder / "result.json").exists()
    monkeypatch.setattr("unidec.training.trainer.Trainer.train_round", None)  # trained it is
    assert make(again.folder, again.workspace, "d/first/0") == 0
    made = json.loads((folder / "result.json").read_text())
    assert not (folder / "failure.json").exists() and [line["epoch"] for line in made["curve"]] == [2]


def test_under_another_identity_it_begins_anew(again: SimpleNamespace) -> None:
    folder = again.workspace.tasks["d/first/0"].folder
    assert make(again.folder, again.workspace, "d/first/0") == 0
    assert make(again.folder, again.workspace, "d/first/0") == 0  # done: nothing happens
    written = (folder / "result.json").stat().st_mtime_ns
    (folder / "outputs" / "left").write_text("of the first")
    other = open_workspace(again.folder, **{"optim.epochs": 1})
    assert not other.tasks["d/first/0"].is_done()
    assert make(again.folder, other, "d/first/0") == 0
    assert (folder / "result.json").stat().st_mtime_ns != written and not (folder / "outputs" / "left").exists()
    assert len(list((folder / "runs").glob("*/run.json"))) == 1
    assert other.tasks["d/first/0"].is_done() and not again.workspace.tasks["d/first/0"].is_done()


@pytest.mark.parametrize("seconds", [0.0, 1.0, 13.9, 14.0, 22.5, 60.0, 1e9])
def test_epochs_that_fill_a_budget(seconds: float) -> None:
    """Against counting: 2 s before the first step, 3 s an epoch, a refresh of 1.5 s each third epoch."""
    times = Times(0.1, 3.0, 0.5, 0.5, 0.5, 2.0, 0.0, {})
    fits = [e for e in range(1, 1001) if 2.0 + 3.0 * e + 1.5 * len(range(0, e, 3)) <= seconds]
    assert cell.affordable_epochs(times, 3, seconds) == max(fits, default=1)


def test_a_budget_of_minutes(again: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(params: Any) -> Times:
        asked.append(params.optim.epochs)
        return Times(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, {})

    monkeypatch.setattr("unidec.pipeline.plan.measure_time", measured)
    (again.folder / "c.yaml").write_text((again.folder / "c.yaml").read_text() + "minutes: 0.05\n")
    workspace = open_workspace(again.folder)
    assert not workspace.tasks["d/first/0"].is_done() and make(again.folder, workspace, "d/first/0") == 0
    made = json.loads((workspace.tasks["d/first/0"].folder / "result.json").read_text())
    assert made["params"]["optim.epochs"] == 3 == made["curve"][-1]["epoch"] and asked == [2]
    # how many epochs the file says makes no difference then; another budget does
    assert open_workspace(again.folder, **{"optim.epochs": 7}).tasks["d/first/0"].is_done()
    (again.folder / "c.yaml").write_text((again.folder / "c.yaml").read_text().replace("0.05", "0.06"))
    assert not open_workspace(again.folder).tasks["d/first/0"].is_done()


def test_a_slice_of_the_data(again: SimpleNamespace) -> None:
    text = (again.folder / "c.yaml").read_text().replace("path: raw", "path: raw\n    train: 50\n    test: 7")
    (again.folder / "c.yaml").write_text(text)
    workspace = open_workspace(again.folder)
    data = next(key for key in workspace.tasks if key.startswith("data"))
    assert data not in again.workspace.tasks and make(again.folder, workspace, data) == 0
    dataset = XMCDataset.open(workspace.tasks[data].folder / "data" / "dataset")
    assert len(dataset.rows("test")) == 7 and len(dataset.rows("train")) + len(dataset.rows("validation")) == 50
    assert (np.diff(dataset.relevance.tocsc().indptr) > 0).all()  # only labels that the slice knows
