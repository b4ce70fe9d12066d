"""The label co-occurrence graph and its soft targets, for label texts as extra training queries (Gandalf).

Source: thesis, chapter 1: `G = Y^T Y`, `y_ij = G_ij / G_jj` for label j's text as a query, cut at delta.

Shape legend: N training queries, L labels, J labels of one block.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.data.storage import load_array, read_manifest, write_folder
from unidec.errors import ArtifactError, DataError
from unidec.progress import progress

if TYPE_CHECKING:
    from unidec.data.dataset import XMCDataset

KIND = "label_graph"
VERSION = 1

_PAIRS_AT_ONCE = 1 << 22  # co-occurrences counted in one block: bounds its memory at about 50 MB


def soft_targets(relevance: csr_matrix, threshold: float) -> csr_matrix:
    """Soft targets of every label's text: float32 CSR [L, L], row j the targets of label j, sorted.

    Entry (j, i) = share of label j's queries that also have label i, kept where it is at least the threshold and not
    0. The diagonal is 1 for every label, also for one without a training query. Row blocks of G are counted, divided
    and cut one after the other, so neither G nor anything L x L is ever held.

    Args:
        relevance: CSR [N, L], training queries; relevant where > 0.
        threshold: delta, 0 to 1.

    Raises:
        DataError: the threshold is out of range.
    """
    if not 0 <= threshold <= 1:
        raise DataError("the label graph's threshold must lie in 0 to 1", where="label_graph.threshold", got=threshold)
    positive = (relevance.data > 0).astype(np.int32)
    positive_NL: Any = csr_matrix((positive, relevance.indices, relevance.indptr), relevance.shape, copy=True)
    positive_NL.sum_duplicates()
    positive_NL.eliminate_zeros()
    positive_NL.data[:] = 1
    label_LN = csr_matrix(positive_NL.T)
    num_labels = len(label_LN.indptr) - 1
    count_L = np.diff(label_LN.indptr)
    blocks = []
    with progress(total=num_labels, desc="label graph", unit="label") as bar:
        for start, stop in _blocks(positive_NL, label_LN):
            graph_JL = (label_LN[start:stop] @ positive_NL).tocsr()
            share = graph_JL.data / np.repeat(count_L[start:stop], np.diff(graph_JL.indptr))
            graph_JL.data = np.where(share >= threshold, share, 0).astype(np.float32)
            graph_JL.eliminate_zeros()
            graph_JL.sort_indices()
            blocks.append(graph_JL)
            bar.update(stop - start)
    return _with_diagonal(blocks, num_labels, unseen=count_L == 0)


def _blocks(positive_NL: csr_matrix, label_LN: csr_matrix) -> list[tuple[int, int]]:
    """Ranges of labels whose counted co-occurrences stay within `_PAIRS_AT_ONCE` (a single label may exceed it)."""
    width_N = np.diff(positive_NL.indptr)
    cost = np.concatenate([[0], np.cumsum(width_N[label_LN.indices], dtype=np.int64)])[label_LN.indptr]
    blocks, start, num_labels = [], 0, len(label_LN.indptr) - 1
    while start < num_labels:
        stop = int(np.searchsorted(cost, cost[start] + _PAIRS_AT_ONCE, side="right")) - 1
        stop = min(max(stop, start + 1), num_labels)
        blocks.append((start, stop))
        start = stop
    return blocks


def _with_diagonal(blocks: list[csr_matrix], num_labels: int, unseen: NDArray[np.bool_]) -> csr_matrix:
    """The blocks below each other; labels without a training query, whose rows are empty, get their own target."""
    data = np.concatenate([block.data for block in blocks] or [np.zeros(0, np.float32)])
    indices = np.concatenate([block.indices for block in blocks] or [np.zeros(0, np.int32)]).astype(np.int32)
    length_L = np.concatenate([np.diff(block.indptr) for block in blocks] or [np.zeros(0, np.int64)])
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(length_L, dtype=np.int64)])
    graph = csr_matrix((data, indices, indptr), shape=(num_labels, num_labels))
    if unseen.any():
        own = np.flatnonzero(unseen)
        one = np.ones(len(own), np.float32)
        graph = csr_matrix(graph + csr_matrix((one, (own, own)), shape=(num_labels, num_labels)))
    graph.sort_indices()
    return graph


def build_label_graph(dataset: XMCDataset, threshold: float, out: str | os.PathLike[str]) -> Path:
    """Stores `soft_targets` of the training rows: indptr.npy (int64), indices.npy (int32), data.npy (float32).

    Raises:
        DataError: the threshold is out of range.
        ArtifactError: the folder cannot be written.
    """
    train_rows = dataset.rows("train")
    graph = soft_targets(dataset.relevance[train_rows], threshold)
    meta = {"threshold": float(threshold), "num_labels": dataset.num_labels, "num_train": len(train_rows)}
    with write_folder(out, KIND, VERSION, meta) as folder:
        np.save(folder.path / "indptr.npy", graph.indptr.astype(np.int64))
        np.save(folder.path / "indices.npy", graph.indices.astype(np.int32))
        np.save(folder.path / "data.npy", graph.data.astype(np.float32))
    return Path(out)


def load_label_graph(path: str | os.PathLike[str], verify: bool = True) -> csr_matrix:
    """Reads a folder of `build_label_graph`: float32 CSR [L, L], memory-mapped.

    Raises:
        ArtifactError: missing, damaged, of another kind or a newer version, or arrays that do not fit together.
    """
    root = Path(path)
    num_labels = read_manifest(root, KIND, VERSION, verify)["meta"].get("num_labels")
    indptr = load_array(root / "indptr.npy", np.int64)
    indices = load_array(root / "indices.npy", np.int32)
    data = load_array(root / "data.npy", np.float32)
    if (
        len(indptr) - 1 != num_labels
        or indptr[0] != 0
        or (np.diff(indptr) < 0).any()
        or not (indptr[-1] == len(indices) == len(data))
        or (len(indices) and (indices.min() < 0 or indices.max() >= num_labels))
    ):
        raise ArtifactError(
            "arrays that are no label graph",
            where=str(root),
            got=f"{len(indptr)} row starts, {len(indices)} columns, {len(data)} values",
            expected=f"{num_labels} labels",
            fix="delete the folder and run the stage that writes it again",
        )
    return csr_matrix((data, indices, indptr), shape=(num_labels, num_labels))
