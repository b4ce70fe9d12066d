"""Records of a training's rounds, and the tables that `dvc plots` draws."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unidec.data.storage import write_bytes_atomic
from unidec.evaluation.page import Records
from unidec.metric_names import DEFAULT_KS, GROUPS, without_at

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
_AT_K = {"precision": "P", "recall": "R", "ndcg": "nDCG"}


def plots_csv(
    history: Records, rounds: Records, metrics: Mapping[str, float], out_dir: str | os.PathLike[str]
) -> list[Path]:
    """Write the tables; "@" in a name becomes "_at_", missing numbers are empty cells.

    training.csv: a row per logged step. validation.csv: a row per round with validation metrics,
    and the `seconds` of training and refreshes until then. at_k.csv: k, precision, recall, ndcg.
    groups.csv: a row per frequency group with its metrics. A table without rows has only its
    header.

    Args:
        history, rounds: lines of history.jsonl and rounds.jsonl.
        metrics: of the test split, "P@1", "tail/R@10", ...
    """
    logged = [name for name in TRAINING if any(name in row for row in history)]
    validation = validation_records(rounds)
    places = ("epoch", "round", "seconds", "minutes")
    names = {name for row in validation for name in row if "/" not in name}
    columns = [*places[:3], *sorted(names - set(places))]
    at_k = [
        {"k": k, **{column: metrics.get(f"{kind}@{k}") for column, kind in _AT_K.items()}}
        for k in DEFAULT_KS
        if f"P@{k}" in metrics
    ]
    groups = [{"group": group, **own} for group, own in by_group(metrics).items()]
    of_groups = dict.fromkeys(itertools.chain(["group"], *groups))
    folder = Path(out_dir)
    return [
        _write(folder / "training.csv", logged or TRAINING[:1], history),
        _write(folder / "validation.csv", columns, validation),
        _write(folder / "at_k.csv", ["k", *_AT_K], at_k),
        _write(folder / "groups.csv", list(of_groups), groups),
    ]


def _write(path: Path, columns: Sequence[str], rows: Records) -> Path:
    import pandas as pd

    frame = pd.DataFrame(list(rows), columns=list(columns))
    frame = frame.replace([math.inf, -math.inf], math.nan)
    heads = [without_at(column) for column in columns]
    text = frame.to_csv(index=False, header=heads, float_format="%.6g", lineterminator="\n")
    write_bytes_atomic(path, text.encode())
    return path


def by_group(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Frequency group -> its metrics, without the group in their names; no empty groups."""
    groups: dict[str, dict[str, float]] = {}
    for group in GROUPS:
        for name, value in metrics.items():
            prefix, _, metric = name.rpartition("/")
            if prefix == group:
                groups.setdefault(group, {})[metric] = value
    return groups


def validation_records(rounds: Records) -> list[dict[str, Any]]:
    """A record for each measured round: "epoch", "round", the validation metrics, and "seconds" and
    "minutes" of training and refreshes from the start to the round's end, without validation.
    """
    seconds = 0.0
    records = []
    for line in rounds:
        seconds += line.get("train_seconds", 0.0)
        seconds += line.get("refresh", {}).get("refresh_seconds", 0.0)
        if "validation" in line:
            record = {
                "epoch": line.get("epoch"),
                "round": line.get("round"),
                "seconds": seconds,
                "minutes": seconds / 60,
            }
            records.append(record | line["validation"])
    return records


def round_parts(rounds: Records) -> dict[str, list[float]]:
    """Name of a part -> its seconds in each round: the parts of the refresh (keys that end in
    "_seconds"; the whole refresh if it has no parts), then "train" and "validation".
    """
    refreshes = [line.get("refresh", {}) for line in rounds]
    keys = [key for refresh in refreshes for key in refresh if key.endswith("_seconds")]
    # "work" is another measure of the same time
    parts = [key for key in dict.fromkeys(keys) if key not in ("work_seconds", "refresh_seconds")]
    if not parts and "refresh_seconds" in keys:
        parts = ["refresh_seconds"]
    found = {
        key.removesuffix("_seconds").replace("_", " "): [
            refresh.get(key, 0.0) for refresh in refreshes
        ]
        for key in parts
    }
    for name in ("train", "validation"):
        key = f"{name}_seconds"
        if any(key in line for line in rounds):
            found[name] = [line.get(key, 0.0) for line in rounds]
    return found
