"""Sections of a report about training: curves, pools, rounds and what their refreshes found and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unidec.evaluation.page import charts, facts, figure, folded, note, table
from unidec.evaluation.plots import AFTER, finite, refresh_parts, wall_seconds
from unidec.evaluation.svg import Line, bar_chart, line_chart

VALIDATION = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")
FOUND = {
    "mine_positive_first": "first label found is a true one, percent of queries",
    "mine_positive_found": "a true label is within the list, percent of queries",
}
Records = Sequence[Mapping[str, Any]]


def curves(history: Records, rounds: Records) -> str:
    """Loss, validation by epoch and by time, learning rates, gradient norm, speed."""
    losses = lines(history, "step", {"loss": "loss", "loss_de": "dual encoder", "loss_clf": "classifier"})
    rates = lines(history, "step", {name: name.removeprefix("lr_") for name in _keys(history, "lr_")})
    norm = lines(history, "step", {"grad_norm": "gradient norm"})
    speed = lines(history, "step", {"texts_per_s": "texts a second"})
    measured = validation_by_time(rounds)
    names = {name: name for name in VALIDATION}
    by_epoch = lines(measured, "epoch", names, dots=True)
    by_time = lines(measured, "minutes", names, dots=True)
    return charts(
        figure("Loss", line_chart(losses, "step", "loss", y_from_zero=True)),
        figure("Validation split by epoch, percent", line_chart(by_epoch, "epoch", "percent")),
        figure(
            "Validation split by wall time, percent",
            line_chart(by_time, "minutes of training and refreshes", "percent", x_from_zero=True),
        ),
        figure("Learning rates", line_chart(rates, "step", "learning rate", y_from_zero=True)),
        figure("Gradient norm before clipping", line_chart(norm, "step", "norm", y_from_zero=True)),
        figure("Speed", line_chart(speed, "step", "texts a second", y_from_zero=True)),
    )


def validation_by_time(rounds: Records) -> list[dict[str, Any]]:
    """A record a measured round: "epoch", "minutes" (training and refreshes until then) and the validation metrics."""
    seconds = wall_seconds(rounds)
    return [
        {"epoch": r.get("epoch"), "minutes": second / 60, **r["validation"]}
        for r, second in zip(rounds, seconds, strict=True)
        if isinstance(r.get("validation"), Mapping)
    ]


def lines(records: Records, x: str, names: Mapping[str, str], dots: bool = False) -> list[Line]:
    """A line for each of `names` ({key: shown}) over the records' key `x`; those without a finite value are left
    out.
    """
    kept = [record for record in records if record.get(x) is not None]
    steps = _column(kept, x)
    drawn = [Line(shown, steps, _column(kept, name), dots=dots) for name, shown in names.items()]
    return [line for line in drawn if any(math.isfinite(y) for y in line.y)]


def pools(history: Records, study: Mapping[str, Any]) -> str:
    """Sizes of pools and positives a query as training went on, and what `unidec.evaluation.pools` found."""
    size = lines(history, "step", {"pool_size": "labels in the pool"})
    positives = lines(history, "step", {"positives_per_query": "positives a query"})
    over_time = (
        figure("Labels in the pool", line_chart(size, "step", "labels", y_from_zero=True)),
        figure("Positives a query in the pool", line_chart(positives, "step", "positives, mean", y_from_zero=True)),
    )
    drawn, about = _study(study)
    return charts(*over_time, *drawn) + about


def _study(study: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Figures, and what is said of them."""
    if not study:
        return (), ""
    counts: list[int] = list(study["histogram"])
    total = max(sum(counts), 1)
    last = len(counts) - 1
    shown = max((i for i, count in enumerate(counts) if count), default=0) + 1
    names = [f"{i}+" if i == last else str(i) for i in range(shown)]
    histogram = bar_chart(
        names, [("queries", [100.0 * count / total for count in counts[:shown]])], "queries, percent",
        x_label="true labels of the query in the pool",
    )  # fmt: skip
    etas = sorted({row["eta"] for row in study["grid"]})
    by_eta = [
        Line(f"eta {eta}", [r["pool_size"] for r in rows], [r["positives"] for r in rows], dots=True)
        for eta in etas
        if (rows := [row for row in study["grid"] if row["eta"] == eta])
    ]
    scatter = line_chart(by_eta, "labels in the pool, mean", "positives a query, mean", y_from_zero=True)
    own = (study["beta"], study["eta"])
    rows = [[f"beta {r['beta']}, eta {r['eta']}", r["pool_size"], r["positives"]] for r in study["grid"]]
    kinds = ["base" if (r["beta"], r["eta"]) == own else "" for r in study["grid"]]
    limit = f"at most {study['size']:,} labels a pool" if study["size"] else "no limit on a pool's size"
    about = (
        f"Drawn from {study['batches']} batches of the last round, {study['queries']:,.0f} queries each on average, "
        f"{limit}. The run samples beta {own[0]} positives and eta {own[1]} hard negatives a query; "
        f"{study['share']:.1f} % of its queries' true labels are in the pool. A line joins settings of one eta, beta "
        f"rising from left to right: {', '.join(map(str, sorted({row['beta'] for row in study['grid']})))}."
    )
    as_table = table(["setting", "labels in the pool", "positives a query"], rows, kinds=kinds)
    drawn = (
        figure("Queries by their true labels in the pool, this run's setting", histogram),
        figure("Positives a query for other settings of beta and eta", scatter),
    )
    return drawn, note(about) + folded("pools, as a table", as_table)


