"""The page of a comparison: one HTML file that loads nothing, readable on a light and a dark screen and on paper."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unidec.evaluation.comparison_input import (
    COSTS,
    HEADLINE,
    Cell,
    ComparisonInput,
    Group,
    Run,
    Summary,
    Task,
    summary,
)
from unidec.evaluation.figures import Chart, Line, Range, bar_chart, line_chart, range_chart
from unidec.evaluation.page import Shown, Table, number, render, write_page
from unidec.evaluation.plots import validation_records
from unidec.evaluation.report import VOLUME, bin_name, colour, interval_and_p
from unidec.evaluation.significance import ALPHA, Comparison
from unidec.metric_names import GROUPS

CURVES = 12  # systems in a chart of curves: more cannot be distinguished
PEER_COLOUR = 5
BIN_METRICS = ("P@5", "PSP@5")
BINS = 6  # systems in a chart of bins
MARKS = {"right": " ▲", "wrong": " ▼", "": ""}
MEGABYTE = 1e6
MAIN = ("P@1", "PSP@5", "R@100")  # compared with the best peer, and drawn
GROUP_METRICS = ("P@5", "PSP@5", "R@10", "coverage@5")
PARTS = {"de": "dual encoder alone", "clf": "classifier alone", "heads": "without votes", "knn": "votes alone"}
PART_METRICS = ("P@1", "nDCG@5", "PSP@5", "R@100")
Contrasts = Mapping[tuple[str, str, str, str], Comparison]
"""By (task, cell, against, metric)."""


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
                 if (table := _group_table(group, name, own, contrasts))])
        for group in comparison.groups
    ]  # fmt: skip
    return render(
        "comparison",
        comparison=comparison,
        head_cards=_cards(comparison, len(tasks)),
        overview=_overview(list(tasks.values()), comparison.cells),
        tasks=[(task, _of_task(cells[name], contrasts)) for name, task in tasks.items()],
        groups=[(group, shown) for group, shown in groups if shown],
        contrasts=_all_contrasts(comparison.contrasts),
        failures=Table(["task", "system", "seed", "state", "why", "log"], failures, text_columns=6),
        settings=_settings(comparison.cells),
        better=MARKS["right"].strip(),
        worse=MARKS["wrong"].strip(),
        alpha=ALPHA,
        limits={"curves": CURVES, "bins": BINS, "first": MAIN[0]},
    )


def _of_task(cells: Sequence[Cell], contrasts: Contrasts) -> dict[str, Any]:
    """Tables and charts of one task's cells."""
    curves, left_out = _curves(cells)
    binned = _with_bins(ranked(cells, MAIN[0]))
    names, numbers = _bins_of(binned)
    heads = [f"{metric}, {name}" for metric in BIN_METRICS for name in names]
    return {
        "headline": _headline(cells, contrasts),
        "against": _recipe_against_peer(cells, contrasts),
        "ranges": [_ranges(cells, metric) for metric in MAIN],
        "curves": curves,
        "left_out": left_out,
        "costs": _costs(cells),
        "by_group": _by_group(cells),
        "bin_charts": _bin_charts(binned),
        "bins": _of_systems(
            binned, heads, lambda cell: [_bin(cell, b, metric) for metric in BIN_METRICS for b in numbers], best=True
        ),
        "parts": _parts(cells),
        "pools": _pools(cells),
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
    for cell in ranked(cells, metric):
        of = cell.summary(metric)
        ends = (of.mean - of.spread, of.mean + of.spread) if of.count > 1 else None
        seeds = cell.values(metric) if ends else ()
        rows.append(Range(cell.name, of.mean, ends, seeds, PEER_COLOUR if cell.kind == "peer" else 0))
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


# -- tables ------------------------------------------------------------------------------------------------------------


def ranked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Cells by falling mean of a metric; those without one last, in the order given."""
    return sorted(cells, key=lambda cell: -cell.summary(metric).mean if cell.values(metric) else math.inf)


def best_of(cells: Sequence[Cell], kind: str, metric: str) -> Cell | None:
    """The cell of a kind with the largest mean of a metric."""
    found = [cell for cell in cells if cell.kind == kind and cell.values(metric)]
    return max(found, key=lambda cell: cell.summary(metric).mean, default=None)


def _of_systems(
    cells: Sequence[Cell], heads: Iterable[str], values: Callable[[Cell], Iterable[Any]], **options: Any
) -> Table:
    """A row for each cell."""
    rows = [[Shown(cell.name, small=" peer" if cell.kind == "peer" else ""), *values(cell)] for cell in cells]
    kinds = ["reference" if cell.kind == "peer" else "" for cell in cells]
    return Table(["system", *heads], rows, kinds=kinds, dense=True, **options)


def _headline(cells: Sequence[Cell], contrasts: Contrasts) -> Table:
    """Mean and spread of each cell, marked where it differs from the best peer."""
    columns = [metric for metric in HEADLINE if any(cell.values(metric) for cell in cells)]
    shown = [cell for cell in ranked(cells, columns[0]) if cell.runs] if columns else []
    peers = {metric: best_of(cells, "peer", metric) for metric in columns}

    def values(cell: Cell) -> list[Any]:
        found: list[Any] = [str(len(cell.runs))]
        for metric, peer in peers.items():
            contrast = contrasts.get((cell.task, cell.name, peer.name, metric)) if peer else None
            found.append(_mean_and_spread(cell.summary(metric), MARKS[colour(contrast)]))
        return found

    return _of_systems(shown, ["seeds", *columns], values, best=True)


def _mean_and_spread(of: Summary, mark: str = "") -> Shown:
    """ "45.12 ± 0.10", compared by the mean."""
    return Shown(number(of.mean), of.mean, _spread(of) + mark)


def _spread(of: Summary) -> str:
    return f" ± {of.spread:.2f}" if math.isfinite(of.spread) else ""


def _recipe_against_peer(cells: Sequence[Cell], contrasts: Contrasts) -> Table:
    """The best recipe and the best peer on each metric."""
    rows = []
    for metric in MAIN:
        recipe, peer = best_of(cells, "recipe", metric), best_of(cells, "peer", metric)
        if recipe is None or peer is None:
            continue
        ours, theirs = recipe.summary(metric), peer.summary(metric)
        contrast = contrasts.get((recipe.task, recipe.name, peer.name, metric))
        difference = Shown(f"{ours.mean - theirs.mean:+.2f}", kind=colour(contrast))
        test = interval_and_p(contrast) if contrast else [None, None]
        rows.append(
            [metric, recipe.name, peer.name, _mean_and_spread(ours), _mean_and_spread(theirs), difference, *test]
        )
    header = ["metric", "best recipe", "best peer", "recipe", "peer", "difference", "95 % interval", "p, corrected"]
    return Table(header, rows, text_columns=3)


def _costs(cells: Sequence[Cell]) -> Table:
    """Means over seeds of time, memory, parameters and search time."""
    shown = [cell for cell in ranked(cells, MAIN[0]) if any(run.costs for run in cell.runs)]
    columns = [key for key in COSTS if any(key in run.costs for cell in shown for run in cell.runs)]

    def cost(cell: Cell, key: str) -> str:
        value = summary([run.costs[key] for run in cell.runs if key in run.costs]).mean
        value /= MEGABYTE if key.endswith("_bytes") else 1
        if not math.isfinite(value):
            return number(None)
        return f"{value:,.0f}" if value >= 100 or key.startswith("parameters") else f"{value:.3g}"

    return _of_systems(shown, [COSTS[key] for key in columns], lambda cell: [cost(cell, key) for key in columns])


def _by_group(cells: Sequence[Cell]) -> Table:
    """Metrics of tail, torso and head labels, means over seeds."""
    columns = {f"{group}/{metric}": f"{metric} {group}" for metric in GROUP_METRICS for group in GROUPS}
    columns = {name: head for name, head in columns.items() if any(any(cell.values(name)) for cell in cells)}  # 0: none
    shown = [cell for cell in ranked(cells, MAIN[0]) if any(cell.values(name) for name in columns)]
    return _of_systems(shown, columns.values(), lambda cell: [cell.summary(name).mean for name in columns], best=True)


def _parts(cells: Sequence[Cell]) -> Table:
    """Each score alone, for cells whose predictions blend several; means over seeds."""
    rows: dict[str, dict[str, float]] = {}
    kinds = []
    for cell in ranked(cells, MAIN[0]):
        names = [name for name in PARTS if any(name in run.parts for run in cell.runs)]
        if names:
            rows[f"{cell.name}, as served"] = {metric: cell.summary(metric).mean for metric in PART_METRICS}
            kinds += ["base", *("" for _ in names)]
        for name in names:
            found = [run.parts[name] for run in cell.runs if name in run.parts]
            rows[f"{cell.name}, {PARTS[name]}"] = {
                metric: summary([part[metric] for part in found if metric in part]).mean for metric in PART_METRICS
            }
    return Table.of("system", rows, PART_METRICS, kinds=kinds)


def _pools(cells: Sequence[Cell]) -> Table:
    """Labels in the pool and positives a query, means over logged steps and seeds."""

    def mean(cell: Cell, key: str) -> float:
        runs = [[float(line[key]) for line in run.history if line.get(key) is not None] for run in cell.runs]
        return summary([summary(values).mean for values in runs]).mean

    means = [(cell.name, mean(cell, "pool_size"), mean(cell, "positives_per_query")) for cell in cells]
    rows = [[name, size, positives, size / positives if positives else math.nan]
            for name, size, positives in means if math.isfinite(size) or math.isfinite(positives)]  # fmt: skip
    header = ["system", "labels in the pool", "positives a query in the pool", "pool labels for one positive"]
    return Table(header, rows)


def _group_table(group: Group, task: str, cells: Sequence[Cell], contrasts: Contrasts) -> Table | None:
    """The base's figures, and the others' differences to it; None where the task has no such cells with results."""
    by_name = {cell.name: cell for cell in cells if cell.runs}
    base, others = by_name.get(group.base), [by_name[name] for name in group.cells if name in by_name]
    if base is None or not others:
        return None
    columns = [metric for metric in HEADLINE if base.values(metric)]
    first = [base.name, str(len(base.runs)), *(_mean_and_spread(base.summary(metric)) for metric in columns)]
    rows: list[list[Any]] = [first]
    for cell in others:
        differences = []
        for metric in columns:
            of, contrast = difference_to(cell, base, metric), contrasts.get((task, cell.name, base.name, metric))
            text, kind = f"{of.mean:+.2f}" if math.isfinite(of.mean) else number(None), colour(contrast)
            differences.append(Shown(text, of.mean, _spread(of) + MARKS[kind], kind))
        rows.append([cell.name, str(len(cell.runs)), *differences])
    return Table(["system", "seeds", *columns], rows, kinds=["base"], caption=task, dense=True)


def difference_to(cell: Cell, base: Cell, metric: str) -> Summary:
    """Differences cell - base: seed by seed where both have the same seeds, else of the means (then without spread)."""
    ours, theirs = (
        {run.seed: run.metrics[metric] for run in some.runs if metric in run.metrics} for some in (cell, base)
    )
    if ours and ours.keys() == theirs.keys():
        return summary([ours[seed] - theirs[seed] for seed in sorted(ours)])
    difference = cell.summary(metric).mean - base.summary(metric).mean
    return Summary(difference, math.nan, min(len(ours), len(theirs)))


def _all_contrasts(contrasts: Mapping[str, Sequence[Comparison]]) -> Table:
    """Every paired test."""
    rows = [[task, c.system, c.against, c.metric, f"{c.difference:+.2f}", *interval_and_p(c)]
            for task, own in contrasts.items() for c in own]  # fmt: skip
    header = ["task", "system", "against", "metric", "difference", "95 % interval", "p, corrected"]
    return Table(header, rows, text_columns=4)


def _overview(tasks: Sequence[Task], cells: Sequence[Cell]) -> Table | None:
    """Systems down, metrics and tasks across, for comparisons of several tasks; systems by the mean of their places."""
    if len(tasks) < 2:
        return None
    found = {(cell.task, cell.name): cell for cell in cells if cell.runs}
    one = {cell.name: cell for cell in found.values()}
    columns = [(metric, task.name) for metric in MAIN for task in tasks]
    nothing = Cell("", "")
    means = {name: [found.get((task, name), nothing).summary(metric).mean for metric, task in columns] for name in one}

    def place(name: str) -> float:
        """Mean over columns of how many do better; last where nothing was measured."""
        measured = [(c, own) for c, own in enumerate(means[name]) if math.isfinite(own)]
        better = [sum(of[c] > own for of in means.values()) for c, own in measured]
        return sum(better) / len(better) if better else math.inf

    shown, heads = [one[name] for name in sorted(one, key=place)], [f"{metric} {task}" for metric, task in columns]
    return _of_systems(shown, heads, lambda cell: means[cell.name], best=True, caption="all data sets, by mean place")


def _settings(cells: Sequence[Cell]) -> Table:
    """What each cell sets; a row for those that are the same on several tasks."""
    rows = dict.fromkeys(
        (cell.name, cell.recipe or cell.kind, cell.about or cell.recipe,
         ", ".join(f"{key} {number(value, exact=True)}" for key, value in cell.settings.items()))
        for cell in cells
    )  # fmt: skip
    return Table(["system", "recipe", "about", "set for it"], list(rows), text_columns=4)
