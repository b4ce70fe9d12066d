"""The page of a comparison: one HTML file that loads nothing, readable on a light and a dark screen and on paper."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from html import escape

from unidec.data.storage import write_bytes_atomic
from unidec.evaluation import comparison_tables as tables
from unidec.evaluation.comparison_input import Cell, ComparisonInput, Group, Run, Task, summary
from unidec.evaluation.page import charts, document, facts, figure, folded, navigation, note, number, section, table
from unidec.evaluation.report import bin_name
from unidec.evaluation.svg import Line, Range, bar_chart, line_chart, range_chart
from unidec.evaluation.training_sections import validation_by_time

MAIN = ("P@1", "PSP@5", "R@100")  # drawn
CURVES = 12  # systems in a chart of curves: more cannot be told apart
PEER_COLOUR = 5
BIN_METRICS = ("P@5", "PSP@5")
BINS = 6  # systems in a chart of bins


def write_comparison(path: str | os.PathLike[str], comparison: ComparisonInput) -> None:
    """Write the page, in one piece.

    Raises:
        ArtifactError: it cannot be written.
    """
    write_bytes_atomic(path, render_comparison(comparison).encode("utf-8", "replace"))


def render_comparison(comparison: ComparisonInput) -> str:
    """The page as text. All texts of the input are escaped."""
    tasks = _tasks(comparison)
    parts = {
        "results": ("Results", _results(comparison, tasks)),
        "time": ("Quality against time", _each(comparison, tasks, _curves)),
        "costs": ("Time, memory, parameters", _each(comparison, tasks, lambda c: tables.costs(c, _first(comparison)))),
        "frequency": ("By frequency of the label", _each(comparison, tasks, _frequency)),
        "parts": ("Scores alone", _each(comparison, tasks, lambda c: tables.parts(c, _first(comparison)))),
        "ablations": ("Ablations", _ablations(comparison, tasks)),
        "pools": ("Pools", _each(comparison, tasks, _pools)),
        "tests": ("Paired tests", tables.all_contrasts(comparison.contrasts) if comparison.contrasts else ""),
        "failures": ("Without a result", _failures(comparison)),
        "settings": ("Settings", tables.settings(comparison.cells, comparison.common)),
        "data": ("Data sets", "".join(_card(task) for task in tasks)),
        "lineage": ("Lineage", facts(comparison.lineage)),
    }
    sections = {anchor: section(anchor, heading, body) for anchor, (heading, body) in parts.items()}
    links = navigation([(anchor, parts[anchor][0]) for anchor in sections if sections[anchor]])
    about = " · ".join(escape(text) for text in (comparison.about, comparison.date) if text)
    top = f'<h1>{escape(comparison.title)}</h1><p class="muted">{about}</p>' + _cards(comparison, tasks)
    notes = "".join(f"<p>{escape(text)}</p>" for text in comparison.notes)
    return document(comparison.title, [top + notes + links, *sections.values()])


def _tasks(comparison: ComparisonInput) -> list[Task]:
    """The tasks, also those that only cells name."""
    named = {task.name: task for task in comparison.tasks}
    found = dict.fromkeys([*named, *(cell.task for cell in comparison.cells)])
    return [named.get(name, Task(name)) for name in found]


def _first(comparison: ComparisonInput) -> str:
    return comparison.headline[0] if comparison.headline else MAIN[0]


def _of(comparison: ComparisonInput, task: Task) -> list[Cell]:
    return [cell for cell in comparison.cells if cell.task == task.name]


def _each(comparison: ComparisonInput, tasks: Sequence[Task], make: Callable[[Sequence[Cell]], str]) -> str:
    """What `make` gives for the cells of each task, under the task's name where there are several."""
    shown = [(task, make(_of(comparison, task))) for task in tasks]
    heading = len(tasks) > 1
    return "".join((f"<h3>{escape(task.name)}</h3>" if heading else "") + body for task, body in shown if body)


def _cards(comparison: ComparisonInput, tasks: Sequence[Task]) -> str:
    runs = sum(len(cell.runs) for cell in comparison.cells)
    if not runs:
        return ""
    names = {cell.name for cell in comparison.cells}
    seconds = [r.costs.get("total_seconds", math.nan) for cell in comparison.cells for r in cell.runs]
    hours = sum(second for second in seconds if math.isfinite(second)) / 3600
    figures = {
        "data sets": len(tasks),
        "systems": len(names),
        "runs": runs,
        "without a result": len(comparison.failures),
    }
    cards = [(f"{value:,}", name) for name, value in figures.items()]
    cards += [(f"{hours:.1f}", "hours of work")] if hours > 0 else []
    body = "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)
    return f'<div class="cards">{body}</div>'


