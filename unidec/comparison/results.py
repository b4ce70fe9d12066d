"""Results of a comparison's cells: gathered from their folders, tested, and put together for page and terminal.

Legend: n test queries, K labels a query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from unidec.comparison.measure import PREDICTIONS
from unidec.comparison.peers import PEERS
from unidec.comparison.plan import Comparison, Job
from unidec.comparison.workspace import LOG, Step, Workspace
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import load_propensity
from unidec.data.storage import load_array, write_json
from unidec.evaluation.comparison_page import Cell, ComparisonInput, Group, Run, Task, write_comparison
from unidec.evaluation.metrics import QueryParts, by_query, filtered_truth
from unidec.evaluation.significance import Comparison as PairedTest
from unidec.evaluation.significance import best_systems, compare_systems
from unidec.progress import progress

REPORT = "report.html"
TESTED = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100")
TABLE = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100")
Results = Mapping[str, dict[str, Any]]  # result.json of each job that has one, by the job's key
NOTE = (
    "Paired randomisation test over the test queries, scores of a system averaged over its seeds, Holm's "
    "correction over all tests of a table at 5 %."
)


def write_report(workspace: Workspace) -> Path:
    """Write report.html of everything that the workspace holds, whatever was asked for last."""
    found = gather(workspace)
    page = page_input(workspace, found, contrasts(workspace, found))
    workspace.root.mkdir(parents=True, exist_ok=True)
    write_comparison(workspace.root / REPORT, page)
    return workspace.root / REPORT


def listing(jobs: Iterable[Job], workspace: Workspace, accept_code: bool) -> list[list[str]]:
    """Rows of every run: its name, what it is, and whether it is done."""
    rows = []
    for job in jobs:
        step = workspace.step(job)
        state = "done" if step.is_done(accept_code) else "failed" if step.failure() else "to do"
        rows.append([job.key, _what(job), state])
    return rows


def table(workspace: Workspace) -> list[list[str]]:
    """The results so far, for a terminal: column heads, then a row for each cell, mean ± spread over seeds."""
    rows = [["data", "cell", "seeds", *TABLE]]
    for cell in page_input(workspace, gather(workspace)).cells:
        if cell.runs:
            found = [cell.summary(name) for name in TABLE]
            figures = [f"{one.mean:.1f}" + (f" ± {one.spread:.1f}" if one.count > 1 else "") for one in found]
            rows.append([cell.task, cell.name, str(len(cell.runs)), *figures])
    return rows


def write_metrics(path: Path, step: Step) -> None:
    """The figures of one run, small enough for git; DVC takes no `@` in a name."""
    result = step.result() or {}
    figures = {name.replace("@", "_at_"): round(result["metrics"][name], 3) for name in TESTED}
    seconds = round(result["costs"].get("train_seconds", 0.0), 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"run": step.name, **figures, "train_seconds": seconds})


def gather(workspace: Workspace) -> Results:
    """The results that there are for these inputs."""
    steps = [workspace.step(job) for job in workspace.comparison.jobs]
    return {step.name: result for step in steps if (result := step.result()) is not None}


def page_input(
    workspace: Workspace, found: Results, contrasts: Mapping[str, Sequence[PairedTest]] | None = None
) -> ComparisonInput:
    """Everything that the page shows."""
    comparison, file = workspace.comparison, workspace.comparison.file
    done = [job for job in comparison.jobs if job.key in found]
    old = sum(found[job.key]["code"] != workspace.step(job).spec["code"] for job in done)
    cards = {job.data: found[job.key]["dataset"] for job in reversed(done)}
    # what made the figures; several values where they differ between cells
    made: dict[str, dict[str, None]] = {"command": {f"unidec compare {comparison.path}": None}}
    for result in found.values():
        for name, value in result["lineage"].items():
            made.setdefault(name, {})[value] = None
    return ComparisonInput(
        title=file.title or f"Comparison {file.name}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        about=file.about,
        notes=[f"{old} of {len(done)} results were made by another version of the code."] if old else [],
        tasks=[Task(name, entry.about, cards.get(name, {})) for name, entry in file.data.items()],
        cells=_cells(comparison, found),
        contrasts=contrasts or {},
        contrast_note=NOTE if contrasts else "",
        groups=[Group(title, group.base, group.cells, group.about) for title, group in file.groups.items()],
        failures=[_failure(job, workspace.step(job)) for job in comparison.jobs if job.key not in found],
        common=comparison.common,
        lineage={name: ", ".join(list(values)[:5]) for name, values in made.items()},
    )


def contrasts(workspace: Workspace, found: Results) -> dict[str, list[PairedTest]]:
    """Every system against the best peer of each metric, and the cells of each group against its base."""
    done: dict[str, list[PairedTest]] = {}
    for data in progress(list(workspace.comparison.file.data), desc="tests", unit="data set"):
        jobs = [job for job in workspace.comparison.jobs if job.data == data and job.key in found]
        scores, tests = _scores(workspace, jobs), done.setdefault(data, [])
        kinds = {job.cell: job.kind for job in jobs}
        peers = [name for name in scores if kinds[name] == "peer"]
        if peers and len(scores) > 1:
            tests += compare_systems(scores, best_systems(scores, peers, TESTED), TESTED)
        for group in workspace.comparison.file.groups.values():
            members = {name: scores[name] for name in (group.base, *group.cells) if name in scores}
            if group.base in members and len(members) > 1:
                tests += compare_systems(members, group.base, TESTED)
    return done


# -- parts ------------------------------------------------------------------------------------------------------------


def _cells(comparison: Comparison, found: Results) -> list[Cell]:
    names = [(data, cell) for data in comparison.file.data for cell in comparison.file.cells]
    cells = []
    for data, name in names:
        jobs = [job for job in comparison.jobs if (job.data, job.cell) == (data, name)]
        for job in jobs[:1]:
            about = comparison.file.cells[name].about or (PEERS[job.peer].about if job.peer else "")
            runs = [_run(comparison, one, found) for one in jobs if one.key in found]
            if job.kind == "peer":
                cells.append(Cell(data, name, "peer", about, "", _settings(job), runs))
            else:
                cells.append(Cell(data, name, "recipe", about, job.params.recipe or "", _settings(job), runs))
    return cells


def _run(comparison: Comparison, job: Job, found: Results) -> Run:
    """One seed; the seconds of the trainings that it builds on are counted with its own."""
    result = found[job.key]
    costs, curve = dict(result["costs"]), [dict(line) for line in result["curve"]]
    if job.needs is not None and job.needs in found:
        earlier = _run(comparison, comparison.job(job.needs), found).costs
        for name in ("train_seconds", "refresh_seconds", "total_seconds"):
            costs[name] = costs.get(name, 0.0) + earlier.get(name, 0.0)
        if curve:
            curve[0]["train_seconds"] += earlier.get("train_seconds", 0.0) + earlier.get("refresh_seconds", 0.0)
    same = {name: result[name] for name in ("metrics", "validation")}
    return Run(job.seed, costs=costs, curve=curve, **same)


def _failure(job: Job, step: Step) -> dict[str, Any]:
    reason, log = step.failure(), step.folder / LOG
    place = Path(*log.parts[-5:]).as_posix() if log.is_file() else ""
    return {"task": job.data, "cell": job.cell, "seed": job.seed, "state": "failed" if reason else "not run",
            "reason": reason, "log": place}  # fmt: skip


def _what(job: Job) -> str:
    if job.kind != "recipe":
        return f"peer {job.peer}" if job.kind == "peer" else f"model of {job.needs}"
    settings = ", ".join(f"{key}={value}" for key, value in _settings(job).items())
    return f"recipe {job.params.recipe}" + (f" with {settings}" if settings else "")


def _settings(job: Job) -> dict[str, Any]:
    """What is set beyond the recipe and the common settings, and the cell that it builds on."""
    settings = {key: value for key, value in job.settings.items() if key != "encoder.start"}
    if job.needs is not None:
        settings["model of" if job.kind == "model_of" else "after"] = job.needs.split("/")[1]
    return settings


def _scores(workspace: Workspace, jobs: Sequence[Job]) -> dict[str, list[QueryParts]]:
    """Scores of each query under each system of one data set, a list over seeds."""
    scores: dict[str, list[QueryParts]] = {}
    files = [(job.cell, file) for job in jobs if (file := workspace.folder(job) / PREDICTIONS).is_file()]
    if not files or not (folder := workspace.data_step(jobs[0]).folder / "data").is_dir():
        return {}
    dataset = XMCDataset.open(folder / "dataset")
    rows = dataset.rows("test")
    truth = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
    inverse_L = load_propensity(folder / "propensity").inverse_L
    for cell, file in files:
        parts = by_query(load_array(file, np.int32, ndim=2), truth, TESTED, inverse_L)
        scores.setdefault(cell, []).append(parts)
    return scores
