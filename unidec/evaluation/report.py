"""The report of a run: one HTML file that loads nothing, readable on a light and a dark screen and on paper."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from unidec.data.storage import write_bytes_atomic
from unidec.evaluation import training_sections
from unidec.evaluation.page import (
    Shown,
    charts,
    document,
    facts,
    figure,
    folded,
    navigation,
    note,
    number,
    section,
    table,
)  # fmt: skip
from unidec.evaluation.significance import Comparison
from unidec.evaluation.svg import bar_chart
from unidec.metric_names import BASELINES

HEADLINE = (
    "P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR",
)  # fmt: skip
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
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReportInput:
    """What the report shows; a part that is not given is left out.

    Attributes:
        title: heading of the page. date: as it shall read; the clock is not asked.
        dataset, model: one line about each.
        metrics: {"both" | "de" | "clf" | "knn" | any name: {metric: percent}}, what is served first; group metrics as
            "tail/R@10".
        baselines: {name: {metric: percent}}; baseline_note: where they come from.
        history: lines of history.jsonl. rounds: lines of rounds.jsonl.
        bins: what `unidec.evaluation.frequency.frequency_bins` returned.
        pools: what `unidec.evaluation.pools.pool_study` returned.
        index: facts about the index, such as {"recall@10": 99.8}.
        calibration: {"score": [any shape], "correct": [same shape]} of predictions.
        right, wrong: examples {"query", "truth": [title], "predictions": [{"label", "title", "score", "de", "clf",
            "knn", "correct"}], "missed": [title]}.
        card: facts about the data set. distributions: of the data set, {"title", "x", "y", "bars": {bar: count}}
            each, x and y named with their units.
        params: all parameters. lineage: git commit, hashes, run id.
        verdict: what the model gains over the baselines, on top of the page. comparison: the figures behind it.
        warnings: why the figures may say little.
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
    """Write the page, in one piece.

    Raises:
        ArtifactError: it cannot be written.
    """
    write_bytes_atomic(path, render(report).encode("utf-8", "replace"))


def render(report: ReportInput) -> str:
    """The page as text. All texts of the input are escaped."""
    parts = {
        "metrics": ("Metrics", _headline(report)),
        "groups": ("By frequency of the label", _groups(report) + _bins(report.bins)),
        "coverage": ("Coverage", _coverage(report)),
        "training": ("Training", training_sections.curves(report.history, report.rounds)),
        "pools": ("Pools", training_sections.pools(report.history, report.pools)),
        "rounds": ("Cost of the rounds", training_sections.costs(report.rounds)),
        "index": ("Index", _index(report)),
        "calibration": ("Calibration", _calibration(report.calibration)),
        "examples": ("Examples", _examples(report)),
        "data": ("Data set", facts(report.card) + _distributions(report.distributions)),
        "parameters": ("Parameters", folded("all parameters", facts(report.params), opened=True)),
        "lineage": ("Lineage", facts(report.lineage)),
    }
    sections = {anchor: section(anchor, heading, body) for anchor, (heading, body) in parts.items()}
    links = navigation([(anchor, parts[anchor][0]) for anchor in sections if sections[anchor]])
    about = " · ".join(escape(text) for text in (report.dataset, report.model, report.date) if text)
    gate = '<a href="gate.html">gate report</a> (once the gate has run)'
    top = f'<h1>{escape(report.title)}</h1><p class="muted">{about} · {gate}</p>' + _cards(report)
    said = "".join(f'<p class="warning"><b>Warning.</b> {escape(text)}</p>' for text in report.warnings)
    if report.verdict:
        said = f'<p class="verdict">{escape(report.verdict)}</p>{said}'
    return document(report.title, [top + said + links, *sections.values()])


def _main_metrics(report: ReportInput) -> Mapping[str, float]:
    return next(iter(report.metrics.values()), {})


def _cards(report: ReportInput) -> str:
    metrics = _main_metrics(report)
    shown = [
        name for name in ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10", "R@100") if np.isfinite(metrics.get(name, np.nan))
    ]
    cards = "".join(f'<div class="card"><b>{metrics[name]:.1f}</b><span>{escape(name)}</span></div>' for name in shown)
    return f'<div class="cards">{cards}</div>' if cards else ""