def _results(comparison: ComparisonInput, tasks: Sequence[Task]) -> str:
    contrasts = tables.indexed(comparison.contrasts)

    def of_task(cells: Sequence[Cell]) -> str:
        shown = tables.headline(cells, comparison.headline, contrasts)
        if not shown:
            return ""
        return shown + tables.recipe_against_peer(cells, MAIN, contrasts) + charts(*(_ranges(cells, m) for m in MAIN))

    body = tables.overview(tasks, comparison.cells, MAIN) + _each(comparison, tasks, of_task)
    if not body:
        return ""
    about = (
        "Test split, percent, filter pairs removed: mean over seeds, ± standard deviation of a sample of seeds where "
        "there are several. The best mean of each column is bold. Grey: peers, which are not recipes of this trainer. "
    )
    marks = f"{tables.BETTER.strip()} {tables.WORSE.strip()}: better or worse than the best peer on that metric, "
    tested = f"{marks}corrected p below {tables.ALPHA}. {comparison.contrast_note}" if comparison.contrasts else ""
    return body + note((about + tested).strip())


def _ranges(cells: Sequence[Cell], metric: str) -> str:
    rows = []
    for cell in tables.ranked(cells, metric):
        of = summary(cell.values(metric))
        colour = PEER_COLOUR if cell.kind == "peer" else 0
        rows.append(Range(cell.name, of.mean, of.spread, cell.values(metric) if of.count > 1 else [], colour))
    about = "percent; grey: peers"
    return figure(f"{metric}, test split", range_chart(rows, about))


def _curves(cells: Sequence[Cell]) -> str:
    """Validation metrics against minutes of training and refreshes, means over seeds; peers are dots."""
    lines = {metric: {cell.name: line for cell in cells if (line := _curve(cell, metric))} for metric in MAIN}
    names = [cell.name for cell in cells if any(cell.name in of for of in lines.values())]
    first = lines[MAIN[0]]
    names.sort(key=lambda name: -max(first[name].y) if name in first else math.inf)
    left_out = len(names) - CURVES
    drawn = []  # the same colours in each
    for metric, of in lines.items():
        chosen = [of.get(name, Line(name, [], [])) for name in names[:CURVES]]
        chart = line_chart(chosen, "minutes of training and refreshes", "percent", x_from_zero=True)
        drawn.append(figure(f"{metric}, validation split", chart))
    shown = charts(*drawn)
    if not shown:
        return ""
    limit = f" The {CURVES} best by {MAIN[0]} are drawn; {left_out} more are in the tables." if left_out > 0 else ""
    return shown + note(
        "A point a round, mean over seeds. Validation and export are not counted as time. A dot without a line: a "
        f"system without rounds of its own, after its training.{limit}"
    )


def _curve(cell: Cell, metric: str) -> Line | None:
    seeds = [points for run in cell.runs if (points := _points(run, metric))]
    if not seeds:
        return None
    length = min(len(points) for points in seeds)  # a seed that stopped early ends the mean
    x = [summary([points[i][0] for points in seeds]).mean for i in range(length)]
    y = [summary([points[i][1] for points in seeds]).mean for i in range(length)]
    return Line(cell.name, x, y, dots=True)


def _points(run: Run, metric: str) -> list[tuple[float, float]]:
    """(minutes, value) of each measured round; of a run without rounds the one point after its training."""
    points = [(r["minutes"], float(r[metric])) for r in validation_by_time(run.curve) if r.get(metric) is not None]
    if not points and metric in run.validation and "train_seconds" in run.costs:
        points = [(run.costs["train_seconds"] / 60, run.validation[metric])]
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _frequency(cells: Sequence[Cell]) -> str:
    """Metrics by tail, torso and head, and by bins of equal volume (thesis, figure 1.3)."""
    groups = tables.by_group(cells, MAIN[0])
    with_bins = _with_bins(tables.ranked(cells, MAIN[0]))
    if not with_bins:
        return groups
    names, numbers = _bins_of(with_bins)
    rows = [
        [tables.named(cell), *(_bin(cell, b, metric) for metric in BIN_METRICS for b in numbers)] for cell in with_bins
    ]
    header = ["system", *(f"{metric}, {name}" for metric in BIN_METRICS for name in names)]
    about = (
        "tail: labels with fewer than 10 training queries, torso: 10 to 100, head: over 100. Bins hold about equally "
        "many (query, label) pairs of the training data; their contributions add up to the metric. "
    )
    limit = f"The {BINS} best are drawn." if len(with_bins) > BINS else ""
    contributions = folded("contributions, as a table", table(header, rows, best=True, dense=True))
    return groups + _bin_charts(with_bins) + contributions + note(about + limit)


