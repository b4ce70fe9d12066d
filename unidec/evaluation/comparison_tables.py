"""Tables of a comparison's page: what each shows of some cells of one task, or of one group of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unidec.evaluation.comparison_input import COSTS, HEADLINE, Cell, Group, Summary, Task, summary
from unidec.evaluation.page import Shown, Table, number
from unidec.evaluation.report import colour, interval_and_p
from unidec.evaluation.significance import Comparison
from unidec.metric_names import GROUPS

MARKS = {"right": " ▲", "wrong": " ▼", "": ""}
MEGABYTE = 1e6
MAIN = ("P@1", "PSP@5", "R@100")  # compared with the best peer, and drawn
GROUP_METRICS = ("P@5", "PSP@5", "R@10", "coverage@5")
PARTS = {"de": "dual encoder alone", "clf": "classifier alone", "heads": "without votes", "knn": "votes alone"}
PART_METRICS = ("P@1", "nDCG@5", "PSP@5", "R@100")
Contrasts = Mapping[tuple[str, str, str, str], Comparison]
"""By (task, cell, against, metric)."""


def ranked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Cells by falling mean of a metric; those without one last, in the order given."""
    return sorted(cells, key=lambda cell: -cell.summary(metric).mean if cell.values(metric) else math.inf)


def best_of(cells: Sequence[Cell], kind: str, metric: str) -> Cell | None:
    """The cell of a kind with the largest mean of a metric."""
    found = [cell for cell in cells if cell.kind == kind and cell.values(metric)]
    return max(found, key=lambda cell: cell.summary(metric).mean, default=None)


def of_systems(
    cells: Sequence[Cell], heads: Iterable[str], values: Callable[[Cell], Iterable[Any]], **options: Any
) -> Table:
    """A row for each cell."""
    rows = [[Shown(cell.name, small=" peer" if cell.kind == "peer" else ""), *values(cell)] for cell in cells]
    kinds = ["reference" if cell.kind == "peer" else "" for cell in cells]
    return Table(["system", *heads], rows, kinds=kinds, dense=True, **options)


def headline(cells: Sequence[Cell], contrasts: Contrasts) -> Table:
    """Mean and spread of each cell, marked where it differs from the best peer."""
    columns = [metric for metric in HEADLINE if any(cell.values(metric) for cell in cells)]
    shown = [cell for cell in ranked(cells, columns[0]) if cell.runs] if columns else []
    peers = {metric: best_of(cells, "peer", metric) for metric in columns}

    def values(cell: Cell) -> list[Any]:
        found: list[Any] = [str(len(cell.runs))]
        for metric, peer in peers.items():
            contrast = contrasts.get((cell.task, cell.name, peer.name, metric)) if peer else None
            found.append(mean_and_spread(cell.summary(metric), MARKS[colour(contrast)]))
        return found

    return of_systems(shown, ["seeds", *columns], values, best=True)


def mean_and_spread(of: Summary, mark: str = "") -> Shown:
    """ "45.12 ± 0.10", compared by the mean."""
    return Shown(number(of.mean), of.mean, _spread(of) + mark)


def _spread(of: Summary) -> str:
    return f" ± {of.spread:.2f}" if math.isfinite(of.spread) else ""


def recipe_against_peer(cells: Sequence[Cell], contrasts: Contrasts) -> Table:
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
        rows.append([metric, recipe.name, peer.name, mean_and_spread(ours), mean_and_spread(theirs), difference, *test])
    header = ["metric", "best recipe", "best peer", "recipe", "peer", "difference", "95 % interval", "p, corrected"]
    return Table(header, rows, text_columns=3)


def costs(cells: Sequence[Cell]) -> Table:
    """Means over seeds of time, memory, parameters and search time."""
    shown = [cell for cell in ranked(cells, MAIN[0]) if any(run.costs for run in cell.runs)]
    columns = [key for key in COSTS if any(key in run.costs for cell in shown for run in cell.runs)]

    def cost(cell: Cell, key: str) -> str:
        value = summary([run.costs[key] for run in cell.runs if key in run.costs]).mean
        value /= MEGABYTE if key.endswith("_bytes") else 1
        if not math.isfinite(value):
            return number(None)
        return f"{value:,.0f}" if value >= 100 or key.startswith("parameters") else f"{value:.3g}"

    return of_systems(shown, [COSTS[key] for key in columns], lambda cell: [cost(cell, key) for key in columns])


def by_group(cells: Sequence[Cell]) -> Table:
    """Metrics of tail, torso and head labels, means over seeds."""
    columns = {f"{group}/{metric}": f"{metric} {group}" for metric in GROUP_METRICS for group in GROUPS}
    columns = {name: head for name, head in columns.items() if any(any(cell.values(name)) for cell in cells)}  # 0: none
    shown = [cell for cell in ranked(cells, MAIN[0]) if any(cell.values(name) for name in columns)]
    return of_systems(shown, columns.values(), lambda cell: [cell.summary(name).mean for name in columns], best=True)


def parts(cells: Sequence[Cell]) -> Table:
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


def pools(cells: Sequence[Cell]) -> Table:
    """Labels in the pool and positives a query, means over logged steps and seeds."""

    def mean(cell: Cell, key: str) -> float:
        runs = [[float(line[key]) for line in run.history if line.get(key) is not None] for run in cell.runs]
        return summary([summary(values).mean for values in runs]).mean

    means = [(cell.name, mean(cell, "pool_size"), mean(cell, "positives_per_query")) for cell in cells]
    rows = [[name, size, positives, size / positives if positives else math.nan]
            for name, size, positives in means if math.isfinite(size) or math.isfinite(positives)]  # fmt: skip
    header = ["system", "labels in the pool", "positives a query in the pool", "pool labels for one positive"]
    return Table(header, rows)


def group_table(group: Group, task: str, cells: Sequence[Cell], contrasts: Contrasts) -> Table | None:
    """The base's figures, and the others' differences to it; None where the task has no such cells with results."""
    by_name = {cell.name: cell for cell in cells if cell.runs}
    base, others = by_name.get(group.base), [by_name[name] for name in group.cells if name in by_name]
    if base is None or not others:
        return None
    columns = [metric for metric in HEADLINE if base.values(metric)]
    first = [base.name, str(len(base.runs)), *(mean_and_spread(base.summary(metric)) for metric in columns)]
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


def all_contrasts(contrasts: Mapping[str, Sequence[Comparison]]) -> Table:
    """Every paired test."""
    rows = [[task, c.system, c.against, c.metric, f"{c.difference:+.2f}", *interval_and_p(c)]
            for task, own in contrasts.items() for c in own]  # fmt: skip
    header = ["task", "system", "against", "metric", "difference", "95 % interval", "p, corrected"]
    return Table(header, rows, text_columns=4)


def overview(tasks: Sequence[Task], cells: Sequence[Cell]) -> Table | None:
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
    return of_systems(shown, heads, lambda cell: means[cell.name], best=True, caption="all data sets, by mean place")


def settings(cells: Sequence[Cell]) -> Table:
    """What each cell sets; a row for those that are the same on several tasks."""
    rows = dict.fromkeys(
        (cell.name, cell.recipe or cell.kind, cell.about or cell.recipe,
         ", ".join(f"{key} {number(value, exact=True)}" for key, value in cell.settings.items()))
        for cell in cells
    )  # fmt: skip
    return Table(["system", "recipe", "about", "set for it"], list(rows), text_columns=4)
