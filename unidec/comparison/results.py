"""Results of a comparison's cells: gathered from their folders, tested, and put together for the page and a table.

Legend: n test queries, K labels a query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from unidec.comparison import peers
from unidec.comparison.measure import PREDICTIONS
from unidec.comparison.plan import Comparison, Job
from unidec.comparison.workspace import LOG, RESULT, Workspace, read_json, same_identity
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import load_propensity
from unidec.data.storage import load_array, write_json
from unidec.evaluation.comparison_input import (
    Cell,
    ComparisonInput,
    Contrast,
    Failure,
    Group,
    Run,
    Task,
    summary,
)
from unidec.evaluation.metrics import filtered_truth
from unidec.evaluation.significance import QueryScores, best_systems, compare_systems, query_scores
from unidec.progress import progress

TESTED = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100")
TABLE = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100")
NOTE = (
    "Paired randomisation test over the test queries, scores of a system averaged over its seeds, Holm's "
    "correction over all tests of a table at 5 %."
)


@dataclass(frozen=True)
class Found:
    """A job and what there is of it.

    Attributes:
        result: of its result.json; None where there is none of the same data and parameters.
        failure: why there is none. folder: of the job. other_code: it was made by another version of the code.
    """

    job: Job
    folder: Path
    result: dict[str, Any] | None
    failure: Failure | None
    other_code: bool = False


def gather(workspace: Workspace) -> list[Found]:
    """Every job of the workspace with its result, or the reason why there is none."""
    found = []
    for task in workspace.cells():
        assert task.job is not None
        job, result = task.job, read_json(task.folder / RESULT)
        told = task.failure()
        log = (Path("cells") / job.folder / LOG).as_posix() if (task.folder / LOG).is_file() else ""
        reason, state = ("", "not run") if told is None else (str(told["what"]), "failed")
        current = result is not None and same_identity(result.get("identity", {}), task.spec["identity"], ("code",))
        if result is not None and not current:
            reason = "its result is of other parameters or data"
        if current:
            assert result is not None
            same = same_identity(result["identity"], task.spec["identity"])
            found.append(Found(job, task.folder, result, None, not same))
        else:
            found.append(Found(job, task.folder, None, Failure(job.data, job.cell, job.seed, state, reason, log)))
    return found


def page_input(comparison: Comparison, found: Sequence[Found], contrasts: Sequence[Contrast] = ()) -> ComparisonInput:
    """All that the page shows."""
    file = comparison.file
    results = [entry.result for entry in found if entry.result is not None]
    notes, old = list(file.notes), sum(entry.other_code for entry in found)
    if old:
        notes.append(f"{old} of {len(results)} results were made by another version of the code.")
    return ComparisonInput(
        title=file.title or f"Comparison {file.name}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        about=file.about,
        notes=notes,
        tasks=[Task(name, entry.about, _card(name, found)) for name, entry in file.data.items()],
        cells=_cells(comparison, found),
        contrasts=contrasts,
        contrast_note=NOTE if contrasts else "",
        groups=[
            Group(title, group.base, group.cells, group.about, group.finding, group.metrics)
            for title, group in file.groups.items()
        ],
        failures=[entry.failure for entry in found if entry.failure is not None],
        common=comparison.common,
        lineage=_lineage(comparison, results),
    )


def contrasts(workspace: Workspace, found: Sequence[Found]) -> list[Contrast]:
    """Every system against the best peer of each metric, and the cells of each group against its base."""
    done: list[Contrast] = []
    names = list(workspace.comparison.file.data)
    for data in progress(names, desc="tests", unit="data set"):
        entries = [entry for entry in found if entry.job.data == data and entry.result is not None]
        scores = _scores(workspace, entries)
        rivals = [name for name in scores if _is_peer(entries, name)]
        if rivals and len(scores) > 1:
            done += _tested(data, scores, best_systems(scores, rivals, TESTED))
        for group in workspace.comparison.file.groups.values():
            members = {name: scores[name] for name in (group.base, *group.cells) if name in scores}
            if group.base in members and len(members) > 1:
                done += _tested(data, members, group.base)
    return done


def write_summary(path: Path, page: ComparisonInput) -> None:
    """Mean, spread and number of seeds of every figure of every cell, for programs."""
    cells = []
    for cell in page.cells:
        names = dict.fromkeys(name for run in cell.runs for name in run.metrics)
        costs = dict.fromkeys(name for run in cell.runs for name in run.costs)
        cells.append({
            "data": cell.task, "cell": cell.name, "kind": cell.kind, "recipe": cell.recipe, "seeds": len(cell.runs),
            "metrics": {name: _figures(cell.values(name)) for name in names},
            "costs": {name: _figures([run.costs[name] for run in cell.runs if name in run.costs]) for name in costs},
        })  # fmt: skip
    tests = [vars(contrast) for contrast in page.contrasts]
    failures = [vars(failure) for failure in page.failures]
    write_json(path, {"title": page.title, "cells": cells, "tests": tests, "failures": failures})


def table(page: ComparisonInput) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for a terminal: mean ± spread."""
    columns = ["data", "cell", "seeds", *TABLE, "train s", "MB"]
    rows = []
    for cell in page.cells:
        if not cell.runs:
            continue
        figures = [_plus_minus(cell.values(name), 1) for name in TABLE]
        seconds = _plus_minus([run.costs.get("train_seconds", float("nan")) for run in cell.runs], 0)
        memory = _plus_minus([run.costs.get("peak_memory_bytes", float("nan")) / 1e6 for run in cell.runs], 0)
        rows.append([cell.task, cell.name, str(len(cell.runs)), *figures, seconds, memory])
    return columns, rows


