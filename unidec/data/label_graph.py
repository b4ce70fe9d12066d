"""The label co-occurrence graph and its soft targets, for label texts as extra training queries (Gandalf).

Source: thesis, chapter 1: `G = Y^T Y`, `y_ij = G_ij / G_jj` for label j's text as a query, cut at delta.

Shape legend: N training queries, L labels, J labels of one block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_matrix, vstack

from unidec.data.flat_file import FlatFile
from unidec.data.storage import load_array, read_manifest, write_folder
from unidec.errors import ArtifactError, DataError
from unidec.progress import progress

if TYPE_CHECKING:
    from unidec.data.dataset import XMCDataset

KIND = "label_graph"
VERSION = 1

_PAIRS_AT_ONCE = 1 << 20  # co-occurrences counted in one block: bounds its memory at about 40 MB
_LABELS_AT_ONCE = 1 << 20  # labels of one block: those without a query cost a row start and their own target


def soft_targets(relevance: csr_matrix, threshold: float) -> csr_matrix:
    """Soft targets of every label's text: float32 CSR [L, L], row j the targets of label j, sorted.

    Entry (j, i) = share of label j's queries that also have label i, kept where it is at least the threshold and not
    0. The diagonal is 1 for every label, also for one without a training query. Row blocks of G are counted, divided
    and cut one after the other (`target_blocks`), so neither G nor anything L x L is ever held.

    Args:
        relevance: CSR [N, L], training queries; relevant where > 0.
        threshold: delta, 0 to 1.

    Raises:
        DataError: the threshold is out of range.
    """
    if not 0 <= threshold <= 1:
        raise DataError("the label graph's threshold must lie in 0 to 1", where="label_graph.threshold", got=threshold)
    blocks = list(target_blocks(relevance, threshold))
    if not blocks:
        return csr_matrix((relevance.shape[1],) * 2, dtype=np.float32)
    return csr_matrix(vstack(blocks, format="csr", dtype=np.float32))


def target_blocks(relevance: csr_matrix, threshold: float) -> Iterator[csr_matrix]:
    """`soft_targets`, some rows at a time, from the first label to the last: float32 CSR [J, L] each.

    Memory: two copies of the pairs' columns, and a block.
    """
    if not 0 <= threshold <= 1:
        raise DataError("the label graph's threshold must lie in 0 to 1", where="label_graph.threshold", got=threshold)
    positive_NL = _ones(relevance)
    label_LN = csr_matrix(positive_NL.T)
    num_labels = len(label_LN.indptr) - 1
    count_L = np.diff(label_LN.indptr)
    with progress(total=num_labels, desc="label graph", unit="label") as bar:
        for start, stop in _blocks(positive_NL, label_LN):
            graph_JL = (label_LN[start:stop] @ positive_NL).tocsr()
            share = graph_JL.data / np.repeat(count_L[start:stop], np.diff(graph_JL.indptr))
            graph_JL.data = np.where(share >= threshold, share, 0).astype(np.float32)
            graph_JL.eliminate_zeros()
            unseen = np.flatnonzero(count_L[start:stop] == 0)
            if len(unseen):  # their rows are empty: each gets its own target
                own = (np.ones(len(unseen), np.float32), (unseen, start + unseen))
                graph_JL = csr_matrix(graph_JL + csr_matrix(own, shape=graph_JL.shape))
            graph_JL.sort_indices()
            yield graph_JL
            bar.update(stop - start)


def _ones(relevance: csr_matrix) -> csr_matrix:
    """1 where relevant, each pair once, rows sorted: int32; shares the columns of a matrix that is so already."""
    if relevance.has_canonical_format and bool((relevance.data > 0).all()):
        ones = np.ones(relevance.nnz, dtype=np.int32)
        return csr_matrix((ones, relevance.indices, relevance.indptr), relevance.shape, copy=False)
    positive = (relevance.data > 0).astype(np.int32)
    matrix: Any = csr_matrix((positive, relevance.indices, relevance.indptr), relevance.shape, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    matrix.data[:] = 1
    return matrix


def _blocks(positive_NL: csr_matrix, label_LN: csr_matrix) -> list[tuple[int, int]]:
    """Ranges of labels whose counted co-occurrences stay within `_PAIRS_AT_ONCE` (a single label may exceed it)."""
    width_N = np.diff(positive_NL.indptr).astype(np.int64)
    cost = np.concatenate([np.zeros(1, np.int64), np.cumsum(label_LN @ width_N, dtype=np.int64)])
    blocks, start, num_labels = [], 0, len(label_LN.indptr) - 1
    while start < num_labels:
        stop = int(np.searchsorted(cost, cost[start] + _PAIRS_AT_ONCE, side="right")) - 1
        stop = min(max(stop, start + 1), start + _LABELS_AT_ONCE, num_labels)
        blocks.append((start, stop))
        start = stop
    return blocks


def build_label_graph(dataset: XMCDataset, threshold: float, out: str | os.PathLike[str]) -> Path:
    """Stores `soft_targets` of the training rows: indptr.npy (int64), indices.npy (int32), data.npy (float32).

    Raises:
        DataError: the threshold is out of range.
        ArtifactError: the folder cannot be written.
    """
    train_rows = dataset.rows("train")
    meta = {"threshold": float(threshold), "num_labels": dataset.num_labels, "num_train": len(train_rows)}
    with (
        write_folder(out, KIND, VERSION, meta) as folder,
        FlatFile(folder.path / "indptr.npy", np.int64) as indptr,
        FlatFile(folder.path / "indices.npy", np.int32) as indices,
        FlatFile(folder.path / "data.npy", np.float32) as data,
    ):
        indptr.add(np.zeros(1, np.int64))
        for block_JL in target_blocks(dataset.relevance[train_rows], threshold):
            indptr.add(block_JL.indptr[1:].astype(np.int64) + indices.size)
            indices.add(block_JL.indices)
            data.add(block_JL.data)
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
