"""Tables of a comparison's page: what each shows of some cells of one task, or of one group of cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unidec.evaluation.comparison_input import COSTS, Cell, Contrast, Group, Summary, Task, summary
from unidec.evaluation.page import Shown, Table, number

ALPHA = 0.05  # of the corrected p-values
BETTER, WORSE = " ▲", " ▼"
MEGABYTE = 1e6
GROUPS = ("tail", "torso", "head")
GROUP_METRICS = ("P@5", "PSP@5", "R@10", "coverage@5")
PARTS = {"de": "dual encoder alone", "clf": "classifier alone", "heads": "without votes", "knn": "votes alone"}
PART_METRICS = ("P@1", "nDCG@5", "PSP@5", "R@100")
Contrasts = Mapping[tuple[str, str, str, str], Contrast]


def indexed(contrasts: Sequence[Contrast]) -> dict[tuple[str, str, str, str], Contrast]:
    """Contrasts by (task, cell, against, metric)."""
    return {(c.task, c.cell, c.against, c.metric): c for c in contrasts}


def ranked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Cells by falling mean of a metric; those without one last, in the order given."""
    means = {id(cell): cell.summary(metric).mean for cell in cells}
    return sorted(cells, key=lambda cell: -means[id(cell)] if math.isfinite(means[id(cell)]) else math.inf)


def best_of(cells: Sequence[Cell], kind: str, metric: str) -> Cell | None:
    """The cell of a kind with the largest mean of a metric."""
    found = [cell for cell in cells if cell.kind == kind and cell.values(metric)]
    return max(found, key=lambda cell: cell.summary(metric).mean, default=None)


def headline(cells: Sequence[Cell], metrics: Sequence[str], contrasts: Contrasts) -> Table:
    """Mean and spread of each cell, marked where it differs from the best peer."""
    columns = [metric for metric in metrics if any(cell.values(metric) for cell in cells)]
    shown = [cell for cell in ranked(cells, columns[0]) if cell.runs] if columns else []
    peers = {metric: best_of(cells, "peer", metric) for metric in columns}

    def marked(cell: Cell, metric: str) -> Shown:
        peer = peers[metric]
        contrast = contrasts.get((cell.task, cell.name, peer.name, metric)) if peer else None
        of = cell.summary(metric)
        return Shown(number(of.mean), of.mean, _spread(of) + _mark(contrast))

    rows = [[named(cell), str(len(cell.runs)), *(marked(cell, metric) for metric in columns)] for cell in shown]
    return Table(["system", "seeds", *columns], rows, best=True, kinds=_kinds(shown), dense=True)


def named(cell: Cell) -> Shown:
    """A cell's name; a peer's with that word."""
    return Shown(cell.name, small=" peer" if cell.kind == "peer" else "")


def _kinds(cells: Sequence[Cell]) -> list[str]:
    return ["reference" if cell.kind == "peer" else "" for cell in cells]


def _spread(of: Summary) -> str:
    return f" ± {of.spread:.2f}" if math.isfinite(of.spread) else ""


def _mark(contrast: Contrast | None) -> str:
    return {"right": BETTER, "wrong": WORSE, "": ""}[_colour(contrast)]


def _colour(contrast: Contrast | None) -> str:
    """ "right" or "wrong" where a test tells two systems apart."""
    if contrast is None or contrast.p_value >= ALPHA:
        return ""
    return "right" if contrast.difference > 0 else "wrong"


def mean_and_spread(of: Summary) -> Shown:
    """ "45.12 ± 0.10", compared by the mean."""
    return Shown(number(of.mean), of.mean, _spread(of))


