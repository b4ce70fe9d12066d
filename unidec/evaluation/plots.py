"""Figures of a run as CSV files, which DVC draws, and what pages count from the records of training."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unidec.data.storage import write_bytes_atomic
from unidec.metric_names import DEFAULT_KS, GROUPS

Records = Sequence[Mapping[str, Any]]

TRAINING = (
    "step", "epoch", "seconds", "loss", "loss_de", "loss_clf", "lr_heads", "lr_clf", "lr_encoder", "lr_bag",
    "grad_norm", "pool_size", "positives_per_query", "texts_per_s", "tokens_per_s",
)  # fmt: skip
_PLACE = ("epoch", "round", "seconds", "minutes")  # of a record of validation


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
    import pandas as pd

    validation = validation_records(rounds)
    measured = sorted({name for row in validation for name in row if "/" not in name} - set(_PLACE))
    at_k = [
        {"k": k, "precision": metrics.get(f"P@{k}"), "recall": metrics.get(f"R@{k}"), "ndcg": metrics.get(f"nDCG@{k}")}
        for k in DEFAULT_KS
        if f"P@{k}" in metrics
    ]
    groups = [{"group": group} | own for group, own in by_group(metrics).items()]
    files: dict[str, tuple[Sequence[str], Records]] = {
        "training.csv": ([name for name in TRAINING if any(name in row for row in history)] or TRAINING[:1], history),
        "validation.csv": ([*_PLACE[:3], *measured], validation),
        "at_k.csv": (["k", "precision", "recall", "ndcg"], at_k),
        "groups.csv": (list(dict.fromkeys(["group", *(key for row in groups for key in row)])), groups),
    }
    for name, (columns, rows) in files.items():
        frame = pd.DataFrame(list(rows), columns=list(columns)).replace([math.inf, -math.inf], math.nan)
        heads = [column.replace("@", "_at_") for column in columns]
        text = frame.to_csv(index=False, header=heads, float_format="%.6g", lineterminator="\n")
        write_bytes_atomic(Path(out_dir) / name, text.encode())
    return [Path(out_dir) / name for name in files]


def by_group(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The metrics of each frequency group that has any, without the group in their names."""
    found = {g: {key[len(g) + 1 :]: value for key, value in metrics.items() if key.startswith(f"{g}/")} for g in GROUPS}
    return {group: own for group, own in found.items() if own}


def validation_records(rounds: Records) -> list[dict[str, Any]]:
    """A record a measured round: "epoch", "round", the validation metrics, and "seconds" and "minutes" of training and
    refreshes from the start until its end, without measuring.
    """
    seconds, found = 0.0, []
    for r in rounds:
        seconds += finite(r, "train_seconds") + finite(r.get("refresh") or {}, "refresh_seconds")
        if r.get("validation"):
            place = (r.get("epoch"), r.get("round"), seconds, seconds / 60)
            found.append(dict(zip(_PLACE, place, strict=True)) | r["validation"])
    return found


def round_parts(rounds: Records) -> dict[str, list[float]]:
    """Seconds of each part of each round, by the part's name: those of its refresh (keys that end in "_seconds"; the
    whole where there are no others), then "train" and "validation".
    """
    refreshes = [r.get("refresh") or {} for r in rounds]
    keys = dict.fromkeys(key for refresh in refreshes for key in refresh if key.endswith("_seconds"))
    if len(keys) > 1:
        keys.pop("refresh_seconds", None)
    parts = {key.removesuffix("_seconds").replace("_", " "): [finite(r, key) for r in refreshes] for key in keys}
    for name in ("train", "validation"):
        if any(f"{name}_seconds" in r for r in rounds):
            parts[name] = [finite(r, f"{name}_seconds") for r in rounds]
    return parts


def finite(row: Mapping[str, Any], name: str) -> float:
    """A record's figure, 0 where there is none."""
    value = row.get(name)
    return float(value) if value is not None and math.isfinite(value) else 0.0
