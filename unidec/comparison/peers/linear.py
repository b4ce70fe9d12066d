"""What the scripts of linear peers share: their task, eight trials on the validation split, what is
left behind.

A script imports this file as it lies beside it, and nothing of unidec.

Legend: n queries, L labels, F features.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy.sparse import csr_matrix, load_npz, save_npz

AT = 5  # of the nDCG that chooses


class Model(Protocol):
    """A trained model."""

    num_parameters: int

    def predict(self, x_nF: csr_matrix) -> csr_matrix:
        """Scores [n, L] of each query's best labels."""


@dataclass(frozen=True)
class Task:
    """Features of texts and relevance of labels, and what the comparison's cells have in common.

    Attributes:
        x_train, x_labels, x_test: csr float32 [n, F]. y_train: csr float32 [n, L].
        validation: the same of the validation split, x and y; None where there is none.
        width: labels to predict. threads, seed: of the training.
    """

    x_train: csr_matrix
    y_train: csr_matrix
    x_labels: csr_matrix
    x_test: csr_matrix
    validation: tuple[csr_matrix, csr_matrix] | None
    width: int
    threads: int
    seed: int


def main(
    train: Callable[[Task, Mapping[str, Any]], Model],
    trials: Sequence[Mapping[str, Any]],
    version: str,
) -> None:
    """Train, predict the test split: `SCRIPT TASK OUT SETTINGS`
    (unidec/comparison/peers/running.py).

    Args:
        train: with some settings. trials: settings; of several the best on the validation split is
        kept.
        version: of the package.
    """
    folder = Path(sys.argv[1])
    out = Path(sys.argv[2])
    given = json.loads(sys.argv[3])
    task = _read(folder, given)
    if task.validation is None:
        trials = trials[:1]
    best = None
    chosen = -1.0
    for settings in trials:
        start = time.perf_counter()
        model = train(task, settings)
        # of this training: trials are not part of a system's costs
        seconds = time.perf_counter() - start
        quality = (
            ndcg(model.predict(task.validation[0]), task.validation[1]) if task.validation else 0.0
        )
        print(
            f"{dict(settings) or 'defaults'}: nDCG@{AT} {100 * quality:.2f}, {seconds:.1f} s",
            flush=True,
        )
        if quality > chosen:
            best = model
            chosen = quality
            kept = settings
            train_seconds = seconds
    assert best is not None
    start = time.perf_counter()
    predicted = best.predict(task.x_test)
    facts = {
        "train_seconds": train_seconds,
        "search_ms": 1000 * (time.perf_counter() - start) / task.x_test.shape[0],
        "parameters": best.num_parameters,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "version": version + "".join(f", {name} {value}" for name, value in kept.items()),
    }
    save_npz(out / "test.npz", csr_matrix(predicted))
    (out / "facts.json").write_text(json.dumps(facts))


def _read(folder: Path, given: Mapping[str, Any]) -> Task:
    def matrix(name: str) -> csr_matrix:
        return load_npz(folder / f"{name}.npz").astype(np.float32)

    x_train, y_train, x_labels, x_test = (
        matrix(name) for name in ("X.train", "Y.train", "X.labels", "X.test")
    )
    has_validation = (folder / "X.validation.npz").is_file()
    validation = (matrix("X.validation"), matrix("Y.validation")) if has_validation else None
    return Task(
        x_train,
        y_train,
        x_labels,
        x_test,
        validation,
        given["width"],
        given["threads"],
        given["seed"],
    )


def ndcg(score_nL: csr_matrix, relevant_nL: csr_matrix) -> float:
    """nDCG of the first `AT` labels, the mean over queries that have a relevant label; 0 to 1."""
    row_N = np.repeat(np.arange(score_nL.shape[0]), np.diff(score_nL.indptr))
    order = np.lexsort((-score_nL.data, row_N))
    row_N = row_N[order]
    label_N = score_nL.indices[order]
    rank_N = np.arange(len(row_N)) - np.searchsorted(row_N, row_N)
    first = rank_N < AT
    relevant_row, relevant_label = relevant_nL.nonzero()
    num_labels = relevant_nL.shape[1]
    hit_N = np.isin(
        row_N[first] * num_labels + label_N[first], relevant_row * num_labels + relevant_label
    )
    gain = np.bincount(
        row_N[first], hit_N / np.log2(2 + rank_N[first]), minlength=score_nL.shape[0]
    )
    count = np.diff(relevant_nL.indptr)
    ideal = np.concatenate([[0], np.cumsum(1 / np.log2(2 + np.arange(AT)))])[np.minimum(count, AT)]
    return float((gain[count > 0] / ideal[count > 0]).mean()) if (count > 0).any() else 0.0
