"""What the words of a query say about every label: votes of similar training queries, words shared with the label's
text, words shared with its training queries.

A training query can be read as if it were not in the data ("left out"): its own vote, its words in its labels' sums and
its count in their frequencies are taken away. So a network that is trained on training queries to rank labels by these
scores alone (`fusion_fit.fit_word_network`) sees what it will see of new queries, and its score is a feature of the
fusion. Source: stacked generalisation (Wolpert 1992).

Legend: B queries, M training queries, L labels, F words, P pairs of a query and a label, T largest scores of a query, X
features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, diags, vstack

from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.sparse import PairScores, SparseRows, heaviest

WORD_FEATURES = (
    "votes", "votes below the most", "log rank by votes",
    "words of the label", "label words below the best", "log rank by label words",
    "words of its queries", "query words below the best", "log rank by query words",
    "most votes", "best label words", "best query words", "log frequency", "log words of the query",
)  # fmt: skip
CANDIDATES = (100, 50, 50)  # of a left-out query: labels with most votes, best by label words, best by query words
_RANKED = 64  # best labels that a rank counts
_ROUNDING = 1e-5  # relative difference that may be nothing else
_QUERIES_AT_ONCE = 256
_BLOCK_SCORES = 1 << 23  # of queries that are scored at once with all labels
_PROFILE_WORDS = 256  # words of a label's queries that are kept, the heaviest: popular labels have thousands

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WordScores:
    """Scores of all labels for B queries.

    Attributes:
        votes: of similar training queries. label_BL, query_BL: cosines of the query's words to those of the label's
            text, and to those of its training queries; float32 [B, L].
        count_L: training queries of each label, float32 [L].
        num_words_B: int64 [B]. own: 1 for the labels of queries that are left out; None: none is.
        by_head: by the first words alone; None where those are not kept.
    """

    votes: PairScores
    label_BL: Floats
    query_BL: Floats
    count_L: Floats
    num_words_B: npt.NDArray[np.int64]
    own: PairScores | None = None
    by_head: WordScores | None = None

    def candidates(self) -> Rows:
        """Keys query * L + label of the best labels by each score, ascending."""
        keys = [self.votes.largest(CANDIDATES[0])]
        for score_BL, count in zip((self.label_BL, self.query_BL), CANDIDATES[1:], strict=True):
            best_BT = np.argpartition(-score_BL, min(count, score_BL.shape[1]) - 1, axis=1)[:, :count]
            key_BT = best_BT + np.arange(len(best_BT))[:, None] * score_BL.shape[1]
            keys.append(key_BT[np.take_along_axis(score_BL, best_BT, axis=1) > 0])
        return np.unique(np.concatenate(keys))

    def features(self, query_P: Rows, label_P: Rows) -> Floats:
        """`WORD_FEATURES` of some pairs, then, with `by_head`, those of the first words: float32 [P, X]."""
        columns, best = [], []
        num_labels = self.votes.shape[1]
        for scores in (self.votes, self.label_BL, self.query_BL):
            if isinstance(scores, PairScores):
                top_BT, value_P = scores.top(_RANKED), scores.at(query_P * num_labels + label_P)
            else:
                # of equals, here the many zeros, numpy's partition finds the smallest ten times as fast as the largest
                top_BT = -np.partition(-scores, min(_RANKED, num_labels) - 1, axis=1)[:, :_RANKED]
                value_P = scores[query_P, label_P]
            best.append(top_BT.max(axis=1)[query_P])
            columns += [value_P, best[-1] - value_P, np.log1p((top_BT[query_P] > value_P[:, None]).sum(axis=1))]
        count_P = self.count_L[label_P]
        if self.own is not None:
            count_P = count_P - self.own.at(query_P * self.own.shape[1] + label_P)
        columns += [*best, np.log1p(count_P), np.log1p(self.num_words_B)[query_P]]
        feature_PX = np.stack(columns, axis=1, dtype=np.float32, casting="same_kind")
        if self.by_head is None:
            return feature_PX
        return np.concatenate([feature_PX, self.by_head.features(query_P, label_P)], axis=1)


class WordScorer:
    """Scores labels by words. Scoring is safe from several threads at once.

    Args:
        neighbours: the training queries, compared by words, with the labels' words. num_votes: how many of them vote.
    """

    def __init__(self, neighbours: Neighbours, num_votes: int) -> None:
        self.neighbours, self.num_votes = neighbours, num_votes
        # of its training queries (PECOS: PIFA), unit vectors in the product
        self._sum_LF = heaviest(csr_matrix(neighbours.labels_ML.T @ neighbours.compared_MD), _PROFILE_WORDS)
        self._norm_L = np.sqrt(np.asarray(self._sum_LF.multiply(self._sum_LF).sum(axis=1)).ravel())
        unit_L = np.divide(1, self._norm_L, out=np.zeros_like(self._norm_L), where=self._norm_L > 0)
        # in one matrix, for one product
        words_2LF = vstack([neighbours.compared_labels, diags(unit_L) @ self._sum_LF], format="csr")
        self._words_F2L = SparseRows(words_2LF.T.tocsr())
        self.by_head = None if neighbours.by_head is None else WordScorer(neighbours.by_head, num_votes)

    @property
    def queries_at_once(self) -> int:
        """How many queries to score in one call, so that their scores take some 32 MB."""
        scores = 3 * max(1, self.neighbours.num_labels) * (1 if self.by_head is None else 2)
        return max(1, min(_QUERIES_AT_ONCE, _BLOCK_SCORES // scores))

    def score(self, words_BF: csr_matrix, left_out: Rows | None = None, first_words: bool = True) -> WordScores:
        """Scores of all labels.

        Args:
            words_BF: queries, as `WordSpace.vectors` gives them. left_out: int64 [B], where they are training queries:
                their own rows; each is read as if it were not there. first_words: score by these too, if they are kept.
        """
        neighbours, num_labels = self.neighbours, self.neighbours.num_labels
        votes = neighbours.votes(words_BF, self.num_votes, left_out)
        words_B2L = self._words_F2L.product(words_BF)
        label_BL, query_BL, own = words_B2L[:, :num_labels], words_B2L[:, num_labels:], None
        if left_out is not None:
            own = PairScores.of(neighbours.labels_ML[left_out])
            query_O, label_O = np.divmod(own.key_N, num_labels)
            query_BL[query_O, label_O] = self._without(words_BF[query_O], label_O, query_BL[query_O, label_O])
        assert neighbours.words is not None
        read_N = words_BF.indices // max(neighbours.words.num_features, 1) == neighbours.part
        num_words_B = np.diff(np.concatenate([[0], np.cumsum(read_N)])[words_BF.indptr])
        by_head = self.by_head.score(words_BF, left_out) if self.by_head is not None and first_words else None
        return WordScores(votes, label_BL, query_BL, neighbours.label_counts, num_words_B, own, by_head)

    def _without(self, words_OF: csr_matrix, label_O: npt.NDArray, cosine_O: Floats) -> Floats:
        """Cosines of queries to the sums of labels that they have, taken out of the sum: float32 [O]."""
        norm_O = self._norm_L[label_O]
        kept_OF = self._sum_LF[label_O].sign()  # the words of the sum, which lacks some of a popular label's
        own_O = np.asarray(words_OF.multiply(words_OF).multiply(kept_OF).sum(axis=1)).ravel()
        product_O = cosine_O * norm_O
        left_O, square_O = product_O - own_O, norm_O**2 - 2 * product_O + own_O
        some = (left_O > _ROUNDING * product_O) & (square_O > _ROUNDING * norm_O**2)
        return np.divide(left_O, np.sqrt(np.maximum(square_O, 0)), out=np.zeros_like(left_O), where=some)
