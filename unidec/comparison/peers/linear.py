"""Shared by the scripts of linear peers: their task, and eight trials on the validation split.

A script imports this file from its own folder, and nothing of unidec.

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

AT = 5  # cutoff of the nDCG that chooses the trial


class Model(Protocol):
    """A trained model."""

    num_parameters: int

    def predict(self, x_nF: csr_matrix) -> csr_matrix:
        """Scores [n, L] of each query's best labels."""


@dataclass(frozen=True)
class Task:
    """Features of texts, relevance of labels, and settings shared by the comparison's cells.

    Attributes:
        x_train, x_labels, x_test: csr float32 [n, F]. y_train: csr float32 [n, L].
        validation: x and y of the validation split; None if there is none.
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
    """Train and predict the test split: `SCRIPT TASK OUT SETTINGS`
    (unidec/comparison/peers/running.py).

    Args:
        train: trains a model with some settings. trials: settings to try; the best on the
        validation split is kept.
        version: of the package.
    """
    folder, out = map(Path, sys.argv[1:3])
    task = _read(folder, json.loads(sys.argv[3]))
    tried = trials if task.validation else trials[:1]
    trained = (_trained(train, task, settings) for settings in tried)  # one in memory at a time
    best = max(trained, key=lambda trial: trial.quality)
    start = time.perf_counter()
    predicted = best.model.predict(task.x_test)
    seconds = time.perf_counter() - start
    chosen = [f"{name} {value}" for name, value in best.settings.items()]
    facts = {
        "train_seconds": best.seconds,
        "search_ms": 1000 * seconds / task.x_test.shape[0],
        "parameters": best.model.num_parameters,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "version": ", ".join([version, *chosen]),
    }
    save_npz(out / "test.npz", csr_matrix(predicted))
    (out / "facts.json").write_text(json.dumps(facts))


@dataclass(frozen=True)
class Trained:
    """A trial: its nDCG on the validation split, and the seconds of its training."""

    model: Model
    settings: Mapping[str, Any]
    quality: float
    seconds: float


def _trained(
    train: Callable[[Task, Mapping[str, Any]], Model], task: Task, settings: Mapping[str, Any]
) -> Trained:
    start = time.perf_counter()
    model = train(task, settings)
    # of this training: trials are not part of a system's costs
    seconds = time.perf_counter() - start
    quality = 0.0
    if task.validation:
        x_nF, y_nL = task.validation
        quality = ndcg(model.predict(x_nF), y_nL)
    print(
        f"{dict(settings) or 'defaults'}: nDCG@{AT} {100 * quality:.2f}, {seconds:.1f} s",
        flush=True,
    )
    return Trained(model, settings, quality, seconds)


def _read(folder: Path, given: Mapping[str, Any]) -> Task:
    matrices = {
        file.stem: load_npz(file).astype(np.float32)  # "X.train", "Y.train", ...
        for file in folder.glob("*.npz")
    }
    validation = None
    if "X.validation" in matrices:
        validation = (matrices["X.validation"], matrices["Y.validation"])
    return Task(
        x_train=matrices["X.train"],
        y_train=matrices["Y.train"],
        x_labels=matrices["X.labels"],
        x_test=matrices["X.test"],
        validation=validation,
        width=given["width"],
        threads=given["threads"],
        seed=given["seed"],
    )


def ndcg(score_nL: csr_matrix, relevant_nL: csr_matrix) -> float:
    """nDCG of the first `AT` labels, the mean over queries that have a relevant label; 0 to 1."""
    discounts = 1 / np.log2(2 + np.arange(AT))
    figures = []
    for row in np.flatnonzero(np.diff(relevant_nL.indptr)):
        scored = score_nL[[row]]
        relevant = relevant_nL[[row]].indices
        best = scored.indices[np.argsort(-scored.data, kind="stable")[:AT]]
        gain = (np.isin(best, relevant) * discounts[: len(best)]).sum()
        figures.append(gain / discounts[: len(relevant)].sum())
    return float(np.mean(figures)) if figures else 0.0
