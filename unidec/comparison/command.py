"""`unidec compare`: plan, run, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unidec.comparison.engine import Outcome, run_tasks
from unidec.comparison.plan import EXPERIMENT, Comparison, Job, load_comparison, select
from unidec.comparison.workspace import RESULT, Task, Workspace, read_json
from unidec.data.storage import write_json
from unidec.errors import Stopped, UnidecError

REPORT, SUMMARY, TRACKING = "report.html", "summary.json", "tracking"


def compare(
    path: Path,
    only: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    *,
    at_once: int = 1,
    folder: Path | None = None,
    accepted: Sequence[str] = (),
    report_only: bool = False,
    metrics: Path | None = None,
) -> tuple[list[Outcome], Path]:
    """Run what is not done yet, and write report.html and summary.json.

    Args:
        path: the comparison file. only: patterns of cells. extra: parameters by key path, for all cells.
        at_once: child processes at a time. folder: of the workspace; None: runs/compare/<name>.
        accepted: keys of a result's identity that may differ ("code"). report_only: nothing is run.
        metrics: a file for the figures of the last run that was asked for, for `dvc metrics`.

    Returns:
        Outcomes of the cells that were asked for, and the report's path.

    Raises:
        ComparisonError: the file is wrong. Stopped: by a signal; what is done is kept, and reported.
    """
    comparison = load_comparison(path, extra)
    jobs = select(comparison, only)
    workspace = Workspace.of(comparison, jobs, folder)
    if report_only:
        return [], report(comparison, workspace.root)
    tracker = _parent(comparison, jobs, workspace)
    status = "FAILED"
    try:
        outcomes = run_tasks(
            workspace, at_once=at_once, threads=comparison.file.threads, accepted=accepted,
            environment=lambda task: _tags(task, tracker),
        )  # fmt: skip
        status = "FAILED" if any(outcome.state != "done" for outcome in outcomes) else "FINISHED"
    except Stopped:
        status = "KILLED"
        raise
    finally:
        page = report(comparison, workspace.root, tested=status != "KILLED")
        if tracker is not None:
            tracker.log_files([page, workspace.root / SUMMARY, path])
            tracker.finish(status)
    cells = [outcome for outcome in outcomes if outcome.task.job is not None]
    if metrics is not None and cells[-1].state == "done":
        _write_metrics(metrics, cells[-1].task)
    return cells, page


def report(comparison: Comparison, root: Path, tested: bool = True) -> Path:
    """Write the report of all that the workspace holds of a comparison, whatever was asked for last."""
    from unidec.comparison import results
    from unidec.evaluation.comparison_page import write_comparison

    workspace = Workspace.of(comparison, comparison.jobs, root)
    found = results.gather(workspace)
    page = results.page_input(comparison, found, results.contrasts(workspace, found) if tested else ())
    root.mkdir(parents=True, exist_ok=True)
    results.write_summary(root / SUMMARY, page)
    write_comparison(root / REPORT, page)
    return root / REPORT


def listing(
    path: Path, only: Sequence[str], extra: Mapping[str, Any] | None, folder: Path | None, accepted: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: every run, what it is, and whether it is done."""
    comparison = load_comparison(path, extra)
    workspace = Workspace.of(comparison, select(comparison, only), folder)
    rows = []
    for task in workspace.cells():
        assert task.job is not None
        told = task.failure()
        state = "done" if task.is_done(accepted) else "failed" if told is not None else "to do"
        rows.append([task.key, _what(task.job), state])
    return ["run", "what", "state"], rows


def show_table(comparison_file: Path, extra: Mapping[str, Any] | None, folder: Path | None
               ) -> tuple[list[str], list[list[str]]]:  # fmt: skip
    """Columns and rows of the results so far."""
    from unidec.comparison import results

    comparison = load_comparison(comparison_file, extra)
    workspace = Workspace.of(comparison, comparison.jobs, folder)
    return results.table(results.page_input(comparison, results.gather(workspace)))


def _write_metrics(path: Path, task: Task) -> None:
    """The figures of one run, small enough for git; DVC takes no `@` in a name."""
    result = read_json(task.folder / RESULT) or {}
    names = {name: name.replace("@", "_at_") for name in ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100")}
    figures = {key: round(result["metrics"][name], 3) for name, key in names.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"run": task.key, **figures, "train_seconds": round(result["costs"].get("train_seconds", 0.0), 1)})


def _what(job: Job) -> str:
    if job.kind == "peer":
        return f"peer {job.peer}"
    if job.kind == "model_of":
        return f"model of {job.needs}"
    settings = ", ".join(f"{key}={value}" for key, value in job.settings.items() if key != "encoder.start")
    after = f" after {job.needs}" if job.needs else ""
    return f"recipe {job.params.recipe}{after}" + (f" with {settings}" if settings else "")


# -- tracking ---------------------------------------------------------------------------------------------------------


def _parent(comparison: Comparison, jobs: Sequence[Job], workspace: Workspace) -> Any:
    """The comparison's own MLflow run; None where every cell is done, and nothing will be logged below it."""
    if all(task.is_done() for task in workspace.cells()):
        return None
    from unidec.tracking.provenance import code_tags
    from unidec.tracking.run import Tracker

    file = comparison.file
    facts: dict[str, Any] = {
        "comparison": file.name, "seeds": ", ".join(map(str, file.seeds)), "data": ", ".join(file.data),
        "cells": ", ".join(file.cells), "runs": len(jobs),
    }  # fmt: skip
    facts |= {f"common.{key}": value for key, value in comparison.common.items()}
    tracker = Tracker(EXPERIMENT)
    try:
        tracker.start(workspace.root / TRACKING, facts, code_tags(), run_name=f"compare {file.name}")
    except UnidecError as error:
        print(f"the comparison is not tracked: {error}", file=sys.stderr)
        return None
    return tracker


def _tags(task: Task, tracker: Any) -> dict[str, str]:
    """Environment of a cell: its MLflow run lies below the comparison's, in the same store."""
    from unidec.tracking.run import RUN_TAGS
    from unidec.tracking.store import tracking_uri

    uri = tracking_uri(".")
    tags = {"mlflow.runName": task.key, "comparison": "" if tracker is None else str(tracker.run_id)}
    if tracker is not None and tracker.run_id:
        tags["mlflow.parentRunId"] = tracker.run_id
    return {"MLFLOW_TRACKING_URI": uri, RUN_TAGS: json.dumps(tags)}