def _with_bins(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if any(run.bins for run in cell.runs)]


def _bins_of(cells: Sequence[Cell]) -> tuple[list[str], list[int]]:
    """Names and numbers of the bins: those of a task's labels, the same for all its cells."""
    first = next(run for run in cells[0].runs if run.bins)
    return [bin_name(row) for row in first.bins], [row["bin"] for row in first.bins]


def _bin_charts(cells: Sequence[Cell]) -> str:
    """Contributions of the bins to P@5 and PSP@5, at most `BINS` cells."""
    names, numbers = _bins_of(cells)
    x_label = "training queries of a label; bins of equal volume, head to tail"
    drawn = []
    for metric in BIN_METRICS:
        bars = [(cell.name, [_bin(cell, b, metric) for b in numbers]) for cell in cells[:BINS]]
        chart = bar_chart(names, bars, "percentage points", x_label=x_label)
        drawn.append(figure(f"Contribution to {metric}, test split", chart))
    return charts(*drawn)


def _bin(cell: Cell, number_of_bin: int, metric: str) -> float:
    values = [row[metric] for run in cell.runs for row in run.bins if row["bin"] == number_of_bin]
    return summary(values).mean


def _ablations(comparison: ComparisonInput, tasks: Sequence[Task]) -> str:
    contrasts = tables.indexed(comparison.contrasts)
    shown = []
    for group in comparison.groups:
        bodies = []
        for task in tasks:
            body = tables.group_table(group, task.name, comparison.cells, comparison.headline, contrasts)
            bodies.append(body + (_group_bins(group, _of(comparison, task)) if body else ""))
        if any(bodies):
            about = f"<p>{escape(group.about)}</p>" if group.about else ""
            finding = f"<p><b>{escape(group.finding)}</b></p>" if group.finding else ""
            shown.append(f"<h3>{escape(group.title)}</h3>{about}{''.join(bodies)}{finding}")
    if not shown:
        return ""
    return "".join(shown) + note(
        "The first row of a table is the base with its figures; the others are differences to it in percentage "
        "points, seed by seed where the seeds are the same (± their standard deviation). Coloured and marked: "
        f"corrected p below {tables.ALPHA} in the paired test against the base, where there is one."
    )


def _group_bins(group: Group, cells: Sequence[Cell]) -> str:
    """The base's and the others' contributions by label frequency."""
    by_name = {cell.name: cell for cell in cells}
    members = _with_bins([by_name[name] for name in (group.base, *group.cells) if name in by_name])
    return folded("by frequency of the label", _bin_charts(members)) if len(members) > 1 else ""


def _pools(cells: Sequence[Cell]) -> str:
    """Sizes of pools and positives a query of each cell, and the one against the other."""
    means = [(cell.name, *tables.pool_means(cell)) for cell in cells]
    dots = [Line(name, [size], [positives], dots=True) for name, size, positives in means if math.isfinite(size)]
    chart = line_chart(
        dots[:CURVES], "labels in the pool, mean", "positives a query, mean", x_from_zero=True, y_from_zero=True
    )
    shown = figure("Positives a query against the size of the pool", chart) if len(dots) > 1 else ""
    return tables.pools(cells) + charts(shown)


def _failures(comparison: ComparisonInput) -> str:
    rows = [[f.task, f.cell, number(f.seed), f.state, f.reason, f.log] for f in comparison.failures]
    return table(["task", "system", "seed", "state", "why", "log"], rows, text_columns=6)


def _card(task: Task) -> str:
    about = f"<p>{escape(task.about)}</p>" if task.about else ""
    body = about + facts(task.card)
    return f"<h3>{escape(task.name)}</h3>{body}" if body else ""
