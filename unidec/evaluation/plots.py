"""Figures of a run as CSV files, which DVC draws, and what pages count from the records of training."""

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

    training.csv: a row a logged step. validation.csv: a row a round with validation metrics, `seconds` of training and
    refreshes until then. at_k.csv: k, precision, recall, ndcg. groups.csv: a row a frequency group with its metrics. A
    table without rows has its header only.

    Args:
        history, rounds: lines of history.jsonl and rounds.jsonl.
        metrics: of the test split, "P@1", "tail/R@10", ...

    Returns:
        the files.
    """
    validation = validation_records(rounds)
    measured = sorted({name for row in validation for name in row} - {"epoch", "round", "seconds", "minutes"})
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
    for name, (columns, rows) in files.items():
        write_bytes_atomic(Path(out_dir) / name, _csv(columns, rows).encode())
    return [Path(out_dir) / name for name in files]


def validation_records(rounds: Records) -> list[dict[str, Any]]:
    """A record a measured round: "epoch", "round", the validation metrics, and "seconds" and "minutes" of training and
    refreshes from the start until its end, without measuring.
    """
    seconds, found = 0.0, []
    for r in rounds:
        known = with_refresh(r)
        if "train_seconds" in known:
            seconds += finite(known, "train_seconds") + finite(known, "refresh_seconds")
        else:
            seconds += finite(known, "seconds")
        if isinstance(r.get("validation"), Mapping):
            place = {"epoch": r.get("epoch"), "round": r.get("round"), "seconds": seconds, "minutes": seconds / 60}
            found.append(place | r["validation"])
    return found


def refresh_parts(rounds: Records) -> tuple[list[str], list[list[float]]]:
    """Seconds of each part of each round: the parts' names, and a row of values for each round.

    The parts of a refresh are its keys that end in "_seconds"; what they leave of `refresh_seconds` is "other refresh".
    Then come "train" and "validation". Other seconds of a round are sums over rounds, or run beside the training.
    """
    rounds = [with_refresh(r) for r in rounds]
    ends = [key for r in rounds for key in r if key.endswith("_seconds")]
    parts = [key for key in dict.fromkeys(ends) if key not in ("refresh_seconds", *_NO_PARTS)]
    columns = {part.removesuffix("_seconds").replace("_", " "): [finite(r, part) for r in rounds] for part in parts}
    rest = [max(0.0, finite(r, "refresh_seconds") - sum(finite(r, p) for p in parts)) for r in rounds]
    if any(second > 0.05 for second in rest):
        columns["other refresh" if parts else "refresh"] = rest
    for name in AFTER:
        if f"{name}_seconds" in ends:
            columns[name] = [finite(r, f"{name}_seconds") for r in rounds]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def with_refresh(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A round's record with the figures of its refresh beside its own."""
    return {**record, **record["refresh"]} if isinstance(record.get("refresh"), Mapping) else record


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
