"""Results of searches: for each query scores and label rows, best first.

Legend: B queries, C candidates, K results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]


def best_first(score_BC: Scores, row_BC: Rows, k: int) -> tuple[Scores, Rows]:
    """The k candidates of each query with the highest scores; ties are ordered by row."""
    order_BK = np.lexsort((row_BC, -score_BC), axis=1)[:, :k]
    best_BK = np.take_along_axis(score_BC, order_BK, axis=1)
    return best_BK, np.take_along_axis(row_BC, order_BK, axis=1)


def recall(found_BK: Rows, exact_BK: Rows) -> float:
    """Share of the exact results that another search found, over all queries, 0 to 1; 1 without any
    results.

    Both arguments are label rows, -1 for no result; K may differ between them.
    """
    is_result_BK = exact_BK >= 0
    num_results = is_result_BK.sum()
    if not num_results:
        return 1.0
    num_labels = max(exact_BK.max(), found_BK.max()) + 1
    first_key_B1 = num_labels * np.arange(len(exact_BK))[:, None]
    wanted = (exact_BK + first_key_B1)[is_result_BK]
    is_hit_BK = np.isin(found_BK + first_key_B1, wanted) & (found_BK >= 0)
    return float(is_hit_BK.sum() / num_results)
