"""Scores of labels by words alone: votes of similar training queries, and cosines of the query's
words to those of the label's text and of its training queries.

Legend: B queries, L labels, P pairs of a query and a candidate, F words, X features, O pairs of a
left-out query and one of its labels, T largest scores of a query, K labels found by cosine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, diags
from scipy.sparse.linalg import norm

from unidec.ranking.heads import PairScores, first_keys
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.sparse import (
    NO_ROWS,
    Array,
    Csr,
    Floats,
    Postings,
    Rows,
    compiled,
    keep_largest,
)

WORD_FEATURES = (
    "votes",
    "votes below the most",
    "log rank by votes",
    "words of the label",
    "label words below the best",
    "log rank by label words",
    "words of its queries",
    "query words below the best",
    "log rank by query words",
    "most votes",
    "best label words",
    "best query words",
    "log frequency",
    "log words of the query",
)
# candidates of a left-out query: labels with most votes, best by label words, best by query words
WORD_CANDIDATES = (100, 50, 50)
VOTED = 100  # labels with the most votes that are added to the candidates
_RANKED = 64  # best labels among which a label's rank is determined
_ROUNDING = 1e-5  # relative differences up to this size may be rounding errors
# largest word weights kept for the queries of a label; popular labels have thousands
_PROFILE_WORDS = 256


class WordCosines:
    """Cosines between the words of B queries and the words of each label.

    Args:
        postings: word vectors of the labels. queries: word vectors of the queries.
        own: cosines that replace the computed ones, for the labels of left-out queries.
    """

    def __init__(self, postings: Postings, queries: Csr, own: PairScores) -> None:
        self._postings = postings
        self._queries = queries
        self._own = own
        self.shape = own.shape

    def search(self, key_P: Rows) -> tuple[Floats, Floats, Rows]:
        """Cosines of the given pairs, float32 [P]; and each query's largest positive cosines with
        their keys, largest first, padded with 0 and -1: float32 and int64 [B, `_RANKED`].

        Args:
            key_P: keys, ascending.
        """
        own = self._own
        num_queries, num_labels = self.shape
        query_P, label_P = np.divmod(key_P, num_labels)
        num_own_B = np.bincount(own.key_N // num_labels, minlength=num_queries)
        num = _RANKED + num_own_B.max(initial=0)
        cosine_BK, label_BK, cosine_P = self._postings.search(self._queries, num, query_P, label_P)
        key_BK = np.where(label_BK < 0, -1, first_keys(*self.shape) + label_BK)
        if num == _RANKED:
            return cosine_P, cosine_BK, key_BK
        is_own_P = np.isin(key_P, own.key_N)
        cosine_P[is_own_P] = own.at(key_P[is_own_P])
        is_other_BK = ~np.isin(key_BK, own.key_N) & (key_BK >= 0)
        key_N = np.concatenate([key_BK[is_other_BK], own.key_N])
        cosine_N = np.concatenate([cosine_BK[is_other_BK], own.score_N])
        order = np.argsort(key_N)
        both = PairScores(key_N[order], cosine_N[order], self.shape)
        return cosine_P, *both.best(_RANKED)

    def largest(self, count: int) -> Rows:
        """Keys of each query's `count` largest positive cosines, at most `_RANKED`."""
        _, cosine_BT, key_BT = self.search(NO_ROWS)
        is_positive = cosine_BT[:, :count] > 0
        return key_BT[:, :count][is_positive]


@dataclass(frozen=True)
class WordEvidence:
    """The three word scores of some pairs: votes, and cosines to the words of the label's text and
    to the words of its training queries.

    Attributes:
        score_SP: float32 [3, P].
        top_SBT: each query's largest scores, largest first, padded with 0: float32 [3, B,
            `_RANKED`].
    """

    score_SP: Floats
    top_SBT: Floats


@dataclass(frozen=True)
class WordScores:
    """Scores of labels for B queries.

    Attributes:
        votes: votes of similar training queries. by_label, by_queries: cosines of the query's words
            to the words of the label's text, and to those of the label's training queries.
        count_L: training queries of each label, float32 [L].
        num_words_B: known words of each query, int64 [B].
        left_out_labels: 1 for the labels of left-out queries; None if no queries are left out.
        by_first_words: the same scores from the first words alone; None if the first words are not
        stored, or not requested.
    """

    votes: PairScores
    by_label: WordCosines
    by_queries: WordCosines
    count_L: Floats
    num_words_B: npt.NDArray[np.int64]
    left_out_labels: PairScores | None
    by_first_words: WordScores | None

    @cached_property
    def most_votes(self) -> tuple[Floats, Rows]:
        """Each query's largest votes and their keys, as in `PairScores.best`: [B, `VOTED`]."""
        return self.votes.best(VOTED)

    def candidates(self) -> Rows:
        """Keys query * L + label of the best labels by each of the three scores, ascending."""
        voted, by_label, by_queries = WORD_CANDIDATES
        _, voted_BT = self.most_votes
        keys = (
            voted_BT[:, :voted].ravel(),
            self.by_label.largest(by_label),
            self.by_queries.largest(by_queries),
        )
        key_P = np.unique(np.concatenate(keys))
        return key_P[key_P >= 0]

    def read(self, key_P: Rows) -> WordEvidence:
        """The three scores of the given pairs; keys must ascend."""
        label_P, label_BT, _ = self.by_label.search(key_P)
        queries_P, queries_BT, _ = self.by_queries.search(key_P)
        votes_BT, _ = self.most_votes
        return WordEvidence(
            score_SP=np.stack([self.votes.at(key_P), label_P, queries_P]),
            top_SBT=np.stack([votes_BT[:, :_RANKED], label_BT, queries_BT]),
        )

    def features(
        self, query_P: Rows, label_P: Rows, evidence: WordEvidence | None = None
    ) -> Floats:
        """`WORD_FEATURES` of the given pairs, then those of the first words if they are
        scored: float32 [P, X].

        Args:
            query_P, label_P: pairs, ascending by query and label.
            evidence: result of `read` for these pairs; None: they are read here.
        """
        key_P = query_P * self.votes.shape[1] + label_P
        if evidence is None:
            evidence = self.read(key_P)
        count_P = self.count_L[label_P]
        if self.left_out_labels is not None:
            count_P = count_P - self.left_out_labels.at(key_P)
        feature_PX = np.empty((len(key_P), len(WORD_FEATURES)), dtype=np.float32)
        _fill_features(query_P, evidence.score_SP, evidence.top_SBT, feature_PX)
        feature_PX[:, -2] = np.log1p(count_P)
        feature_PX[:, -1] = np.log1p(self.num_words_B)[query_P]
        if self.by_first_words is None:
            return feature_PX
        of_first_words_PX = self.by_first_words.features(query_P, label_P)
        return np.concatenate([feature_PX, of_first_words_PX], axis=1)


