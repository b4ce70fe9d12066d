"""The page of a comparison: its input as plain values, and one HTML file that loads no others."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unidec.evaluation.figures import PEER, Chart, Line, Range, line_chart, point_chart, range_chart
from unidec.evaluation.page import Records, Shown, number, render, write_page
from unidec.evaluation.significance import ALPHA, Comparison
from unidec.metric_names import GROUPS, shown

CURVES = 8  # maximum systems with a colour in a chart of curves: the number of colours
MARKS = {"right": " ▲", "wrong": " ▼", "": ""}
ORDER = "P@1"  # metric by which systems are ordered


@dataclass(frozen=True)
class Task:
    """A data set with a choice of text: name (unique), one line about it, and facts (nested
    mappings allowed).
    """

    name: str
    about: str = ""
    card: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One seed of a cell.

    Attributes:
        metrics: of the test split in percent, named as by `metrics.evaluate`. validation: the same
        for the validation split.
        costs: "train_seconds", "refresh_seconds", "work_seconds" (processor seconds of both, on a
            GPU wall seconds), "total_seconds", "search_ms" (per query), "peak_memory_bytes",
            "parameters", "bundle_bytes", if they were measured.
        curve: lines of rounds.jsonl; empty for peers.
        commit: of the code that produced the run; "" outside git.
    """

    seed: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    curve: Records = ()
    commit: str = ""


@dataclass(frozen=True)
class Summary:
    """Mean (NaN without values), sample standard deviation (n - 1; NaN below two values) and number
    of values.
    """

    mean: float
    spread: float
    count: int

    def shown(self, mark: str = "", kind: str = "", form: str = "") -> Shown:
        """A table cell such as "45.12 ± 0.10", compared by the mean."""
        mean = number(self.mean)
        if form and math.isfinite(self.mean):
            mean = format(self.mean, form)
        if math.isfinite(self.spread):
            mark = f" ± {self.spread:.2f}{mark}"
        return Shown(mean, self.mean, mark, kind)


