"""Random walks between labels and queries: what else the queries of a label, and theirs in turn, are about.

Source: the random-walk estimate of label co-occurrence (ECLARE, Mittal et al. 2021), which Gandalf tries as its graph
(thesis, section 1.5 and table 1.7). The thesis gives no settings; those below are ours.

Shape legend: N queries, L labels, J labels of a block, H hops.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.sparse import csr_matrix

HOPS = 400  # of each label's walk
RESTART = 0.8  # chance after each hop to go on from the label itself: one hop in 25 is the third in a row or later
LABELS_AT_ONCE = 1024  # random numbers belong to a block, so this is part of what is drawn
_SEED = 20210


def visit_blocks(label_LN: csr_matrix, positive_NL: csr_matrix) -> Iterator[tuple[int, csr_matrix]]:
    """How often a walk from each label comes by each label: (first label, int64 CSR [J, L]) a block, rows sorted.

    A hop goes to one of the label's queries and from there to one of that query's labels (often back to the same one),
    all alike. Walks are drawn from fixed numbers: the same data gives the same visits, whichever rows are empty.

    Args:
        label_LN: CSR, the queries of each label that walks; a row without entries stays where it is, without a visit.
        positive_NL: CSR, the labels of each query, all of them.
    """
    num_labels = label_LN.shape[0]
    queries_L = csr_matrix(positive_NL.T)  # also of labels that do not walk, but are walked by
    for number, start in enumerate(range(0, num_labels, LABELS_AT_ONCE)):
        stop = min(start + LABELS_AT_ONCE, num_labels)
        draw = np.random.default_rng([_SEED, number])
        walking_J = np.flatnonzero(np.diff(label_LN.indptr[start : stop + 1]))
        visited_HJ = _walk(queries_L, positive_NL, start + walking_J, walking_J, stop - start, draw)
        key, count = np.unique(walking_J * num_labels + visited_HJ, return_counts=True)
        row, column = np.divmod(key, num_labels)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=stop - start))])
        yield start, csr_matrix((count, column, indptr), shape=(stop - start, num_labels))


def _walk(
    queries_L: csr_matrix, labels_N: csr_matrix, home_J: np.ndarray, lane_J: np.ndarray, lanes: int,
    draw: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Labels that walks from `home_J` reach, int64 [H, J]; of each hop's `lanes` draws theirs are those at `lane_J`."""
    visited_HJ = np.empty((HOPS, len(home_J)), dtype=np.int64)
    at_J = home_J
    for hop in range(HOPS):
        to_query_J, to_label_J, again_J = draw.random((3, lanes))[:, lane_J]
        visited_HJ[hop] = _pick(labels_N, _pick(queries_L, at_J, to_query_J), to_label_J)
        at_J = np.where(again_J < RESTART, home_J, visited_HJ[hop])
    return visited_HJ


def _pick(matrix: csr_matrix, rows_J: np.ndarray, draw_J: np.ndarray) -> np.ndarray:
    """One of each row's columns, all alike, int64 [J]; every row has one."""
    begin_J = matrix.indptr[rows_J].astype(np.int64)
    count_J = matrix.indptr[rows_J + 1] - begin_J
    return matrix.indices[begin_J + (draw_J * count_J).astype(np.int64)].astype(np.int64)
