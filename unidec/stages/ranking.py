"""Labels ranked for the queries of a split, and their metrics: for validation in training, for the index, for the test.

Legend: N queries, n queries of a split, L labels, D width of a head, K places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch

from unidec.config import Params
from unidec.data.dataset import Split, XMCDataset
from unidec.data.propensity import Propensity, load_propensity
from unidec.evaluation.metrics import evaluate, filtered_truth
from unidec.model.frozen import cached_inputs
from unidec.model.search import exact_search
from unidec.model.unidec import UniDEC
from unidec.retrieval.space import Space, label_vectors, query_vectors
from unidec.stages import paths
from unidec.training.precision import autocast_type

K = 100
HEADLINE = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR")
CLF_WEIGHTS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
TUNED_ON = "nDCG@5"


def headline(metrics: dict[str, float]) -> dict[str, float]:
    """The few figures people compare."""
    return {name: metrics[name] for name in HEADLINE if name in metrics}


@dataclass(frozen=True)
class Ranking:
    """Vectors of both heads for the queries of a split and all labels; None for a head that is not there.

    Attributes:
        rows: int64 [n], data set rows of the queries.
        query_de, query_clf: float32 [n, D]; label_de, label_clf: float32 [L, D]; bias: float32 [L] or None.
    """

    dataset: XMCDataset
    rows: np.ndarray
    query_de: np.ndarray | None
    query_clf: np.ndarray | None
    label_de: np.ndarray | None
    label_clf: np.ndarray | None
    bias: np.ndarray | None

    @classmethod
    def of_model(
        cls,
        model: UniDEC,
        dataset: XMCDataset,
        split: Split,
        precision: str,
        label_de: np.ndarray | None = None,
    ) -> Ranking:
        """Encode a split's queries, and all labels unless their embeddings are given."""
        tokens = {which: paths.open_tokens(which) for which in ("queries", "labels")}
        amp = autocast_type(precision, model.device)
        build = cached_inputs(model.encoder, tokens, paths.CACHE, model.device, amp)
        rows = dataset.rows(split)
        with torch.autocast(model.device.type, dtype=amp or torch.bfloat16, enabled=amp is not None):
            query_de, query_clf = model.encode_queries(tokens["queries"], rows, build)
            if label_de is None and model.heads != "clf":
                label_de = model.encode_labels(tokens["labels"], build)
        return cls(dataset, rows, query_de, query_clf, label_de, *model.classifier_table())

    @property
    def truth(self) -> sp.csr_matrix:
        """Relevance of these queries without filtered pairs."""
        return filtered_truth(self.dataset.relevance[self.rows], self.filter_pairs)

    @property
    def filter_pairs(self) -> sp.csr_matrix:
        """Filter pairs of these queries."""
        return self.dataset.filter_pairs[self.rows]

    def labels(self, space: Space, clf_normalize: bool) -> np.ndarray:
        """Label side of a space, float32 [L, D']."""
        return label_vectors(self.label_de, self.label_clf, self.bias, space, clf_normalize)

    def queries(self, space: Space, clf_weight: float, clf_normalize: bool) -> np.ndarray:
        """Query side of a space, float32 [n, D']."""
        return query_vectors(self.query_de, self.query_clf, space, clf_weight, clf_normalize, self.bias is not None)

    def top(self, space: Space, clf_weight: float, clf_normalize: bool, k: int = K) -> tuple[np.ndarray, np.ndarray]:
        """Exact search without filtered pairs: (scores float32 [n, k], labels int64 [n, k], -1 where there are
        none)."""
        query, label = self.queries(space, clf_weight, clf_normalize), self.labels(space, clf_normalize)
        return exact_search(query, label, min(k, len(label)), exclude=self.filter_pairs)

    def metrics(
        self, space: Space, clf_weight: float, clf_normalize: bool, propensity: Propensity | None = None
    ) -> dict[str, float]:
        """Every metric of the split under one space."""
        propensity = propensity or load_propensity(paths.PROPENSITY, verify=False)
        return evaluate(
            self.top(space, clf_weight, clf_normalize)[1], self.truth, propensity.inverse_L, propensity.group_L
        )


def tuned_clf_weight(ranking: Ranking, params: Params) -> float:
    """The classifier's weight: as given, or the best of `CLF_WEIGHTS` on the ranking's split ("auto").

    Raw classifier scores are training logits times tau, of the order of cosines: one range serves both forms.
    """
    index = params.index
    if index.clf_weight != "auto":
        return float(index.clf_weight)
    propensity = load_propensity(paths.PROPENSITY, verify=False)
    scored = {w: ranking.metrics("both", w, index.clf_normalize, propensity)[TUNED_ON] for w in CLF_WEIGHTS}
    return max(scored, key=lambda weight: scored[weight])


def validation_metrics(ranking: Ranking, params: Params) -> dict[str, float]:
    """Metrics of the validation split in the space that will be served; empty when there is no such split."""
    if not len(ranking.rows):
        return {}
    index = params.index
    weight = 1.0 if index.clf_weight == "auto" else float(index.clf_weight)
    return ranking.metrics(index.space, weight, index.clf_normalize)
