"""Results of a comparison's cells: collected from their folders, tested for significance, and
formatted for page and terminal.

Legend: n test queries, K labels per query.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from scipy.sparse import csr_matrix

from unidec.comparison.peers import PEERS
from unidec.comparison.plan import Job
from unidec.comparison.workspace import LOG, PREDICTIONS, SCORES, Comparison, Step
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import load_propensity
from unidec.data.storage import load_array, write_bytes_atomic, write_json
from unidec.errors import ArtifactError
from unidec.evaluation.comparison_page import Cell, ComparisonInput, Run, Task, write_comparison
from unidec.evaluation.metrics import QueryParts, by_query, filtered_truth
from unidec.evaluation.significance import Comparison as PairedTest
from unidec.evaluation.significance import best_systems, compare_systems
from unidec.training.stopping import METRIC

TESTED = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100")
ENDS = ("above", "below")  # of the fraction whose sums over the queries are a metric
TABLE = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100")
Results = dict[str, dict[str, Any]]  # result.json of each job that has one, by the job's key
NOTE = (
    "Paired randomisation test over the test queries, scores of a system averaged over its "
    "seeds, Holm's correction over all tests of a table at 5 %."
)


def write_report(comparison: Comparison) -> Path:
    """Write report.html, and its figures as results.json, to the comparison's folder.

    Both contain all results of the folder, not only those of the last call.

    Returns:
        The path of report.html.
    """
    found = gather(comparison)
    page = page_input(comparison, found, contrasts(comparison, found))
    comparison.root.mkdir(parents=True, exist_ok=True)
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
        the validation metric after each round of the first seed, as [processor minutes, percent].
        "tests": paired tests, p-values after Holm's correction. "failures": runs without a result.
        "title", "lineage": as on the page.
    """

    def curve(run: Run) -> list[list[float | None]]:
        measured = [
            line
            for line in run.curve
            if "work_seconds" in line and METRIC in line.get("validation", ())
        ]
        return [
            [_rounded(line["work_seconds"] / 60), _rounded(line["validation"][METRIC])]
            for line in measured
        ]

    def summaries(cell: Cell, of: Literal["metrics", "costs"]) -> dict[str, list[float | None]]:
        names = dict.fromkeys(name for run in cell.runs for name in getattr(run, of))
        values = {name: cell.summary(name, of) for name in names}
        return {
            name: [_rounded(value.mean), _rounded(value.spread)] for name, value in values.items()
        }

    cells = [
        {
            "data": cell.task,
            "cell": cell.name,
            "kind": cell.kind,
            "recipe": cell.recipe,
            "settings": cell.settings,
            "seeds": [run.seed for run in cell.runs],
            "metrics": summaries(cell, "metrics"),
            "costs": summaries(cell, "costs"),
            "curve": curve(cell.runs[0]),
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
        for data, tests in page.contrasts.items()
        for test in tests
    ]
    return {
        "title": page.title,
        "lineage": page.lineage,
        "cells": cells,
        "tests": tests,
        "failures": page.failures,
    }


def _rounded(value: float, digits: int = 3) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def table(comparison: Comparison) -> list[list[str]]:
    """The results so far, for a terminal: column heads, then a row per cell, mean ± spread over
    seeds.
    """
    rows = [["data", "cell", "seeds", *TABLE]]
    for cell in _cells(comparison, gather(comparison)):
        if cell.runs:
            found = [cell.summary(name) for name in TABLE]
            figures = [
                f"{one.mean:.1f}" + (f" ± {one.spread:.1f}" if one.count > 1 else "")
                for one in found
            ]
            rows.append([cell.task, cell.name, str(len(cell.runs)), *figures])
    return rows


def write_metrics(path: Path, step: Step) -> None:
    """Write the metrics of one run, small enough for git; DVC allows no `@` in a name."""
    result = step.result() or {}
    figures = {name.replace("@", "_at_"): round(result["metrics"][name], 3) for name in TESTED}
    seconds = round(result["costs"].get("train_seconds", 0.0), 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"run": step.name, **figures, "train_seconds": seconds})


def gather(comparison: Comparison) -> Results:
    """The results that exist for these inputs."""
    return {
        key: result
        for key in comparison.jobs
        if (result := comparison.steps[key].result()) is not None
    }


def page_input(
    comparison: Comparison, found: Results, contrasts: Mapping[str, Sequence[PairedTest]]
) -> ComparisonInput:
    """Everything that the page shows: the data sets on which something ran, or all if
    nothing did.
    """
    file = comparison.file
    old = sum(result["code"] != comparison.steps[key].spec["code"] for key, result in found.items())
    notes = (
        [f"{old} of {len(found)} results were made by another version of the code."] if old else []
    )
    if (tuning := file.tuning) is not None:
        notes.append(
            f"Each recipe had {tuning.trials} trials on {tuning.data}; the best by {METRIC} of its "
            "validation split is its setting here (Settings, tuned). Figures of all trials: "
            f"{tuning.file}."
        )
    jobs = comparison.jobs
    if started := {
        job.data for key, job in jobs.items() if key in found or comparison.steps[key].failure()
    }:
        if later := dict.fromkeys(job.data for job in jobs.values() if job.data not in started):
            notes.append(f"Not run yet: {', '.join(later)}.")
        comparison = replace(
            comparison, jobs={key: job for key, job in jobs.items() if job.data in started}
        )
    shown = {job.data for job in comparison.jobs.values()}
    cards = {comparison.jobs[key].data: found[key]["dataset"] for key in reversed(found)}
    # what the figures were made with; several values if they differ between cells
    made: dict[str, dict[str, None]] = {"command": {f"unidec compare {comparison.path}": None}}
    for result in found.values():
        for name, value in result["lineage"].items():
            made.setdefault(name, {})[value] = None
    return ComparisonInput(
        title=file.title or f"Comparison {file.name}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        about=file.about,
        notes=notes,
        tasks=[
            Task(name, entry.about, cards.get(name, {}))
            for name, entry in file.data.items()
            if name in shown
        ],
        cells=_cells(comparison, found),
        contrasts=contrasts,
        contrast_note=NOTE,
        groups=[{"title": title, **group.model_dump()} for title, group in file.groups.items()],
        failures=[
            _failure(job, comparison.steps[key])
            for key, job in comparison.jobs.items()
            if key not in found
        ],
        common=comparison.common,
        lineage={name: ", ".join(list(values)[:5]) for name, values in made.items()},
    )


