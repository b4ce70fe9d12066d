"""Results of a comparison's cells: collected, tested, and formatted for page and terminal.

Legend: n test queries, K labels per query.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from scipy.sparse import csr_matrix

from unidec.comparison.jobs import Job
from unidec.comparison.peers import PEERS
from unidec.comparison.workspace import LOG, PREDICTIONS, SCORES, Comparison, Step
from unidec.config import by_key_path
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import load_propensity
from unidec.data.storage import load_array, write_bytes_atomic, write_file, write_json
from unidec.errors import ArtifactError
from unidec.evaluation.comparison_page import Cell, ComparisonInput, Run, Task, write_comparison
from unidec.evaluation.metrics import QueryParts, by_query, truth_of
from unidec.evaluation.significance import Comparison as PairedTest
from unidec.evaluation.significance import best_systems, compare_systems
from unidec.metric_names import shown, without_at
from unidec.text_page import render_text
from unidec.training.stopping import METRIC

# costs to which those of the trainings that a run builds on are added
_ADDED = ("train_seconds", "refresh_seconds", "total_seconds", "work_seconds")
Results = dict[str, dict[str, Any]]  # result.json of each job that has one, by the job's key
NOTE = (
    "Paired randomisation test over the test queries, scores of a system averaged over its "
    "seeds, Holm's correction over all tests of a table at 5 %."
)


def write_report(comparison: Comparison) -> Path:
    """Write report.html, and its figures as results.json, to the comparison's folder.

    Both contain all results in the folder, not only the last call's.

    Returns:
        The path of report.html.
    """
    found = gather(comparison)
    page = page_input(comparison, found, contrasts(comparison, found))
    write_comparison(comparison.root / "report.html", page)
    write_bytes_atomic(comparison.root / "results.json", in_lines(figures(page)))
    return comparison.root / "report.html"


def in_lines(found: Mapping[str, Any]) -> bytes:
    """Figures as JSON with a line per cell and per test: short, and a diff shows which of them
    changed.
    """
    parts = []
    for name, value in found.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            lines = [json.dumps(entry, ensure_ascii=False) for entry in value]
            text = "[\n" + ",\n".join(lines) + "\n]"
        parts.append(f'"{name}": {text}')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def figures(page: ComparisonInput) -> dict[str, Any]:
    """The figures of a page as plain values, rounded to 3 decimals: small enough for git, and for
    other programs.

    Returns:
        "cells": metrics and costs as [mean, standard deviation over seeds or None], and a curve:
        the validation metric after each round of the first seed, as [processor minutes, percent];
        each with its settings, and the seed and commit of each run. "common": settings of all.
        "data": facts about the data sets, with their sha256.
        "tests": paired tests, p-values after Holm's correction. "failures": runs without a result.
        "title", "lineage": as on the page.
    """
    cells = [
        {
            "data": cell.task,
            "cell": cell.name,
            "kind": cell.kind,
            "recipe": cell.recipe,
            "settings": cell.settings,
            "seeds": [run.seed for run in cell.runs],
            "commits": [run.commit for run in cell.runs],
            "metrics": _summaries(cell, "metrics"),
            "costs": _summaries(cell, "costs"),
            "curve": _curve(cell.runs[0]),
        }
        for cell in page.cells
        if cell.runs
    ]
    tests = [
        {
            "data": data,
            "cell": test.system,
            "against": test.against,
            "metric": test.metric,
            "difference": _rounded(test.difference),
            "low": _rounded(test.low),
            "high": _rounded(test.high),
            "p": _rounded(test.p_adjusted, 5),
        }
        for data, of_data in page.contrasts.items()
        for test in of_data
    ]
    return {
        "title": page.title,
        "lineage": page.lineage,
        "common": page.common,
        "data": {task.name: task.card for task in page.tasks},
        "cells": cells,
        "tests": tests,
        "failures": page.failures,
    }


def _curve(run: Run) -> list[list[float | None]]:
    return [
        [_rounded(line["work_seconds"] / 60), _rounded(line["validation"][METRIC])]
        for line in run.curve
        if METRIC in line["validation"]
    ]


def _summaries(cell: Cell, of: Literal["metrics", "costs"]) -> dict[str, list[float | None]]:
    found = {}
    for name in dict.fromkeys(chain.from_iterable(getattr(run, of) for run in cell.runs)):
        value = cell.summary(name, of)
        found[name] = [_rounded(value.mean), _rounded(value.spread)]
    return found


def _rounded(value: float, digits: int = 3) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def table(comparison: Comparison) -> str:
    """The results so far, for a terminal: a row per cell, mean ± spread over seeds."""
    cells = _cells(comparison, comparison.jobs, gather(comparison))
    return render_text("comparison.txt", names=shown("compare"), cells=cells)


def write_metrics(path: Path, step: Step) -> None:
    """Write the metrics of one run, small enough for git; DVC allows no `@` in a name."""
    result = step.result() or {}
    figures: dict[str, Any] = {"run": step.name}
    for name in shown("tested"):
        figures[without_at(name)] = round(result["metrics"][name], 3)
    figures["train_seconds"] = round(result["costs"].get("train_seconds", 0.0), 1)
    write_json(path, figures)


def gather(comparison: Comparison) -> Results:
    """The results that exist for these inputs."""
    found = {key: comparison.steps[key].result() for key in comparison.jobs}
    return {key: result for key, result in found.items() if result is not None}


def page_input(
    comparison: Comparison, found: Results, contrasts: Mapping[str, Sequence[PairedTest]]
) -> ComparisonInput:
    """The input of the page: data sets on which something ran, or all if nothing did."""
    file = comparison.file
    notes = _notes(comparison, found)
    planned = dict.fromkeys(job.data for job in comparison.jobs.values())
    started = {
        job.data
        for key, job in comparison.jobs.items()
        if key in found or comparison.steps[key].failure()
    }
    later = [data for data in planned if data not in started]
    if started and later:
        notes.append(f"Not run yet: {', '.join(later)}.")
    used = started or planned
    jobs = {key: job for key, job in comparison.jobs.items() if job.data in used}
    cards = {jobs[key].data: found[key]["dataset"] for key in reversed(found)}
    tasks = [
        Task(name, entry.about, cards.get(name, {}))
        for name, entry in file.data.items()
        if name in used
    ]
    return ComparisonInput(
        title=file.title or f"Comparison {file.name}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        about=file.about,
        notes=notes,
        tasks=tasks,
        cells=_cells(comparison, jobs, found),
        contrasts=contrasts,
        contrast_note=NOTE,
        groups=[{"title": title, **group.model_dump()} for title, group in file.groups.items()],
        failures=[_failure(job, comparison) for job in jobs.values() if job.key not in found],
        common={**by_key_path(file.common), **comparison.overrides},
        lineage=_lineage(comparison, found),
    )


def _notes(comparison: Comparison, found: Results) -> list[str]:
    """Paragraphs under the page's heading."""
    notes = []
    steps = comparison.steps
    old = 0
    for key, result in found.items():
        old += result["code"] != steps[key].spec["code"]
    if old:
        notes.append(f"{old} of {len(found)} results were made by another version of the code.")
    if tuning := comparison.file.tuning:
        notes.append(
            f"Each recipe had {tuning.trials} trials on {tuning.data}; the best by {METRIC} of its "
            "validation split is its setting here (Settings, tuned). Figures of all trials: "
            f"{tuning.file}."
        )
    return notes


