"""Sections of a report about training: curves, pools, rounds, what their refreshes found and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unidec.evaluation.figures import Chart, Line, bar_chart, line_chart
from unidec.evaluation.page import Table
from unidec.evaluation.plots import AFTER, finite, refresh_parts, validation_records, with_refresh

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
Records = Sequence[Mapping[str, Any]]


def context(history: Records, rounds: Records, study: Mapping[str, Any]) -> dict[str, Any]:
    """What the template of the report shows about training."""
    return {"curves": curves(history, rounds), **_pools(history, study), **_costs(rounds)}


def curves(history: Records, rounds: Records) -> list[Chart | None]:
    """Loss, validation by epoch and by time, learning rates, gradient norm, speed."""
    rates = sorted({key for record in history for key in record if key.startswith("lr_")})
    measured, names = validation_records(rounds), {name: name for name in VALIDATION}
    losses = {"loss": "loss", "loss_de": "dual encoder", "loss_clf": "classifier"}
    by_step: tuple[tuple[str, dict[str, str], str], ...] = (
        ("Learning rates", {name: name.removeprefix("lr_") for name in rates}, "learning rate"),
        ("Gradient norm before clipping", {"grad_norm": "gradient norm"}, "norm"),
        ("Speed", {"texts_per_s": "texts a second"}, "texts a second"),
    )
    return [
        line_chart("Loss", lines(history, "step", losses), "step", "loss", y_from_zero=True),
        line_chart("Validation split by epoch, percent", lines(measured, "epoch", names, True), "epoch", "percent"),
        line_chart("Validation split by wall time, percent", lines(measured, "minutes", names, True),
                   "minutes of training and refreshes", "percent", x_from_zero=True),
        *(line_chart(caption, lines(history, "step", shown), "step", label, y_from_zero=True)
          for caption, shown, label in by_step),
    ]  # fmt: skip


def lines(records: Records, x: str, names: Mapping[str, str], dots: bool = False) -> list[Line]:
    """A line for each of `names` ({key: shown}) over the records' key `x`; those without finite values are left out."""
    kept = [record for record in records if record.get(x) is not None]
    drawn = [Line(shown, _column(kept, x), _column(kept, name), dots) for name, shown in names.items()]
    return [line for line in drawn if any(math.isfinite(y) for y in line.y)]


def _column(records: Records, name: str) -> list[float]:
    return [float(value) if (value := record.get(name)) is not None else math.nan for record in records]


def _pools(history: Records, study: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of pools and positives a query as training went on, and what `unidec.evaluation.pools` found."""
    charts = [
        line_chart(caption, lines(history, "step", {key: shown}), "step", label, y_from_zero=True)
        for caption, key, shown, label in (
            ("Labels in the pool", "pool_size", "labels in the pool", "labels"),
            ("Positives a query in the pool", "positives_per_query", "positives a query", "positives, mean"),
        )
    ]
    if not study:
        return {"pool_charts": charts, "study": {}, "pools": None}
    counts, grid, own = list(study["histogram"]), study["grid"], (study["beta"], study["eta"])
    shown = max((i for i, count in enumerate(counts) if count), default=0) + 1
    names = [f"{i}+" if i == len(counts) - 1 else str(i) for i in range(shown)]
    shares = [100.0 * count / max(sum(counts), 1) for count in counts[:shown]]
    by_eta = [
        Line(f"eta {eta}", [r["pool_size"] for r in rows], [r["positives"] for r in rows], dots=True)
        for eta in sorted({row["eta"] for row in grid})
        if (rows := [row for row in grid if row["eta"] == eta])
    ]
    charts += [
        bar_chart("Queries by their true labels in the pool, this run's setting", names, [("queries", shares)],
                  "queries, percent", x_label="true labels of the query in the pool"),
        line_chart("Positives a query for other settings of beta and eta", by_eta, "labels in the pool, mean",
                   "positives a query, mean", y_from_zero=True),
    ]  # fmt: skip
    rows = [[f"beta {r['beta']}, eta {r['eta']}", r["pool_size"], r["positives"]] for r in grid]
    kinds = ["base" if (r["beta"], r["eta"]) == own else "" for r in grid]
    table = Table(["setting", "labels in the pool", "positives a query"], rows, kinds=kinds)
    return {"pool_charts": charts, "study": study, "pools": table}


def _costs(rounds: Records) -> dict[str, Any]:
    """Seconds of each round's parts, what refreshes found, totals."""
    parts, values = refresh_parts(rounds)
    if not parts:
        return {"cost_charts": [], "cost_totals": {}, "costs": None, "found": None}
    groups = [str(r.get("round", i + 1)) for i, r in enumerate(rounds)]
    bars = [(name, [row[i] for row in values]) for i, name in enumerate(parts)]
    refresh = [(name, column) for name, column in bars if name not in AFTER]
    steps = [finite(r, "steps_per_s") for r in rounds if r.get("steps_per_s")]
    total = {
        "training steps, seconds": sum(sum(column) for name, column in bars if name == "train"),
        "refreshes, seconds": sum(sum(column) for _, column in refresh),
        "validation, seconds": sum(finite(r, "validation_seconds") for r in rounds) or None,
        "steps a second": sum(steps) / len(steps) if steps else None,
        **_memory(rounds),
    }
    rows: list[list[Any]] = [[group, *row, sum(row)] for group, row in zip(groups, values, strict=True)]
    rows.append(["all", *(sum(column) for _, column in bars), sum(sum(row) for row in values)])
    return {
        "cost_charts": [
            bar_chart("Seconds a round", groups, bars, "seconds", x_label="round", stacked=True),
            bar_chart("Of these, refresh", groups, refresh, "seconds", x_label="round", stacked=True),
        ],
        "cost_totals": {name: round(value, 2) for name, value in total.items() if value is not None},
        "costs": Table(["round", *parts, "sum"], rows, kinds=[*("" for _ in groups), "base"]),
        "found": _found(rounds, groups),
    }


def _found(rounds: Records, groups: Sequence[str]) -> Table:
    """What clustering and mining found, a row a round."""
    merged = [with_refresh(r) for r in rounds]
    used = [key for key in FOUND if any(r.get(key) is not None for r in merged)]

    def shown(record: Mapping[str, Any], key: str) -> Any:
        value = record.get(key)
        return 100.0 * value if key in SHARES and value is not None else value

    rows = [[group, *(shown(r, key) for key in used)] for group, r in zip(groups, merged, strict=True)]
    return Table(["round", *(FOUND[key] for key in used)], rows if used else [])


def _memory(rounds: Records) -> dict[str, float]:
    seen = [r["memory"] for r in rounds if isinstance(r.get("memory"), Mapping)]
    found = {shown: [m[key] for m in seen if m.get(key) is not None] for key, shown in MEMORY.items()}
    return {shown: max(values) for shown, values in found.items() if values}