def summary(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation and number of the finite values."""
    finite = [float(value) for value in values if math.isfinite(value)]
    mean = statistics.fmean(finite) if finite else math.nan
    spread = statistics.stdev(finite) if len(finite) > 1 else math.nan
    return Summary(mean, spread, len(finite))


@dataclass(frozen=True)
class Cell:
    """One system on one task, with all its seeds.

    Attributes:
        task: name of its task. name: unique within the task.
        kind: "recipe": trained by unidec; "peer": other software, or a method without training.
        about: one line. recipe: name of its recipe. settings: settings that differ from the recipe
        and the common settings.
        runs: the seeds that succeeded; may be empty.
    """

    task: str
    name: str
    kind: Literal["recipe", "peer"] = "recipe"
    about: str = ""
    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    runs: Sequence[Run] = ()

    def values(self, name: str, of: Literal["metrics", "costs"] = "metrics") -> list[float]:
        """The finite values of a metric or cost, one for each seed that has it."""
        values = [float(getattr(run, of).get(name, math.nan)) for run in self.runs]
        return [value for value in values if math.isfinite(value)]

    def summary(self, name: str, of: Literal["metrics", "costs"] = "metrics") -> Summary:
        """A metric or a cost over the seeds."""
        return summary(self.values(name, of))


@dataclass(frozen=True)
class ComparisonInput:
    """The content of the page; empty parts are omitted.

    Attributes:
        date: as displayed. about: one line. notes: paragraphs under the heading, about the
        findings.
        tasks, cells: shown in this order; a task that is only named by a cell gets a table without
        a card.
        contrasts: paired tests by task. contrast_note: the test that was used, and its correction.
        groups: ablations, shown for each task that has their cells: {"title", "base": name of the
            cell that the others are compared with, "cells": the others, in order, "about": the
            reproduced table and paper}.
        failures: runs without a result: {"task", "cell", "seed", "state": "failed" or "not run",
        "reason", "log"}.
        common: settings that all recipes share. lineage: commit, hashes, machine, commands.
    """

    title: str = "Comparison"
    date: str = ""
    about: str = ""
    notes: Sequence[str] = ()
    tasks: Sequence[Task] = ()
    cells: Sequence[Cell] = ()
    contrasts: Mapping[str, Sequence[Comparison]] = field(default_factory=dict)
    contrast_note: str = ""
    groups: Records = ()
    failures: Records = ()
    common: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)


def write_comparison(path: str | os.PathLike[str], comparison: ComparisonInput) -> None:
    """Write the page atomically. Raises ArtifactError if that fails."""
    write_page(path, render_comparison(comparison))


def render_comparison(comparison: ComparisonInput) -> str:
    """The page as text."""
    tasks = {task.name: task for task in comparison.tasks}
    for cell in comparison.cells:
        tasks.setdefault(cell.task, Task(cell.task))
    shown_tasks = [
        {"task": task, **_of_task([cell for cell in comparison.cells if cell.task == name])}
        for name, task in tasks.items()
    ]
    contrasts = {
        (name, test.system, test.against, test.metric): test
        for name, tests in comparison.contrasts.items()
        for test in tests
    }
    return render(
        "comparison",
        comparison=comparison,
        tasks=shown_tasks,
        contrasts=contrasts,
        alpha=ALPHA,
        difference_to=difference_to,
        marks=MARKS,
        limit=f"The {CURVES} best by {ORDER} have colours.",
    )


def _of_task(cells: Sequence[Cell]) -> dict[str, Any]:
    """The template's variables for one task: cells (best first), metrics and groups of its tables,
    charts.
    """
    cells = ranked(cells, ORDER)
    best_peers = {}
    for metric in shown("comparison"):
        if any(cell.values(metric) for cell in cells):
            peers = (cell.name for cell in ranked(cells, metric) if cell.kind == "peer")
            best_peers[metric] = next(peers, "")
    groups = {}
    for metric in shown("comparison-group"):
        for group in GROUPS:
            name = f"{group}/{metric}"
            if _has_values(cells, name):  # 0: no query
                groups[name] = f"{metric} {group}"
    points = [
        (
            cell.name,
            cell.summary("P@1").mean,
            cell.summary("PSP@5").mean,
            cell.kind == "peer",
        )
        for cell in cells
    ]
    trade = point_chart("P@1 against PSP@5, test split", "P@1, percent", "PSP@5, percent", points)
    in_groups = [f"{group}/{metric}" for metric in shown("drawn-group") for group in GROUPS]
    drawn = shown("part")
    timed = [cell for cell in cells if any(_curve(cell, metric).x for metric in drawn)]
    return {
        "cells": cells,
        "metrics": list(best_peers),
        "best_peers": best_peers,
        "groups": groups,
        "ranges": [_ranges(cells, metric) for metric in shown("drawn")],
        "group_ranges": [_ranges(cells, name) for name in in_groups],
        "trade": trade,
        "curves": [_curves(timed, metric) for metric in drawn],
        "more_curves": len(timed) > CURVES,
    }


def _has_values(cells: Sequence[Cell], metric: str) -> bool:
    """Whether a metric is above 0 anywhere."""
    return any(any(cell.values(metric)) for cell in cells)


def _ranges(cells: Sequence[Cell], metric: str) -> Chart | None:
    """A chart of a metric by cell: means and, for several seeds, standard deviations and individual
    values.
    """
    if not _has_values(cells, metric):
        return None
    rows = []
    for cell in ranked(cells, metric):
        of_seeds = cell.summary(metric)
        rows.append(
            Range(
                cell.name,
                of_seeds.mean,
                of_seeds.spread,
                cell.values(metric),
                PEER if cell.kind == "peer" else 0,
            )
        )
    return range_chart(f"{metric}, test split", rows, "percent; grey: peers")


def _curves(cells: Sequence[Cell], metric: str) -> Chart | None:
    """A chart of a validation metric against time, the best systems in colour."""
    lines = [
        replace(_curve(cell, metric), muted=place >= CURVES) for place, cell in enumerate(cells)
    ]
    return line_chart(
        f"{metric}, validation split",
        lines,
        "processor minutes of training and refreshes",
        "percent",
        x_from_zero=True,
    )


def _curve(cell: Cell, metric: str) -> Line:
    """Means over seeds of a validation metric against time; the line ends with the shortest seed's
    last point.
    """
    of_runs = [_points(run, metric) for run in cell.runs]
    x = []
    y = []
    for points in zip(*filter(None, of_runs), strict=False):
        minutes, values = zip(*points, strict=True)
        x.append(statistics.fmean(minutes))
        y.append(statistics.fmean(values))
    return Line(cell.name, x, y, dots=True)


def _points(run: Run, metric: str) -> list[tuple[float, float]]:
    """(minutes, value) of each measured round; for a run without rounds a single point at the end
    of its training.
    """
    records = run.curve or [{**run.costs, "validation": run.validation}]
    points = []
    for record in records:
        seconds = record.get("work_seconds", math.nan)
        value = record.get("validation", {}).get(metric, math.nan)
        if math.isfinite(seconds + value):
            points.append((seconds / 60, value))
    return points


def ranked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Cells by descending mean of a metric; cells without it come last, in the given order."""
    return sorted(
        cells, key=lambda cell: -cell.summary(metric).mean if cell.values(metric) else math.inf
    )


def difference_to(cell: Cell, base: Cell, metric: str) -> Summary:
    """The differences cell - base: seed by seed if both have the same seeds, else of the means
    (without a spread).
    """
    ours = _by_seed(cell, metric)
    theirs = _by_seed(base, metric)
    if ours and ours.keys() == theirs.keys():
        return summary([ours[seed] - theirs[seed] for seed in sorted(ours)])
    return Summary(
        cell.summary(metric).mean - base.summary(metric).mean,
        math.nan,
        min(len(ours), len(theirs)),
    )


def _by_seed(cell: Cell, metric: str) -> dict[int, float]:
    return {run.seed: run.metrics[metric] for run in cell.runs if metric in run.metrics}