# -- parts ------------------------------------------------------------------------------------------------------------


def _cells(comparison: Comparison, found: Sequence[Found]) -> list[Cell]:
    cells = []
    before = {one.job.key: one for one in found}
    for data in comparison.file.data:
        for name, entry in comparison.file.cells.items():
            mine = [one for one in found if one.job.data == data and one.job.cell == name]
            if not mine:
                continue
            job = mine[0].job
            about, settings = entry.about, dict(job.settings)
            if job.kind == "peer":
                about, settings = about or peers.info(job.peer).about, dict(job.options)
            settings.pop("encoder.start", None)
            if job.needs is not None:
                settings["model of" if job.kind == "model_of" else "after"] = job.needs.split("/")[1]
            runs = [_run(one, before) for one in mine if one.result is not None]
            kind = "peer" if job.kind == "peer" else "recipe"
            recipe = "" if job.kind == "peer" else job.params.recipe or ""
            cells.append(Cell(data, name, kind, about, recipe, settings, runs))  # type: ignore[arg-type]
    return cells


def _run(entry: Found, before: Mapping[str, Found]) -> Run:
    """One seed; the seconds of the trainings that it builds on are counted with its own."""
    result = entry.result
    assert result is not None
    costs, curve = dict(result["costs"]), [dict(line) for line in result.get("curve", ())]
    needed = before.get(entry.job.needs or "")
    if needed is not None and needed.result is not None:
        earlier = _run(needed, before).costs
        for name in ("train_seconds", "refresh_seconds", "total_seconds"):
            costs[name] = costs.get(name, 0.0) + earlier.get(name, 0.0)
        if curve:
            curve[0]["train_seconds"] += earlier.get("train_seconds", 0.0) + earlier.get("refresh_seconds", 0.0)
    return Run(
        entry.job.seed, result["metrics"], result.get("validation", {}), result.get("parts", {}), costs, curve,
        result.get("history", ()), result.get("bins", ()),
    )  # fmt: skip


def _card(data: str, found: Iterable[Found]) -> Mapping[str, Any]:
    return next((one.result["dataset"] for one in found if one.job.data == data and one.result is not None), {})


def _lineage(comparison: Comparison, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What made the figures; several values where they differ between cells."""
    lineage: dict[str, Any] = {"command": f"unidec compare {comparison.path}"}
    for section in ("code", "machine"):
        for name in dict.fromkeys(key for result in results for key in result.get(section, {})):
            values = dict.fromkeys(str(result.get(section, {}).get(name, "-")) for result in results)
            values.pop("-", None)
            lineage[f"{section}, {name}"] = ", ".join(list(values)[:5])
    return lineage


def _scores(workspace: Workspace, entries: Sequence[Found]) -> dict[str, list[QueryScores]]:
    """Scores of each query under each system, a list over seeds; systems without predictions are left out."""
    scores: dict[str, list[QueryScores]] = {}
    opened: dict[Path, tuple[Any, np.ndarray]] = {}
    for entry in entries:
        folder = workspace.tasks[workspace.tasks[entry.job.key].needs[0]].folder / "data"
        if not (entry.folder / PREDICTIONS).is_file() or not (folder / "dataset").is_dir():
            continue
        if folder not in opened:
            dataset = XMCDataset.open(folder / "dataset")
            rows = dataset.rows("test")
            truth = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
            opened[folder] = truth, load_propensity(folder / "propensity").inverse_L
        truth, inverse_L = opened[folder]
        labels = load_array(entry.folder / PREDICTIONS, np.int32, ndim=2)
        scores.setdefault(entry.job.cell, []).append(query_scores(labels, truth, inverse_L))
    return scores


def _is_peer(entries: Iterable[Found], cell: str) -> bool:
    return any(entry.job.kind == "peer" for entry in entries if entry.job.cell == cell)


def _tested(
    data: str, scores: Mapping[str, Sequence[QueryScores]], against: str | Mapping[str, str]
) -> list[Contrast]:  # fmt: skip
    return [
        Contrast(data, one.system, one.against, one.metric, one.difference, one.low, one.high, one.p_adjusted)
        for one in compare_systems(scores, against, TESTED)
    ]


def _figures(values: Sequence[float]) -> dict[str, float | int | None]:
    found = summary(values)
    spread = None if found.count < 2 else found.spread
    return {"mean": found.mean if found.count else None, "spread": spread, "count": found.count}


def _plus_minus(values: Sequence[float], digits: int) -> str:
    found = summary(values)
    if not found.count:
        return "-"
    spread = f" ± {found.spread:.{digits}f}" if found.count > 1 else ""
    return f"{found.mean:.{digits}f}{spread}"
