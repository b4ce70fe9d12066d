"""Gandalf: label texts are also training queries (Gandalf, section 3).

Label l is row N + l, and its relevances are row l of the label graph, soft targets in (0, 1]. A
label whose row is empty is not a query.

Legend: N queries of the data set, L labels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from unidec.model.pool import TrainingPairs


def with_label_queries(pairs: TrainingPairs, label_graph: sp.csr_matrix) -> TrainingPairs:
    """The pairs of N + L rows: queries, whose positives all have relevance 1, then labels with soft
    targets.

    Args:
        label_graph: csr [L, L].
    """
    relevance = pairs.relevance
    num_queries, num_labels = relevance.shape
    assert label_graph.shape == (num_labels, num_labels)
    ones = np.ones(relevance.nnz, np.float32)
    of_queries = sp.csr_matrix((ones, relevance.indices, relevance.indptr), relevance.shape)
    no_pairs = sp.csr_matrix((num_labels, num_labels), dtype=pairs.filter_pairs.dtype)
    with_targets = np.flatnonzero(np.diff(label_graph.indptr))
    return replace(
        pairs,
        rows=np.concatenate([pairs.rows, num_queries + with_targets]),
        relevance=sp.vstack([of_queries, label_graph], format="csr"),
        filter_pairs=sp.vstack([pairs.filter_pairs, no_pairs], format="csr"),
        soft=True,
    )
