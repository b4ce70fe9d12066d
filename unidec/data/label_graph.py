"""The label graph: soft targets for label texts that serve as extra training queries (Gandalf).

Source: thesis, chapter 1: `G = Y^T Y`, `y_ij = G_ij / G_jj` with label j's text as a query, values
up to delta set to 0; variants of sections 1.3 (one-hot targets, GLaS) and 1.5 (random walks:
ECLARE, Mittal et al. 2021; number of hops and restart probability are our choice).

Shape legend: N training queries, L labels, J labels of one block, H hops, Q entries of a sparse
block.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.sparse import csr_matrix

from unidec.config import LabelGraph
from unidec.data.array_file import load_csr, row_blocks, write_csr
from unidec.data.chunks import offsets_of
from unidec.data.csr import ones_at, rows_of
from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_manifest, verify_once, write_folder
from unidec.progress import progress

KIND = "label_graph"
VERSION = 1

# co-occurrences counted in one block, which limits its memory to about 40 MB
_PAIRS_AT_ONCE = 1 << 20
# maximum number of labels in one block, since labels without queries need memory, too
_LABELS_AT_ONCE = 1 << 20
_SEED = 1707  # of the random choice of labels
_HOPS = 400  # length of each label's walk
_RESTART = 0.8  # probability after each hop to restart from the label itself
# labels of a block; random numbers are drawn per block, so changing this changes the walks
_WALKS_AT_ONCE = 1024
_WALK_SEED = 20210  # of the random walks

Kind = Literal["cooccurrence", "random-walk", "glas", "self"]


def target_blocks(
    relevance: csr_matrix,
    threshold: float,
    *,
    kind: Kind = "cooccurrence",
    share: float = 1.0,
    tail_first: bool = False,
) -> Iterator[csr_matrix]:
    """Soft targets of all label texts in blocks of rows, in the order of the labels: float32 CSR
    [J, L], sorted.

    Row j holds the targets of label j's text: those above the threshold (equation 1.6), and label j
    itself. Entry (j, i) depends on the kind:

    - "cooccurrence": the share of label j's queries that also have label i, P(i | j) (Gandalf,
      equation 1.6);
    - "random-walk": visits of i divided by visits of j, at most 1, in a random walk from j;
    - "glas": sigmoid(S_ji) with S_ji = (P(i | j) + P(j | i)) / 2, if S_ji is above the threshold
      (section 1.3.2);
    - "self": 1 for the label itself and 0 otherwise (Z' of table 1.2).

    Entry (j, j) is 1 (for "glas" sigmoid(1), by its formula), even if label j has no training
    query. No L x L matrix is held in memory: only a block and two copies of the pairs' columns
    (three with a share below 1 or random walks).

    Args:
        relevance: CSR [N, L] of the training queries; a label is relevant if its value is > 0.
        threshold: delta, 0 to 1.
        share: share of the labels that have targets, > 0 and <= 1; the rows of the other labels are
        empty.
        tail_first: choose the labels with the fewest training queries (ties at random) instead of
            random labels. The labels of a smaller share are a subset of those of a larger share.
    """
    positive_NL = (relevance > 0).astype(np.int32)  # without duplicates, rows sorted
    label_LN = csr_matrix(positive_NL.T)
    count_L = np.diff(label_LN.indptr)
    chosen_L = chosen_labels(count_L, share, tail_first)
    if not chosen_L.all():
        label_LN.data *= np.repeat(chosen_L, count_L)
        label_LN.eliminate_zeros()
    with progress(total=len(count_L), desc="label graph", unit="label") as bar:
        for start, graph_JL in _graph_blocks(positive_NL, label_LN, count_L, kind):
            stop = start + graph_JL.shape[0]
            is_own_Q = graph_JL.indices == start + rows_of(graph_JL)
            is_target_Q = (graph_JL.data > threshold) | is_own_Q
            graph_JL.data = np.where(is_target_Q, graph_JL.data, 0).astype(np.float32)
            graph_JL.eliminate_zeros()
            is_alone_J = (count_L[start:stop] == 0) | (kind == "self")
            alone = np.flatnonzero(chosen_L[start:stop] & is_alone_J)
            if len(alone):  # the only target of a label with an empty row is the label itself
                itself_JL = ones_at((alone, start + alone), graph_JL.shape)
                graph_JL = csr_matrix(graph_JL + itself_JL)
            if kind == "glas":
                score_Q = graph_JL.data.astype(np.float64)
                graph_JL.data = (1 / (1 + np.exp(-score_Q))).astype(np.float32)
            graph_JL.sort_indices()
            yield graph_JL
            bar.update(stop - start)


def chosen_labels(count_L: np.ndarray, share: float, tail_first: bool) -> np.ndarray:
    """Mask of the labels whose text is used as a query: bool [L], at least one True if L > 0."""
    order_L = np.random.default_rng(_SEED).permutation(len(count_L))
    if tail_first:
        order_L = order_L[np.argsort(count_L[order_L], kind="stable")]
    chosen_L = np.zeros(len(count_L), dtype=bool)
    chosen_L[order_L[: max(1, round(share * len(count_L)))]] = True
    return chosen_L


def _graph_blocks(
    positive_NL: csr_matrix, label_LN: csr_matrix, count_L: np.ndarray, kind: Kind
) -> Iterator[tuple[int, csr_matrix]]:
    """Blocks (first label, float64 CSR [J, L]) of targets before the threshold; rows without
    queries are empty.
    """
    if kind == "random-walk":
        for start, visits_JL in _visit_blocks(label_LN, positive_NL):
            row_Q = rows_of(visits_JL)
            self_Q = np.maximum(visits_JL.diagonal(start)[row_Q], 1)
            share_Q = np.minimum(visits_JL.data / self_Q, 1.0)
            is_self_Q = visits_JL.indices == start + row_Q
            visits_JL.data = np.where(is_self_Q, 1.0, share_Q)
            yield start, visits_JL
        return
    for start, stop in _blocks(positive_NL, label_LN):
        if kind == "self":
            yield start, csr_matrix((stop - start, len(count_L)), dtype=np.float64)
            continue
        graph_JL = (label_LN[start:stop] @ positive_NL).tocsr()
        share_Q = graph_JL.data / count_L[start + rows_of(graph_JL)]
        if kind == "glas":
            share_Q = (share_Q + graph_JL.data / count_L[graph_JL.indices]) / 2
        graph_JL.data = share_Q
        yield start, graph_JL


def _blocks(positive_NL: csr_matrix, label_LN: csr_matrix) -> Iterator[tuple[int, int]]:
    """Ranges of labels with at most `_PAIRS_AT_ONCE` co-occurrences each (a single label may exceed
    the limit).
    """
    width_N = np.diff(positive_NL.indptr).astype(np.int64)
    cost_L = label_LN @ width_N
    total_L = offsets_of(cost_L)
    return row_blocks(total_L, _PAIRS_AT_ONCE, _LABELS_AT_ONCE)


def build_label_graph(
    dataset: XMCDataset, settings: LabelGraph, out: str | os.PathLike[str]
) -> Path:
    """Store the `target_blocks` of the training queries in a folder, and return its path.

    The files are indptr.npy (int64), indices.npy (int32) and data.npy (float32).

    Raises:
        ArtifactError: the folder cannot be written.
    """
    train_rows = dataset.rows("train")
    options = settings.model_dump()
    meta = {**options, "num_labels": dataset.num_labels, "num_train": len(train_rows)}
    with write_folder(out, KIND, VERSION, meta) as folder:
        blocks = target_blocks(dataset.relevance[train_rows], **options)
        write_csr(folder.path, "", blocks, np.float32)
    return Path(out)


def load_label_graph(path: str | os.PathLike[str], verify: bool = True) -> csr_matrix:
    """Read a folder written by `build_label_graph`: float32 CSR [L, L], memory-mapped.

    Raises:
        ArtifactError: the folder is missing, damaged, of another kind or a newer version, or its
        arrays do not match.
    """
    root = Path(path)
    with verify_once(root, verify) as needed:
        meta = read_manifest(root, KIND, VERSION, needed)["meta"]
        num_labels = int(meta.get("num_labels", -1))
        return load_csr(root, "", (num_labels, num_labels), np.float32, needed)


def _visit_blocks(
    label_LN: csr_matrix, positive_NL: csr_matrix
) -> Iterator[tuple[int, csr_matrix]]:
    """Number of visits to each label by a random walk from each label: blocks (first label, int64
    CSR [J, L]), rows sorted.

    A hop goes to a random query of the label and from there to a random label of that query. The
    seeds are fixed, so the same data gives the same visits. No walk starts from a label whose row
    of `label_LN` is empty.
    """
    num_labels = label_LN.shape[0]
    # includes labels from which no walk starts, but which walks may visit
    queries_L = csr_matrix(positive_NL.T)
    for number, start in enumerate(range(0, num_labels, _WALKS_AT_ONCE)):
        stop = min(start + _WALKS_AT_ONCE, num_labels)
        generator = np.random.default_rng([_WALK_SEED, number])
        walking_J = np.flatnonzero(np.diff(label_LN.indptr[start : stop + 1]))
        # random numbers are drawn for every label of a block, also for those without a walk
        draws = (generator.random((3, stop - start))[:, walking_J] for _ in range(_HOPS))
        visited_HJ = _walk(queries_L, positive_NL, start + walking_J, draws)
        key, count = np.unique(walking_J * num_labels + visited_HJ, return_counts=True)
        row, column = np.divmod(key, num_labels)
        yield start, csr_matrix((count, (row, column)), shape=(stop - start, num_labels))


def _walk(
    queries_L: csr_matrix, labels_N: csr_matrix, start_J: np.ndarray, draws: Iterable[np.ndarray]
) -> np.ndarray:
    """Labels visited at each hop by the walks from `start_J`, int64 [H, J]; `draws` yields, for
    each hop, three random numbers per walk.
    """
    visited = []
    current_J = start_J
    for to_query_J, to_label_J, restart_J in draws:
        query_J = _pick(queries_L, current_J, to_query_J)
        label_J = _pick(labels_N, query_J, to_label_J)
        visited.append(label_J)
        current_J = np.where(restart_J < _RESTART, start_J, label_J)
    return np.stack(visited)


def _pick(matrix: csr_matrix, rows_J: np.ndarray, draw_J: np.ndarray) -> np.ndarray:
    """A random column of each row, chosen by `draw_J` in [0, 1): int64 [J]. No row may be empty."""
    begin_J = matrix.indptr[rows_J].astype(np.int64)
    count_J = matrix.indptr[rows_J + 1] - begin_J
    return matrix.indices[begin_J + (draw_J * count_J).astype(np.int64)].astype(np.int64)
