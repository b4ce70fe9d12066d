"""Fits a calibration, a map from scores to probabilities, on the validation split.

Legend: N queries, K results, B bins of neighbouring scores.

Scores are divided into bins with about equally many relevant labels. Isotonic regression merges
bins until the share of relevant labels does not decrease with the score (Zadrozny and Elkan 2002).
Between the mean scores of adjacent bins, the probability is interpolated (centred isotonic
regression, Oron and Flournoy 2017).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from unidec.ranking.ranker import MOST_POINTS, Calibration
from unidec.ranking.sparse import Floats

RELEVANT_A_BIN = 25
LEAST_RELEVANT = 2 * RELEVANT_A_BIN  # with fewer relevant labels, no calibration is fitted


def fit_calibration(score_NK: Floats, relevant_NK: npt.NDArray[np.bool_]) -> Calibration | None:
    """Fit a calibration to the labels returned for queries.

    Half a relevant and half an irrelevant label are added to each bin (Jeffreys' prior), so that no
    probability is 0 or 1.

    Args:
        score_NK: scores by which the labels are ranked; not finite beyond a query's last label.
        relevant_NK: whether each label is relevant. No part of the ranking may have been trained on
        these queries.

    Returns:
        None if there are fewer than `LEAST_RELEVANT` relevant labels.
    """
    from scipy.optimize import isotonic_regression

    finite_NK = np.isfinite(score_NK)
    score = score_NK[finite_NK].astype(np.float64)
    relevant = relevant_NK[finite_NK]
    num_relevant = int(relevant.sum())
    if num_relevant < LEAST_RELEVANT:
        return None
    num_bins = min(MOST_POINTS, num_relevant // RELEVANT_A_BIN)
    shares = np.arange(1, num_bins) / num_bins
    edges = np.unique(np.quantile(score[relevant], shares))
    bin_of = np.searchsorted(edges, score, side="right")
    _, bin_of = np.unique(bin_of, return_inverse=True)  # without empty bins
    count_B = np.bincount(bin_of)
    relevant_B = np.bincount(bin_of, relevant)
    score_B = np.bincount(bin_of, score)
    share_B = (relevant_B + 0.5) / (count_B + 1)
    regression = isotonic_regression(share_B, weights=count_B + 1)
    begins = regression.blocks[:-1]
    scores = np.add.reduceat(score_B, begins) / np.add.reduceat(count_B, begins)
    return Calibration(scores=scores.tolist(), probabilities=regression.x[begins].tolist())
