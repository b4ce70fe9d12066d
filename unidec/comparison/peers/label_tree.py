# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["napkinxc==0.7.2", "numpy==2.4.6", "scipy==1.17.1"]
#
# [[tool.uv.dependency-metadata]]
# name = "napkinxc"
# version = "0.7.2"
# requires-dist = ["numpy", "scipy"]
# ///
"""napkinXC's probabilistic label tree on a peer task (`linear.py`).

Logistic regression by LIBLINEAR in the nodes of a tree by hierarchical k-means over labels, exact
search; the best of `TRIALS`. Source: Jasinska-Kobus, Wydmuch, Dembczynski, Kuznetsov and
Busa-Fekete 2020, "Probabilistic label trees for extreme multi-label classification"."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from linear import Task, main
from napkinxc.models import PLT
from scipy.sparse import csr_matrix

TRIALS: tuple[dict[str, Any], ...] = (  # cost, loss, and form of the tree
    {},
    {"liblinear_c": 2.0},
    {"liblinear_c": 32.0},
    {"loss": "l2", "liblinear_c": 1.0},
    {"loss": "l2", "liblinear_c": 0.2},
    {"max_leaves": 400},
    {"arity": 16},
    {"ensemble": 3},
)
BYTES = 8  # of a stored weight and its feature


class LabelTree:
    """A trained tree, or several."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=".")
        self._task = task
        self._model = PLT(self._folder.name, seed=task.seed, threads=task.threads, **settings)
        relevant = task.y_train
        labels = np.split(relevant.indices, relevant.indptr[1:-1])
        labels_of = [own.tolist() for own in labels]
        self._model.fit(task.x_train, labels_of)
        self._model.load()
        files = Path(self._folder.name).rglob("weights.bin")
        size = sum(file.stat().st_size for file in files)
        self.num_parameters = size // BYTES

    def predict(self, x_nF: csr_matrix) -> csr_matrix:
        """Probabilities of each query's best labels."""
        found = self._model.predict_proba(x_nF, top_k=self._task.width)
        indptr = np.cumsum([0, *map(len, found)])
        labels = [label for own in found for label, _ in own]
        scores = [score for own in found for _, score in own]
        shape = (x_nF.shape[0], self._task.y_train.shape[1])
        return csr_matrix((scores, labels, indptr), shape=shape, dtype=np.float64)


if __name__ == "__main__":
    main(LabelTree, TRIALS, f"napkinxc {version('napkinxc')}")
