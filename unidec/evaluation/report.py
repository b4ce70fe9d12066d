"""The report of a run: one HTML file that loads nothing, readable on a light and a dark screen and on paper."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unidec.evaluation import training_sections
from unidec.evaluation.figures import bar_chart
from unidec.evaluation.page import Shown, Table, number, write_page
from unidec.evaluation.page import render as render_page
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES

HEADLINE = (
    "P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR",
)  # fmt: skip
CARDS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10", "R@100")
HEADS = {
    "both": "both heads",
    "de": "dual encoder alone",
    "clf": "classifier alone",
    "knn": "votes of similar queries alone",
}
GROUPS = {"tail": "tail (< 10)", "torso": "torso (10 to 100)", "head": "head (> 100)"}
GROUP_CHARTS = ("P@1", "PSP@5", "R@10", "R@100")
COVERAGE = (1, 3, 5, 10, 100)
SCORES = {"score": "score", "de": "DE", "clf": "CLF", "knn": "votes"}
VOLUME = "training queries of a label; bins of equal volume, head to tail"
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReportInput:
    """What the report shows; a part that is not given is left out.

    Attributes:
        date: as it shall read. dataset, model: one line about each.
        metrics: {"both" | "de" | "clf" | "knn" | any name: {metric: percent}}, what is served first; group metrics as
            "tail/R@10". baselines: the same; baseline_note: where they come from.
        history, rounds: lines of history.jsonl and rounds.jsonl. bins: of `frequency_bins`. pools: of `pool_study`.
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
    pools: Mapping[str, Any] = field(default_factory=dict)
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
    main = next(iter(report.metrics.values()), {})
    drawn = [
        bar_chart(shown["title"], list(shown["bars"]), [(shown["y"], list(shown["bars"].values()))], shown["y"],
                  x_label=shown["x"], digits=0)
        for shown in report.distributions
    ]  # fmt: skip
    facts = {name: value for name, value in report.index.items() if not isinstance(value, Mapping | list | tuple)}
    return render_page(
        "report",
        report=report,
        head_cards=[(f"{main[name]:.1f}", name, "") for name in CARDS if np.isfinite(main.get(name, np.nan))],
        num_queries=int(main.get("num_queries", 0)),
        headline=_headline(report),
        against=_against_baselines(report.comparison),
        **_groups(report),
        **_bins(report.bins),
        **_coverage(report),
        **training_sections.context(report.history, report.rounds, report.pools),
        index=Table(["figure", "value"], list(facts.items())),
        has_recall=any(str(name).startswith("recall") for name in facts),
        **_calibration(report.calibration),
        formula=_formula(report.index),
        score_names=SCORES,
        score_parts=lambda rows: [name for name in SCORES if any(row.get(name) is not None for row in rows)],
        score=lambda value: number(None) if value is None or not np.isfinite(value) else f"{value:.3f}",
        distributions=drawn,
    )


def _headline(report: ReportInput) -> Table:
    ours = {HEADS.get(name, name): values for name, values in report.metrics.items()}
    systems = {**ours, **report.baselines}
    columns = [name for name in HEADLINE if any(name in values for values in systems.values())]
    rows = [[name, *(values.get(column) for column in columns)] for name, values in systems.items()]
    kinds = [*("" for _ in ours), *("reference" for _ in report.baselines)]
    return Table(["system", *columns], rows if columns else [], best=True, kinds=kinds)


def _against_baselines(comparison: Sequence[Comparison]) -> Table:
    """The model beside the better baseline of each metric, with intervals and p-values."""
    rows = []
    for one in comparison:
        group, _, metric = one.metric.rpartition("/")
        rows.append([
            f"{metric}, {GROUPS[group]}" if group else metric,
            one.value,
            Shown(f"{one.difference:+.2f}", kind="right" * one.better + "wrong" * one.worse),
            f"{one.low:+.2f} to {one.high:+.2f}",
            "< 0.001" if one.p_adjusted < 0.001 else f"{one.p_adjusted:.3f}",
            Shown(f"{one.against_value:.2f}", small=f" {BASELINES[one.against]}"),
        ])  # fmt: skip
    header = ["metric", "model", "difference", "95 % interval", "p, corrected", "better baseline"]
    return Table(header, rows, caption="Against the TF-IDF baselines")


def _has_group(metrics: Mapping[str, float], group: str) -> bool:
    """Whether labels of a frequency group were measured; without test queries of it all its figures are 0."""
    return metrics.get(f"{group}/num_queries", 1) > 0 and any(key.startswith(f"{group}/") for key in metrics)


def _groups(report: ReportInput) -> dict[str, Any]:
    systems = report.metrics
    groups = [group for group in GROUPS if any(_has_group(of, group) for of in systems.values())]
    charts = []
    for metric in GROUP_CHARTS:
        have = [name for name in systems if all(f"{group}/{metric}" in systems[name] for group in groups)]
        bars = [(HEADS.get(name, name), [systems[name][f"{group}/{metric}"] for group in groups]) for name in have]
        charts.append(bar_chart(f"{metric}, percent", [GROUPS[group] for group in groups], bars, "percent"))
    columns = [m for m in HEADLINE if any(f"{g}/{m}" in of for g in groups for of in systems.values())]
    rows = [
        [f"{HEADS.get(name, name)}, {group}", *(of.get(f"{group}/{metric}") for metric in columns)]
        for name, of in systems.items()
        for group in groups
        if any(f"{group}/{metric}" in of for metric in columns)
    ]
    return {"group_charts": charts, "groups": Table(["system, group", *columns], rows)}


