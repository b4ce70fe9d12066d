# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["libpecos==1.2.8", "numpy==1.26.4", "scipy==1.11.4", "scikit-learn==1.5.2"]
#
# [[tool.uv.dependency-metadata]]
# name = "libpecos"
# version = "1.2.8"
# requires-dist = []
# ///
"""PECOS XR-Linear on a peer task (`linear.py`).

One tree over the labels (hierarchical k-means on PIFA beside the label's features), teacher-forced
negatives, default costs, beam 50; the peers that are tuned have the best of `TRIALS`. Source: Yu,
Zhong, Zhang, Chang and Dhillon 2022, "PECOS"."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from linear import Task, main
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import csc_matrix, csr_matrix

# costs of positives and negatives, pruning of weights, labels kept per level
TRIALS: tuple[dict[str, Any], ...] = (
    {},
    {"Cp": 0.5, "Cn": 0.5},
    {"Cp": 2.0, "Cn": 2.0},
    {"Cp": 2.0},
    {"Cp": 4.0},
    {"threshold": 0.02},
    {"beam_size": 10},
    {"beam_size": 200},
)
BEAM = 50


class XRLinear:
    """A tree of linear models."""

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        costs = {name: value for name, value in settings.items() if name != "beam_size"}
        self._model = XLinearModel.train(
            task.x_train,
            csc_matrix(task.y_train),
            C=tree(task),
            negative_sampling_scheme="tfn",
            threads=task.threads,
            **costs,
        )
        self._task = task
        self._beam = settings.get("beam_size", BEAM)
        self.num_parameters = int(sum(layer.W.nnz for layer in self._model.model.model_chain))

    def predict(self, x_nF: csr_matrix) -> csr_matrix:
        """Scores of each query's best labels."""
        width = self._task.width
        threads = self._task.threads
        return self._model.predict(x_nF, beam_size=self._beam, only_topk=width, threads=threads)


def tree(task: Task) -> Any:
    """The label clusters, the same in each trial; recomputed, as they count towards a training's
    seconds.
    """
    features = LabelEmbeddingFactory.create(
        task.y_train, task.x_train, Z=task.x_labels, method="pifa_lf_concat"
    )
    return Indexer.gen(
        features, indexer_type="hierarchicalkmeans", threads=task.threads, seed=task.seed
    )


if __name__ == "__main__":
    is_tuned = json.loads(sys.argv[3])["peer"] != "xr-linear"
    trials = TRIALS if is_tuned else TRIALS[:1]
    main(XRLinear, trials, f"libpecos {version('libpecos')}")
