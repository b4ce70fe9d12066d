"""UniDEC as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.base import BaseEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.utils.validation import check_is_fitted

from unidec import api
from unidec.data.dataset import XMCDataset
from unidec.errors import DataError


class UniDECClassifier(BaseEstimator):
    """Multi-label classification of texts into labels that have texts.

    Args:
        recipe: see `unidec.fit`.
        k: number of labels scored per query; all others have probability 0.
        params: other parameters by key.
        folder: where data, checkpoints and the bundle are kept; None: a temporary folder.

    Attributes:
        model_: the `unidec.Model`.
        classes_: int64 [L], the columns of Y.

    Example:
        >>> classifier = unidec.UniDECClassifier().fit(queries, Y, label_texts=labels)
        >>> classifier.predict_proba(["brushes for painting"]).shape == (1, len(labels))
        True
    """

    def __init__(
        self, recipe: str = "unidec", k: int = 100, params: Mapping[str, Any] | None = None, folder: str | None = None
    ) -> None:
        self.recipe, self.k, self.params, self.folder = recipe, k, params, folder

    def fit(self, texts: Sequence[str], Y: Any, label_texts: Sequence[str] | None = None) -> UniDECClassifier:
        """Train.

        Args:
            texts: N queries.
            Y: [N, L] indicator matrix, dense or sparse.
            label_texts: L texts; None: "label 0", "label 1", ..., which only a classifier can learn from.

        Raises:
            DataError: the shape of Y does not fit the texts, or Y has no positives.
        """
        texts, truth = list(texts), csr_matrix(Y)
        names = list(label_texts) if label_texts is not None else [f"label {label}" for label in range(truth.shape[1])]
        if truth.shape != (len(texts), len(names)):
            raise DataError("Y has the wrong shape", where="Y", got=truth.shape, expected=(len(texts), len(names)))
        self.classes_ = np.arange(len(names))
        self.model_ = api.fit(texts, names, truth, recipe=self.recipe, params=self.params, folder=self.folder)
        self._calibrate(texts, truth)
        return self

    def decision_function(self, texts: Sequence[str]) -> csr_matrix:
        """Scores of the k best labels of each query: float64 CSR [N, L]."""
        check_is_fitted(self, "model_")
        found = self.model_.predict(texts, min(self.k, len(self.classes_)))
        indptr = np.concatenate([[0], np.cumsum([len(labels) for labels in found])])
        columns = np.array([int(label.uid) for labels in found for label in labels], dtype=np.int64)
        scores = np.array([label.score for labels in found for label in labels])
        return csr_matrix((scores, columns, indptr), (len(found), len(self.classes_)))

    def predict_proba(self, texts: Sequence[str]) -> csr_matrix:
        """Probabilities of the k best labels of each query, by Platt scaling: float64 CSR [N, L]."""
        scores = self.decision_function(texts)
        scores.data = 1.0 / (1.0 + np.exp(-(self._scale * scores.data + self._shift)))
        return scores

    def predict(self, texts: Sequence[str]) -> csr_matrix:
        """Labels with a probability of at least 0.5: int64 CSR [N, L] of ones."""
        likely = self.predict_proba(texts)
        likely.data = (likely.data >= 0.5).astype(np.int64)
        likely.eliminate_zeros()
        return likely.astype(np.int64)

    def _calibrate(self, texts: Sequence[str], truth: csr_matrix) -> None:
        """Platt scaling: a logistic regression of relevance on the score, on the validation queries, or on all."""
        dataset = XMCDataset.open(self.model_.folder.parents[1] / "data" / "dataset", verify=False)
        held_out = dataset.rows("validation")
        rows = held_out if len(held_out) else np.arange(len(texts))
        scores = self.decision_function([texts[row] for row in rows.tolist()]).tocoo()
        relevant = np.asarray(truth[rows].astype(bool)[scores.row, scores.col]).ravel()
        self._scale, self._shift = 1.0, 0.0
        if relevant.any() and not relevant.all():
            fitted = LogisticRegression().fit(scores.data[:, None], relevant)
            self._scale, self._shift = float(fitted.coef_[0, 0]), float(fitted.intercept_[0])
