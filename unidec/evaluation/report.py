"""The report of a run: one HTML file that loads no other files, and CSV files for DVC's plots."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.storage import write_bytes_atomic
from unidec.evaluation import page
from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Records, Shown, Table
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES, DEFAULT_KS

HEADLINE = (
    "P@1",
    "P@3",
    "P@5",
    "nDCG@5",
    "PSP@1",
    "PSP@3",
    "PSP@5",
    "R@10",
    "R@100",
    "coverage@5",
    "MRR",
)
CARDS = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@10", "R@100")
HEADS = {
    "both": "both heads",
    "de": "dual encoder alone",
    "clf": "classifier alone",
    "knn": "votes of similar queries alone",
}
# of `wins_and_losses`
VERDICT = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100", "tail/R@10", "torso/R@10", "head/R@10")
AT_BEST = "at best"  # row of the highest values that are possible
EQUAL = 0.05  # percentage points: smaller differences would be shown as 0.0
GROUPS = {
    "tail": "tail (< 10 queries)",
    "torso": "torso (10 to 100 queries)",
    "head": "head (> 100 queries)",
}
BY_GROUP = {
    "P@5": "contributes to P@5",
    "within/P@5": "P@5 within",
    "nDCG@5": "nDCG@5 within",
    "PSP@5": "PSP@5 within",
    "R@10": "R@10 within",
    "R@100": "R@100 within",
    "coverage@5": "coverage@5 within",
    "num_queries": "queries with such a label",
}
BINS = {
    "labels": "labels",
    "mean_frequency": "training queries, mean",
    "test_pairs": "test pairs",
    "P@5": "contributes to P@5",
    "PSP@5": "contributes to PSP@5",
    "recall@5": "recall@5 within",
    "coverage@5": "coverage@5 within",
}
# with more weight on rare labels, PSP rises and the others fall
TRADED = ("P@1", "nDCG@5", "PSP@1", "PSP@5")
VALIDATION = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")
TRAINING = (
    "step",
    "epoch",
    "seconds",
    "loss",
    "loss_de",
    "loss_clf",
    "lr_heads",
    "lr_clf",
    "lr_encoder",
    "lr_bag",
    "grad_norm",
    "pool_size",
    "positives_per_query",
    "texts_per_s",
    "tokens_per_s",
)
"""Columns of training.csv."""
_PLACE = ("epoch", "round", "seconds", "minutes")  # first keys of a record of `validation_records`
MEMORY = {"host_used_gib": "peak memory, GiB", "device_used_gib": "peak memory of the GPU, GiB"}


@dataclass(frozen=True)
class ReportInput:
    """The content of the report; empty parts are omitted.

    Attributes:
        date: as displayed. dataset, model: one line about each.
        metrics: {"both" | "de" | "clf" | "knn" | any name: {metric: percent}}, the served system
            first; group metrics as "tail/R@10". baselines: the same. baseline_note: how they were
            built.
        at_best: the highest values that any ranking of these queries can have.
        history, rounds: lines of history.jsonl and rounds.jsonl. bins: of `frequency_bins`.
        index: facts about the index, such as {"recall@10": 99.8}.
        fusion: "by_tail": metrics by the "tail" weight; "lost_without": {feature: points of the
        "objective"}.
        calibration: {"score": [any shape], "correct": [same shape]} of predictions, and their
            "probability" if the bundle has a calibration.
        gains, losses: examples {"query", "truth": [title], "predictions": [{"label", "title",
            "score", "correct"}], "missed": [title], "gain": nDCG@5 of the query minus that of
            `gain_over`, in points}, the largest first.
        earlier: test metrics of earlier runs by their displayed names; {}: the run was measured on
        other data.
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
    at_best: Mapping[str, float] = field(default_factory=dict)
    baseline_note: str = ""
    history: Records = ()
    rounds: Records = ()
    bins: Records = ()
    index: Mapping[str, Any] = field(default_factory=dict)
    fusion: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    gains: Records = ()
    losses: Records = ()
    gain_over: str = ""
    earlier: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = ""
    comparison: Sequence[Comparison] = ()
    warnings: Sequence[str] = ()