def _lineage(comparison: Comparison, found: Results) -> dict[str, str]:
    """Versions, commits and machine of the figures; several values if they differ between cells."""
    made = {"command": {f"unidec compare {comparison.path}": None}}
    for result in found.values():
        for name, value in result["lineage"].items():
            made.setdefault(name, {})[value] = None
    return {name: ", ".join([*values][:5]) for name, values in made.items()}


def contrasts(comparison: Comparison, found: Results) -> dict[str, list[PairedTest]]:
    """Every system against the best peer of each metric, and the cells of each group against its
    base.
    """
    done: dict[str, list[PairedTest]] = {}
    metrics = shown("tested")
    entries = comparison.file.cells
    jobs = [job for job in comparison.jobs.values() if job.key in found]
    for data in comparison.file.data:
        scores = _scores(comparison, [job for job in jobs if job.data == data])
        tests = done.setdefault(data, [])
        peers = [name for name in scores if entries[name].peer]
        if peers and len(scores) > 1:
            best = best_systems(scores, peers, metrics)
            tests += compare_systems(scores, best, metrics)
        for group in comparison.file.groups.values():
            names = (group.base, *group.cells)
            members = {name: scores[name] for name in names if name in scores}
            if group.base in members and len(members) > 1:
                tests += compare_systems(members, group.base, metrics)
    return done