def _headline(report: ReportInput) -> str:
    ours = {HEADS.get(name, name): values for name, values in report.metrics.items()}
    systems = {**ours, **report.baselines}
    columns = [name for name in HEADLINE if any(name in values for values in systems.values())]
    rows = [[name, *(values.get(column) for column in columns)] for name, values in systems.items()]
    if not columns:
        return ""
    queries = _main_metrics(report).get("num_queries")
    about = "Test split, percent, filter pairs removed; the best of each column in bold."
    if queries:
        about = f"{int(queries):,} queries. {about}"
    kinds = [*("" for _ in ours), *("reference" for _ in report.baselines)]
    return (
        table(["system", *columns], rows, best=True, kinds=kinds)
        + note(f"{about} {report.baseline_note}".strip())
        + _against_baselines(report.comparison)
    )


def _against_baselines(comparison: Sequence[Comparison]) -> str:
    """The model beside the better baseline of each metric, with intervals and p-values."""
    rows = []
    for one in comparison:
        group, _, metric = one.metric.rpartition("/")
        name = f"{metric}, {GROUPS[group]}" if group else metric
        interval, kind = Shown(f"{one.low:+.2f} to {one.high:+.2f}"), "right" * one.better + "wrong" * one.worse
        difference = Shown(f"{one.difference:+.2f}", kind=kind)
        p_value = Shown("< 0.001" if one.p_adjusted < 0.001 else f"{one.p_adjusted:.3f}")
        baseline = Shown(f"{one.against_value:.2f}", small=f" {BASELINES[one.against]}")
        rows.append([name, one.value, difference, interval, p_value, baseline])
    header = ["metric", "model", "difference", "95 % interval", "p, corrected", "better baseline"]
    about = (
        "Difference in percentage points, on the queries that both ranked; interval by paired bootstrap, p-value by "
        "paired randomisation test with Holm's correction over these rows."
    )
    shown = table(header, rows, caption="Against the TF-IDF baselines")
    return shown + note(about) if shown else ""


def _groups(report: ReportInput) -> str:
    names = list(report.metrics)
    groups = [g for g in GROUPS if any(_has_group(report.metrics[name], g) for name in names)]
    if not groups:
        return ""
    figures = []
    for metric in GROUP_CHARTS:
        have = [name for name in names if all(f"{group}/{metric}" in report.metrics[name] for group in groups)]
        bars = [(HEADS.get(n, n), [report.metrics[n][f"{group}/{metric}"] for group in groups]) for n in have]
        figures.append(figure(f"{metric}, percent", bar_chart([GROUPS[g] for g in groups], bars, "percent")))
    columns = [m for m in HEADLINE if any(f"{g}/{m}" in report.metrics[n] for g in groups for n in names)]
    rows = [
        [f"{HEADS.get(name, name)}, {group}", *(report.metrics[name].get(f"{group}/{metric}") for metric in columns)]
        for name in names
        for group in groups
        if any(f"{group}/{metric}" in report.metrics[name] for metric in columns)
    ]
    about = (
        "Groups by the number of training queries of a label. Truth is restricted to the group and predictions keep "
        "their ranks, so P@k of the three groups add up to the whole."
    )
    return charts(*figures) + table(["system, group", *columns], rows) + note(about)


def _has_group(metrics: Mapping[str, float], group: str) -> bool:
    """Whether labels of a frequency group were measured; without test queries of it all its figures are 0."""
    return metrics.get(f"{group}/num_queries", 1) > 0 and any(key.startswith(f"{group}/") for key in metrics)


