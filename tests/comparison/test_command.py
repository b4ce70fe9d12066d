"""`unidec compare` as people call it: the flow, real child processes, the report, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import shared_prefect
from helpers.raw_files import write_raw
from helpers.tiny_data import make_raw

from unidec import cli
from unidec.comparison import cell
from unidec.comparison.workspace import load_comparison
from unidec.tracking.store import prepare_store

pytestmark = pytest.mark.timeout(600)
RunFlow = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(
    tiny_bert: Path,
    prefect_api: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A working folder with raw data and c.yaml: two peers, one of which cannot work,
    and a recipe.
    """
    write_raw(make_raw(num_train=96, num_test=40), tmp_path / "raw", "xmc-json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", prepare_store(f"sqlite:///{tmp_path}/mlflow.db"))
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    values = {
        "name": "tiny",
        "seeds": [0],
        "common": {
            "encoder": {"name": str(tiny_bert), "kind": "bag", "trainable_layers": 0},
            "model.dim": 16,
            "optim.epochs": 20,
            "pool": {"batch_size": 16, "size": 60, "refresh": 1},
            "run.check_memory": False,
        },
        "data": {"d": {"path": "raw", "max_length": 16, "set": {"data.validation_share": 0.1}}},
        "cells": {"depsl": {"recipe": "depsl"}, "kNN": {"peer": "knn"}, "mix": {"peer": "mix"}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path


def done() -> list[str]:
    """Names of the runs that have a result."""
    comparison = load_comparison("c.yaml")
    return [name for name in comparison.jobs if comparison.steps[name].is_done()]


def unidec(python: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """`unidec compare c.yaml`, as a person calls it."""
    command = [*python, "-m", "unidec.cli", "compare", "c.yaml", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture
def run_flow(
    prefect_api: str,
    warm_python: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[RunFlow]:
    """The same in this process, where Prefect is imported already: (exit code, stdout, stderr)."""
    from flows.command import main

    monkeypatch.setattr(cell, "COMMAND", (*warm_python, *cell.COMMAND[1:]))

    def run(*words: str) -> tuple[int, str, str]:
        code = main("compare", ["c.yaml", *words])
        return code, *capfd.readouterr()

    with shared_prefect.connected(prefect_api):
        yield run


@pytest.mark.parametrize(
    ("name", "problems"),
    [("No Name", ["No Name"]), ("named", ["no such folder", "no such recipe"])],
    ids=["form", "content"],
)
def test_a_wrong_file_is_reported_once(
    name: str,
    problems: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """Before Prefect has a run: its logs would repeat the error twice."""
    from flows.command import main

    monkeypatch.chdir(tmp_path)
    # nothing listens there, and nothing needs it
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    (tmp_path / "c.yaml").write_text(
        f"name: {name}\ndata: {{d: {{path: nowhere}}}}\ncells: {{a: {{recipe: depls}}}}\n"
    )
    assert main("compare", ["c.yaml"]) == 2
    said = capfd.readouterr().err
    for part in problems:
        assert said.count(part) == 1, said
    assert said.startswith(f"c.yaml: {len(problems)} problem")


def test_from_nothing_to_a_report(
    project: Path,
    warm_python: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = unidec(warm_python, "--only", "kNN", "--metrics", "figures/knn.json")
    assert made.returncode == 0, made.stderr
    workspace = project / "runs" / "compare" / "tiny"
    assert f"report: {workspace.relative_to(project)}/report.html" in made.stdout
    page = (workspace / "report.html").read_text()
    assert "kNN" in page and "depsl" in page  # what did not run is named too
    figures = json.loads((project / "figures" / "knn.json").read_text())
    result = json.loads(next(workspace.glob("cells/d/knn/0-*/result.json")).read_text())
    assert figures["run"] == "d/kNN/0"
    expected = result["metrics"]["P@1"]
    assert figures["P_at_1"] == pytest.approx(expected, abs=1e-3)

    from mlflow import MlflowClient

    run = MlflowClient(f"sqlite:///{project}/mlflow.db").get_run(result["mlflow_run"])
    assert run.info.run_name == "d/kNN/0"
    assert run.data.tags["comparison"] == "tiny"

    assert done() == ["d/kNN/0"]
    (workspace / "report.html").unlink()
    # no flow: in this process
    monkeypatch.setattr(sys, "argv", ["unidec", "compare", "c.yaml", "--report-only"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code and "report.html" in capfd.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(capfd.readouterr().out) == {
        "report": str(workspace.relative_to(project) / "report.html")
    }
    page = (workspace / "report.html").read_text()
    assert "kNN" in page
    assert "depsl" in page
    assert done() == ["d/kNN/0"]
    # what fails is named, and the exit code reports it; the rest is there all the same
    place = next(workspace.glob("cells/d/knn/0-*"))
    (workspace / "cells/d/mix").write_text("a file where a folder should be")
    broken = unidec(warm_python, "--only", "mix", "--only", "kNN")
    assert broken.returncode == 1
    assert "the process of this run cannot be started" in broken.stderr
    assert "report: " in broken.stderr
    assert "d\tkNN\t1" in broken.stdout
    assert "Traceback" not in broken.stderr
    assert (place / "result.json").is_file()


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """What `unidec compare c.yaml` says of wrong words. In this process: no flow begins."""
    from flows.command import main

    assert main("compare", ["c.yaml", *words]) == 2
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    return errors


def test_wrong_files_and_names(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "no such cell" in refused(capfd, "--only", "KNN")
    monkeypatch.setattr(
        sys, "argv", ["unidec", "compare", "c.yaml", "--report-only", "--set", "pool.betta=3"]
    )
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert not (project / "runs").exists()


def test_tuned_then_compared(
    project: Path, run_flow: RunFlow, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two trials of a search, of which the better is chosen; before that nothing runs, and after it
    none again.
    """
    values = yaml.safe_load((project / "c.yaml").read_text())
    values["data"]["part"] = {
        "path": "raw",
        "train": 60,
        "test": 10,
        "set": {"data.validation_share": 0.3},
    }
    values["tuning"] = {
        "data": "part",
        "file": "tuned/c.yaml",
        "trials": 2,
        "ranges": {"lr": [1, 30]},
    }
    (project / "c.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    short = ("--set", "optim.epochs=1", "--set", "optim.warmup_epochs=0.0")
    assert "unidec compare c.yaml --tune" in refused(capfd, *short)
    code, printed, errors = run_flow("--tune", *short)
    assert code == 0 and "chosen: tuned/c.yaml" in printed, errors
    entry = yaml.safe_load((project / "tuned/c.yaml").read_text())["depsl"]
    figures = entry["trials"]
    assert entry["set"] == ({"lr": 30} if figures.get("lr=30", 0) > figures["as it is"] else {})
    results = list((project / "runs/compare/tiny/cells/part/depsl").glob("0-*/result.json"))
    reached = [
        json.loads(file.read_text())["curve"][-1]["validation"]["nDCG@5"] for file in results
    ]
    expected = sorted(figures.values())
    assert sorted(reached) == pytest.approx(expected, abs=1e-3)
    table = (project / "runs/compare/tiny/tuning/depsl/trials.md").read_text()
    assert table.count("| trained |") == 2
    before = [file.stat().st_mtime_ns for file in results]
    code, _, errors = run_flow("--tune", *short)
    assert code == 0, errors
    depsl = yaml.safe_load((project / "tuned/c.yaml").read_text())["depsl"]
    assert depsl == entry
    assert [file.stat().st_mtime_ns for file in results] == before
    code, _, errors = run_flow("--only", "depsl", *short)
    assert code == 0, errors
    page = (project / "runs/compare/tiny/report.html").read_text()
    assert "2 trials" in page
    assert f"tuned {'lr=30' if entry['set'] else 'as it is'}" in page


@pytest.mark.slow  # test_cell.py has its quick form
def test_terminated_and_started_again(project: Path, warm_python: list[str]) -> None:
    """SIGTERM to the comparison ends the training with a checkpoint; the same command resumes from
    it.
    """
    command = [sys.executable, "-m", "unidec.cli", "compare", "c.yaml", "--only", "depsl"]
    cells = project / "runs/compare/tiny/cells/d/depsl"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not list(cells.glob("0-*/runs/*/rounds.jsonl")):
        assert time.monotonic() < end, process.communicate()
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 143 and "run again to resume" in printed
    (run,) = cells.glob("0-*/runs/*/rounds.jsonl")
    folder = run.parents[2]
    before = (run.parent / "rounds.jsonl").read_text().splitlines()
    assert 0 < len(before) < 20
    assert not (folder / "result.json").exists()
    again = unidec(warm_python, "--only", "depsl")
    assert again.returncode == 0, again.stderr
    after = (run.parent / "rounds.jsonl").read_text().splitlines()
    assert len(after) == 20
    assert after[: len(before)] == before
    assert "resumes after epoch" in (folder / "log.txt").read_text()