def render(report: ReportInput) -> str:
    """The HTML of the report."""
    systems = {HEADS.get(name, name): values for name, values in report.metrics.items()}
    main = next(iter(systems.values()), {})
    earlier = {name: metrics for name, metrics in report.earlier.items() if metrics}
    compared: dict[str, Mapping[str, Any]] = {**systems, **earlier, **report.baselines}
    if report.at_best:  # as texts, so that they are not the best of a column
        compared[AT_BEST] = {name: Shown(f"{value:.2f}") for name, value in report.at_best.items()}
    kinds = ["" if name in systems else "reference" for name in compared]
    group_chart, groups = _groups(systems, report.at_best)
    bin_charts, bins = _bins(report.bins)
    by_tail = _lines(
        report.fusion.get("by_tail", ()), "tail", {name: name for name in TRADED}, dots=True
    )
    return page.render(
        "report",
        report=report,
        head_cards=_cards(main, report.at_best),
        num_queries=int(main.get("num_queries", 0)),
        verdicts=[
            (name, wins_and_losses(main, metrics)) for name, metrics in report.earlier.items()
        ],
        headline=Table.of("system", compared, HEADLINE, best=True, kinds=kinds),
        groups_shown=GROUPS,
        baselines_shown=BASELINES,
        frequency_charts=[*bin_charts, group_chart],
        groups=groups,
        bins=bins,
        curves=_curves(report.history, report.rounds),
        **_rounds(report.rounds),
        **_calibration(report.calibration or {}),
        tail_chart=line_chart(
            "Frequent against rare labels",
            by_tail,
            "weight of the log inverse propensity",
            "percent, validation split",
        ),
        lost_without={
            name.replace("blend", "weighted sum"): f"{lost:.2f}"
            for name, lost in sorted(
                report.fusion.get("lost_without", {}).items(), key=lambda part: -part[1]
            )
        },
    )


def wins_and_losses(own: Mapping[str, float], other: Mapping[str, float]) -> str:
    """The metrics on which a system is higher or lower than another, or equal, as one line."""
    if not other:
        return "measured on other data; the gate ranks this test split with both"
    parts: dict[str, list[str]] = {"higher": [], "lower": [], "equal": []}
    for name in VERDICT:
        if name in own and name in other:
            group, _, metric = name.rpartition("/")
            gap = own[name] - other[name]
            shown = f"{metric} of {group} labels" if group else metric
            if abs(gap) < EQUAL:
                parts["equal"].append(shown)
            else:
                parts["higher" if gap > 0 else "lower"].append(f"{shown} {gap:+.1f}")
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in parts.items() if names)