def costs(rounds: Records) -> str:
    """Seconds of each round's parts, what refreshes found, totals."""
    parts, values = refresh_parts(rounds)
    if not parts:
        return ""
    groups = [str(r.get("round", i + 1)) for i, r in enumerate(rounds)]
    bars = [(name, [row[i] for row in values]) for i, name in enumerate(parts)]
    refresh = [(name, column) for name, column in bars if name not in AFTER]
    rows: list[list[Any]] = [[group, *row, sum(row)] for group, row in zip(groups, values, strict=True)]
    rows.append(["all", *(sum(column) for _, column in bars), sum(sum(row) for row in values)])
    kinds = [*("" for _ in groups), "base"]
    total = {
        "training steps, seconds": sum(sum(column) for name, column in bars if name == "train"),
        "refreshes, seconds": sum(sum(column) for _, column in refresh),
        "validation, seconds": sum(finite(r, "validation_seconds") for r in rounds) or None,
        "steps a second": _mean([finite(r, "steps_per_s") for r in rounds if r.get("steps_per_s")]),
        **_memory(rounds),
    }
    return (
        charts(
            figure("Seconds a round", bar_chart(groups, bars, "seconds", x_label="round", stacked=True)),
            figure("Of these, refresh", bar_chart(groups, refresh, "seconds", x_label="round", stacked=True)),
        )
        + facts({name: round(value, 2) for name, value in total.items() if value is not None})
        + folded("seconds, as a table", table(["round", *parts, "sum"], rows, kinds=kinds))
        + _found(rounds, groups)
    )


def _found(rounds: Records, groups: Sequence[str]) -> str:
    """What clustering and mining found, a row a round."""
    merged = [{**r, **r["refresh"]} if isinstance(r.get("refresh"), Mapping) else r for r in rounds]
    columns = {"clusters": "clusters", "cluster_cosine": "mean cosine to the cluster's centre",
               "mine_negative_score": "mean score of mined negatives",
               "mine_positive_rank": "mean rank of a true label", **FOUND}  # fmt: skip
    used = [key for key in columns if any(r.get(key) is not None for r in merged)]
    if not used:
        return ""
    rows = [
        [group, *(_percent(r.get(key)) if key in FOUND else r.get(key) for key in used)]
        for group, r in zip(groups, merged, strict=True)
    ]
    about = "Each line is the refresh before the round: the model as it was then, on the training queries."
    return folded("what the refreshes found", table(["round", *(columns[key] for key in used)], rows) + note(about))


def _memory(rounds: Records) -> dict[str, float]:
    """Peak memory, GiB."""
    seen = [r["memory"] for r in rounds if isinstance(r.get("memory"), Mapping)]
    names = {"host_used_gib": "peak memory, GiB", "device_used_gib": "peak memory of the GPU, GiB"}
    found = {shown: [m[key] for m in seen if m.get(key) is not None] for key, shown in names.items()}
    return {shown: max(values) for shown, values in found.items() if values}


def _percent(share: Any) -> Any:
    return 100.0 * share if isinstance(share, int | float) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _column(records: Records, name: str) -> list[float]:
    return [float(value) if (value := record.get(name)) is not None else math.nan for record in records]


def _keys(records: Records, prefix: str) -> list[str]:
    return sorted({key for record in records for key in record if key.startswith(prefix)})
