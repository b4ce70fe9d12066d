"""Votes of similar training queries: a third score besides those of the two heads.

Legend: M training queries, B queries, N nearest training queries of a query, L labels, D width of a
head (or number of words), T votes of all queries, E labels of those votes.

    votes(x, l) = sum over the N nearest m of w_m(x) y_ml       y_ml is 1 for a label of m, else 0
    score(x, l) = heads(x, l) + weight * votes(x, l)

For queries compared by vectors, w_m = exp((cos - largest cos) / 0.05) for positive cosines
("softmax"). These votes are divided by the query's largest vote before labels are excluded, so that
a label's score does not depend on the exclusions.

For queries compared by words, w(x) = (K + I)^-1 k(x), where k holds the positive cosines between x
and its neighbours, and K the cosines between those neighbours ("ridge-labels"): kernel ridge
regression of the labels on the neighbours alone. Near-duplicate neighbours share one vote. Each
label's text is an additional voter: it votes for its label with weight 1, and for co-occurring
labels with `COMPANION` times the share of its label's training queries that also have that label.

Sources: local learning (Bottou and Vapnik 1992) with the dual form of ridge regression (Saunders et
al. 1998); the distance-weighted vote of nearest neighbours (Dudani 1976); interpolation of a model
with its nearest training examples, softmax over their similarities (Khandelwal et al. 2020, kNN-LM,
section 2).
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix, diags, identity, vstack

from unidec.data.raw import joined_texts, text_array
from unidec.model.words import WordSpace
from unidec.ranking.heads import PairScores, unit_rows
from unidec.ranking.index import LabelIndex
from unidec.ranking.sparse import (
    NOT_REACHED,
    Array,
    Csr,
    Floats,
    Postings,
    Rows,
    Sums,
    Workspace,
    add,
    compiled,
    compiled_inline,
    keep_largest,
)

Vote = Literal["softmax", "ridge-labels"]
RIDGE = 1.0  # measured: benchmarks/results/votes.md
TEMPERATURE = 0.05  # of the softmax vote; close to the temperature of the heads' own softmax
_MOST_PRODUCTS = 1 << 20  # kernel entries (pairs of neighbours) of the systems solved at a time
# votes of a label's text for co-occurring labels: weight, and minimum share
COMPANION = np.float32(0.5)
LEAST_SHARE = np.float32(0.1)
_ONE = np.float32(1)
MOST_CO_OCCURRING = 128  # co-occurring labels stored for each label: the most frequent ones


class Neighbours:
    """Training queries that vote for their labels. Voting is thread-safe.

    Args:
        vectors_MD: vectors by which queries are compared: either in a head's space (stored as
            float16, unit length), or CSR word vectors if `words` is given.
        labels_ML: CSR [M, L], labels of the queries (relevance above 0); each label counts once.
        uids, titles: uids and titles of the M queries.
        words: the word space of `vectors_MD`; None if the vectors are in a head's space.
        label_words_LF: with words: CSR word vectors of the label texts.
        part: the part of the word vectors that is compared; see `WordSpace.part`.

    Raises:
        ValueError: the number of queries differs between the arguments or is 0, numbers are not
            finite, or the word vectors of queries or labels do not fit the words.
    """

    def __init__(
        self,
        vectors_MD: npt.NDArray[Any] | csr_matrix,
        labels_ML: csr_matrix,
        uids: Any,
        titles: Any,
        words: WordSpace | None = None,
        label_words_LF: csr_matrix | None = None,
        part: int = 0,
    ) -> None:
        self.uids = text_array(uids, pa.large_string())
        self.titles = text_array(titles, pa.large_string())
        self.words = words
        self.part = part
        values = vectors_MD if words is None else vectors_MD.data
        if not np.isfinite(values).all():
            raise ValueError("vectors_MD must be finite")
        if words is not None and vectors_MD.shape[1] != words.num_columns:
            raise ValueError("vectors_MD must have a column for each word")
        self.vectors_MD: Any = vectors_MD
        if words is not None:
            # rounded as in the stored file, so that neighbours do not change when the bundle is
            # loaded
            self.vectors_MD = _rounded_to_float16(vectors_MD)
        elif vectors_MD.dtype != np.float16:
            self.vectors_MD = unit_rows(vectors_MD).astype(np.float16)
        parts = (vectors_MD, labels_ML)
        counts = {part.shape[0] for part in parts} | {len(self.uids), len(self.titles)}
        if len(counts) != 1 or 0 in counts:
            what = "vectors, labels, uids and titles must be of the same queries"
            raise ValueError(f"{what}, got {sorted(counts)}")
        self.label_words_LF: Any = None
        self.labels_ML = csr_matrix(labels_ML > 0, dtype=np.float32)
        self.labels_ML.sum_duplicates()
        self.labels_ML.data[:] = 1.0  # duplicates were summed
        self.compared_MD = voting = self.vectors_MD
        voted = self.labels_ML
        if words is not None:
            if label_words_LF is None:
                raise ValueError("labels vote by their words, but those are missing")
            self.label_words_LF = _rounded_to_float16(label_words_LF)
            self.compared_MD = words.part(self.vectors_MD, part)
            voting = vstack([self.compared_MD, self.compared_labels], format="csr")
            self._share_memory(voting)
            voted = vstack([voted, self._voted_by_labels()], format="csr")
        self.num_voters = voted.shape[0]
        voted.sort_indices()
        self._voters = _Voters(
            self.num_queries, Csr.of(voted), Csr.of(self.labels_ML), self.label_counts
        )
        self._of_labels = Workspace(self.num_labels)
        self._index: LabelIndex | None = None
        self._postings: Postings | None = None
        self._products: RowProducts | None = None
        if words is None:
            self._index = LabelIndex.build(voting.astype(np.float32))
        else:
            self._postings = Postings(voting)
            self._products = RowProducts(voting)

    def _share_memory(self, voting: csr_matrix) -> None:
        """Replace copies of the compared word vectors by rows of `voting`, which holds them all."""
        assert self.words is not None
        num_queries = self.num_queries
        self.compared_MD = _rows(voting, 0, num_queries)
        self.compared_labels = _rows(voting, num_queries, voting.shape[0])
        if not self.words.head:
            self.vectors_MD = self.compared_MD
            self.label_words_LF = self.compared_labels

    @property
    def vote(self) -> Vote:
        """How votes are weighted; see the module's description."""
        return "softmax" if self.words is None else "ridge-labels"

    @property
    def num_queries(self) -> int:
        """Number of training queries M."""
        return int(self.vectors_MD.shape[0])

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return int(self.labels_ML.shape[1])

    @cached_property
    def compared_labels(self) -> csr_matrix:
        """The compared part of the label texts' word vectors, CSR [L, C]."""
        assert self.words is not None and self.label_words_LF is not None
        return self.words.part(self.label_words_LF, self.part)

    @cached_property
    def by_first_words(self) -> Neighbours | None:
        """The same queries, compared by their first words; None if first words are not stored."""
        if self.words is None or not self.words.head or self.part:
            return None
        return Neighbours(
            self.vectors_MD,
            self.labels_ML,
            self.uids,
            self.titles,
            words=self.words,
            label_words_LF=self.label_words_LF,
            part=1,
        )

    @cached_property
    def label_counts(self) -> Floats:
        """Number of training queries of each label, float32 [L]."""
        return np.asarray(self.labels_ML.sum(axis=0)).ravel()

    @cached_property
    def co_occurrence(self) -> csr_matrix:
        """Label co-occurrence, float32 CSR [L, L]: the share of the row label's training queries
        that also have the column label; the diagonal is 0, and each row keeps its
        `MOST_CO_OCCURRING` largest entries.
        """
        count_LL = csr_matrix(self.labels_ML.T @ self.labels_ML)
        num_queries_L = np.maximum(count_LL.diagonal(), 1)
        count_LL.setdiag(0)
        share_LL = diags(1 / num_queries_L) @ keep_largest(count_LL, MOST_CO_OCCURRING)
        return csr_matrix(share_LL, dtype=np.float32)

    def _voted_by_labels(self) -> csr_matrix:
        """Labels that each label's text votes for: the label itself, with value 1, and labels whose
        co-occurrence is at least `LEAST_SHARE`, with that share; float32 CSR [L, L].
        """
        others_LL = self.co_occurrence.copy()
        others_LL.data[others_LL.data < LEAST_SHARE] = 0
        others_LL.eliminate_zeros()
        own_LL = identity(self.num_labels, dtype=np.float32, format="csr")
        return csr_matrix(own_LL + others_LL)

    def with_queries(
        self, compared: Any, labels_ML: csr_matrix, uids: Any, titles: Any
    ) -> Neighbours:
        """These queries, followed by others.

        Args:
            compared: the others' vectors or words (`Voting.compared`). labels_ML: labels of all
                queries. uids, titles: of the others.
        """
        if self.words is None:
            own = unit_rows(compared).astype(np.float16)
            vectors: Any = np.concatenate([self.vectors_MD, own])
        else:
            vectors = vstack([self.vectors_MD, compared], format="csr")
        return Neighbours(
            vectors,
            labels_ML,
            joined_texts(self.uids, uids),
            joined_texts(self.titles, titles),
            words=self.words,
            label_words_LF=self.label_words_LF,
        )

    def nearest(self, query_BD: Floats | csr_matrix, num: int) -> tuple[Floats, Rows]:
        """The voters with the largest cosine, best first; ties are ordered by row.

        Args:
            query_BD: float [B, D] of any length, in the space of `vectors_MD`; with words, CSR from
            `words.vectors`.
            num: N, at least 1; capped at the number of voters.

        Returns:
            cosines float32 [B, N] to the float16 vectors, and rows int64 [B, N]; rows from M on are
            labels. By words, only texts that share a word with the query are neighbours; missing
            ones have cosine 0 and row -1.
        """
        num = min(num, self.num_voters)
        if self._index is not None:
            return self._index.search(unit_rows(cast(Floats, query_BD)), num)
        assert self._postings is not None
        return self._postings.best(Csr.of(query_BD), num)

    def weights(self, cosine_BN: Floats, row_BN: Rows) -> Floats:
        """Weight of each neighbour's vote, float32 [B, N]; the arguments are the result of
        `nearest`.
        """
        if self.words is None:
            below_BN = cosine_BN - cosine_BN.max(axis=1, keepdims=True, initial=-1.0)
            weight_BN = np.exp(below_BN / np.float32(TEMPERATURE))
            return np.where(cosine_BN > 0, weight_BN, np.float32(0))
        out_BN = np.empty_like(cosine_BN)
        step = max(1, _MOST_PRODUCTS // row_BN.shape[1] ** 2)
        for begin in range(0, len(out_BN), step):
            block = slice(begin, begin + step)
            out_BN[block] = self._ridge_weights(cosine_BN[block], row_BN[block])
        return out_BN

    def _ridge_weights(self, cosine_BN: Floats, row_BN: Rows) -> Floats:
        """Weights by ridge regression. Neighbours without a positive cosine get a separate
        equation, and weight 0.
        """
        is_near_BN = cosine_BN > 0
        near_BN = np.where(is_near_BN, row_BN, -1)
        assert self._products is not None
        kernel_BNN = self._products.of(near_BN)
        kernel_BNN += np.float32(RIDGE) * np.identity(row_BN.shape[1], dtype=np.float32)
        cosine_BN1 = np.where(is_near_BN, cosine_BN, 0)[:, :, None]
        return np.linalg.solve(kernel_BNN, cosine_BN1)[:, :, 0]

    def votes(
        self, query_BD: Floats | csr_matrix, num: int, left_out: Rows | None = None
    ) -> PairScores:
        """Positive votes of the `num` nearest voters for labels. A query has no votes if no cosine
        is positive or no neighbour has a label.

        Args:
            left_out: int64 [B], rows of the queries if they are training queries compared by words.
                Each query is treated as absent from the training data: `num` others vote, and label
                co-occurrence excludes it.
        """
        if left_out is None:
            cosine_BN, row_BN = self.nearest(query_BD, num)
            left_out = np.full(len(row_BN), -1, dtype=np.int64)
        else:
            cosine_BN, row_BN = self.nearest(query_BD, num + 1)
            cosine_BN[row_BN == left_out[:, None]] = 0
        weight_BN = self.weights(cosine_BN, row_BN)
        begin = self._voters.voted.begin
        row_N = row_BN[row_BN >= 0]
        num_entries = (begin[row_N + 1] - begin[row_N]).sum()
        key_T = np.empty(num_entries, dtype=np.int64)
        vote_T = np.empty(num_entries, dtype=np.float32)
        ballots = _Ballots(weight_BN, row_BN, left_out)
        num = _count_votes(ballots, self._voters, self._of_labels.sums, key_T, vote_T)
        order = np.argsort(key_T[:num])
        votes = PairScores(key_T[order], vote_T[order], (len(row_BN), self.num_labels))
        return votes.relative() if self.words is None else votes


def _rows(matrix: csr_matrix, begin: int, end: int) -> csr_matrix:
    """Rows `begin` to `end` (exclusive) as a view of the matrix's entries."""
    offsets = matrix.indptr[begin : end + 1]
    entries = slice(offsets[0], offsets[-1])
    shape = (end - begin, matrix.shape[1])
    parts = (matrix.data[entries], matrix.indices[entries], offsets - offsets[0])
    return csr_matrix(parts, shape=shape)


def _rounded_to_float16(matrix: csr_matrix) -> csr_matrix:
    """A float32 copy with values rounded to float16."""
    out = csr_matrix(matrix, dtype=np.float32, copy=True)
    out.data = out.data.astype(np.float16).astype(np.float32)
    return out


class RowProducts:
    """Computes inner products between rows of a matrix. Thread-safe.

    Args:
        matrix_RF: CSR [R, F].
    """

    def __init__(self, matrix_RF: csr_matrix) -> None:
        self._rows = Csr.of(matrix_RF)
        self._links = _Links(matrix_RF.shape[1])

    def of(self, row_BN: Rows) -> Floats:
        """Inner products between each query's rows, float32 [B, N, N]; 0 for row -1."""
        num_queries, num_rows = row_BN.shape
        product_BNN = np.zeros((num_queries, num_rows, num_rows), dtype=np.float32)
        _products(self._rows, row_BN, self._links.last_F, product_BNN)
        return product_BNN


class _Links(threading.local):
    """Thread-local buffer for the last entry of each column, for `_products`."""

    def __init__(self, num_columns: int) -> None:
        self.last_F = np.full(num_columns, -1, dtype=np.int64)


@compiled
def _products(rows: Csr, row_BN: Array, last_F: Array, product_BNN: Array) -> None:
    """Sum the products of all pairs of entries in the same column. The entries of a column form a
    linked list, the last one first.

    Args:
        last_F: last entry of each column, int64; all -1 before and after the call.
    """
    num_rows = row_BN.shape[1]
    for query in range(len(row_BN)):
        num_entries = 0
        for row in row_BN[query]:
            if row >= 0:
                num_entries += rows.begin[row + 1] - rows.begin[row]
        before_E = np.empty(num_entries, dtype=np.int64)
        row_E = np.empty(num_entries, dtype=np.int64)
        value_E = np.empty(num_entries, dtype=np.float32)
        entry = 0
        for n in range(num_rows):
            row = row_BN[query, n]
            if row < 0:
                continue
            for place in range(rows.begin[row], rows.begin[row + 1]):
                column = rows.column[place]
                value = rows.value[place]
                before_E[entry] = last_F[column]
                row_E[entry] = n
                value_E[entry] = value
                last_F[column] = entry
                other = entry
                while other >= 0:
                    product_BNN[query, n, row_E[other]] += value * value_E[other]
                    other = before_E[other]
                entry += 1
        for n in range(num_rows):
            row = row_BN[query, n]
            for m in range(n):
                product_BNN[query, m, n] = product_BNN[query, n, m]
            if row >= 0:
                for place in range(rows.begin[row], rows.begin[row + 1]):
                    last_F[rows.column[place]] = -1


class _Voters(NamedTuple):
    """Voters' data for compiled code."""

    num_queries: int
    voted: Csr  # [voters, L]: a training query's labels; for a label, itself and co-occurring ones
    labels_ML: Csr
    label_counts: Array


class _Ballots(NamedTuple):
    """The voters of each query, their weights, and the training query that is left out, or -1."""

    weight_BN: Array
    row_BN: Array
    left_out_B: Array


@compiled_inline
def _has(matrix: Csr, row: int, column: int) -> bool:
    for place in range(matrix.begin[row], matrix.begin[row + 1]):
        if matrix.column[place] == column:
            return True
    return False


@compiled_inline
def _share(voters: _Voters, voter: int, place: int, left_out: int) -> Any:
    """Weight of a voter's vote for one of its labels, as if training query `left_out` were absent,
    which changes only the shares of that query's labels.
    """
    share = voters.voted.value[place]
    label = voters.voted.column[place]
    voting_label = voter - voters.num_queries
    if voting_label < 0 or voting_label == label:
        return share
    if left_out >= 0 and _has(voters.labels_ML, left_out, voting_label):
        count = voters.label_counts[voting_label]
        num_both = share * count
        if _has(voters.labels_ML, left_out, label):
            num_both -= _ONE
        share = num_both / max(count - _ONE, _ONE)
        if share < LEAST_SHARE:
            return np.float32(0)
    return COMPANION * share


@compiled
def _count_votes(
    ballots: _Ballots, voters: _Voters, sums: Sums, key_T: Array, vote_T: Array
) -> Any:
    """Write the keys and values of the positive vote sums, query by query; returns their number."""
    num_labels = len(sums.total)
    num_queries, num_voters = ballots.row_BN.shape
    num_written = 0
    for query in range(num_queries):
        left_out = ballots.left_out_B[query]
        num_reached = np.int64(0)
        for n in range(num_voters):
            weight = ballots.weight_BN[query, n]
            if weight == 0:
                continue
            voter = ballots.row_BN[query, n]
            for place in range(voters.voted.begin[voter], voters.voted.begin[voter + 1]):
                label = voters.voted.column[place]
                vote = weight * _share(voters, voter, place, left_out)
                num_reached = add(sums, num_reached, label, vote)
        for n in range(num_reached):
            label = sums.reached[n]
            if sums.total[label] > 0:
                key_T[num_written] = query * num_labels + label
                vote_T[num_written] = sums.total[label]
                num_written += 1
            sums.total[label] = NOT_REACHED
    return num_written
