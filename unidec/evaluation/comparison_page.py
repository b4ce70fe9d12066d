"""The page of a comparison: one HTML file that loads nothing, readable on a light and a dark screen and on paper."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from unidec.evaluation import comparison_tables as tables
from unidec.evaluation.comparison_input import Cell, ComparisonInput, Group, Run, Task, summary
from unidec.evaluation.comparison_tables import MAIN
from unidec.evaluation.figures import Chart, Line, Range, bar_chart, line_chart, range_chart
from unidec.evaluation.page import Table, number, render, write_page
from unidec.evaluation.plots import validation_records
from unidec.evaluation.report import VOLUME, bin_name
from unidec.evaluation.significance import ALPHA

CURVES = 12  # systems in a chart of curves: more cannot be told apart
PEER_COLOUR = 5
BIN_METRICS = ("P@5", "PSP@5")
BINS = 6  # systems in a chart of bins


def write_comparison(path: str | os.PathLike[str], comparison: ComparisonInput) -> None:
    """Write the page atomically. Raises ArtifactError where it cannot be written."""
    write_page(path, render_comparison(comparison))


def render_comparison(comparison: ComparisonInput) -> str:
    """The page as text."""
    tasks = {task.name: task for task in comparison.tasks}
    for cell in comparison.cells:
        tasks.setdefault(cell.task, Task(cell.task))
    cells = {name: [cell for cell in comparison.cells if cell.task == name] for name in tasks}
    contrasts = {(task, c.system, c.against, c.metric): c for task, own in comparison.contrasts.items() for c in own}
    failures = [[f.task, f.cell, number(f.seed), f.state, f.reason, f.log] for f in comparison.failures]
    groups = [
        (group, [(table, _group_bins(group, own)) for name, own in cells.items()
                 if (table := tables.group_table(group, name, own, contrasts))])
        for group in comparison.groups
    ]  # fmt: skip
    return render(
        "comparison",
        comparison=comparison,
        head_cards=_cards(comparison, len(tasks)),
        overview=tables.overview(list(tasks.values()), comparison.cells),
        tasks=[(task, _of_task(cells[name], contrasts)) for name, task in tasks.items()],
        groups=[(group, shown) for group, shown in groups if shown],
        contrasts=tables.all_contrasts(comparison.contrasts),
        failures=Table(["task", "system", "seed", "state", "why", "log"], failures, text_columns=6),
        settings=tables.settings(comparison.cells),
        better=tables.MARKS["right"].strip(),
        worse=tables.MARKS["wrong"].strip(),
        alpha=ALPHA,
        limits={"curves": CURVES, "bins": BINS, "first": MAIN[0]},
    )


def _of_task(cells: Sequence[Cell], contrasts: tables.Contrasts) -> dict[str, Any]:
    """Tables and charts of one task's cells."""
    curves, left_out = _curves(cells)
    binned = _with_bins(tables.ranked(cells, MAIN[0]))
    names, numbers = _bins_of(binned)
    heads = [f"{metric}, {name}" for metric in BIN_METRICS for name in names]
    return {
        "headline": tables.headline(cells, contrasts),
        "against": tables.recipe_against_peer(cells, contrasts),
        "ranges": [_ranges(cells, metric) for metric in MAIN],
        "curves": curves,
        "left_out": left_out,
        "costs": tables.costs(cells),
        "by_group": tables.by_group(cells),
        "bin_charts": _bin_charts(binned),
        "bins": tables.of_systems(
            binned, heads, lambda cell: [_bin(cell, b, metric) for metric in BIN_METRICS for b in numbers], best=True
        ),
        "parts": tables.parts(cells),
        "pools": tables.pools(cells),
    }


