"""Figures of a run as CSV files (DVC draws them) and as PNG files (for the tracking server)."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unidec.data.storage import write_bytes_atomic

Records = Sequence[Mapping[str, Any]]

TRAINING = (
    "step", "epoch", "seconds", "loss", "loss_de", "loss_clf", "lr_heads", "lr_clf", "lr_encoder", "lr_bag",
    "grad_norm", "pool_size", "positives_per_query", "texts_per_s", "tokens_per_s",
)  # fmt: skip
AT_K = (1, 3, 5, 10, 100)
GROUPS = ("tail", "torso", "head")
AFTER = ("train", "validation")  # parts of a round that follow its refresh
_NO_PARTS = ("train_seconds", "validation_seconds", "trained_seconds", "checkpoint_seconds")  # of the refresh


def plots_csv(
    history: Records, rounds: Records, metrics: Mapping[str, float], out_dir: str | os.PathLike[str]
) -> list[Path]:
    """Write the tables that `dvc plots` draws; "@" in a name becomes "_at_", a missing number an empty cell.

    training.csv: a row a logged step. validation.csv: a row a round with validation metrics,
    `seconds` of training and refreshes until then. at_k.csv: k, precision,
    recall, ndcg. groups.csv: a row a frequency group with its metrics. A table without rows has its header only.

    Args:
        history, rounds: lines of history.jsonl and rounds.jsonl.
        metrics: of the test split, "P@1", "tail/R@10", ...
        out_dir: made if it is not there.

    Returns:
        the files.
    """
    validation = [
        {"epoch": r.get("epoch"), "round": r.get("round"), "seconds": second, **r["validation"]}
        for r, second in zip(rounds, wall_seconds(rounds), strict=True)
        if isinstance(r.get("validation"), Mapping)
    ]
    measured = sorted({name for row in validation for name in row} - {"epoch", "round", "seconds"})
    at_k = [
        {"k": k, "precision": metrics.get(f"P@{k}"), "recall": metrics.get(f"R@{k}"), "ndcg": metrics.get(f"nDCG@{k}")}
        for k in AT_K
        if f"P@{k}" in metrics
    ]
    groups = [
        {"group": g} | {key.split("/", 1)[1]: value for key, value in metrics.items() if key.startswith(f"{g}/")}
        for g in GROUPS
    ]
    groups = [row for row in groups if len(row) > 1]
    of_group = [name for name in dict.fromkeys(key for row in groups for key in row) if name != "group"]
    files = {
        "training.csv": ([name for name in TRAINING if any(name in row for row in history)] or TRAINING[:1], history),
        "validation.csv": (["epoch", "round", "seconds", *(n for n in measured if "/" not in n)], validation),
        "at_k.csv": (["k", "precision", "recall", "ndcg"], at_k),
        "groups.csv": (["group", *of_group], groups),
    }
    written = []
    for name, (columns, rows) in files.items():
        path = Path(out_dir) / name
        write_bytes_atomic(path, _csv(columns, rows).encode())
        written.append(path)
    return written


def save_pngs(
    history: Records, rounds: Records, metrics: Mapping[str, float], out_dir: str | os.PathLike[str]
) -> list[Path]:
    """Draw training.png, validation.png, groups.png and rounds.png, those for which there are figures.

    Args:
        as `plots_csv`.

    Returns:
        the files.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def save(name: str, draw: Any) -> None:
        figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        write_bytes_atomic(Path(out_dir) / name, buffer.getvalue())
        written.append(Path(out_dir) / name)

    written: list[Path] = []
    losses = [name for name in ("loss", "loss_de", "loss_clf") if any(name in row for row in history)]
    if losses:
        save("training.png", lambda axes: _draw_lines(axes, history, "step", losses, "loss"))
    validation = [{**r, **r["validation"]} for r in rounds if isinstance(r.get("validation"), Mapping)]
    names = [n for n in ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100") if any(n in row for row in validation)]
    if names:
        save("validation.png", lambda axes: _draw_lines(axes, validation, "epoch", names, "percent", marker="o"))
    groups = [g for g in GROUPS if f"{g}/R@10" in metrics]
    if groups:
        save("groups.png", lambda axes: _draw_groups(axes, groups, metrics))
    parts, values = refresh_parts(rounds)
    if parts:
        save("rounds.png", lambda axes: _draw_stack(axes, parts, values))
    return written


def refresh_parts(rounds: Records) -> tuple[list[str], list[list[float]]]:
    """Seconds of each part of each round: the parts' names, and a row of values for each round.

    The parts of a refresh are its keys that end in "_seconds"; what they leave of `refresh_seconds` is "other refresh".
    Then come "train" and "validation". Other seconds of a round are sums over rounds, or run beside the training.
    """
    rounds = [{**r, **r["refresh"]} if isinstance(r.get("refresh"), Mapping) else r for r in rounds]
    ends = [key for r in rounds for key in r if key.endswith("_seconds")]
    parts = [key for key in dict.fromkeys(ends) if key not in ("refresh_seconds", *_NO_PARTS)]
    rest = [max(0.0, finite(r, "refresh_seconds") - sum(finite(r, p) for p in parts)) for r in rounds]
    names = [part.removesuffix("_seconds").replace("_", " ") for part in parts]
    values = [[finite(r, part) for part in parts] for r in rounds]
    if any(second > 0.05 for second in rest):
        names.append("other refresh" if parts else "refresh")
        values = [[*row, second] for row, second in zip(values, rest, strict=True)]
    for name in AFTER:
        if f"{name}_seconds" in ends:
            names.append(name)
            values = [[*row, finite(r, f"{name}_seconds")] for row, r in zip(values, rounds, strict=True)]
    return names, values


def wall_seconds(rounds: Records) -> list[float]:
    """Seconds of training and refreshes from the start until the end of each round, without measuring.

    A line that says neither counts with its `seconds`.
    """
    total, out = 0.0, []
    for r in rounds:
        known = {**r, **r["refresh"]} if isinstance(r.get("refresh"), Mapping) else r
        if "train_seconds" in known:
            total += finite(known, "train_seconds") + finite(known, "refresh_seconds")
        else:
            total += finite(known, "seconds")
        out.append(total)
    return out


def finite(row: Mapping[str, Any], name: str) -> float:
    """A record's figure, 0 where there is none."""
    value = row.get(name)
    return float(value) if value is not None and math.isfinite(value) else 0.0


def _csv(columns: Sequence[str], rows: Records) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name.replace("@", "_at_") for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _draw_lines(axes: Any, rows: Records, x: str, names: Sequence[str], label: str, **style: Any) -> None:
    for name in names:
        points = [(row[x], row[name]) for row in rows if row.get(name) is not None and row.get(x) is not None]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.5, **style)
    axes.set(xlabel=x, ylabel=label)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_groups(axes: Any, groups: Sequence[str], metrics: Mapping[str, float]) -> None:
    names = [name for name in ("P@1", "nDCG@5", "PSP@5", "R@10", "R@100") if f"{groups[0]}/{name}" in metrics]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [g + width * (i - (len(names) - 1) / 2) for g in range(len(groups))]
        axes.bar(places, [metrics.get(f"{group}/{name}", 0.0) for group in groups], width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("percent")
    axes.legend(frameon=False, ncols=len(names), fontsize=8)


def _draw_stack(axes: Any, parts: Sequence[str], values: Sequence[Sequence[float]]) -> None:
    base = [0.0] * len(values)
    for i, part in enumerate(parts):
        column = [row[i] for row in values]
        axes.bar(range(1, len(values) + 1), column, bottom=base, label=part)
        base = [a + b for a, b in zip(base, column, strict=True)]
    axes.set(xlabel="round", ylabel="seconds")
    axes.legend(frameon=False, fontsize=8)