def recipe_against_peer(cells: Sequence[Cell], metrics: Sequence[str], contrasts: Contrasts) -> Table:
    """The best recipe and the best peer on each metric."""
    rows = []
    for metric in metrics:
        recipe, peer = best_of(cells, "recipe", metric), best_of(cells, "peer", metric)
        if recipe is None or peer is None:
            continue
        ours, theirs = recipe.summary(metric), peer.summary(metric)
        contrast = contrasts.get((recipe.task, recipe.name, peer.name, metric))
        difference = Shown(f"{ours.mean - theirs.mean:+.2f}", kind=_colour(contrast))
        test = _interval(contrast) if contrast else [None, None]
        rows.append([metric, recipe.name, peer.name, mean_and_spread(ours), mean_and_spread(theirs), difference, *test])
    header = ["metric", "best recipe", "best peer", "recipe", "peer", "difference", "95 % interval", "p, corrected"]
    return Table(header, rows, text_columns=3)


def _interval(of: Contrast) -> list[str]:
    return [f"{of.low:+.2f} to {of.high:+.2f}", "< 0.001" if of.p_value < 0.001 else f"{of.p_value:.3f}"]


def costs(cells: Sequence[Cell], metric: str) -> Table:
    """Means over seeds of time, memory, parameters and search time; cells by falling `metric`."""
    shown = [cell for cell in ranked(cells, metric) if any(run.costs for run in cell.runs)]
    columns = [key for key in COSTS if any(key in run.costs for cell in shown for run in cell.runs)]
    rows = [
        [named(cell), *(_cost(key, summary([r.costs[key] for r in cell.runs if key in r.costs])) for key in columns)]
        for cell in shown
    ]
    return Table(["system", *(COSTS[key] for key in columns)], rows, kinds=_kinds(shown), dense=True)


def _cost(key: str, of: Summary) -> str:
    value = of.mean / MEGABYTE if key.endswith("_bytes") else of.mean
    if not math.isfinite(value):
        return number(None)
    return f"{value:,.0f}" if value >= 100 or key.startswith("parameters") else f"{value:.3g}"


def by_group(cells: Sequence[Cell], metric: str) -> Table:
    """Metrics of tail, torso and head labels, means over seeds; cells by falling `metric`."""
    names = [f"{g}/{m}" for m in GROUP_METRICS for g in GROUPS]
    columns = [name for name in names if any(any(cell.values(name)) for cell in cells)]  # 0 for all: no such labels
    shown = [cell for cell in ranked(cells, metric) if any(cell.values(name) for name in columns)]
    rows = [[named(cell), *(cell.summary(name).mean for name in columns)] for cell in shown]
    heads = [" ".join(reversed(name.split("/"))) for name in columns]
    return Table(["system", *heads], rows, best=True, kinds=_kinds(shown), dense=True)


def parts(cells: Sequence[Cell], metric: str) -> Table:
    """Each score alone, for cells whose predictions blend several; means over seeds."""
    rows: list[list[Any]] = []
    kinds = []
    for cell in ranked(cells, metric):
        names = [name for name in PARTS if any(name in run.parts for run in cell.runs)]
        if names:
            rows.append([f"{cell.name}, as served", *(cell.summary(m).mean for m in PART_METRICS)])
            kinds.append("base")
        for name in names:
            found = [run.parts[name] for run in cell.runs if name in run.parts]
            means = (summary([part[m] for part in found if m in part]).mean for m in PART_METRICS)
            rows.append([f"{cell.name}, {PARTS[name]}", *means])
            kinds.append("")
    return Table(["system", *PART_METRICS], rows, kinds=kinds)


def pools(cells: Sequence[Cell]) -> Table:
    """Labels in the pool and positives a query, means over logged steps and seeds."""
    rows = []
    for cell in cells:
        size, positives = pool_means(cell)
        if math.isfinite(size) or math.isfinite(positives):
            rows.append([cell.name, size, positives, size / positives if positives else math.nan])
    header = ["system", "labels in the pool", "positives a query in the pool", "pool labels for one positive"]
    return Table(header, rows)


def pool_means(cell: Cell) -> tuple[float, float]:
    """Mean size of a pool and mean positives a query, NaN where they were not logged."""

    def mean(key: str) -> float:
        runs = [[float(line[key]) for line in run.history if line.get(key) is not None] for run in cell.runs]
        return summary([summary(values).mean for values in runs]).mean

    return mean("pool_size"), mean("positives_per_query")


