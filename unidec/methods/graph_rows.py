"""Related labels' texts in classifier rows, from the label graph (ECLARE: Mittal et al. 2021).

Legend: S labels of a batch, L labels, E pairs of related labels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import scipy.sparse as sp

from unidec.methods.residual_rows import RelatedPairs
from unidec.model.additions import NO_ROWS, Drawn


class GraphTexts:
    """The texts of related labels; a step uses those in its pool.

    Args:
        label_graph: csr [L, L]; its diagonal is not used.
    """

    source: ClassVar = "labels"
    gate_start: ClassVar = 0.0  # a row starts without them

    def __init__(self, label_graph: sp.csr_matrix):
        diagonal = sp.diags(label_graph.diagonal(), format="csr")
        self.related_LN = sp.csr_matrix(label_graph - diagonal)
        self.related_LN.eliminate_zeros()

    def draw(self, drawn: Drawn) -> tuple[RelatedPairs, np.ndarray]:
        labels_S = drawn.clf_pool.pool_S
        pairs = self.related_LN[labels_S][:, labels_S].tocoo()
        return RelatedPairs.on(drawn.device, pairs.row, pairs.col, pairs.data), NO_ROWS

    def rows(self, places: np.ndarray) -> np.ndarray:
        return places