def _cards(comparison: ComparisonInput, num_tasks: int) -> list[Any]:
    runs = [run for cell in comparison.cells for run in cell.runs]
    if not runs:
        return []
    seconds = [run.costs.get("total_seconds", math.nan) for run in runs]
    hours = sum(second for second in seconds if math.isfinite(second)) / 3600
    figures = {
        "data sets": num_tasks,
        "systems": len({cell.name for cell in comparison.cells}),
        "runs": len(runs),
        "without a result": len(comparison.failures),
    }
    cards = [(f"{value:,}", name, "") for name, value in figures.items()]
    return cards + ([(f"{hours:.1f}", "hours of work", "")] if hours > 0 else [])


def _ranges(cells: Sequence[Cell], metric: str) -> Chart | None:
    rows = []
    for cell in tables.ranked(cells, metric):
        of = cell.summary(metric)
        ends = (of.mean - of.spread, of.mean + of.spread) if of.count > 1 else None
        colour = PEER_COLOUR if cell.kind == "peer" else 0
        rows.append(Range(cell.name, of.mean, ends, cell.values(metric) if ends else (), colour))
    return range_chart(f"{metric}, test split", rows, "percent; grey: peers")


def _curves(cells: Sequence[Cell]) -> tuple[list[Chart | None], int]:
    """Validation metrics against minutes of training and refreshes, means over seeds; peers are dots. The same systems
    in the same colours in each chart; how many are left out.
    """
    lines = {metric: {cell.name: line for cell in cells if (line := _curve(cell, metric))} for metric in MAIN}
    names = [cell.name for cell in cells if any(cell.name in of for of in lines.values())]
    first = lines[MAIN[0]]
    names.sort(key=lambda name: -max(first[name].y) if name in first else math.inf)
    charts = [
        line_chart(f"{metric}, validation split", [of.get(name, Line(name, [], [])) for name in names[:CURVES]],
                   "minutes of training and refreshes", "percent", x_from_zero=True)
        for metric, of in lines.items()
    ]  # fmt: skip
    return charts, max(0, len(names) - CURVES)


def _curve(cell: Cell, metric: str) -> Line | None:
    seeds = [points for run in cell.runs if (points := _points(run, metric))]
    if not seeds:
        return None
    # a seed that stopped early ends the mean
    x, y = ([summary(values).mean for values in zip(*([point[axis] for point in points] for points in seeds))]
            for axis in (0, 1))  # fmt: skip
    return Line(cell.name, x, y, dots=True)


def _points(run: Run, metric: str) -> list[tuple[float, float]]:
    """(minutes, value) of each measured round; of a run without rounds the one point after its training."""
    points = [(r["minutes"], float(r[metric])) for r in validation_records(run.curve) if r.get(metric) is not None]
    if not points and metric in run.validation and "train_seconds" in run.costs:
        points = [(run.costs["train_seconds"] / 60, run.validation[metric])]
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _with_bins(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if any(run.bins for run in cell.runs)]


def _bins_of(cells: Sequence[Cell]) -> tuple[list[str], list[int]]:
    """Names and numbers of the bins: those of a task's labels, the same for all its cells."""
    bins = next((run.bins for cell in cells for run in cell.runs if run.bins), ())
    return [bin_name(row) for row in bins], [row["bin"] for row in bins]


def _bin_charts(cells: Sequence[Cell]) -> list[Chart | None]:
    """Contributions of the bins to P@5 and PSP@5, at most `BINS` cells."""
    names, numbers = _bins_of(cells)
    return [
        bar_chart(f"Contribution to {metric}, test split", names,
                  [(cell.name, [_bin(cell, b, metric) for b in numbers]) for cell in cells[:BINS]],
                  "percentage points", x_label=VOLUME)
        for metric in BIN_METRICS
    ]  # fmt: skip


def _bin(cell: Cell, number_of_bin: int, metric: str) -> float:
    return summary([row[metric] for run in cell.runs for row in run.bins if row["bin"] == number_of_bin]).mean


def _group_bins(group: Group, cells: Sequence[Cell]) -> list[Chart | None]:
    """The base's and the others' contributions by label frequency."""
    by_name = {cell.name: cell for cell in cells}
    members = _with_bins([by_name[name] for name in (group.base, *group.cells) if name in by_name])
    return _bin_charts(members) if len(members) > 1 else []
