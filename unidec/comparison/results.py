"""Results of a comparison's cells: collected from their folders, tested for significance, and formatted for page and
terminal.

Legend: n test queries, K labels per query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from unidec.comparison.chosen import AS_IT_IS
from unidec.comparison.peers import PEERS
from unidec.comparison.plan import Job, flat
from unidec.comparison.workspace import LOG, PREDICTIONS, Comparison, Step
from unidec.config import read_yaml
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import load_propensity
from unidec.data.storage import load_array, write_bytes_atomic, write_json
from unidec.errors import UnidecError
from unidec.evaluation.comparison_page import Cell, ComparisonInput, Run, Task, write_comparison
from unidec.evaluation.metrics import QueryParts, by_query, filtered_truth
from unidec.evaluation.significance import Comparison as PairedTest
from unidec.evaluation.significance import best_systems, compare_systems
from unidec.training.stopping import METRIC

TESTED = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@100")
TABLE = ("P@1", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100")
Results = dict[str, dict[str, Any]]  # result.json of each job that has one, by the job's key
NOTE = (
    "Paired randomisation test over the test queries, scores of a system averaged over its seeds, Holm's "
    "correction over all tests of a table at 5 %."
)
HEAD = """\
# Written by `unidec compare {path} --tune`: the best of each system's trials by {metric} of the
# validation split of "{data}", seed {seed}.
"""


def write_report(comparison: Comparison) -> Path:
    """Write report.html with all results in the comparison's folder, not only those of the last call."""
    found = gather(comparison)
    page = page_input(comparison, found, contrasts(comparison, found))
    comparison.root.mkdir(parents=True, exist_ok=True)
    write_comparison(comparison.root / "report.html", page)
    return comparison.root / "report.html"


def table(comparison: Comparison) -> list[list[str]]:
    """The results so far, for a terminal: column heads, then a row per cell, mean ± spread over seeds."""
    rows = [["data", "cell", "seeds", *TABLE]]
    for cell in _cells(comparison, gather(comparison)):
        if cell.runs:
            found = [cell.summary(name) for name in TABLE]
            figures = [f"{one.mean:.1f}" + (f" ± {one.spread:.1f}" if one.count > 1 else "") for one in found]
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
    return {key: result for key in comparison.jobs if (result := comparison.steps[key].result()) is not None}


def page_input(
    comparison: Comparison, found: Results, contrasts: Mapping[str, Sequence[PairedTest]]
) -> ComparisonInput:  # fmt: skip
    """Everything that the page shows."""
    file = comparison.file
    old = sum(result["code"] != comparison.steps[key].spec["code"] for key, result in found.items())
    notes = [f"{old} of {len(found)} results were made by another version of the code."] if old else []
    if (tuning := file.tuning) is not None:
        own = max(len(entry.trials or ()) for entry in file.cells.values())
        notes.append(
            f"Each recipe had {len(tuning.trials) + own} trials on {tuning.data}; the best by {METRIC} of its "
            f"validation split is its setting here (Settings, tuned). Figures of all trials: {tuning.file}."
        )
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
            if file.tuning is None or name != file.tuning.data
        ],
        cells=_cells(comparison, found),
        contrasts=contrasts,
        contrast_note=NOTE,
        groups=[{"title": title, **group.model_dump()} for title, group in file.groups.items()],
        failures=[_failure(job, comparison.steps[key]) for key, job in comparison.jobs.items() if key not in found],
        common=comparison.common,
        lineage={name: ", ".join(list(values)[:5]) for name, values in made.items()},
    )