def _cards(main: Mapping[str, float], at_best: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """The main figures, each with what could be reached at best."""
    shown = []
    for name in CARDS:
        if not math.isfinite(main.get(name, math.nan)):
            continue
        limit = at_best.get(name, math.nan)
        words = f"{name}, at best {limit:.1f}" if math.isfinite(limit) else name
        shown.append((f"{main[name]:.1f}", words, ""))
    return shown


def _groups(
    systems: Mapping[str, Mapping[str, float]], at_best: Mapping[str, float]
) -> tuple[Chart | None, Table]:
    """A chart of R@10 and a table of all metrics by frequency group, without groups that have no
    test queries.
    """
    main = next(iter(systems.values()), {})
    counts = {name: value for name, value in main.items() if "num_queries" in name}
    measured = {**systems, **({AT_BEST: {**at_best, **counts}} if at_best else {})}
    rows = {
        (name, group): of_group | _within(of_group, metrics.get("num_queries", math.nan))
        for name, metrics in measured.items()
        for group, of_group in by_group(metrics).items()
        if of_group.get("num_queries", 1) > 0
    }
    groups = [group for group in GROUPS if any(group == of for _, of in rows)]
    bars = [
        (name, [rows[name, group].get("R@10", math.nan) for group in groups])
        for name in systems
        if all((name, group) in rows for group in groups)
    ]
    chart = bar_chart(
        "R@10 within each group", [GROUPS[group] for group in groups], bars, "percent"
    )
    return chart, Table.of(
        "system, group", {f"{name}, {group}": own for (name, group), own in rows.items()}, BY_GROUP
    )


def _within(group: Mapping[str, float], num_queries: float) -> dict[str, Any]:
    """P@5 over only the queries that have a label of the group, and their number. (The group's
    metric "P@5" is over all queries, so that groups add up.)
    """
    group_queries = group.get("num_queries", math.nan)
    within = (
        {"within/P@5": group.get("P@5", math.nan) * num_queries / group_queries}
        if group_queries
        else {}
    )
    return {key: value for key, value in within.items() if math.isfinite(value)} | (
        {"num_queries": int(group_queries)} if math.isfinite(group_queries) else {}
    )


def _bins(bins: Records) -> tuple[list[Chart | None], Table]:
    """Charts and a table of contributions to P@5 and PSP@5 by label frequency (thesis, figure 1.3),
    and of metrics within each bin.
    """
    names = [
        f"{row['least']:,} to {row['most']:,}"
        if row["least"] != row["most"]
        else f"{row['most']:,}"
        for row in bins
    ]
    label = "training queries of a label; bins of equal volume, head to tail"
    charts = [
        bar_chart(
            caption,
            names,
            [(metric, [row[metric] for row in bins]) for metric in metrics],
            unit,
            x_label=label,
        )
        for caption, unit, metrics in (
            (
                "Contributions to P@5 and PSP@5: bins add up to the whole",
                "percentage points",
                ("P@5", "PSP@5"),
            ),
            (
                "Within each bin: pairs found, labels found at least once",
                "percent",
                ("recall@5", "coverage@5"),
            ),
        )
    ]
    rows = dict(zip(names, bins, strict=True))
    return charts, Table.of(
        "training queries", rows, BINS, caption="by bin, most frequent labels first"
    )


def _calibration(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """The reliability curve of the probabilities and their expected calibration error in percentage
    points (Guo et al. 2017, equation 3; bins of equal size); without probabilities, the precision
    by score.
    """
    if "probability" in calibration:
        bins = calibration_bins(calibration["probability"], calibration["correct"])
        means, shares = ([100 * part[i] for part in bins] for i in (1, 2))
        lines = [
            Line("this model", means, shares, dots=True),
            Line("perfectly calibrated", [0, 100], [0, 100]),
        ]
        chart = line_chart(
            "Predictions that are right, by their probability",
            lines if bins else [],
            "probability, percent; a tenth of the predictions each",
            "right, percent",
            y_from_zero=True,
            x_from_zero=True,
        )
        distances = [size * abs(mean - precision) for _, mean, precision, size in bins]
        error = 100 * sum(distances) / max(1, sum(size for *_, size in bins))
        return {"calibration": chart, "calibration_error": error}
    bins = calibration_bins(calibration["score"], calibration["correct"]) if calibration else []
    chart = bar_chart(
        "Share of predictions that are right, by score",
        [f"{high:.3g}" for high, *_ in bins],
        [("precision", [100 * precision for _, _, precision, _ in bins])],
        "precision, percent",
        x_label="score up to; a tenth of the predictions each",
    )
    return {"calibration": chart, "calibration_error": None}


def calibration_bins(
    score: Any, correct: Any, num_bins: int = 10
) -> list[tuple[float, float, float, int]]:
    """Predictions in bins of equal size by score: highest score, mean score, precision (0 to 1) and
    size of each bin.

    Args:
        score: score or probability; any shape; entries that are not finite (padding) are ignored.
        correct: same shape, truthy if the prediction is correct.
    """
    score_n = np.asarray(score, dtype=np.float64).ravel()
    correct_n = np.asarray(correct).astype(bool).ravel()
    order = np.argsort(np.where(np.isfinite(score_n), score_n, np.inf), kind="stable")[
        : np.isfinite(score_n).sum()
    ]
    parts = np.array_split(order, min(num_bins, len(order))) if len(order) else []
    return [
        (
            float(score_n[part[-1]]),
            float(score_n[part].mean()),
            float(correct_n[part].mean()),
            len(part),
        )
        for part in parts
    ]


def _curves(history: Records, rounds: Records) -> list[Chart | None]:
    """Charts of validation metrics by time, and of loss, learning rates, gradient norm and pool by
    step.
    """
    rates = sorted({key for record in history for key in record if key.startswith("lr_")})
    validation = _lines(
        validation_records(rounds), "minutes", {name: name for name in VALIDATION}, dots=True
    )
    by_step: list[tuple[str, dict[str, str], str]] = [
        ("Loss", {"loss": "loss", "loss_de": "dual encoder", "loss_clf": "classifier"}, "loss"),
        ("Learning rates", {name: name.removeprefix("lr_") for name in rates}, "learning rate"),
        ("Gradient norm before clipping", {"grad_norm": "gradient norm"}, "norm"),
        ("Labels in the pool", {"pool_size": "labels in the pool"}, "labels"),
        (
            "Positives a query in the pool",
            {"positives_per_query": "positives a query"},
            "positives, mean",
        ),
    ]
    return [
        line_chart(
            "Validation split, percent",
            validation,
            "minutes of training and refreshes",
            "percent",
            x_from_zero=True,
        ),
        *(
            line_chart(caption, _lines(history, "step", names), "step", label, y_from_zero=True)
            for caption, names, label in by_step
        ),
    ]


def _lines(records: Records, x: str, names: Mapping[str, str], dots: bool = False) -> list[Line]:
    """A line for each of `names` (key -> displayed name) over the records' key `x`; lines without
    finite values are omitted.
    """
    values = {
        key: [math.nan if record.get(key) is None else float(record[key]) for record in records]
        for key in (x, *names)
    }
    drawn = [Line(shown, values[x], values[name], dots) for name, shown in names.items()]
    return [line for line in drawn if any(math.isfinite(y) for y in line.y)]


def _rounds(rounds: Records) -> dict[str, Any]:
    """The template's variables on costs: a chart of the seconds of each round's parts,
    and totals.
    """
    parts = round_parts(rounds)
    groups = [str(r.get("round", i + 1)) for i, r in enumerate(rounds)]
    total: dict[str, float | None] = {
        f"{name}, seconds": sum(column) for name, column in parts.items()
    }
    for key, shown in MEMORY.items():
        total[shown] = (
            max((finite(r.get("memory") or {}, key) for r in rounds), default=0.0) or None
        )
    return {
        "cost_chart": bar_chart(
            "Seconds a round", groups, list(parts.items()), "seconds", x_label="round", stacked=True
        ),
        "cost_totals": {
            name: round(value, 2) for name, value in total.items() if value is not None
        },
    }


def plots_csv(
    history: Records, rounds: Records, metrics: Mapping[str, float], out_dir: str | os.PathLike[str]
) -> list[Path]:
    """Write the tables that `dvc plots` draws; "@" in a name becomes "_at_", missing numbers are
    empty cells.

    training.csv: a row per logged step. validation.csv: a row per round with validation metrics,
    and the `seconds` of training and refreshes until then. at_k.csv: k, precision, recall, ndcg.
    groups.csv: a row per frequency group with its metrics. A table without rows has only its
    header.

    Args:
        history, rounds: lines of history.jsonl and rounds.jsonl.
        metrics: of the test split, "P@1", "tail/R@10", ...
    """
    import pandas as pd

    validation = validation_records(rounds)
    measured = sorted({name for row in validation for name in row if "/" not in name} - set(_PLACE))
    at_k = [
        {
            "k": k,
            "precision": metrics.get(f"P@{k}"),
            "recall": metrics.get(f"R@{k}"),
            "ndcg": metrics.get(f"nDCG@{k}"),
        }
        for k in DEFAULT_KS
        if f"P@{k}" in metrics
    ]
    groups = [{"group": group} | of_group for group, of_group in by_group(metrics).items()]
    files: dict[str, tuple[Sequence[str], Records]] = {
        "training.csv": (
            [name for name in TRAINING if any(name in row for row in history)] or TRAINING[:1],
            history,
        ),
        "validation.csv": ([*_PLACE[:3], *measured], validation),
        "at_k.csv": (["k", "precision", "recall", "ndcg"], at_k),
        "groups.csv": (
            list(dict.fromkeys(["group", *(key for row in groups for key in row)])),
            groups,
        ),
    }
    for name, (columns, rows) in files.items():
        frame = pd.DataFrame(list(rows), columns=list(columns)).replace(
            [math.inf, -math.inf], math.nan
        )
        heads = [column.replace("@", "_at_") for column in columns]
        text = frame.to_csv(index=False, header=heads, float_format="%.6g", lineterminator="\n")
        write_bytes_atomic(Path(out_dir) / name, text.encode())
    return [Path(out_dir) / name for name in files]


def by_group(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Frequency group -> its metrics, without the group in their names; groups without metrics are
    omitted.
    """
    groups = {
        g: {key[len(g) + 1 :]: value for key, value in metrics.items() if key.startswith(f"{g}/")}
        for g in GROUPS
    }
    return {group: of_group for group, of_group in groups.items() if of_group}


def validation_records(rounds: Records) -> list[dict[str, Any]]:
    """A record for each measured round: "epoch", "round", the validation metrics, and "seconds" and
    "minutes" of training and refreshes from the start to the round's end, without validation."""
    seconds = 0.0
    records = []
    for r in rounds:
        seconds += finite(r, "train_seconds") + finite(r.get("refresh") or {}, "refresh_seconds")
        if r.get("validation"):
            place = (r.get("epoch"), r.get("round"), seconds, seconds / 60)
            records.append(dict(zip(_PLACE, place, strict=True)) | r["validation"])
    return records


def round_parts(rounds: Records) -> dict[str, list[float]]:
    """Name of a part -> its seconds in each round: the parts of the refresh (keys that end in
    "_seconds"; the whole refresh if it has no parts), then "train" and "validation"."""
    refreshes = [r.get("refresh") or {} for r in rounds]
    keys = dict.fromkeys(
        key for refresh in refreshes for key in refresh if key.endswith("_seconds")
    )
    keys.pop("work_seconds", None)  # another measure of the same time
    if len(keys) > 1:
        keys.pop("refresh_seconds", None)
    parts = {
        key.removesuffix("_seconds").replace("_", " "): [finite(r, key) for r in refreshes]
        for key in keys
    }
    for name in ("train", "validation"):
        if any(f"{name}_seconds" in r for r in rounds):
            parts[name] = [finite(r, f"{name}_seconds") for r in rounds]
    return parts


def finite(row: Mapping[str, Any], name: str) -> float:
    """A figure of a record; 0 if it is missing or not finite."""
    value = row.get(name)
    return float(value) if value is not None and math.isfinite(value) else 0.0