def _bins(bins: Records) -> str:
    """What labels of each frequency add to P@5 and PSP@5 (thesis, figure 1.3)."""
    if not bins:
        return ""
    names = [bin_name(row) for row in bins]
    added = [(metric, [row[metric] for row in bins]) for metric in ("P@5", "PSP@5")]
    found = [(shown, [row[key] for row in bins]) for key, shown in (("recall@5", "R@5"), ("coverage@5", "coverage@5"))]
    x_label = "training queries of a label; bins of equal volume, head to tail"
    columns = {"labels": "labels", "mean_frequency": "training queries, mean", "test_pairs": "test pairs",
               "P@5": "adds to P@5", "PSP@5": "adds to PSP@5", "recall@5": "its pairs found in the first 5, percent",
               "coverage@5": "coverage@5"}  # fmt: skip
    rows = [[name, *(row[key] for key in columns)] for name, row in zip(names, bins, strict=True)]
    about = (
        "Labels in order of their training queries, cut into bins that hold about equally many (query, label) pairs of "
        "the training data. The contributions add up to the metric of the whole."
    )
    return (
        "<h3>Bins of equal volume</h3>"
        + charts(
            figure("Contribution to P@5 and PSP@5", bar_chart(names, added, "percentage points", x_label=x_label)),
            figure("Found within the first 5", bar_chart(names, found, "percent", x_label=x_label)),
        )
        + table(["training queries", *columns.values()], rows, caption="by bin, most frequent labels first")
        + note(about)
    )


def bin_name(row: Mapping[str, Any]) -> str:
    """Frequencies of a bin: "12 to 40"."""
    return f"{row['least']:,} to {row['most']:,}" if row["least"] != row["most"] else f"{row['most']:,}"


def _coverage(report: ReportInput) -> str:
    """Share of the labels that are found for some query, by depth."""
    found = [(name, values) for name, values in report.metrics.items() if f"coverage@{COVERAGE[0]}" in values]
    if not found:
        return ""
    depths = [k for k in COVERAGE if any(f"coverage@{k}" in values for _, values in found)]
    groups, about_x = [f"at {k}" for k in depths], "first labels of a query"

    def bars(prefix: str, values: Mapping[str, float]) -> list[float]:
        return [values.get(f"{prefix}coverage@{k}", np.nan) for k in depths]

    by_head = [(HEADS.get(name, name), bars("", values)) for name, values in found]
    main_name, main = found[0]
    first = HEADS.get(main_name, main_name)
    by_group = [(GROUPS[g], bars(f"{g}/", main)) for g in GROUPS if _has_group(main, g)]
    rows = [[name, *values] for name, values in [*by_head, *((f"{first}, {n}", v) for n, v in by_group)]]
    about = "Share of the labels of the test split that are right for at least one query within the first k, percent."
    return (
        charts(
            figure(
                "Coverage of labels, percent",
                bar_chart(groups, by_head, "labels, percent", x_label=about_x),
            ),
            figure(
                f"The same by frequency of the label, {first}",
                bar_chart(groups, by_group, "labels, percent", x_label=about_x),
            ),
        )
        + table(["system", *(f"coverage@{k}" for k in depths)], rows)
        + note(about)
    )


def _distributions(distributions: Records) -> str:
    drawn = []
    for shown in distributions:
        bars = [(shown["y"], list(shown["bars"].values()))]
        chart = bar_chart(list(shown["bars"]), bars, shown["y"], x_label=shown["x"], digits=0)
        drawn.append(figure(shown["title"], chart))
    return charts(*drawn)


def _index(report: ReportInput) -> str:
    rows = [[name, value] for name, value in report.index.items() if not isinstance(value, Mapping | list | tuple)]
    if not rows:
        return ""
    about = "recall@k: share of the k labels of exact search that the index finds, percent." if any(
        str(name).startswith("recall") for name, _ in rows
    ) else ""  # fmt: skip
    return table(["figure", "value"], rows) + (note(about) if about else "")


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return ""
    bins = calibration_bins(calibration["score"], calibration["correct"])
    if not bins:
        return ""
    bars = [("precision", [100 * row["precision"] for row in bins])]
    groups = [str(i + 1) for i in range(len(bins))]
    chart = bar_chart(groups, bars, "precision, percent", x_label="tenth of the predictions by score, lowest first")
    rows = [
        [i + 1, f"{row['low']:.3f} to {row['high']:.3f}", row["count"], 100 * row["precision"]]
        for i, row in enumerate(bins)
    ]
    lists = table(["tenth", "score", "predictions", "right, percent"], rows, text_columns=2)
    shown = figure("Share of predictions that are right, by score", chart)
    return f'<div class="charts">{shown}<div>{lists}</div></div>' + note(
        "A score orders well where the bars rise; how steeply says how far it can be used as a threshold."
    )


