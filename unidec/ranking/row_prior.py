"""Classifier rows of rare labels, drawn towards what the labels' texts predict.

A label with few training queries has a row that has hardly learnt more than which queries to stay
away from. Rows of labels with many training queries show how a row depends on the label's text.

Legend: L labels, B labels of a block, D width of a head.
"""

from __future__ import annotations

import numpy as np

from unidec.data.chunks import blocks
from unidec.data.tokens import Ints
from unidec.ranking.sparse import Floats

AT_ONCE = 65_536  # labels


def draw_rows(clf_LD: Floats, text_LD: Floats, num_queries_L: Ints, prior: float) -> None:
    """Replace each classifier row, in place, by its mean with its prediction (empirical Bayes;
    Efron and Morris, 1975):

        row_l = (n_l row_l + prior text_l M) / (n_l + prior)

    M minimises sum_l n_l |row_l - text_l M|^2 + |M|^2 (ridge regression).

    Args:
        clf_LD: float32 [L, D], the trained rows. text_LD: float32 [L, D], the dual encoder's
            vectors of the labels. Both may be memory-mapped.
        num_queries_L: n, int64 [L], training queries of each label.
        prior: above 0, number of training queries that a prediction counts as.
    """
    weight_L1 = num_queries_L.astype(np.float32)[:, None]
    gram_DD = np.eye(text_LD.shape[1])
    target_DD = np.zeros_like(gram_DD)
    for some in blocks(len(clf_LD), AT_ONCE):
        weighted_BD = weight_L1[some] * text_LD[some]
        gram_DD += weighted_BD.T @ text_LD[some]
        target_DD += weighted_BD.T @ clf_LD[some]
    map_DD = np.linalg.solve(gram_DD, target_DD).astype(np.float32)
    share_L1 = prior / (weight_L1 + prior)
    for some in blocks(len(clf_LD), AT_ONCE):
        predicted_BD = text_LD[some] @ map_DD
        clf_LD[some] += share_L1[some] * (predicted_BD - clf_LD[some])