def _bins(bins: Records) -> dict[str, Any]:
    """What labels of each frequency add to P@5 and PSP@5 (thesis, figure 1.3)."""
    names = [bin_name(row) for row in bins]
    added = [(metric, [row[metric] for row in bins]) for metric in ("P@5", "PSP@5")]
    found = [(shown, [row[key] for row in bins]) for key, shown in (("recall@5", "R@5"), ("coverage@5", "coverage@5"))]
    columns = {"labels": "labels", "mean_frequency": "training queries, mean", "test_pairs": "test pairs",
               "P@5": "adds to P@5", "PSP@5": "adds to PSP@5", "recall@5": "its pairs found in the first 5, percent",
               "coverage@5": "coverage@5"}  # fmt: skip
    rows = [[name, *(row[key] for key in columns)] for name, row in zip(names, bins, strict=True)]
    charts = [
        bar_chart("Contribution to P@5 and PSP@5", names, added, "percentage points", x_label=VOLUME),
        bar_chart("Found within the first 5", names, found, "percent", x_label=VOLUME),
    ]
    caption = "by bin, most frequent labels first"
    return {"bin_charts": charts, "bins": Table(["training queries", *columns.values()], rows, caption=caption)}


def bin_name(row: Mapping[str, Any]) -> str:
    """Frequencies of a bin: "12 to 40"."""
    return f"{row['least']:,} to {row['most']:,}" if row["least"] != row["most"] else f"{row['most']:,}"


def _coverage(report: ReportInput) -> dict[str, Any]:
    """Share of the labels that are found for some query, by depth."""
    found = {HEADS.get(name, name): of for name, of in report.metrics.items() if f"coverage@{COVERAGE[0]}" in of}
    if not found:
        return {"coverage_charts": [], "coverage": None}
    depths = [k for k in COVERAGE if any(f"coverage@{k}" in values for values in found.values())]
    first, main = next(iter(found.items()))

    def bars(prefix: str, values: Mapping[str, float]) -> list[float]:
        return [values.get(f"{prefix}coverage@{k}", np.nan) for k in depths]

    by_head = [(name, bars("", values)) for name, values in found.items()]
    by_group = [(GROUPS[g], bars(f"{g}/", main)) for g in GROUPS if _has_group(main, g)]
    rows = [[name, *values] for name, values in [*by_head, *((f"{first}, {n}", v) for n, v in by_group)]]
    charts = [
        bar_chart(caption, [f"at {k}" for k in depths], shown, "labels, percent", x_label="first labels of a query")
        for caption, shown in (
            ("Coverage of labels, percent", by_head),
            (f"The same by frequency of the label, {first}", by_group),
        )
    ]
    return {"coverage_charts": charts, "coverage": Table(["system", *(f"coverage@{k}" for k in depths)], rows)}


def _calibration(calibration: Mapping[str, Any] | None) -> dict[str, Any]:
    bins = calibration_bins(calibration["score"], calibration["correct"]) if calibration else []
    bars = [("precision", [100 * row["precision"] for row in bins])]
    rows: list[list[Any]] = [
        [str(i), f"{row['low']:.3f} to {row['high']:.3f}", row["count"], 100 * row["precision"]]
        for i, row in enumerate(bins, 1)
    ]
    chart = bar_chart(
        "Share of predictions that are right, by score", [row[0] for row in rows], bars, "precision, percent",
        x_label="tenth of the predictions by score, lowest first",
    )  # fmt: skip
    header = ["tenth", "score", "predictions", "right, percent"]
    return {"calibration_chart": chart, "calibration": Table(header, rows, text_columns=2)}


def calibration_bins(score: Any, correct: Any, num_bins: int = 10) -> list[dict[str, float]]:
    """Predictions in bins of equal number by score: low, high, mean score, count and precision (0 to 1) of each.

    Args:
        score: any shape; entries that are not finite (padding) are left out.
        correct: same shape, truthy where the prediction is right.
    """
    score_n, correct_n = np.asarray(score, dtype=np.float64), np.asarray(correct).astype(bool)
    keep = np.isfinite(score_n)
    score_n, correct_n = score_n[keep], correct_n[keep]
    order = np.argsort(score_n, kind="stable")
    cuts = np.linspace(0, len(order), min(num_bins, len(order)) + 1).astype(int)
    return [
        {
            "low": float(score_n[part[0]]), "high": float(score_n[part[-1]]), "mean": float(score_n[part].mean()),
            "count": len(part), "precision": float(correct_n[part].mean()),
        }
        for part in (order[a:b] for a, b in itertools.pairwise(cuts.tolist()))
    ]  # fmt: skip


def _formula(index: Mapping[str, Any]) -> str:
    """How a score is computed from its parts."""
    heads = {"both": f"DE + {number(index.get('clf_weight'))} × CLF", "de": "DE", "clf": "CLF"}
    if index.get("space") not in heads:
        return ""
    if not index.get("knn_weight"):
        return f"score = {heads[index['space']]}"
    return f"score = {heads[index['space']]} + {number(index['knn_weight'])} × votes; a query's largest vote is 1"
