"""Training queries' texts in classifier rows (GraphSAGE: Hamilton et al. 2017): a row is its
label's text, a free vector and the mean of the label's queries.

Legend: S labels of a batch, L labels, n training queries, E pairs of a label and a query drawn for
it, M queries drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.sparse as sp

from unidec.data.tokens import places
from unidec.methods.residual_rows import RelatedPairs
from unidec.model.additions import Drawn

_STREAM = 0x717279  # separates these random numbers from others of a step


@dataclass
class QueryTexts:
    """The texts of a label's training queries; a step draws some, the export takes the mean of all.

    Attributes:
        related_LN: csr [L, n], 1 where a training query has the label.
        query_rows: int64 [n], data set rows of the training queries.
        num_drawn: maximum queries that a step draws for a label.
    """

    source: ClassVar = "queries"
    gate_start: ClassVar = 1.0  # a row starts as a plain sum

    related_LN: sp.csr_matrix
    query_rows: np.ndarray
    num_drawn: int

    def draw(self, drawn: Drawn) -> tuple[RelatedPairs, np.ndarray]:
        """Draw queries for each label. Queries of the batch are excluded: otherwise a label's row
        would contain the text with which it is compared.
        """
        pool = drawn.clf_pool
        pairs = self.related_LN[pool.pool_S].tocoo()
        row_E = pairs.row
        query_E = self.query_rows[pairs.col]
        draw_E = drawn.rng(_STREAM).random(len(row_E))
        draw_E[np.isin(query_E, pool.rows_B)] = 2.0
        order = np.lexsort((draw_E, row_E))
        row_E = row_E[order]
        place_E = places(np.bincount(row_E))
        chosen_E = (place_E < self.num_drawn) & (draw_E[order] < 1)
        rows_M, text_E = np.unique(query_E[order][chosen_E], return_inverse=True)
        related = RelatedPairs.on(drawn.device, row_E[chosen_E], text_E, np.ones(len(text_E)))
        return related, rows_M

    def rows(self, places: np.ndarray) -> np.ndarray:
        return self.query_rows[places]
