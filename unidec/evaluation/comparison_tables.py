"""Tables of a comparison's page: what each shows of some cells of one task, or of one group of cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unidec.evaluation.comparison_input import COSTS, Cell, Contrast, Group, Run, Summary, Task, summary
from unidec.evaluation.page import Shown, facts, folded, number, table

ALPHA = 0.05  # of the corrected p-values
BETTER, WORSE = " ▲", " ▼"
MEGABYTE = 1e6
GROUPS = ("tail", "torso", "head")
GROUP_METRICS = ("P@5", "PSP@5", "R@10", "coverage@5")
PARTS = {"de": "dual encoder", "clf": "classifier", "heads": "without votes", "knn": "votes"}
PART_METRICS = ("P@1", "nDCG@5", "PSP@5", "R@100")
Contrasts = Mapping[tuple[str, str, str, str], Contrast]


def indexed(contrasts: Sequence[Contrast]) -> dict[tuple[str, str, str, str], Contrast]:
    """Contrasts by (task, cell, against, metric)."""
    return {(c.task, c.cell, c.against, c.metric): c for c in contrasts}


def ranked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """Cells by falling mean of a metric; those without one last, in the order given."""
    return sorted(cells, key=lambda cell: -_or(summary(cell.values(metric)).mean, -math.inf))


def best_of(cells: Sequence[Cell], kind: str, metric: str) -> Cell | None:
    """The cell of a kind with the largest mean of a metric."""
    found = [cell for cell in cells if cell.kind == kind and cell.values(metric)]
    return max(found, key=lambda cell: summary(cell.values(metric)).mean, default=None)


def headline(cells: Sequence[Cell], metrics: Sequence[str], contrasts: Contrasts) -> str:
    """Mean and spread of each cell, marked where it differs from the best peer."""
    columns = [metric for metric in metrics if any(cell.values(metric) for cell in cells)]
    shown = [cell for cell in ranked(cells, columns[0]) if cell.runs] if columns else []
    rows = [
        [
            named(cell),
            Shown(str(len(cell.runs))),
            *(_marked(cell, metric, _against_peer(cell, metric, cells, contrasts)) for metric in columns),
        ]
        for cell in shown
    ]
    return table(["system", "seeds", *columns], rows, best=True, kinds=_kinds(shown), dense=True)


def named(cell: Cell) -> Shown:
    """A cell's name; a peer's with that word."""
    return Shown(cell.name, small=" peer" if cell.kind == "peer" else "")


def _kinds(cells: Sequence[Cell]) -> list[str]:
    return ["reference" if cell.kind == "peer" else "" for cell in cells]


def _marked(cell: Cell, metric: str, contrast: Contrast | None) -> Shown:
    value = mean_and_spread(summary(cell.values(metric)))
    mark = {"right": BETTER, "wrong": WORSE, "": ""}[_colour(contrast)]
    return Shown(value.text, value.value, value.small + mark)


def _against_peer(cell: Cell, metric: str, cells: Sequence[Cell], contrasts: Contrasts) -> Contrast | None:
    peer = best_of(cells, "peer", metric)
    return contrasts.get((cell.task, cell.name, peer.name, metric)) if peer else None


def mean_and_spread(of: Summary) -> Shown:
    """ "45.12 ± 0.10", compared by the mean."""
    small = f" ± {of.spread:.2f}" if math.isfinite(of.spread) else ""
    return Shown(number(of.mean), of.mean, small)


def recipe_against_peer(cells: Sequence[Cell], metrics: Sequence[str], contrasts: Contrasts) -> str:
    """The best recipe and the best peer on each metric."""
    rows = []
    for metric in metrics:
        recipe, peer = best_of(cells, "recipe", metric), best_of(cells, "peer", metric)
        if recipe is None or peer is None:
            continue
        ours, theirs = summary(recipe.values(metric)), summary(peer.values(metric))
        contrast = contrasts.get((recipe.task, recipe.name, peer.name, metric))
        interval, p_value = (
            (f"{contrast.low:+.2f} to {contrast.high:+.2f}", _p(contrast.p_value)) if contrast else (None, None)
        )
        difference = ours.mean - theirs.mean
        sign = _colour(contrast)
        rows.append(
            [metric, recipe.name, peer.name, mean_and_spread(ours), mean_and_spread(theirs),
             Shown(f"{difference:+.2f}", difference, kind=sign), interval, p_value]
        )  # fmt: skip
    header = ["metric", "best recipe", "best peer", "recipe", "peer", "difference", "95 % interval", "p, corrected"]
    return table(header, rows, text_columns=3)


def costs(cells: Sequence[Cell], metric: str) -> str:
    """Means over seeds of time, memory, parameters and search time; cells by falling `metric`."""
    shown = [cell for cell in ranked(cells, metric) if any(run.costs for run in cell.runs)]
    columns = [key for key in COSTS if any(key in run.costs for cell in shown for run in cell.runs)]
    rows = [
        [named(cell), *(_cost(key, summary([r.costs[key] for r in cell.runs if key in r.costs])) for key in columns)]
        for cell in shown
    ]
    return table(["system", *(COSTS[key] for key in columns)], rows, kinds=_kinds(shown), dense=True)


def _cost(key: str, of: Summary) -> Shown:
    if not math.isfinite(of.mean):
        return Shown(number(None))
    if key.startswith("parameters"):
        return Shown(f"{of.mean:,.0f}", of.mean)
    value = of.mean / MEGABYTE if key.endswith("_bytes") else of.mean
    return Shown(f"{value:,.0f}" if value >= 100 else f"{value:.3g}", value)


def by_group(cells: Sequence[Cell], metric: str) -> str:
    """Metrics of tail, torso and head labels, means over seeds; cells by falling `metric`."""
    names = [f"{g}/{m}" for m in GROUP_METRICS for g in GROUPS]
    columns = [name for name in names if any(any(cell.values(name)) for cell in cells)]  # 0 for all: no such labels
    shown = [cell for cell in ranked(cells, metric) if any(cell.values(name) for name in columns)]
    rows = [[named(cell), *(summary(cell.values(name)).mean for name in columns)] for cell in shown]
    heads = [f"{name.split('/')[1]} {name.split('/')[0]}" for name in columns]
    return table(["system", *heads], rows, best=True, kinds=_kinds(shown), dense=True)


def parts(cells: Sequence[Cell], metric: str) -> str:
    """Each score alone, for cells whose predictions blend several; means over seeds."""
    rows, kinds = [], []
    for cell in ranked(cells, metric):
        names = [name for name in PARTS if any(name in run.parts for run in cell.runs)]
        if not names:
            continue
        rows.append([f"{cell.name}, as served", *(summary(cell.values(m)).mean for m in PART_METRICS)])
        kinds.append("base")
        for name in names:
            found = [run.parts[name] for run in cell.runs if name in run.parts]
            means = (summary([part[m] for part in found if m in part]).mean for m in PART_METRICS)
            rows.append([f"{cell.name}, {PARTS[name]} alone" if name != "heads" else f"{cell.name}, {PARTS[name]}",
                         *means])  # fmt: skip
            kinds.append("")
    return table(["system", *PART_METRICS], rows, kinds=kinds)


def pools(cells: Sequence[Cell]) -> str:
    """Labels in the pool and positives a query, means over logged steps and seeds."""
    rows = []
    for cell in cells:
        size, positives = pool_means(cell)
        if math.isfinite(size) or math.isfinite(positives):
            rows.append([cell.name, size, positives, size / positives if positives else math.nan])
    header = ["system", "labels in the pool", "positives a query in the pool", "pool labels for one positive"]
    return table(header, rows)


def pool_means(cell: Cell) -> tuple[float, float]:
    """Mean size of a pool and mean positives a query, NaN where they were not logged."""
    size, positives = (
        summary([_mean_of(run, key) for run in cell.runs]).mean for key in ("pool_size", "positives_per_query")
    )
    return size, positives


def _mean_of(run: Run, key: str) -> float:
    return summary([float(line[key]) for line in run.history if line.get(key) is not None]).mean


def group_table(group: Group, task: str, cells: Sequence[Cell], headline: Sequence[str], contrasts: Contrasts) -> str:
    """The base's figures, and the others' differences to it; nothing where the task has no such cells with results."""
    by_name = {cell.name: cell for cell in cells if cell.task == task and cell.runs}
    base = by_name.get(group.base)
    others = [by_name[name] for name in group.cells if name in by_name]
    if base is None or not others:
        return ""
    columns = [metric for metric in group.metrics or headline if base.values(metric)]
    rows: list[list[Any]] = [
        [base.name, Shown(str(len(base.runs))), *(mean_and_spread(summary(base.values(m))) for m in columns)]
    ]
    for cell in others:
        told = [contrasts.get((task, cell.name, base.name, metric)) for metric in columns]
        differences = [
            _difference(difference_to(cell, base, metric), contrast)
            for metric, contrast in zip(columns, told, strict=True)
        ]
        rows.append([cell.name, Shown(str(len(cell.runs))), *differences])
    return table(["system", "seeds", *columns], rows, kinds=["base"], caption=task, dense=True)


def difference_to(cell: Cell, base: Cell, metric: str) -> Summary:
    """Differences cell - base: seed by seed where both have the same seeds, else of the means (then without spread)."""
    ours = {run.seed: run.metrics[metric] for run in cell.runs if metric in run.metrics}
    theirs = {run.seed: run.metrics[metric] for run in base.runs if metric in run.metrics}
    if ours and ours.keys() == theirs.keys():
        return summary([ours[seed] - theirs[seed] for seed in sorted(ours)])
    difference = summary(list(ours.values())).mean - summary(list(theirs.values())).mean
    return Summary(difference, math.nan, min(len(ours), len(theirs)))


def _difference(of: Summary, contrast: Contrast | None) -> Shown:
    if not math.isfinite(of.mean):
        return Shown(number(None))
    small = f" ± {of.spread:.2f}" if math.isfinite(of.spread) else ""
    kind = _colour(contrast)
    mark = {"right": BETTER, "wrong": WORSE, "": ""}[kind]
    return Shown(f"{of.mean:+.2f}", of.mean, small + mark, kind)


def _colour(contrast: Contrast | None) -> str:
    """ "right" or "wrong" where a test tells two systems apart."""
    if contrast is None or contrast.p_value >= ALPHA:
        return ""
    return "right" if contrast.difference > 0 else "wrong"


def all_contrasts(contrasts: Sequence[Contrast]) -> str:
    """Every paired test."""
    rows = [
        [c.task, c.cell, c.against, c.metric, Shown(f"{c.difference:+.2f}"), f"{c.low:+.2f} to {c.high:+.2f}",
         _p(c.p_value)]
        for c in contrasts
    ]  # fmt: skip
    header = ["task", "system", "against", "metric", "difference", "95 % interval", "p, corrected"]
    return folded(f"all {len(rows):,} paired tests", table(header, rows, text_columns=4))


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def overview(tasks: Sequence[Task], cells: Sequence[Cell], metrics: Sequence[str]) -> str:
    """Systems down, metrics and tasks across, for comparisons of several tasks; systems by the mean of their places."""
    if len(tasks) < 2:
        return ""
    found = {(cell.task, cell.name): cell for cell in cells if cell.runs}
    one = {cell.name: cell for cell in cells if cell.runs}
    columns = [(metric, task) for metric in metrics for task in tasks]
    means = {
        (metric, task.name, name): summary(found[task.name, name].values(metric)).mean
        for metric, task in columns
        for name in one
        if (task.name, name) in found
    }

    def place(name: str) -> float:
        """Mean over columns of how many do better; last where nothing was measured."""
        places = []
        for metric, task in columns:
            own = means.get((metric, task.name, name), math.nan)
            if math.isfinite(own):
                places.append(sum(means.get((metric, task.name, other), -math.inf) > own for other in one))
        return sum(places) / len(places) if places else math.inf

    names = sorted(one, key=place)
    rows = [[named(one[name]), *(means.get((metric, task.name, name)) for metric, task in columns)] for name in names]
    header = ["system", *(f"{metric} {task.name}" for metric, task in columns)]
    kinds = _kinds([one[name] for name in names])
    return table(header, rows, best=True, kinds=kinds, dense=True, caption="all data sets, by mean place")


def settings(cells: Sequence[Cell], common: Mapping[str, Any]) -> str:
    """What all recipes share, and what each cell sets."""
    rows: dict[str, list[Any]] = {}
    for cell in cells:
        about = cell.about or cell.recipe
        said = ", ".join(f"{key} {number(value, exact=True)}" for key, value in cell.settings.items())
        rows.setdefault(f"{cell.name}\0{about}\0{said}", [cell.name, cell.recipe or cell.kind, cell.about, said])
    own = table(["system", "recipe", "about", "set for it"], list(rows.values()), text_columns=4)
    return own + (f"<h3>In common</h3>{facts(common)}" if common else "")


def _or(value: float, other: float) -> float:
    return value if math.isfinite(value) else other
