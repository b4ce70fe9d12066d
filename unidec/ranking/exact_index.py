"""Exact search for the labels with the largest inner product, for tuning and evaluation.

Legend: B queries, K results, D width of the searched space (`heads.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unidec.data.csr import ones_at
from unidec.ranking.heads import Heads
from unidec.ranking.sparse import Floats, Rows, best_first


@dataclass(frozen=True)
class ExactIndex:
    """Compares queries with all labels, in tiles (`model.search`).

    Attributes:
        vectors: the labels' vectors. device: where to compute; None: the CPU.
    """

    vectors: Heads
    device: Any = None

    def search(
        self, queries_BD: Floats, k: int, rescore: int = 0, excluded: Rows | None = None
    ) -> tuple[Floats, Rows]:
        """Like `LabelIndex.search`, but the result has at most L columns."""
        from unidec.model.search import exact_search

        num_labels = self.vectors.num_labels
        exclude = None
        if excluded is not None:
            pairs = np.divmod(excluded, num_labels)
            exclude = ones_at(pairs, (len(queries_BD), num_labels), bool)
        scores_BK, rows_BK = exact_search(
            queries_BD,
            self.vectors,
            min(k, num_labels),
            exclude=exclude,
            device=self.device,
            desc="exact search",
        )
        return best_first(scores_BK, rows_BK, k)