def contrasts(comparison: Comparison, found: Results) -> dict[str, list[PairedTest]]:
    """Every system against the best peer of each metric, and the cells of each group against its
    base.
    """
    done: dict[str, list[PairedTest]] = {}
    for data in comparison.file.data:
        jobs = [job for key, job in comparison.jobs.items() if job.data == data and key in found]
        scores = _scores(comparison, jobs)
        tests = done.setdefault(data, [])
        peers = [name for name in scores if comparison.file.cells[name].peer]
        if peers and len(scores) > 1:
            tests += compare_systems(scores, best_systems(scores, peers, TESTED), TESTED)
        for group in comparison.file.groups.values():
            members = {name: scores[name] for name in (group.base, *group.cells) if name in scores}
            if group.base in members and len(members) > 1:
                tests += compare_systems(members, group.base, TESTED)
    return done


def _cells(comparison: Comparison, found: Results) -> list[Cell]:
    seeds: dict[tuple[str, str], list[Job]] = {}
    for job in comparison.jobs.values():
        seeds.setdefault((job.data, job.cell), []).append(job)
    cells = []
    for (data, name), (job, *others) in seeds.items():
        about = comparison.file.cells[name].about or (PEERS[job.peer].about if job.peer else "")
        runs = [_run(comparison, one, found) for one in (job, *others) if one.key in found]
        kind: Literal["recipe", "peer"] = "peer" if job.peer else "recipe"
        cells.append(Cell(data, name, kind, about, job.params.recipe or "", job.settings, runs))
    return cells


def _run(comparison: Comparison, job: Job, found: Results) -> Run:
    """The run of one seed; its seconds include those of the trainings that it builds on."""
    result = found[job.key]
    costs = dict(result["costs"])
    curve = [dict(line) for line in result["curve"]]
    if curve and "work_seconds" in curve[-1]:
        costs["work_seconds"] = curve[-1]["work_seconds"]
    if job.needs in found:
        earlier = _run(comparison, comparison.jobs[job.needs], found).costs
        for name in ("train_seconds", "refresh_seconds", "total_seconds", "work_seconds"):
            if name in costs or name in earlier:
                costs[name] = costs.get(name, 0.0) + earlier.get(name, 0.0)
        if curve:
            curve[0]["train_seconds"] += earlier.get("train_seconds", 0.0) + earlier.get(
                "refresh_seconds", 0.0
            )
        for line in curve if "work_seconds" in costs else ():
            line["work_seconds"] += earlier.get("work_seconds", 0.0)
    return Run(job.seed, result["metrics"], result["validation"], costs, curve)


def _failure(job: Job, step: Step) -> dict[str, Any]:
    reason = step.failure()
    log = step.folder / LOG
    place = Path(*log.parts[-5:]).as_posix() if log.is_file() else ""
    return {
        "task": job.data,
        "cell": job.cell,
        "seed": job.seed,
        "state": "failed" if reason else "not run",
        "reason": reason,
        "log": place,
    }


def _scores(comparison: Comparison, jobs: Sequence[Job]) -> dict[str, list[QueryParts]]:
    """Scores of each query by each system on one data set, a list over seeds.

    They are read from a run's scores.npz; if it is missing, they are computed from the run's
    predictions and written."""
    scores: dict[str, list[QueryParts]] = {}
    # of the test split, with inverse propensities float64 [L]
    truth: tuple[csr_matrix, np.ndarray] | None = None
    for job in jobs:
        step = comparison.steps[job.key]
        if not (step.folder / SCORES).is_file():
            if not (step.folder / PREDICTIONS).is_file():
                continue
            truth = truth or _truth(comparison.steps[step.needs[0]].folder / "data")
            labels = load_array(step.folder / PREDICTIONS, np.int32, ndim=2)
            _write_scores(step.folder / SCORES, by_query(labels, truth[0], TESTED, truth[1]))
        scores.setdefault(job.cell, []).append(_read_scores(step.folder / SCORES))
    return scores


def _truth(data: Path) -> tuple[csr_matrix, np.ndarray]:
    dataset = XMCDataset.open(data / "dataset")
    rows = dataset.rows("test")
    truth = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
    return truth, load_propensity(data / "propensity").inverse_L


def _write_scores(path: Path, parts: QueryParts) -> None:
    """Write scores as compressed float32 [n] arrays: "P@1/above", "P@1/below", ... (see
    `metrics.by_query`).
    """
    arrays = {
        f"{metric}/{end}": values_N.astype(np.float32)
        for metric, both in parts.items()
        for end, values_N in zip(ENDS, both, strict=True)
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes_atomic(path, buffer.getvalue())


def _read_scores(path: Path) -> QueryParts:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {
                metric: [arrays[f"{metric}/{end}"].astype(np.float64) for end in ENDS]
                for metric in TESTED
            }
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        fix = "remove it: it is computed again from the predictions beside it"
        raise ArtifactError("scores cannot be read", where=str(path), got=error, fix=fix) from error
    return {metric: (above_N, below_N) for metric, (above_N, below_N) in found.items()}