@compiled
def _fill_features(query_P: Array, score_SP: Array, top_SBT: Array, feature_PX: Array) -> None:
    """Features of the three scores: for each, the score, its difference from the query's best, and
    the log of its rank; then the query's best value of each score.
    """
    num_scores, _, num_ranked = top_SBT.shape
    for pair in range(len(query_P)):
        for s in range(num_scores):
            score = score_SP[s, pair]
            top_T = top_SBT[s, query_P[pair]]
            rank = 0
            while rank < num_ranked and top_T[rank] > score:
                rank += 1
            feature_PX[pair, 3 * s] = score
            feature_PX[pair, 3 * s + 1] = top_T[0] - score
            feature_PX[pair, 3 * s + 2] = np.log1p(rank)
            feature_PX[pair, 3 * num_scores + s] = top_T[0]


class WordScorer:
    """Scores labels by words. Scoring is thread-safe.

    Args:
        neighbours: training queries, compared by words, with the labels' words. num_votes:
        neighbours that vote.
    """

    def __init__(self, neighbours: Neighbours, num_votes: int) -> None:
        self.neighbours = neighbours
        self.num_votes = num_votes
        # sums of the word vectors of each label's training queries (PECOS: PIFA); normalised below
        sum_LF = csr_matrix(neighbours.labels_ML.T @ neighbours.compared_MD)
        sum_LF = keep_largest(sum_LF, _PROFILE_WORDS)
        norm_L = norm(sum_LF, axis=1)
        self._norm_L = norm_L
        inverse_L = np.divide(1, norm_L, out=np.zeros_like(norm_L), where=norm_L > 0)
        self._profiles = Postings(diags(inverse_L) @ sum_LF)
        self._labels = Postings(neighbours.compared_labels)
        self.by_first_words: WordScorer | None = None
        if neighbours.by_first_words is not None:
            self.by_first_words = WordScorer(neighbours.by_first_words, num_votes)

    def score(
        self, words_BF: csr_matrix, left_out: Rows | None = None, first_words: bool = True
    ) -> WordScores:
        """Scores of labels.

        Args:
            words_BF: queries, from `WordSpace.vectors`.
            left_out: int64 [B], rows of the queries if they are training queries; each is treated
            as absent from the training data.
            first_words: also score by the first words alone, if they are stored.
        """
        neighbours = self.neighbours
        num_labels = neighbours.num_labels
        votes = neighbours.votes(words_BF, self.num_votes, left_out)
        queries = Csr.of(words_BF)
        none = PairScores.none((words_BF.shape[0], num_labels))
        own = none
        left_out_labels = None
        if left_out is not None:
            left_out_labels = PairScores.of(neighbours.labels_ML[left_out])
            key_O = left_out_labels.key_N
            query_O, label_O = np.divmod(key_O, num_labels)
            with_query_O = self._profiles.at(queries, query_O, label_O)
            cosine_O = self._without_query(words_BF[query_O], label_O, with_query_O)
            own = replace(left_out_labels, score_N=cosine_O.astype(np.float32))
        assert neighbours.words is not None
        by_first_words = None
        if self.by_first_words is not None and first_words:
            by_first_words = self.by_first_words.score(words_BF, left_out)
        return WordScores(
            votes=votes,
            by_label=WordCosines(self._labels, queries, none),
            by_queries=WordCosines(self._profiles, queries, own),
            count_L=neighbours.label_counts,
            num_words_B=neighbours.words.num_words(words_BF, neighbours.part),
            left_out_labels=left_out_labels,
            by_first_words=by_first_words,
        )

    def _without_query(
        self, words_OF: csr_matrix, label_O: npt.NDArray, cosine_O: Floats
    ) -> Floats:
        """Cosine of each query q to the word sum s of one of its labels, with q subtracted from the
        sum: cos(q, s - q), float32 [O].

        Args:
            cosine_O: cos(q, s).
        """
        norm_O = self._norm_L[label_O]
        # the sums of popular labels are truncated, so subtract only words that are in the sum
        square_O = self._profiles.shared_squares(Csr.of(words_OF), label_O)  # |q|^2
        product_O = cosine_O * norm_O  # q . s
        rest_O = product_O - square_O  # q . (s - q)
        rest_square_O = norm_O**2 - 2 * product_O + square_O  # |s - q|^2
        valid_O = rest_O > _ROUNDING * product_O
        valid_O &= rest_square_O > _ROUNDING * norm_O**2
        rest_norm_O = np.sqrt(np.maximum(rest_square_O, 0))
        return np.divide(rest_O, rest_norm_O, out=np.zeros_like(rest_O), where=valid_O)
