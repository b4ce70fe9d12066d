"""The report of a run: one HTML file that loads nothing, readable on a light and a dark screen and on paper."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Shown, Table, number, write_page
from unidec.evaluation.page import render as render_page
from unidec.evaluation.plots import AFTER, Records, by_group, finite, round_parts, validation_records
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES, DEFAULT_KS

HEADLINE = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR")
CARDS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10", "R@100")
HEADS = {
    "both": "both heads",
    "de": "dual encoder alone",
    "clf": "classifier alone",
    "knn": "votes of similar queries alone",
}
GROUPS = {"tail": "tail (< 10)", "torso": "torso (10 to 100)", "head": "head (> 100)"}
GROUP_CHARTS = ("P@1", "PSP@5", "R@10", "R@100")
VOLUME = "training queries of a label; bins of equal volume, head to tail"
BINS = {"labels": "labels", "mean_frequency": "training queries, mean", "test_pairs": "test pairs",
        "P@5": "adds to P@5", "PSP@5": "adds to PSP@5", "recall@5": "its pairs found in the first 5, percent",
        "coverage@5": "coverage@5"}  # fmt: skip
VALIDATION = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")
FOUND = {
    "clusters": "clusters",
    "cluster_cosine": "mean cosine to the cluster's centre",
    "mine_negative_score": "mean score of mined negatives",
    "mine_positive_rank": "mean rank of a true label",
    "mine_positive_first": "first label found is a true one, percent of queries",
    "mine_positive_found": "a true label is within the list, percent of queries",
}
SHARES = ("mine_positive_first", "mine_positive_found")  # shown in percent
MEMORY = {"host_used_gib": "peak memory, GiB", "device_used_gib": "peak memory of the GPU, GiB"}
Systems = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ReportInput:
    """What the report shows; a part that is not given is left out.

    Attributes:
        date: as it shall read. dataset, model: one line about each.
        metrics: {"both" | "de" | "clf" | "knn" | any name: {metric: percent}}, what is served first; group metrics as
            "tail/R@10". baselines: the same; baseline_note: where they come from.
        history, rounds: lines of history.jsonl and rounds.jsonl. bins: of `frequency_bins`.
        index: facts about the index, such as {"recall@10": 99.8}.
        calibration: {"score": [any shape], "correct": [same shape]} of predictions.
        right, wrong: examples {"query", "truth": [title], "predictions": [{"label", "title", "score", "de", "clf",
            "knn", "correct"}], "missed": [title]}.
        card: facts about the data set. distributions: {"title", "x", "y", "bars": {bar: count}} each.
        params: all parameters. lineage: git commit, hashes, run id.
        verdict: what the model gains over the baselines. comparison: the figures behind it.
        warnings: why the figures may mean little.
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
    bins: Records = ()
    index: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    right: Records = ()
    wrong: Records = ()
    card: Mapping[str, Any] = field(default_factory=dict)
    distributions: Records = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = ""
    comparison: Sequence[Comparison] = ()
    warnings: Sequence[str] = ()


def write_report(path: str | os.PathLike[str], report: ReportInput) -> None:
    """Write the page atomically. Raises ArtifactError where it cannot be written."""
    write_page(path, render(report))


def render(report: ReportInput) -> str:
    """The page as text."""
    systems = {HEADS.get(name, name): values for name, values in report.metrics.items()}
    main = next(iter(systems.values()), {})
    drawn = [
        bar_chart(shown["title"], list(shown["bars"]), [(shown["y"], list(shown["bars"].values()))], shown["y"],
                  x_label=shown["x"], digits=0)
        for shown in report.distributions
    ]  # fmt: skip
    facts = {name: value for name, value in report.index.items() if not isinstance(value, Mapping | list | tuple)}
    kinds = [*("" for _ in systems), *("reference" for _ in report.baselines)]
    return render_page(
        "report",
        report=report,
        head_cards=[(f"{main[name]:.1f}", name, "") for name in CARDS if math.isfinite(main.get(name, math.nan))],
        num_queries=int(main.get("num_queries", 0)),
        headline=Table.of("system", {**systems, **report.baselines}, HEADLINE, best=True, kinds=kinds),
        against=_against_baselines(report.comparison),
        **_groups(systems),
        **_bins(report.bins),
        **_coverage(systems),
        curves=_curves(report.history, report.rounds),
        pool_charts=[
            _by_step("Labels in the pool", report.history, {"pool_size": "labels in the pool"}, "labels"),
            _by_step(
                "Positives a query in the pool",
                report.history,
                {"positives_per_query": "positives a query"},
                "positives, mean",
            ),
        ],
        **_costs(report.rounds),
        index=Table(["figure", "value"], list(facts.items())),
        has_recall=any(str(name).startswith("recall") for name in facts),
        **_calibration(report.calibration),
        score=lambda value: f"{value:.3f}" if value is not None and math.isfinite(value) else number(None),
        distributions=drawn,
    )


