"""UniDEC as a scikit-learn estimator."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.base import BaseEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.utils.validation import check_is_fitted

from unidec import api
from unidec.config import load_params
from unidec.data.chunks import offsets_of
from unidec.data.formats.memory import listed
from unidec.data.raw import hold_out, text_table
from unidec.errors import DataError

FEWEST_QUERIES = 50  # validation queries; with fewer, probabilities are fitted on all queries
log = logging.getLogger(__name__)


class UniDECClassifier(BaseEstimator):
    """Multi-label classification of texts into labels that have texts.

    It can be pickled (also by joblib): the pickle holds the files of the model's bundle.
    `cross_val_score` and searches use `score`, the share of texts whose first label is relevant.

    Probabilities come from Platt scaling of the scores, fitted on the validation queries
    (`data.validation_share`). With fewer than 50 of them it is fitted on all queries, which were
    trained on, so that the probabilities are too high; a warning is logged, and `calibrated_on_` is
    "training".

    Args:
        recipe: see `unidec.fit`.
        k: number of labels scored per query; all others have probability 0.
        params: other parameters by key.
        folder: where data, checkpoints and the bundle are kept; None: a temporary folder, as in
            `unidec.fit`.

    Attributes:
        model_: the `unidec.Model`.
        classes_: int64 [L], the columns of Y.
        calibrated_on_: "validation"; "training"; or "nothing" if all scored labels were
            irrelevant, or all relevant: then the probability is the logistic function of the score.

    Example:
        >>> classifier = unidec.UniDECClassifier().fit(queries, Y, label_texts=labels)
        >>> classifier.predict_proba(["brushes for painting"]).shape == (1, len(labels))
        True
    """

    def __init__(
        self,
        recipe: str = "unidec",
        k: int = 100,
        params: Mapping[str, Any] | None = None,
        folder: str | None = None,
    ) -> None:
        self.recipe = recipe
        self.k = k
        self.params = params
        self.folder = folder

    def fit(
        self, texts: Sequence[str], Y: Any, label_texts: Sequence[str] | None = None
    ) -> UniDECClassifier:
        """Train.

        Args:
            texts: N queries.
            Y: [N, L] indicator matrix, dense or sparse.
            label_texts: L texts; None: "label 0", "label 1", ..., which only a classifier can learn
                from.

        Raises:
            DataError: the shape of Y does not fit the texts, or Y has no positives.
        """
        texts = listed(texts, "texts")
        if label_texts is None:
            num_labels = csr_matrix(Y).shape[1]
            names = [f"label {label}" for label in range(num_labels)]
        else:
            names = listed(label_texts, "label_texts")
        truth = _checked(Y, len(texts), len(names))
        self.classes_ = np.arange(len(names))
        self.model_ = api.fit(
            texts, names, truth, recipe=self.recipe, params=self.params, folder=self.folder
        )
        data = load_params(None, {"recipe": self.recipe, **(self.params or {})}).data
        uids = [str(row) for row in range(len(texts))]
        queries = text_table(uids, texts)
        no_filters = csr_matrix(truth.shape, dtype=bool)
        # as `fit` did
        is_held_out = hold_out(queries, no_filters, data.validation_share, data.split_seed)
        self._calibrate(texts, truth, np.flatnonzero(is_held_out))
        return self

    def score(self, texts: Sequence[str], Y: Any) -> float:
        """P@1, from 0 to 1: the share of the texts whose first label is relevant; texts without
        labels are left out.

        Raises:
            DataError: the shape of Y does not fit the texts, or it has no labels.
        """
        check_is_fitted(self, "model_")
        texts = listed(texts, "texts")
        truth = _checked(Y, len(texts), len(self.classes_))
        return self.model_.evaluate(texts, truth)["P@1"] / 100

    def decision_function(self, texts: Sequence[str]) -> csr_matrix:
        """Scores of the k best labels of each query: float64 CSR [N, L]."""
        check_is_fitted(self, "model_")
        num_labels = len(self.classes_)
        found = self.model_.predict(texts, min(self.k, num_labels))
        labels = [label for answer in found for label in answer]
        scores = np.array([label.score for label in labels])
        columns = np.array([int(label.uid) for label in labels], dtype=np.int64)
        ends = offsets_of([len(answer) for answer in found])
        return csr_matrix((scores, columns, ends), (len(found), num_labels))

    def predict_proba(self, texts: Sequence[str]) -> csr_matrix:
        """Probabilities of the k best labels, by Platt scaling: float64 CSR [N, L]."""
        scores = self.decision_function(texts)
        logits = self._scale * scores.data + self._shift
        scores.data = 1.0 / (1.0 + np.exp(-logits))
        return scores

    def predict(self, texts: Sequence[str]) -> csr_matrix:
        """Labels with a probability of at least 0.5: int64 CSR [N, L] of ones."""
        likely = self.predict_proba(texts)
        likely.data = (likely.data >= 0.5).astype(np.int64)
        likely.eliminate_zeros()
        return likely.astype(np.int64)

    def _calibrate(self, texts: Sequence[str], truth: csr_matrix, held_out: np.ndarray) -> None:
        """Platt scaling: a logistic regression of relevance on the score, on the validation
        queries, or on all.
        """
        self.calibrated_on_: Literal["validation", "training", "nothing"] = "validation"
        rows = held_out
        if len(held_out) < FEWEST_QUERIES:
            self.calibrated_on_ = "training"
            rows = np.arange(len(texts))
            log.warning(
                "probabilities are too high: fitted on training queries, as there are %d "
                "validation queries (below %d)",
                len(held_out),
                FEWEST_QUERIES,
            )
        scores = self.decision_function([texts[row] for row in rows]).tocoo()
        truth = truth[rows].astype(bool)
        relevant = np.asarray(truth[scores.row, scores.col]).ravel()
        self._scale = 1.0
        self._shift = 0.0
        if not relevant.any() or relevant.all():
            self.calibrated_on_ = "nothing"
            return
        fitted = LogisticRegression().fit(scores.data[:, None], relevant)
        self._scale = float(fitted.coef_[0, 0])
        self._shift = float(fitted.intercept_[0])


def _checked(Y: Any, num_texts: int, num_labels: int) -> csr_matrix:
    """Y as CSR [N, L]; a DataError if it has another shape."""
    truth = csr_matrix(Y)
    expected = (num_texts, num_labels)
    if truth.shape != expected:
        raise DataError("Y has the wrong shape", where="Y", got=truth.shape, expected=expected)
    return truth
