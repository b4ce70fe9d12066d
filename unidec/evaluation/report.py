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
from unidec.evaluation.page import charts, document, facts, figure, note, number, section, table
from unidec.evaluation.plots import refresh_parts
from unidec.evaluation.svg import Line, bar_chart, line_chart

HEADLINE = (
    "P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR",
)  # fmt: skip
HEADS = {"both": "both heads", "de": "dual encoder alone", "clf": "classifier alone"}
GROUPS = {"tail": "tail (< 10)", "torso": "torso (10 to 100)", "head": "head (> 100)"}
GROUP_CHARTS = ("P@1", "PSP@5", "R@10", "R@100")
VALIDATION = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReportInput:
    """What the report shows; a part that is not given is left out.

    Attributes:
        title: heading of the page. date: as it shall read; the clock is not asked.
        dataset, model: one line about each.
        metrics: {"both" | "de" | "clf" | any name: {metric: percent}}, group metrics as "tail/R@10".
        baselines: {name: {metric: percent}}; baseline_note: where they come from.
        history: lines of history.jsonl. rounds: lines of rounds.jsonl.
        index: facts about the index, such as {"recall@10": 99.8}.
        calibration: {"score": [any shape], "correct": [same shape]} of predictions.
        right, wrong: examples {"query", "truth": [title], "predictions": [{"label", "title", "score", "de", "clf",
            "correct"}], "missed": [title]}.
        card: facts about the data set. params: all parameters. lineage: git commit, hashes, run id.
        notes: paragraphs under the headline figures.
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
    calibration: Mapping[str, Any] | None = None
    right: Records = ()
    wrong: Records = ()
    card: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


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
        "groups": ("By frequency of the label", _groups(report)),
        "training": ("Training", _training(report)),
        "pools": ("Pools", _pools(report.history)),
        "rounds": ("Cost of the rounds", _rounds(report.rounds)),
        "index": ("Index", _index(report)),
        "calibration": ("Calibration", _calibration(report.calibration)),
        "examples": ("Examples", _examples(report)),
        "data": ("Data set", facts(report.card)),
        "parameters": ("Parameters", _folded("all parameters", facts(report.params), opened=True)),
        "lineage": ("Lineage", facts(report.lineage)),
    }
    sections = {anchor: section(anchor, heading, body) for anchor, (heading, body) in parts.items()}
    links = "".join(f'<a href="#{anchor}">{escape(parts[anchor][0])}</a>' for anchor in sections if sections[anchor])
    about = " · ".join(escape(text) for text in (report.dataset, report.model, report.date) if text)
    top = f'<h1>{escape(report.title)}</h1><p class="muted">{about}</p>' + _cards(report)
    notes = "".join(f"<p>{escape(text)}</p>" for text in report.notes)
    navigation = f"<nav>{links}</nav>" if links else ""
    return document(report.title, [top + notes + navigation, *sections.values()])


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
    return table(["system", *columns], rows, best=True) + note(f"{about} {report.baseline_note}".strip())


def _groups(report: ReportInput) -> str:
    names = list(report.metrics)
    groups = [g for g in GROUPS if any(key.startswith(f"{g}/") for name in names for key in report.metrics[name])]
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


def _column(records: Records, name: str) -> list[float]:
    return [float(value) if (value := record.get(name)) is not None else np.nan for record in records]


def _lines(records: Records, x: str, names: Mapping[str, str], dots: bool = False) -> list[Line]:
    kept = [record for record in records if record.get(x) is not None]
    steps = _column(kept, x)
    lines = [Line(shown, steps, _column(kept, name), dots=dots) for name, shown in names.items()]
    return [line for line in lines if np.isfinite(line.y).any()]


def _training(report: ReportInput) -> str:
    history = report.history
    losses = _lines(history, "step", {"loss": "loss", "loss_de": "dual encoder", "loss_clf": "classifier"})
    rates = _lines(history, "step", {name: name.removeprefix("lr_") for name in _keys(history, "lr_")})
    norm = _lines(history, "step", {"grad_norm": "gradient norm"})
    speed = _lines(history, "step", {"texts_per_s": "texts a second"})
    validation = [{**r, **r["validation"]} for r in report.rounds if isinstance(r.get("validation"), Mapping)]
    names = {name: name for name in VALIDATION}
    by_epoch = _lines(validation, "epoch", names, dots=True)
    minutes = [{**r, "minutes": r["seconds"] / 60} for r in validation if r.get("seconds") is not None]
    by_time = _lines(minutes, "minutes", names, dots=True)
    figures = [
        figure("Loss", line_chart(losses, "step", "loss", y_from_zero=True)),
        figure("Validation split by epoch, percent", line_chart(by_epoch, "epoch", "percent")),
        figure("Validation split by time, percent", line_chart(by_time, "minutes", "percent")),
        figure("Learning rates", line_chart(rates, "step", "learning rate", y_from_zero=True)),
        figure("Gradient norm before clipping", line_chart(norm, "step", "norm", y_from_zero=True)),
        figure("Speed", line_chart(speed, "step", "texts a second", y_from_zero=True)),
    ]
    return charts(*figures)


def _keys(records: Records, prefix: str) -> list[str]:
    return sorted({key for record in records for key in record if key.startswith(prefix)})


def _pools(history: Records) -> str:
    size = _lines(history, "step", {"pool_size": "labels in the pool"})
    positives = _lines(history, "step", {"positives_per_query": "positives a query"})
    in_pool = line_chart(size, "step", "labels", y_from_zero=True)
    per_query = line_chart(positives, "step", "positives", y_from_zero=True)
    return charts(figure("Labels in the pool", in_pool), figure("Positives a query in the pool", per_query))


def _rounds(rounds: Records) -> str:
    parts, values = refresh_parts(rounds)
    if not parts:
        return ""
    groups = [str(r.get("round", i + 1)) for i, r in enumerate(rounds)]
    bars = [(name, [row[i] for row in values]) for i, name in enumerate(parts)]
    refresh = [(name, column) for name, column in bars if name != "train"]
    rows = [[group, *row, sum(row)] for group, row in zip(groups, values, strict=True)]
    shown = charts(
        figure("Seconds a round", bar_chart(groups, bars, "seconds", x_label="round", stacked=True)),
        figure("Of these, refresh", bar_chart(groups, refresh, "seconds", x_label="round", stacked=True)),
    )
    return shown + _folded("seconds, as a table", table(["round", *parts, "sum"], rows))


def _index(report: ReportInput) -> str:
    rows = [[name, value] for name, value in report.index.items() if not isinstance(value, Mapping | list | tuple)]
    if not rows:
        return ""
    about = "recall@k: share of the k labels of exact search that the index finds, percent." if any(
        str(name).startswith("recall") for name, _ in rows
    ) else ""  # fmt: skip
    return table(["", ""], rows) + (note(about) if about else "")


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
    return f'<div class="pair">{"".join(columns)}</div>' if columns else ""


def _example(example: Mapping[str, Any]) -> str:
    predictions = example.get("predictions", ())
    parts = [name for name in ("score", "de", "clf") if any(p.get(name) is not None for p in predictions)]
    titles = {"score": "score", "de": "DE", "clf": "CLF"}
    head = "".join(f"<th>{titles[name]}</th>" for name in parts)
    rows = []
    for prediction in predictions:
        right = bool(prediction.get("correct"))
        mark = f'<td class="{"right" if right else "wrong"}">{"✓" if right else "✗"}</td>'
        values = "".join(f"<td>{_score(prediction.get(name))}</td>" for name in parts)
        text = escape(str(prediction.get("title") or prediction.get("label", "")))
        rows.append(f'<tr>{mark}<td class="text">{text}</td>{values}</tr>')
    header = f'<tr><th></th><th class="text">prediction</th>{head}</tr>'
    body = f"<table><thead>{header}</thead><tbody>{''.join(rows)}</tbody></table>"
    missed = _listed("missed", example.get("missed", ()))
    truth = _listed("true labels", example.get("truth", ()))
    return f'<div class="example"><h4>{escape(str(example.get("query", "")))}</h4>{body}{missed}{truth}</div>'


def _score(value: Any) -> str:
    return number(None) if value is None or not np.isfinite(value) else f"{value:.3f}"


def _listed(name: str, titles: Sequence[Any]) -> str:
    shown = "; ".join(str(title) for title in titles[:12])
    more = f"; and {len(titles) - 12} more" if len(titles) > 12 else ""
    return f'<p class="note"><b>{escape(name)} ({len(titles)}):</b> {escape(shown + more)}</p>' if titles else ""


def _folded(summary: str, body: str, opened: bool = False) -> str:
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(summary)}</summary>{body}</details>" if body else ""
