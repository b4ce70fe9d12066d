"""The report of a run: one HTML file that loads no other files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unidec.evaluation import page
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Records, Table
from unidec.evaluation.plot_tables import by_group, round_parts, validation_records
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES, of_all_labels, parse, shown

HEADS = {
    "both": "both heads",
    "de": "dual encoder alone",
    "clf": "classifier alone",
    "knn": "votes of similar queries alone",
}
GROUPS = {
    "tail": "tail (< 10 queries)",
    "torso": "torso (10 to 100 queries)",
    "head": "head (> 100 queries)",
}
LINES = {
    "loss_de": "dual encoder",
    "loss_clf": "classifier",
    "grad_norm": "gradient norm",
    "pool_size": "labels in the pool",
    "positives_per_query": "positives a query",
}
MEMORY = {"host_used_gib": "peak memory, GiB", "device_used_gib": "peak memory of the GPU, GiB"}


@dataclass(frozen=True)
class ReportInput:
    """The content of the report; empty parts are omitted.

    Attributes:
        date: as displayed. dataset: one line about it. model: the encoder's name.
        metrics: {"both" | "de" | "clf" | "knn" | any name: {metric: percent}}, the served system
            first; group metrics as "tail/R@10". baselines: the same. baseline_note: how they were
            built.
        history, rounds: lines of history.jsonl and rounds.jsonl.
        index: facts about the index, such as {"recall@10": 99.8}.
        fusion: "by_tail": metrics by the "tail" weight.
        widths: metrics of the heads on the validation split by the "width" of their vectors.
        calibration: {"probability": [any shape], "correct": [same shape]} of predictions.
        gains, losses: examples {"query", "truth": [title], "predictions": [{"label", "title",
            "score", "correct"}], "missed": [title], "gain": nDCG@5 of the query minus that of
            `gain_over`, in points}, the largest first.
        card: facts about the data set. params: all parameters. lineage: git commit, hashes, run id.
        verdict: a sentence on the gains over the baselines. comparison: the comparisons behind it.
        warnings: sentences on why the metrics may be misleading.
    """

    title: str = "UniDEC report"
    date: str = ""
    dataset: str = ""
    model: str = ""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    baseline_note: str = ""
    history: Records = ()
    rounds: Records = ()
    index: Mapping[str, Any] = field(default_factory=dict)
    fusion: Mapping[str, Any] = field(default_factory=dict)
    widths: Records = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)
    gains: Records = ()
    losses: Records = ()
    gain_over: str = ""
    card: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = ""
    comparison: Sequence[Comparison] = ()
    warnings: Sequence[str] = ()


def render(report: ReportInput) -> str:
    """The HTML of the report."""
    systems = {HEADS.get(name, name): figures for name, figures in report.metrics.items()}
    main = next(iter(systems.values()), {})
    compared = {**systems, **report.baselines}
    kinds = ["" if name in systems else "reference" for name in compared]
    group_charts, groups = _groups(systems)
    return page.render(
        "report",
        report=report,
        main=main,
        num_queries=int(main.get("num_queries", 0)),
        headline=Table.of("system", compared, shown("headline"), best=True, kinds=kinds),
        groups_shown=GROUPS,
        baselines_shown=BASELINES,
        group_charts=group_charts,
        groups=groups,
        curves=_curves(report.history, report.rounds),
        cost_chart=_cost_chart(report.rounds),
        cost_totals=_cost_totals(report.rounds),
        **_calibration(report.calibration),
        width_chart=line_chart(
            "Both heads by their width",
            _lines(report.widths, "width", shown("traded"), dots=True),
            "first dimensions of each head",
            "percent, validation split",
            x_from_zero=True,
        ),
        tail_chart=line_chart(
            "Frequent against rare labels",
            _lines(report.fusion.get("by_tail", ()), "tail", shown("traded"), dots=True),
            "weight of the log inverse propensity",
            "percent, validation split",
        ),
    )


def _groups(systems: Mapping[str, Mapping[str, float]]) -> tuple[list[Chart | None], Table]:
    """Charts and a table of metrics by frequency group, without groups that no test query has."""
    columns = {}
    for metric in shown("group"):
        if parse(metric).kind == "P":
            columns[metric] = f"contributes to {metric}"
            columns[f"within/{metric}"] = f"{metric} within"
        else:
            columns[metric] = f"{metric} within"
    columns["num_queries"] = "queries with such a label"
    rows = {}
    for name, metrics in systems.items():
        for group, of_group in by_group(metrics).items():
            if of_group.get("num_queries", 1):
                rows[name, group] = _within(of_group, metrics.get("num_queries"))
    present = {group for _, group in rows}
    groups = [group for group in GROUPS if group in present]
    heads = [GROUPS[group] for group in groups]
    complete = [name for name in systems if all((name, group) in rows for group in groups)]
    charts = []
    for metric in shown("drawn-group"):
        bars = [
            (name, [rows[name, group].get(metric, math.nan) for group in groups])
            for name in complete
        ]
        charts.append(bar_chart(f"{metric} within each group", heads, bars, "percent"))
    named = {f"{name}, {group}": row for (name, group), row in rows.items()}
    return charts, Table.of("system, group", named, columns)


def _within(group: Mapping[str, float], num_queries: float | None) -> dict[str, Any]:
    """A group's metrics with P@k over only the queries that have a label of the group. (The group's
    metric "P@k" is over all queries, so that groups add up.)
    """
    row: dict[str, Any] = dict(group)
    if "num_queries" not in group:
        return row
    row["num_queries"] = int(group["num_queries"])
    for name, value in group.items():
        if parse(name).kind == "P" and num_queries is not None:
            row[f"within/{name}"] = value * num_queries / group["num_queries"]
    return row


def _calibration(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables on probabilities: their reliability curve, and the expected
    calibration error in percentage points (Guo et al. 2017, equation 3; bins of equal size).
    """
    bins = calibration_bins(**calibration) if calibration else []
    if not bins:
        return {"calibration": None, "calibration_error": 0.0}
    mean, precision, size = np.transpose(bins)
    chart = line_chart(
        "Predictions that are right, by their probability",
        [
            Line("this model", 100 * mean, 100 * precision, dots=True),
            Line("perfectly calibrated", [0, 100], [0, 100]),
        ],
        "probability, percent; a tenth of the predictions each",
        "right, percent",
        y_from_zero=True,
        x_from_zero=True,
    )
    error = np.average(abs(mean - precision), weights=size)
    return {"calibration": chart, "calibration_error": 100 * float(error)}


