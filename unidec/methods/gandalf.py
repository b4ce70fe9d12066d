"""Gandalf: label texts are also training queries (Gandalf, section 3), or the only ones, or a
random sample of both trains (thesis, table 1.2: Z and U(G, N)).

Label l is row N + l, and its relevances are row l of the label graph, soft targets in (0, 1]. A
label whose row is empty is not a query.

Legend: N queries of the data set, L labels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from unidec.data.csr import pattern
from unidec.model.pool import TrainingPairs

_STREAM = 0x67616E64  # separates the sample's random numbers from others of a seed


def with_label_queries(
    pairs: TrainingPairs, label_graph: sp.csr_matrix, which: str, seed: int
) -> TrainingPairs:
    """The pairs of N + L rows: queries, whose positives all have relevance 1, then labels with soft
    targets.

    Args:
        label_graph: csr [L, L].
        which: rows that train: "all"; "labels" alone; or "sample", as many of all as there are
            queries, drawn without replacement by the seed.
    """
    relevance = pairs.relevance
    num_queries, num_labels = relevance.shape
    assert label_graph.shape == (num_labels, num_labels)
    no_pairs = sp.csr_matrix((num_labels, num_labels), dtype=pairs.filter_pairs.dtype)
    label_rows = num_queries + np.flatnonzero(np.diff(label_graph.indptr))
    rows = label_rows if which == "labels" else np.concatenate([pairs.rows, label_rows])
    if which == "sample":
        rng = np.random.default_rng([seed, _STREAM])
        rows = np.sort(rng.choice(rows, len(pairs.rows), replace=False))
    return replace(
        pairs,
        rows=rows,
        relevance=sp.vstack([pattern(relevance), label_graph], format="csr"),
        filter_pairs=sp.vstack([pairs.filter_pairs, no_pairs], format="csr"),
        soft=True,
    )
