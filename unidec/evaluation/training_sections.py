"""Sections of a report about training: curves, pools, rounds, what their refreshes found and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Table
from unidec.evaluation.plots import AFTER, Records, finite, round_parts, validation_records

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


def context(history: Records, rounds: Records, study: Mapping[str, Any]) -> dict[str, Any]:
    """What the template of the report shows about training; study: of `unidec.evaluation.pools`."""
    return {"curves": _curves(history, rounds), **_pools(history, study), **_costs(rounds)}


def _curves(history: Records, rounds: Records) -> list[Chart | None]:
    """Loss, validation by epoch and by time, learning rates, gradient norm, speed."""
    rates = sorted({key for record in history for key in record if key.startswith("lr_")})
    measured = validation_records(rounds)
    validation = [
        line_chart(f"Validation split by {name}, percent", lines(measured, x, {n: n for n in VALIDATION}, True), label,
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
    return line_chart(caption, lines(history, "step", names), "step", label, y_from_zero=True)


def lines(records: Records, x: str, names: Mapping[str, str], dots: bool = False) -> list[Line]:
    """A line for each of `names` ({key: shown}) over the records' key `x`; those without finite values are left out."""
    kept = [record for record in records if record.get(x) is not None]
    drawn = [Line(shown, _column(kept, x), _column(kept, name), dots) for name, shown in names.items()]
    return [line for line in drawn if any(math.isfinite(y) for y in line.y)]


def _column(records: Records, name: str) -> list[float]:
    return [float(value) if (value := record.get(name)) is not None else math.nan for record in records]


def _pools(history: Records, study: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of pools and positives a query by step, and the study of other settings."""
    charts = [
        _by_step("Labels in the pool", history, {"pool_size": "labels in the pool"}, "labels"),
        _by_step("Positives a query in the pool", history, {"positives_per_query": "positives a query"},
                 "positives, mean"),
    ]  # fmt: skip
    if not study:
        return {"pool_charts": charts, "study": {}, "pools": None}
    counts, grid, own = list(study["histogram"]), study["grid"], (study["beta"], study["eta"])
    shown = max((i for i, count in enumerate(counts) if count), default=0) + 1
    names = [f"{i}+" if i == len(counts) - 1 else str(i) for i in range(shown)]
    shares = [100.0 * count / max(sum(counts), 1) for count in counts[:shown]]
    by_eta = [
        Line(f"eta {eta}", [row["pool_size"] for row in rows], [row["positives"] for row in rows], dots=True)
        for eta in sorted({row["eta"] for row in grid})
        if (rows := [row for row in grid if row["eta"] == eta])
    ]
    charts += [
        bar_chart("Queries by their true labels in the pool, this run's setting", names, [("queries", shares)],
                  "queries, percent", x_label="true labels of the query in the pool"),
        line_chart("Positives a query for other settings of beta and eta", by_eta, "labels in the pool, mean",
                   "positives a query, mean", y_from_zero=True),
    ]  # fmt: skip
    settings = {f"beta {row['beta']}, eta {row['eta']}": row for row in grid}
    kinds = ["base" if (row["beta"], row["eta"]) == own else "" for row in grid]
    heads = {"pool_size": "labels in the pool", "positives": "positives a query"}
    return {"pool_charts": charts, "study": study, "pools": Table.of("setting", settings, heads, kinds=kinds)}


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