def contrasts(comparison: Comparison, found: Results) -> dict[str, list[PairedTest]]:
    """Every system against the best peer of each metric, and the cells of each group against its base."""
    done: dict[str, list[PairedTest]] = {}
    for data in comparison.file.data:
        jobs = [job for key, job in comparison.jobs.items() if job.data == data and key in found]
        scores, tests = _scores(comparison, jobs), done.setdefault(data, [])
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
    costs, curve = dict(result["costs"]), [dict(line) for line in result["curve"]]
    if curve and "work_seconds" in curve[-1]:
        costs["work_seconds"] = curve[-1]["work_seconds"]
    if job.needs in found:
        earlier = _run(comparison, comparison.jobs[job.needs], found).costs
        for name in ("train_seconds", "refresh_seconds", "total_seconds", "work_seconds"):
            if name in costs or name in earlier:
                costs[name] = costs.get(name, 0.0) + earlier.get(name, 0.0)
        if curve:
            curve[0]["train_seconds"] += earlier.get("train_seconds", 0.0) + earlier.get("refresh_seconds", 0.0)
        for line in curve if "work_seconds" in costs else ():
            line["work_seconds"] += earlier.get("work_seconds", 0.0)
    return Run(job.seed, result["metrics"], result["validation"], costs, curve)


def _failure(job: Job, step: Step) -> dict[str, Any]:
    reason, log = step.failure(), step.folder / LOG
    place = Path(*log.parts[-5:]).as_posix() if log.is_file() else ""
    return {"task": job.data, "cell": job.cell, "seed": job.seed, "state": "failed" if reason else "not run",
            "reason": reason, "log": place}  # fmt: skip


def _scores(comparison: Comparison, jobs: Sequence[Job]) -> dict[str, list[QueryParts]]:
    """Scores of each query by each system on one data set, a list over seeds."""
    scores: dict[str, list[QueryParts]] = {}
    steps = [(job, comparison.steps[job.key]) for job in jobs]
    files = [(job.cell, file) for job, step in steps if (file := step.folder / PREDICTIONS).is_file()]
    if not files:
        return {}
    data = comparison.steps[steps[0][1].needs[0]].folder / "data"
    dataset = XMCDataset.open(data / "dataset")
    rows = dataset.rows("test")
    truth = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
    inverse_L = load_propensity(data / "propensity").inverse_L
    for cell, file in files:
        parts = by_query(load_array(file, np.int32, ndim=2), truth, TESTED, inverse_L)
        scores.setdefault(cell, []).append(parts)
    return scores


def write_chosen(comparison: Comparison, steps: Sequence[Step], outcomes: Mapping[str, str]) -> Path:
    """Choose the best trial of each cell whose trials ran, and write the file; entries of other cells are kept.

    Args:
        steps: the requested steps. outcomes: why a step has no result, "" if it has one.

    Raises:
        UnidecError: some steps have no result; the cells whose trials all ran are written.
    """
    tuning = comparison.file.tuning
    assert tuning is not None
    asked, path = {step.name for step in steps}, Path(tuning.file)
    entries: dict[str, Any] = read_yaml(path)[0] if path.is_file() else {}
    for cell in comparison.file.cells:
        trials = {job.trial: job for key, job in comparison.jobs.items() if job.cell == cell and key in asked}
        figures = {words: _figure(comparison.steps[job.key]) for words, job in trials.items()}
        ran = {words: value for words, value in figures.items() if value is not None}
        if ran and len(trials) == sum(job.cell == cell for job in comparison.jobs.values()):
            best = max(ran, key=lambda words: ran[words])
            shown = {words or AS_IT_IS: value for words, value in figures.items()}
            entries[cell] = {"set": flat(trials[best].settings), "trials": shown}
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {cell: entries[cell] for cell in comparison.file.cells if cell in entries}
    head = HEAD.format(path=comparison.path, metric=METRIC, data=tuning.data, seed=comparison.file.seeds[0])
    text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, default_flow_style=None, width=118)
    write_bytes_atomic(path, (head + text).encode())
    if lost := [f"{name}: {reason}" for name, reason in outcomes.items() if reason]:
        raise UnidecError("\n".join([f"{len(lost)} of {len(outcomes)} steps have no result", *lost, f"chosen: {path}"]))
    return path


def _figure(step: Step) -> float | None:
    """The metric after the last round; None: no result by this code, or not a finite number."""
    curve = (step.result() or {}).get("curve") if step.is_done() else None
    value = curve[-1]["validation"].get(METRIC) if curve else None
    return round(value, 3) if value is not None and math.isfinite(value) else None