def calibration_bins(score: Any, correct: Any, num_bins: int = 10) -> list[dict[str, float]]:
    """Predictions in bins of equal number by score: low, high, mean score, count and precision (0 to 1) of each.

    Args:
        score: any shape; entries that are not finite (padding) are left out.
        correct: same shape, truthy where the prediction is right.
    """
    score_n = np.asarray(score, dtype=np.float64).ravel()
    correct_n = np.asarray(correct).ravel().astype(bool)
    if score_n.shape != correct_n.shape:
        raise ValueError(f"scores and marks differ in number: {score_n.shape} and {correct_n.shape}")
    keep = np.isfinite(score_n)
    order = np.argsort(score_n[keep], kind="stable")
    score_n, correct_n = score_n[keep][order], correct_n[keep][order]
    cuts = np.linspace(0, len(score_n), min(num_bins, len(score_n)) + 1).astype(int)
    return [
        {
            "low": float(score_n[a]),
            "high": float(score_n[b - 1]),
            "mean": float(score_n[a:b].mean()),
            "count": int(b - a),
            "precision": float(correct_n[a:b].mean()),
        }
        for a, b in itertools.pairwise(cuts.tolist())
    ]


def _examples(report: ReportInput) -> str:
    columns = []
    for heading, examples in (("Got right", report.right), ("Got wrong", report.wrong)):
        if examples:
            columns.append(f"<div><h3>{heading}</h3>{''.join(map(_example, examples))}</div>")
    return f'<div class="pair">{"".join(columns)}</div>' + _formula(report.index) if columns else ""


def _formula(index: Mapping[str, Any]) -> str:
    """How a score comes from its parts."""
    heads = {"both": f"DE + {number(index.get('clf_weight'))} × CLF", "de": "DE", "clf": "CLF"}
    if index.get("space") not in heads:
        return ""
    if not index.get("knn_weight"):
        return note(f"score = {heads[index['space']]}")
    votes = f"{number(index['knn_weight'])} × votes"
    return note(f"score = {heads[index['space']]} + {votes}; a query's largest vote is 1")


def _example(example: Mapping[str, Any]) -> str:
    predictions = example.get("predictions", ())
    parts = [name for name in SCORES if any(p.get(name) is not None for p in predictions)]
    head = "".join(f'<th scope="col">{SCORES[name]}</th>' for name in parts)
    rows = []
    for prediction in predictions:
        right = bool(prediction.get("correct"))
        word, sign = ("right", "✓") if right else ("wrong", "✗")
        mark = f'<td class="{word}"><span role="img" aria-label="{word}">{sign}</span></td>'
        values = "".join(f"<td>{_score(prediction.get(name))}</td>" for name in parts)
        text = escape(str(prediction.get("title") or prediction.get("label", "")))
        rows.append(f'<tr>{mark}<td class="text">{text}</td>{values}</tr>')
    header = f'<tr><td></td><th scope="col" class="text">prediction</th>{head}</tr>'
    body = f"<table><thead>{header}</thead><tbody>{''.join(rows)}</tbody></table>"
    true, lost = example.get("truth", ()), example.get("missed", ())
    missed = _listed("missed", lost) if len(lost) < len(true) else ""
    truth = _listed("true labels" if len(lost) < len(true) else "true labels, all missed", true)
    return f'<div class="example"><h4>{escape(str(example.get("query", "")))}</h4>{body}{missed}{truth}</div>'


def _score(value: Any) -> str:
    return number(None) if value is None or not np.isfinite(value) else f"{value:.3f}"


def _listed(name: str, titles: Sequence[Any]) -> str:
    shown = "; ".join(str(title) for title in titles[:12])
    more = f"; and {len(titles) - 12} more" if len(titles) > 12 else ""
    return f'<p class="note"><b>{escape(name)} ({len(titles)}):</b> {escape(shown + more)}</p>' if titles else ""
