"""The page of a comparison: its input as plain values, and one HTML file that loads no
other files.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unidec.evaluation.figures import PEER, Chart, Line, Range, line_chart, point_chart, range_chart
from unidec.evaluation.page import Records, Shown, number, render, write_page
from unidec.evaluation.report import validation_records
from unidec.evaluation.significance import ALPHA, Comparison
from unidec.metric_names import GROUPS

HEADLINE = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@5", "R@10", "R@100", "coverage@5")
CURVES = 8  # most systems with a colour in a chart of curves: the number of colours
MARKS = {"right": " ▲", "wrong": " ▼", "": ""}
MAIN = ("P@1", "PSP@5", "R@100")  # drawn
GROUP_METRICS = ("P@5", "PSP@5", "R@10", "coverage@5")
CURVE_METRICS = ("nDCG@5", *MAIN)
BY_GROUP = "R@10"  # drawn for each group of labels


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
        metrics: of the test split in percent, named as `metrics.evaluate` does. validation: of the
        validation split.
        costs: "train_seconds", "refresh_seconds", "work_seconds" (processor seconds of both, on a
            GPU wall seconds), "total_seconds", "search_ms" (per query), "peak_memory_bytes",
            "parameters", "bundle_bytes"; those that were measured.
        curve: lines of rounds.jsonl; empty for peers.
    """

    seed: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    curve: Records = ()


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
        spread = f" ± {self.spread:.2f}" if math.isfinite(self.spread) else ""
        mean = f"{self.mean:{form}}" if form and math.isfinite(self.mean) else number(self.mean)
        return Shown(mean, self.mean, spread + mark, kind)


