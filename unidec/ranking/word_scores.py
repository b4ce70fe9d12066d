"""Scores of all labels from the words of a query: votes of similar training queries, and cosines to the words of the
label's text and of its training queries.

A training query can be scored as if it were absent from the training data ("left out"): its own vote, its words in the
sums of its labels and its count in their frequencies are subtracted. A network trained on training queries to rank
labels by these scores alone (`fusion_fit.fit_word_network`) therefore sees the same distribution as for new queries.
Its score is a feature of the fusion. Source: stacked generalisation (Wolpert 1992).

Legend: B queries, M training queries, L labels, F words, P pairs of a query and a label, O pairs of a left-out query
and one of its labels, T largest scores of a query, X features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, diags, vstack

from unidec.ranking.candidates import DenseScores, PairScores, SparseRows, keep_largest
from unidec.ranking.neighbours import Neighbours

WORD_FEATURES = (
    "votes", "votes below the most", "log rank by votes",
    "words of the label", "label words below the best", "log rank by label words",
    "words of its queries", "query words below the best", "log rank by query words",
    "most votes", "best label words", "best query words", "log frequency", "log words of the query",
)  # fmt: skip
CANDIDATES = (100, 50, 50)  # of a left-out query: labels with most votes, best by label words, best by query words
_RANKED = 64  # best labels among which a rank is counted
_ROUNDING = 1e-5  # relative differences up to this size may be rounding errors
_QUERIES_AT_ONCE = 256
_BLOCK_SCORES = 1 << 23  # scores of all labels for the queries of one block
_PROFILE_WORDS = 256  # largest word weights kept for the queries of a label; popular labels have thousands

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WordScores:
    """Scores of all labels for B queries.

    Attributes:
        votes: votes of similar training queries. by_label, by_queries: cosines of the query's words to the words of
            the label's text, and to those of the label's training queries.
        count_L: training queries of each label, float32 [L].
        num_words_B: known words of each query, int64 [B].
        left_out_labels: 1 for the labels of left-out queries; None if no queries are left out.
        by_first_words: the same scores from the first words alone; None if those are not stored or not scored.
    """

    votes: PairScores
    by_label: DenseScores
    by_queries: DenseScores
    count_L: Floats
    num_words_B: npt.NDArray[np.int64]
    left_out_labels: PairScores | None = None
    by_first_words: WordScores | None = None

    def candidates(self) -> Rows:
        """Keys query * L + label of the best labels by each of the three scores, ascending."""
        scores: tuple[PairScores | DenseScores, ...] = (self.votes, self.by_label, self.by_queries)
        keys = [some.largest(count) for some, count in zip(scores, CANDIDATES, strict=True)]
        return np.unique(np.concatenate(keys))

    def features(self, query_P: Rows, label_P: Rows) -> Floats:
        """`WORD_FEATURES` of the given pairs, followed by those of the first words if scored: float32 [P, X]."""
        columns, best = [], []
        key_P = query_P * self.votes.shape[1] + label_P
        for scores in (self.votes, self.by_label, self.by_queries):
            top_BT = scores.top(_RANKED)
            value_P = scores.at(key_P)
            best.append(top_BT.max(axis=1)[query_P])
            columns += [value_P, best[-1] - value_P, np.log1p((top_BT[query_P] > value_P[:, None]).sum(axis=1))]
        count_P = self.count_L[label_P]
        if self.left_out_labels is not None:
            count_P = count_P - self.left_out_labels.at(key_P)
        columns += [*best, np.log1p(count_P), np.log1p(self.num_words_B)[query_P]]
        feature_PX = np.stack(columns, axis=1, dtype=np.float32, casting="same_kind")
        if self.by_first_words is None:
            return feature_PX
        return np.concatenate([feature_PX, self.by_first_words.features(query_P, label_P)], axis=1)


class WordScorer:
    """Scores labels by words. Scoring is thread-safe.

    Args:
        neighbours: training queries, compared by words, with the labels' words. num_votes: neighbours that vote.
    """

    def __init__(self, neighbours: Neighbours, num_votes: int) -> None:
        self.neighbours, self.num_votes = neighbours, num_votes
        # sums of the word vectors of each label's training queries (PECOS: PIFA); normalised below
        self._sum_LF = keep_largest(csr_matrix(neighbours.labels_ML.T @ neighbours.compared_MD), _PROFILE_WORDS)
        self._norm_L = np.sqrt(np.asarray(self._sum_LF.multiply(self._sum_LF).sum(axis=1)).ravel())
        unit_L = np.divide(1, self._norm_L, out=np.zeros_like(self._norm_L), where=self._norm_L > 0)
        # both kinds of label vectors in one matrix, for a single product
        words_2LF = vstack([neighbours.compared_labels, diags(unit_L) @ self._sum_LF], format="csr")
        self._words_F2L = SparseRows(words_2LF.T.tocsr())
        self.by_first_words = (
            None if neighbours.by_first_words is None else WordScorer(neighbours.by_first_words, num_votes)
        )

    @property
    def queries_at_once(self) -> int:
        """Queries to score in one call, so that their scores take about 32 MB."""
        scores = 3 * max(1, self.neighbours.num_labels) * (1 if self.by_first_words is None else 2)
        return max(1, min(_QUERIES_AT_ONCE, _BLOCK_SCORES // scores))

    def score(self, words_BF: csr_matrix, left_out: Rows | None = None, first_words: bool = True) -> WordScores:
        """Scores of all labels.

        Args:
            words_BF: queries, from `WordSpace.vectors`.
            left_out: int64 [B], rows of the queries if they are training queries; each is treated as absent.
            first_words: also score by the first words, if they are stored.
        """
        neighbours, num_labels = self.neighbours, self.neighbours.num_labels
        votes = neighbours.votes(words_BF, self.num_votes, left_out)
        by_words = self._words_F2L.product(words_BF)
        by_label = by_words.columns(0, num_labels)
        by_queries = by_words.columns(num_labels, 2 * num_labels)
        left_out_labels = None
        if left_out is not None:
            left_out_labels = PairScores.of(neighbours.labels_ML[left_out])
            key_O = left_out_labels.key_N
            query_O, label_O = np.divmod(key_O, num_labels)
            by_queries.put(key_O, self._without_query(words_BF[query_O], label_O, by_queries.at(key_O)))
        assert neighbours.words is not None
        num_words_B = neighbours.words.num_words(words_BF, neighbours.part)
        by_first_words = None
        if self.by_first_words is not None and first_words:
            by_first_words = self.by_first_words.score(words_BF, left_out)
        counts = (neighbours.label_counts, num_words_B)
        return WordScores(votes, by_label, by_queries, *counts, left_out_labels, by_first_words)

    def _without_query(self, words_OF: csr_matrix, label_O: npt.NDArray, cosine_O: Floats) -> Floats:
        """Cosine of each query q to the sum s of a label that it has, without its own part: cos(q, s - q), float32 [O].

        Args:
            cosine_O: cos(q, s).
        """
        norm_O = self._norm_L[label_O]
        in_sum_OF = self._sum_LF[label_O].sign()  # a popular label's sum lacks some of its words
        square_O = np.asarray(words_OF.multiply(words_OF).multiply(in_sum_OF).sum(axis=1)).ravel()  # |q|^2
        product_O = cosine_O * norm_O  # q . s
        rest_product_O = product_O - square_O  # q . (s - q)
        rest_square_O = norm_O**2 - 2 * product_O + square_O  # |s - q|^2
        valid = (rest_product_O > _ROUNDING * product_O) & (rest_square_O > _ROUNDING * norm_O**2)
        rest_norm_O = np.sqrt(np.maximum(rest_square_O, 0))
        return np.divide(rest_product_O, rest_norm_O, out=np.zeros_like(rest_product_O), where=valid)