def _cells(comparison: Comparison, jobs: Mapping[str, Job], found: Results) -> list[Cell]:
    of_cell: dict[tuple[str, str], list[Job]] = {}
    for job in jobs.values():
        of_cell.setdefault((job.data, job.cell), []).append(job)
    return [_cell(comparison, seeds, found) for seeds in of_cell.values()]


def _cell(comparison: Comparison, seeds: Sequence[Job], found: Results) -> Cell:
    """A cell with the runs that have a result."""
    job = seeds[0]
    about = comparison.file.cells[job.cell].about
    if job.peer:
        about = about or PEERS[job.peer].about
    return Cell(
        job.data,
        job.cell,
        kind="peer" if job.peer else "recipe",
        about=about,
        recipe=job.params.recipe or "",
        settings=job.settings,
        runs=[_run(comparison, one, found) for one in seeds if one.key in found],
    )


def _run(comparison: Comparison, job: Job, found: Results) -> Run:
    """The run of one seed; its seconds include the trainings that it builds on."""
    result = found[job.key]
    costs = dict(result["costs"])
    curve = [dict(line) for line in result["curve"]]
    if curve:
        costs["work_seconds"] = curve[-1]["work_seconds"]
    if job.needs in found:
        before = _run(comparison, comparison.jobs[job.needs], found).costs
        for name in _ADDED:
            if name in before:
                costs[name] = costs.get(name, 0.0) + before[name]
        if curve:
            curve[0]["train_seconds"] += before["train_seconds"] + before["refresh_seconds"]
        for line in curve:
            line["work_seconds"] += before["work_seconds"]
    return Run(
        seed=job.seed,
        metrics=result["metrics"],
        validation=result["validation"],
        costs=costs,
        curve=curve,
        commit=result["lineage"].get("commit", ""),
    )


def _failure(job: Job, comparison: Comparison) -> dict[str, Any]:
    step = comparison.steps[job.key]
    reason = step.failure()
    log = step.folder / LOG
    return {
        "task": job.data,
        "cell": job.cell,
        "seed": job.seed,
        "state": "failed" if reason else "not run",
        "reason": reason,
        "log": Path(*log.parts[-5:]).as_posix() if log.is_file() else "",
    }


def _scores(comparison: Comparison, jobs: Sequence[Job]) -> dict[str, list[QueryParts]]:
    """Scores of each query by each system on one data set, a list over seeds.

    They are read from a run's scores.npz; if it is missing, they are computed from the run's
    predictions and written."""
    scores: dict[str, list[QueryParts]] = {}
    for job in jobs:
        step = comparison.steps[job.key]
        place = step.folder / SCORES
        predictions = step.folder / PREDICTIONS
        if not place.is_file() and predictions.is_file():
            made_by = comparison.steps[step.needs[0]]
            relevance, inverse_L = _truth(made_by.folder / "data")
            labels = load_array(predictions, np.int32, ndim=2)
            _write_scores(place, by_query(labels, relevance, shown("tested"), inverse_L))
        if place.is_file():
            scores.setdefault(job.cell, []).append(read_scores(place))
    return scores


@lru_cache(maxsize=1)
def _truth(data: Path) -> tuple[csr_matrix, np.ndarray]:
    """The truth of a data set's test split, and inverse propensities float64 [L]."""
    dataset = XMCDataset.open(data / "dataset")
    relevance = truth_of(dataset, dataset.rows("test"))
    return relevance, load_propensity(data / "propensity").inverse_L


def _write_scores(path: Path, parts: QueryParts) -> None:
    """Write scores as compressed float32 [n] arrays: "P@1/above", "P@1/below", ... (see
    `metrics.by_query`).
    """
    arrays = {
        f"{metric}/{side}": part_N.astype(np.float32)
        for metric, both in parts.items()
        for side, part_N in zip(("above", "below"), both, strict=True)
    }
    with write_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_scores(path: Path) -> QueryParts:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {
                metric: (
                    arrays[f"{metric}/above"].astype(np.float64),
                    arrays[f"{metric}/below"].astype(np.float64),
                )
                for metric in shown("tested")
            }
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ArtifactError(
            "scores cannot be read",
            where=path,
            got=error,
            fix="remove it: it is computed again from the predictions beside it",
        ) from error