def summary(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation and number of the finite values."""
    finite = [float(value) for value in values if math.isfinite(value)]
    mean = statistics.fmean(finite) if finite else math.nan
    return Summary(mean, statistics.stdev(finite) if len(finite) > 1 else math.nan, len(finite))


@dataclass(frozen=True)
class Cell:
    """One system on one task, with all its seeds.

    Attributes:
        task: name of its task. name: unique within the task.
        kind: "recipe": trained by unidec; "peer": other software, or a method without training.
        about: one line. recipe: its recipe's name. settings: those that differ from the recipe and
        the common settings.
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
        contrasts: paired tests by task. contrast_note: which test was used, and how it is
        corrected.
        groups: ablations, shown for each task that has their cells: {"title", "base": name of the
            cell that the others are compared with, "cells": the others, in order, "about": which
            table of which paper this repeats}.
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
    cells = {name: [cell for cell in comparison.cells if cell.task == name] for name in tasks}
    contrasts = {
        (task, c.system, c.against, c.metric): c
        for task, own in comparison.contrasts.items()
        for c in own
    }
    return render(
        "comparison",
        comparison=comparison,
        tasks=[{"task": task, **_of_task(cells[name])} for name, task in tasks.items()],
        contrasts=contrasts,
        alpha=ALPHA,
        difference_to=difference_to,
        marks=MARKS,
        limit=f"The {CURVES} best by {MAIN[0]} have colours.",
    )


def _of_task(cells: Sequence[Cell]) -> dict[str, Any]:
    """The template's variables for one task: cells (best first), metrics and groups of its tables,
    charts.
    """
    cells = ranked(cells, MAIN[0])
    metrics = [metric for metric in HEADLINE if any(cell.values(metric) for cell in cells)]
    groups = [
        (f"{group}/{metric}", f"{metric} {group}") for metric in GROUP_METRICS for group in GROUPS
    ]
    timed = [cell for cell in cells if any(_curve(cell, metric).x for metric in CURVE_METRICS)]
    by_work = all(
        "work_seconds" in line for cell in timed for run in cell.runs for line in run.curve
    )
    x_label = f"{'processor ' if by_work else ''}minutes of training and refreshes"
    return {
        "cells": cells,
        "metrics": metrics,
        "best_peers": {
            m: next((c.name for c in ranked(cells, m) if c.kind == "peer" and c.values(m)), "")
            for m in metrics
        },
        # 0: no query
        "groups": {
            name: head for name, head in groups if any(any(cell.values(name)) for cell in cells)
        },
        "ranges": [_ranges(cells, metric) for metric in MAIN],
        "group_ranges": [_ranges(cells, f"{group}/{BY_GROUP}") for group in GROUPS],
        "trade": point_chart(
            "P@1 against PSP@5, test split",
            "P@1, percent",
            "PSP@5, percent",
            [
                (
                    cell.name,
                    cell.summary("P@1").mean,
                    cell.summary("PSP@5").mean,
                    cell.kind == "peer",
                )
                for cell in cells
            ],
        ),
        "curves": [
            line_chart(
                f"{metric}, validation split",
                [
                    replace(_curve(cell, metric, by_work), muted=i >= CURVES)
                    for i, cell in enumerate(timed)
                ],
                x_label,
                "percent",
                x_from_zero=True,
            )
            for metric in CURVE_METRICS
        ],
        "more_curves": len(timed) > CURVES,
    }


def _ranges(cells: Sequence[Cell], metric: str) -> Chart | None:
    """A chart of a metric by cell: means, and for several seeds the standard deviation and the
    single values.
    """
    rows = []
    for cell in ranked(cells, metric) if any(any(cell.values(metric)) for cell in cells) else ():
        over_seeds = cell.summary(metric)
        mean = over_seeds.mean
        spread = over_seeds.spread
        ends = (mean - spread, mean + spread) if over_seeds.count > 1 else None
        seeds = cell.values(metric) if ends else ()
        colour = PEER if cell.kind == "peer" else 0
        rows.append(Range(cell.name, mean, ends, seeds, colour))
    return range_chart(f"{metric}, test split", rows, "percent; grey: peers")


def _curve(cell: Cell, metric: str, by_work: bool = False) -> Line:
    """Means over seeds of a validation metric against time; the line ends with the shortest seed's
    last point.
    """
    seeds = [points for run in cell.runs if (points := _points(run, metric, by_work))]
    x, y = (
        [statistics.fmean(point[axis] for point in points) for points in zip(*seeds, strict=False)]
        for axis in (0, 1)
    )
    return Line(cell.name, x, y, dots=True)


def _points(run: Run, metric: str, by_work: bool) -> list[tuple[float, float]]:
    """(minutes, value) of each measured round; for a run without rounds a single point at the end
    of its training.
    """
    lines = [line for line in run.curve if line.get("validation")]
    if by_work:
        minutes = [line["work_seconds"] / 60 for line in lines]
        total = "work_seconds"
    else:
        minutes = [record["minutes"] for record in validation_records(run.curve)]
        total = "train_seconds"
    values = [line["validation"].get(metric) for line in lines]
    points = [(x, float(y)) for x, y in zip(minutes, values, strict=True) if y is not None]
    if not points and metric in run.validation and total in run.costs:
        points = [(run.costs[total] / 60, run.validation[metric])]
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def ranked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Cells by falling mean of a metric; those without the metric come last, in the given order."""
    return sorted(
        cells, key=lambda cell: -cell.summary(metric).mean if cell.values(metric) else math.inf
    )


def difference_to(cell: Cell, base: Cell, metric: str) -> Summary:
    """The differences cell - base: seed by seed if both have the same seeds, else of the means
    (without a spread).
    """
    ours, theirs = (
        {run.seed: run.metrics[metric] for run in one.runs if metric in run.metrics}
        for one in (cell, base)
    )
    if ours and ours.keys() == theirs.keys():
        return summary([ours[seed] - theirs[seed] for seed in sorted(ours)])
    difference = cell.summary(metric).mean - base.summary(metric).mean
    return Summary(difference, math.nan, min(len(ours), len(theirs)))