def group_table(
    group: Group, task: str, cells: Sequence[Cell], headline: Sequence[str], contrasts: Contrasts
) -> Table | None:
    """The base's figures, and the others' differences to it; None where the task has no such cells with results."""
    by_name = {cell.name: cell for cell in cells if cell.task == task and cell.runs}
    base, others = by_name.get(group.base), [by_name[name] for name in group.cells if name in by_name]
    if base is None or not others:
        return None
    columns = [metric for metric in group.metrics or headline if base.values(metric)]
    rows: list[list[Any]] = [
        [base.name, str(len(base.runs)), *(mean_and_spread(base.summary(metric)) for metric in columns)]
    ]
    for cell in others:
        differences = []
        for metric in columns:
            of, contrast = difference_to(cell, base, metric), contrasts.get((task, cell.name, base.name, metric))
            text = f"{of.mean:+.2f}" if math.isfinite(of.mean) else number(None)
            differences.append(Shown(text, of.mean, _spread(of) + _mark(contrast), _colour(contrast)))
        rows.append([cell.name, str(len(cell.runs)), *differences])
    return Table(["system", "seeds", *columns], rows, kinds=["base"], caption=task, dense=True)


def difference_to(cell: Cell, base: Cell, metric: str) -> Summary:
    """Differences cell - base: seed by seed where both have the same seeds, else of the means (then without spread)."""
    ours, theirs = (
        {run.seed: run.metrics[metric] for run in some.runs if metric in run.metrics} for some in (cell, base)
    )
    if ours and ours.keys() == theirs.keys():
        return summary([ours[seed] - theirs[seed] for seed in sorted(ours)])
    difference = summary(list(ours.values())).mean - summary(list(theirs.values())).mean
    return Summary(difference, math.nan, min(len(ours), len(theirs)))


def all_contrasts(contrasts: Sequence[Contrast]) -> Table:
    """Every paired test."""
    rows = [[c.task, c.cell, c.against, c.metric, f"{c.difference:+.2f}", *_interval(c)] for c in contrasts]
    header = ["task", "system", "against", "metric", "difference", "95 % interval", "p, corrected"]
    return Table(header, rows, text_columns=4)


def overview(tasks: Sequence[Task], cells: Sequence[Cell], metrics: Sequence[str]) -> Table | None:
    """Systems down, metrics and tasks across, for comparisons of several tasks; systems by the mean of their places."""
    if len(tasks) < 2:
        return None
    found = {(cell.task, cell.name): cell for cell in cells if cell.runs}
    one = {cell.name: cell for cell in found.values()}
    columns = [(metric, task.name) for metric in metrics for task in tasks]
    means = {
        name: [found[task, name].summary(metric).mean if (task, name) in found else math.nan
               for metric, task in columns]
        for name in one
    }  # fmt: skip

    def place(name: str) -> float:
        """Mean over columns of how many do better; last where nothing was measured."""
        better = [
            sum(means[other][c] > own for other in one) for c, own in enumerate(means[name]) if math.isfinite(own)
        ]
        return sum(better) / len(better) if better else math.inf

    names = sorted(one, key=place)
    rows = [[named(one[name]), *means[name]] for name in names]
    header = ["system", *(f"{metric} {task}" for metric, task in columns)]
    kinds = _kinds([one[name] for name in names])
    return Table(header, rows, best=True, kinds=kinds, dense=True, caption="all data sets, by mean place")


def settings(cells: Sequence[Cell]) -> Table:
    """What each cell sets."""
    rows: dict[str, list[Any]] = {}
    for cell in cells:
        about = cell.about or cell.recipe
        values = ", ".join(f"{key} {number(value, exact=True)}" for key, value in cell.settings.items())
        rows.setdefault(f"{cell.name}\0{about}\0{values}", [cell.name, cell.recipe or cell.kind, about, values])
    return Table(["system", "recipe", "about", "set for it"], list(rows.values()), text_columns=4)