def calibration_bins(
    probability: Any, correct: Any, num_bins: int = 10
) -> list[tuple[float, float, int]]:
    """Predictions in bins of equal size by probability: mean probability, precision (0 to 1) and
    size of each bin.

    Args:
        probability: any shape; entries that are not finite (padding) are ignored.
        correct: same shape, truthy if the prediction is correct.
    """
    probability_n = np.asarray(probability, dtype=np.float64)
    is_finite_n = np.isfinite(probability_n)
    probability_n = probability_n[is_finite_n]
    correct_n = np.asarray(correct).astype(bool)[is_finite_n]
    order = np.argsort(probability_n, kind="stable")
    return [
        (float(probability_n[part].mean()), float(correct_n[part].mean()), len(part))
        for part in np.array_split(order, num_bins)
        if len(part)
    ]


def _curves(history: Records, rounds: Records) -> list[Chart | None]:
    """Charts of validation metrics by time, and of loss, learning rates, gradient norm and pool by
    step.
    """
    charts = [
        line_chart(
            "Validation split, percent",
            _lines(validation_records(rounds), "minutes", of_all_labels(), dots=True),
            "minutes of training and refreshes",
            "percent",
            x_from_zero=True,
        )
    ]
    rates = sorted({key for record in history for key in record if key.startswith("lr_")})
    for caption, label, keys in (
        ("Loss", "loss", ("loss", "loss_de", "loss_clf")),
        ("Learning rates", "learning rate", rates),
        ("Gradient norm before clipping", "norm", ("grad_norm",)),
        ("Labels in the pool", "labels", ("pool_size",)),
        ("Positives a query in the pool", "positives, mean", ("positives_per_query",)),
    ):
        lines = _lines(history, "step", keys)
        charts.append(line_chart(caption, lines, "step", label, y_from_zero=True))
    return charts


def _lines(records: Records, x: str, keys: Sequence[str], dots: bool = False) -> list[Line]:
    """A line for each key over the records' key `x`; lines without finite values are omitted."""

    def column(key: str) -> list[float]:
        return np.array([record.get(key) for record in records], dtype=float).tolist()

    lines = [
        Line(LINES.get(key, key.removeprefix("lr_")), column(x), column(key), dots) for key in keys
    ]
    return [line for line in lines if np.isfinite(line.y).any()]


def _cost_chart(rounds: Records) -> Chart | None:
    """The seconds of each round's parts."""
    groups = [str(line.get("round", i)) for i, line in enumerate(rounds, 1)]
    parts = list(round_parts(rounds).items())
    return bar_chart("Seconds a round", groups, parts, "seconds", x_label="round", stacked=True)


def _cost_totals(rounds: Records) -> dict[str, float]:
    """Seconds of the parts of all rounds, and their largest memory."""
    parts = round_parts(rounds)
    totals = {f"{name}, seconds": round(sum(column), 2) for name, column in parts.items()}
    measured = [line.get("memory", {}) for line in rounds]
    for key, name in MEMORY.items():
        if used := [memory[key] for memory in measured if key in memory]:
            totals[name] = round(max(used), 2)
    return totals
