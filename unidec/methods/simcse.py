"""SimCSE (Gao et al. 2021): all N + L texts are both queries and labels, and the only positive of
each is itself. A step encodes the texts twice, with different dropout.

Legend: N queries of the data set, L labels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from unidec.model.pool import TrainingPairs


def texts_as_labels(pairs: TrainingPairs) -> TrainingPairs:
    """The pairs of N + L texts, each of which is its own only positive. The query and the label of
    a filter pair (the same item, usually with the same text) are ignored for each other.
    """
    num_queries, num_labels = pairs.filter_pairs.shape
    filtered = sp.bmat([[None, pairs.filter_pairs], [pairs.filter_pairs.T, None]], format="csr")
    return replace(
        pairs,
        rows=np.concatenate([pairs.rows, num_queries + np.arange(num_labels)]),
        relevance=sp.eye_array(num_queries + num_labels, dtype=np.float32, format="csr"),
        filter_pairs=filtered,
        labels_are_texts=True,
    )