def _against_baselines(comparison: Sequence[Comparison]) -> Table:
    """The model beside the better baseline of each metric, with intervals and p-values."""
    rows = []
    for one in comparison:
        group, _, metric = one.metric.rpartition("/")
        rows.append([
            f"{metric}, {GROUPS[group]}" if group else metric,
            one.value,
            Shown(f"{one.difference:+.2f}", kind=colour(one)),
            *interval_and_p(one),
            Shown(f"{one.against_value:.2f}", small=f" {BASELINES[one.against]}"),
        ])  # fmt: skip
    header = ["metric", "model", "difference", "95 % interval", "p, corrected", "better baseline"]
    return Table(header, rows, caption="Against the TF-IDF baselines")


def interval_and_p(one: Comparison) -> list[str]:
    """As a table of paired tests shows them."""
    return [f"{one.low:+.2f} to {one.high:+.2f}", "< 0.001" if one.p_adjusted < 0.001 else f"{one.p_adjusted:.3f}"]


def colour(one: Comparison | None) -> str:
    """ "right" or "wrong" where a test tells two systems apart."""
    return "" if one is None else "right" * one.better + "wrong" * one.worse


def _of_groups(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Metrics of each frequency group that was measured; without test queries of a group all its figures are 0."""
    return {group: own for group, own in by_group(metrics).items() if own.get("num_queries", 1) > 0}


def _groups(systems: Systems) -> dict[str, Any]:
    measured = {name: _of_groups(metrics) for name, metrics in systems.items()}
    groups = [group for group in GROUPS if any(group in own for own in measured.values())]
    charts = []
    for metric in GROUP_CHARTS:
        bars = [(name, [own[g][metric] for g in groups]) for name, own in measured.items()
                if all(metric in own.get(g, {}) for g in groups)]  # fmt: skip
        charts.append(bar_chart(f"{metric}, percent", [GROUPS[group] for group in groups], bars, "percent"))
    rows = {f"{name}, {group}": values for name, own in measured.items() for group, values in own.items()}
    return {"group_charts": charts, "groups": Table.of("system, group", rows, HEADLINE)}


def _bins(bins: Records) -> dict[str, Any]:
    """What labels of each frequency add to P@5 and PSP@5 (thesis, figure 1.3)."""
    names = [bin_name(row) for row in bins]
    added = [(metric, [row[metric] for row in bins]) for metric in ("P@5", "PSP@5")]
    found = [(shown, [row[key] for row in bins]) for key, shown in (("recall@5", "R@5"), ("coverage@5", "coverage@5"))]
    charts = [
        bar_chart("Contribution to P@5 and PSP@5", names, added, "percentage points", x_label=VOLUME),
        bar_chart("Found within the first 5", names, found, "percent", x_label=VOLUME),
    ]
    rows = dict(zip(names, bins, strict=True))
    table = Table.of("training queries", rows, BINS, caption="by bin, most frequent labels first")
    return {"bin_charts": charts, "bins": table}


def bin_name(row: Mapping[str, Any]) -> str:
    """Frequencies of a bin: "12 to 40"."""
    return f"{row['least']:,} to {row['most']:,}" if row["least"] != row["most"] else f"{row['most']:,}"


def _coverage(systems: Systems) -> dict[str, Any]:
    """Share of the labels that are found for some query, by depth."""
    by_head = {name: metrics for name, metrics in systems.items() if "coverage@1" in metrics}
    if not by_head:
        return {"coverage_charts": [], "coverage": None}
    first, main = next(iter(by_head.items()))
    by_group = {GROUPS[group]: own for group, own in _of_groups(main).items()}
    depths = [k for k in DEFAULT_KS if any(f"coverage@{k}" in metrics for metrics in by_head.values())]
    charts = [
        bar_chart(caption, [f"at {k}" for k in depths],
                  [(name, [own.get(f"coverage@{k}", math.nan) for k in depths]) for name, own in shown.items()],
                  "labels, percent", x_label="first labels of a query")
        for caption, shown in (("Coverage of labels, percent", by_head),
                               (f"The same by frequency of the label, {first}", by_group))
    ]  # fmt: skip
    rows = by_head | {f"{first}, {name}": own for name, own in by_group.items()}
    return {"coverage_charts": charts, "coverage": Table.of("system", rows, [f"coverage@{k}" for k in depths])}


def _calibration(calibration: Mapping[str, Any] | None) -> dict[str, Any]:
    bins = calibration_bins(calibration["score"], calibration["correct"]) if calibration else []
    rows: list[list[Any]] = [
        [str(i), f"{low:.3f} to {high:.3f}", count, 100 * precision]
        for i, (low, high, count, precision) in enumerate(bins, 1)
    ]
    chart = bar_chart(
        "Share of predictions that are right, by score", [row[0] for row in rows],
        [("precision", [row[-1] for row in rows])], "precision, percent",
        x_label="tenth of the predictions by score, lowest first",
    )  # fmt: skip
    header = ["tenth", "score", "predictions", "right, percent"]
    return {"calibration_chart": chart, "calibration": Table(header, rows, text_columns=2)}


def calibration_bins(score: Any, correct: Any, num_bins: int = 10) -> list[tuple[float, float, int, float]]:
    """Predictions in bins of equal number by score: lowest and highest score, count and precision (0 to 1) of each.

    Args:
        score: any shape; entries that are not finite (padding) are left out.
        correct: same shape, truthy where the prediction is right.
    """
    score_n, correct_n = np.asarray(score, dtype=np.float64), np.asarray(correct).astype(bool)
    keep = np.isfinite(score_n)
    score_n, correct_n = score_n[keep], correct_n[keep]
    order = np.argsort(score_n, kind="stable")
    cuts = np.linspace(0, len(order), min(num_bins, len(order)) + 1).astype(int)
    parts = (order[a:b] for a, b in itertools.pairwise(cuts.tolist()))
    return [(float(score_n[p[0]]), float(score_n[p[-1]]), len(p), float(correct_n[p].mean())) for p in parts]


# -- training ----------------------------------------------------------------------------------------------------------


def _curves(history: Records, rounds: Records) -> list[Chart | None]:
    """Loss, validation by epoch and by time, learning rates, gradient norm, speed."""
    rates = sorted({key for record in history for key in record if key.startswith("lr_")})
    measured = validation_records(rounds)
    validation = [
        line_chart(f"Validation split by {name}, percent", _lines(measured, x, {n: n for n in VALIDATION}, True), label,
                   "percent", x_from_zero=x == "minutes")
        for name, x, label in (("epoch", "epoch", "epoch"),
                               ("wall time", "minutes", "minutes of training and refreshes"))
    ]  # fmt: skip
    losses = {"loss": "loss", "loss_de": "dual encoder", "loss_clf": "classifier"}
    return [
        _by_step("Loss", history, losses, "loss"),
        *validation,
        _by_step("Learning rates", history, {name: name.removeprefix("lr_") for name in rates}, "learning rate"),
        _by_step("Gradient norm before clipping", history, {"grad_norm": "gradient norm"}, "norm"),
        _by_step("Speed", history, {"texts_per_s": "texts a second"}, "texts a second"),
    ]


def _by_step(caption: str, history: Records, names: Mapping[str, str], label: str) -> Chart | None:
    return line_chart(caption, _lines(history, "step", names), "step", label, y_from_zero=True)


def _lines(records: Records, x: str, names: Mapping[str, str], dots: bool = False) -> list[Line]:
    """A line for each of `names` ({key: shown}) over the records' key `x`; those without finite values are left out."""
    kept = [record for record in records if record.get(x) is not None]
    drawn = [Line(shown, _column(kept, x), _column(kept, name), dots) for name, shown in names.items()]
    return [line for line in drawn if any(math.isfinite(y) for y in line.y)]


def _column(records: Records, name: str) -> list[float]:
    return [float(value) if (value := record.get(name)) is not None else math.nan for record in records]


def _costs(rounds: Records) -> dict[str, Any]:
    """Seconds of each round's parts, what refreshes found, totals."""
    parts = round_parts(rounds)
    if not parts:
        return {"cost_charts": [], "cost_totals": {}, "costs": None, "found": None}
    groups = [str(r.get("round", i + 1)) for i, r in enumerate(rounds)]
    refresh = [(name, column) for name, column in parts.items() if name not in AFTER]
    steps = [finite(r, "steps_per_s") for r in rounds if r.get("steps_per_s")]
    total: dict[str, float | None] = {
        "training steps, seconds": sum(parts.get("train", [])),
        "refreshes, seconds": sum(sum(column) for _, column in refresh),
        "validation, seconds": sum(parts.get("validation", [])) or None,
        "steps a second": sum(steps) / len(steps) if steps else None,
    }
    for key, shown in MEMORY.items():
        total[shown] = max((finite(r.get("memory") or {}, key) for r in rounds), default=0.0) or None
    rows: list[list[Any]] = [[group, *row, sum(row)] for group, *row in zip(groups, *parts.values(), strict=True)]
    sums = [sum(column) for column in parts.values()]
    kinds = [*("" for _ in rows), "base"]
    found = {
        group: {key: 100.0 * value if key in SHARES and value is not None else value for key, value in of.items()}
        for group, of in zip(groups, (r.get("refresh") or {} for r in rounds), strict=True)
    }
    return {
        "cost_charts": [
            bar_chart(caption, groups, bars, "seconds", x_label="round", stacked=True)
            for caption, bars in (("Seconds a round", list(parts.items())), ("Of these, refresh", refresh))
        ],
        "cost_totals": {name: round(value, 2) for name, value in total.items() if value is not None},
        "costs": Table(["round", *parts, "sum"], [*rows, ["all", *sums, sum(sums)]], kinds=kinds),
        "found": Table.of("round", found, FOUND),
    }
