"""Learnt fusion: a small network ranks the candidates of heads and votes by their features.

Legend: B queries, L labels, C candidates from the search, P pairs of a query and a candidate, F
words, X features, M training queries, O pairs of a left-out query and one of its labels, T largest
scores of a query, D width of a head, H hidden units.

    score(x, l) = network(features of x and l) + tail * log(inverse propensity of l)

The features are `FEATURES`, optionally followed by `BY_WORDS`, which come from a second network.
That network ranks labels by words alone: by votes of similar training queries, and by cosines to
the words of the label's text and of its training queries. It is trained on training queries, each
scored as if it were absent from the training data ("left out"): its own vote, its words in the sums
of its labels and its count in their frequencies are subtracted, so that the network sees the same
distribution as for new queries (stacked generalisation, Wolpert 1992). The fusion is trained with
the decoupled softmax over each query's candidates (`fusion_fit.py`).

Source: NGAME (section 3, "score fusion") learns to combine the scores of an encoder and a
classifier, with decision trees over labels. Here one network serves all labels, and also uses
votes, words and label frequencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.sparse import csr_matrix, diags

from unidec.cores import thread_pool
from unidec.data.propensity import inverse_propensity
from unidec.ranking.candidates import (
    Candidates,
    Compared,
    PairScores,
    Ranked,
    SparseRows,
    allowed_keys,
    candidate_keys,
    first_keys,
    keep_largest,
)
from unidec.ranking.heads import Floats, Heads, Rows
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.postings import Postings
from unidec.ranking.query_encoder import Encoded

CANDIDATES = 300  # labels searched per query to train the fusion, or to return 100 labels
FEWEST_CANDIDATES = 100  # labels searched if fewer results are requested
RESCORE = 2  # labels per candidate that an approximate search scores exactly
VOTED = 100  # labels with the most votes that are added to the candidates
FEATURES = (
    "blend",
    "dual encoder",
    "classifier",
    "votes",
    "words of the label",
    "words of its queries",
    "labels it comes with",
    "log frequency",
    "log rank by the blend",
    "log rank by the dual encoder",
    "log rank by the classifier",
    "log rank by votes",
    "blend below the best",
    "dual encoder below the best",
    "classifier below the best",
    "votes below the most",
    "label words below the best",
    "query words below the best",
    "best blend",
    "log words of the query",
)
BY_WORDS = ("score by words", "score by words below the best", "log rank by words")
_LIKELY = 10  # labels with the best blend, whose co-occurrence with a candidate is a feature
_LIKELY_TEMPERATURE = 0.3  # of the softmax that weights those labels
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
# of a left-out query: labels with most votes, best by label words, best by query words
WORD_CANDIDATES = (100, 50, 50)
_RANKED = 64  # best labels among which a rank is counted
_ROUNDING = 1e-5  # relative differences up to this size may be rounding errors
QUERIES_AT_ONCE = 256
# largest word weights kept for the queries of a label; popular labels have thousands
_PROFILE_WORDS = 256
LIMIT = 6.0  # standard deviations from the mean at which a feature is clipped
_PAIRS_AT_ONCE = 1 << 11  # the hidden units of this number of pairs fit in the cache

Number = Annotated[float, Field(allow_inf_nan=False)]


class Network(BaseModel):
    """A small network that scores pairs of a query and a label from their features, as stored in
    bundle.json.

        score(x, l) = w . f(x, l) + sum over h of o_h max(0, v_h . f(x, l) + b_h)

    where f(x, l) are the standardised features: minus their mean, divided by their standard
    deviation, and clipped.

    Attributes:
        mean, scale: of each feature, [X]; scale above 0.
        linear: [X]. hidden: [H][X], hidden_bias and out: [H].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mean: list[Number]
    scale: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    linear: list[Number]
    hidden: list[list[Number]]
    hidden_bias: list[Number]
    out: list[Number]

    @model_validator(mode="after")
    def _check_layers(self) -> Network:
        widths = set(map(len, (self.mean, self.scale, self.linear, *self.hidden)))
        if len(widths) != 1:
            raise ValueError(f"the layers differ in width: {sorted(widths)} features")
        if not len(self.hidden) == len(self.hidden_bias) == len(self.out):
            raise ValueError("the layers differ in their number of hidden units")
        return self

    @cached_property
    def _arrays(self) -> tuple[Floats, ...]:
        inputs = (self.mean, self.scale, self.linear)
        hidden = (np.transpose(self.hidden), self.hidden_bias, self.out)
        return tuple(np.asarray(part, dtype=np.float32) for part in inputs + hidden)

    def scores(self, feature_PX: Floats) -> Floats:
        """Scores of pairs with the given features, float32 [P]."""
        mean_X, scale_X, linear_X, hidden_XH, bias_H, out_H = self._arrays
        out_P = np.empty(len(feature_PX), dtype=np.float32)
        for start in range(0, len(out_P), _PAIRS_AT_ONCE):
            block = slice(start, start + _PAIRS_AT_ONCE)
            x_PX = np.clip((feature_PX[block] - mean_X) / scale_X, -LIMIT, LIMIT)
            hidden_PH = np.maximum(x_PX @ hidden_XH + bias_H, 0)
            out_P[block] = x_PX @ linear_X + hidden_PH @ out_H
        return out_P


class Fusion(Network):
    """A trained fusion, as stored in bundle.json.

    Attributes:
        tail: weight of the log inverse propensity. propensity: its constants A and B.
        gain: improvement over the blend on the validation split, by metric.
        words: the network that ranks by words; None: the fusion does not use `BY_WORDS`.
    """

    propensity: tuple[Number, Number]
    tail: Number = 0.0
    gain: dict[str, Number] = Field(default_factory=dict)
    words: Network | None = None

    @model_validator(mode="after")
    def _check_features(self) -> Fusion:
        num = len(self.mean)
        if num != len(self.features):
            raise ValueError(f"weights of {num} features, expected {len(self.features)}")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return FEATURES if self.words is None else FEATURES + BY_WORDS


class WordCosines:
    """Cosines of the words of B queries to the words of each label.

    Args:
        postings: word vectors of the labels. words_BF: those of the queries, with sorted indices.
        own: cosines in place of the computed ones, for the labels of left-out queries.
    """

    def __init__(self, postings: Postings, words_BF: csr_matrix, own: PairScores) -> None:
        self._postings = postings
        self._words_BF = words_BF
        self._own = own
        self.shape = own.shape
        most_own = np.bincount(own.key_N // own.shape[1]).max(initial=0)
        cosine_BK, label_BK = postings.best(words_BF, _RANKED + most_own)
        key_BK = first_keys(*own.shape) + label_BK
        is_other_BK = (label_BK >= 0) & ~np.isin(key_BK, own.key_N)
        key_N = np.concatenate([key_BK[is_other_BK], own.key_N])
        cosine_N = np.concatenate([cosine_BK[is_other_BK], own.score_N])
        order = np.argsort(key_N)
        self._best = PairScores(key_N[order], cosine_N[order], own.shape)

    def at(self, key_P: Rows) -> Floats:
        """Cosines of the given pairs, float32 [P]."""
        query_P, label_P = np.divmod(key_P, self._own.shape[1])
        cosine_P = self._postings.at(self._words_BF, query_P, label_P)
        is_own_P = np.isin(key_P, self._own.key_N)
        return np.where(is_own_P, self._own.at(key_P), cosine_P)

    def top(self, count: int) -> Floats:
        """Each query's `count` largest cosines, at most `_RANKED`: float32 [B, count]."""
        return self._best.top(count)

    def largest(self, count: int) -> Rows:
        """Keys of each query's `count` largest positive cosines, at most `_RANKED`."""
        keys = self._best.largest(count)
        return keys[self._best.at(keys) > 0]


@dataclass(frozen=True)
class WordScores:
    """Scores of labels for B queries.

    Attributes:
        votes: votes of similar training queries. by_label, by_queries: cosines of the query's words
            to the words of the label's text, and to those of the label's training queries.
        count_L: training queries of each label, float32 [L].
        num_words_B: known words of each query, int64 [B].
        left_out_labels: 1 for the labels of left-out queries; None if no queries are left out.
        by_first_words: the same scores from the first words alone; None if those are not stored or
        not scored.
    """

    votes: PairScores
    by_label: WordCosines
    by_queries: WordCosines
    count_L: Floats
    num_words_B: npt.NDArray[np.int64]
    left_out_labels: PairScores | None = None
    by_first_words: WordScores | None = None

    def candidates(self) -> Rows:
        """Keys query * L + label of the best labels by each of the three scores, ascending."""
        voted, by_label, by_queries = WORD_CANDIDATES
        keys = (
            self.votes.largest(voted),
            self.by_label.largest(by_label),
            self.by_queries.largest(by_queries),
        )
        return np.unique(np.concatenate(keys))

    def features(self, query_P: Rows, label_P: Rows) -> Floats:
        """`WORD_FEATURES` of the given pairs, followed by those of the first words if scored:
        float32 [P, X].
        """
        columns = []
        best = []
        key_P = query_P * self.votes.shape[1] + label_P
        for scores in (self.votes, self.by_label, self.by_queries):
            top_BT = scores.top(_RANKED)
            value_P = scores.at(key_P)
            best_P = top_BT.max(axis=1)[query_P]
            is_above_PT = top_BT[query_P] > value_P[:, None]
            rank_P = is_above_PT.sum(axis=1)
            best.append(best_P)
            columns += [value_P, best_P - value_P, np.log1p(rank_P)]
        count_P = self.count_L[label_P]
        if self.left_out_labels is not None:
            count_P = count_P - self.left_out_labels.at(key_P)
        num_words_P = self.num_words_B[query_P]
        columns += [*best, np.log1p(count_P), np.log1p(num_words_P)]
        feature_PX = _features(columns)
        if self.by_first_words is None:
            return feature_PX
        of_first_words_PX = self.by_first_words.features(query_P, label_P)
        return np.concatenate([feature_PX, of_first_words_PX], axis=1)


def _features(columns: list[npt.NDArray]) -> Floats:
    return np.stack(columns, axis=1, dtype=np.float32, casting="same_kind")


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
        self._sum_LF = keep_largest(sum_LF, _PROFILE_WORDS)
        norm_L = np.sqrt(_row_sums(self._sum_LF.multiply(self._sum_LF)))
        self._norm_L = norm_L
        inverse_L = np.divide(1, norm_L, out=np.zeros_like(norm_L), where=norm_L > 0)
        profile_LF = diags(inverse_L) @ self._sum_LF
        self._labels = Postings(neighbours.compared_labels)
        self._profiles = Postings(profile_LF)
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
            as absent.
            first_words: also score by the first words, if they are stored.
        """
        neighbours = self.neighbours
        num_labels = neighbours.num_labels
        votes = neighbours.votes(words_BF, self.num_votes, left_out)
        none = PairScores.none((words_BF.shape[0], num_labels))
        own = none
        left_out_labels = None
        if left_out is not None:
            left_out_labels = PairScores.of(neighbours.labels_ML[left_out])
            key_O = left_out_labels.key_N
            query_O, label_O = np.divmod(key_O, num_labels)
            with_query_O = self._profiles.at(words_BF, query_O, label_O)
            cosine_O = self._without_query(words_BF[query_O], label_O, with_query_O)
            own = replace(left_out_labels, score_N=cosine_O.astype(np.float32))
        assert neighbours.words is not None
        by_first_words = None
        if self.by_first_words is not None and first_words:
            by_first_words = self.by_first_words.score(words_BF, left_out)
        return WordScores(
            votes=votes,
            by_label=WordCosines(self._labels, words_BF, none),
            by_queries=WordCosines(self._profiles, words_BF, own),
            count_L=neighbours.label_counts,
            num_words_B=neighbours.words.num_words(words_BF, neighbours.part),
            left_out_labels=left_out_labels,
            by_first_words=by_first_words,
        )

    def _without_query(
        self, words_OF: csr_matrix, label_O: npt.NDArray, cosine_O: Floats
    ) -> Floats:
        """Cosine of each query q to the sum s of a label that it has, without its own part: cos(q,
        s - q), float32 [O].

        Args:
            cosine_O: cos(q, s).
        """
        norm_O = self._norm_L[label_O]
        in_sum_OF = self._sum_LF[label_O].sign()  # a popular label's sum lacks some of its words
        square_O = _row_sums(words_OF.multiply(words_OF).multiply(in_sum_OF))  # |q|^2
        product_O = cosine_O * norm_O  # q . s
        rest_O = product_O - square_O  # q . (s - q)
        rest_square_O = norm_O**2 - 2 * product_O + square_O  # |s - q|^2
        valid_O = rest_O > _ROUNDING * product_O
        valid_O &= rest_square_O > _ROUNDING * norm_O**2
        rest_norm_O = np.sqrt(np.maximum(rest_square_O, 0))
        return np.divide(rest_O, rest_norm_O, out=np.zeros_like(rest_O), where=valid_O)


def _row_sums(matrix: csr_matrix) -> Floats:
    return np.asarray(matrix.sum(axis=1)).ravel()


@dataclass(frozen=True)
class Evidence(Candidates):
    """Candidates with their features, float32 [P, X]."""

    feature_PX: Floats


class LabelEvidence:
    """Computes the fusion's features from labels and training queries. Reading is thread-safe.

    Args:
        heads: both heads, and the weight of the blend.
        neighbours: training queries, compared by words, with the labels' words. num_votes:
        neighbours that vote.
        propensity: the data set's constants A and B.
        by_words: the network that ranks by words; None: without the features `BY_WORDS`.
    """

    def __init__(
        self,
        heads: Heads,
        neighbours: Neighbours,
        num_votes: int,
        propensity: tuple[float, float],
        by_words: Network | None = None,
    ) -> None:
        self.de = heads.alone("de")
        self.clf = heads.alone("clf")
        self.clf_weight = np.float32(heads.clf_weight)
        self.words = WordScorer(neighbours, num_votes)
        self.by_words = by_words
        count_L = neighbours.label_counts.astype(np.int64)
        inverse_L = inverse_propensity(count_L, neighbours.num_queries, *propensity)
        self.log_frequency_L = np.log1p(neighbours.label_counts).astype(np.float32)
        self.log_inverse_L = np.log(inverse_L).astype(np.float32)
        self._co_occurrence_LL = SparseRows(neighbours.co_occurrence)

    def read(
        self, encoded: Encoded, found_BC: Rows, excluded: Rows, allowed: Rows | None = None
    ) -> Evidence:
        """Features of the candidates of each query: the labels in `found_BC`, and the `VOTED`
        labels with most votes.

        Args:
            encoded: queries, by both heads and by words.
            found_BC: labels with the best blend, without excluded ones; -1 for no label.
            excluded: int64 keys query * L + label of excluded pairs.
            allowed: the only labels that are returned; it does not change a label's features.
        """
        step = QUERIES_AT_ONCE
        if len(found_BC) <= step:
            return self._read(encoded, found_BC, excluded, allowed)

        def read_block(start: int) -> Evidence:
            block = slice(start, start + step)
            key = excluded - start * self.num_labels
            is_here = (key >= 0) & (key < step * self.num_labels)
            evidence = self._read(encoded.take(block), found_BC[block], key[is_here], allowed)
            return replace(evidence, query_P=evidence.query_P + start)

        starts = range(0, len(found_BC), step)
        with thread_pool() as threads:
            parts = list(threads.map(read_block, starts))

        def joined(name: str) -> npt.NDArray:
            return np.concatenate([getattr(part, name) for part in parts])

        return Evidence(
            query_P=joined("query_P"),
            label_P=joined("label_P"),
            votes_P=joined("votes_P"),
            feature_PX=joined("feature_PX"),
            num_queries=len(found_BC),
        )

    def rank(self, fusion: Fusion, evidence: Evidence, k: int, tail: float = 0.0) -> Ranked:
        """The k best labels by a fusion, with `tail` added to its weight of the log inverse
        propensity.
        """
        weight = np.float32(fusion.tail + tail)
        score_P = fusion.scores(evidence.feature_PX)
        log_inverse_P = self.log_inverse_L[evidence.label_P]
        return evidence.best(score_P + weight * log_inverse_P, k)

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return len(self.log_frequency_L)

    def _read(
        self, encoded: Encoded, found_BC: Rows, excluded: Rows, allowed: Rows | None
    ) -> Evidence:
        assert encoded.words_BF is not None
        num_queries = len(found_BC)
        num_labels = self.num_labels
        scored = self.words.score(encoded.words_BF, first_words=self.by_words is not None)
        key_P = candidate_keys(found_BC, scored.votes.largest(VOTED), num_labels, excluded)
        reference_P = np.ones(len(key_P), dtype=bool)  # candidates to which others are compared
        # features are relative to all candidates, whatever labels are allowed
        if allowed is not None:
            reference = key_P
            key_P = np.union1d(key_P, allowed_keys(allowed, num_queries, num_labels, excluded))
            reference_P = np.isin(key_P, reference)
        pairs = Candidates.of(key_P, scored.votes)
        query_P = pairs.query_P
        label_P = pairs.label_P
        compared = Compared(pairs, reference_P)
        de_BD = self.de.queries(encoded.de_BD, None)
        clf_BD = self.clf.queries(None, encoded.clf_BD)
        de_P = self.de.pair_scores(de_BD, query_P, label_P)
        clf_P = self.clf.pair_scores(clf_BD, query_P, label_P)
        blend_P = de_P + self.clf_weight * clf_P
        ranked = (blend_P, de_P, clf_P, pairs.votes_P)
        scores = (*ranked, scored.by_label.at(key_P), scored.by_queries.at(key_P))
        best = [compared.best(score_P) for score_P in scores]
        ranks = [compared.rank(score_P) for score_P in ranked]
        best_P = best[0]
        rank_P = ranks[0]
        likely_N = np.flatnonzero(reference_P & (rank_P < _LIKELY))
        likelihood_N = (blend_P - best_P)[likely_N] / np.float32(_LIKELY_TEMPERATURE)
        co_occurrence = self._co_occurrence(
            query_P[likely_N], label_P[likely_N], np.exp(likelihood_N), num_queries
        )
        columns = [
            *scores,
            co_occurrence.at(key_P),
            self.log_frequency_L[label_P],
            *map(np.log1p, ranks),
            *map(np.subtract, best, scores),
            best_P,
            np.log1p(scored.num_words_B[query_P]),
        ]
        if self.by_words is not None:
            score_P = self.by_words.scores(scored.features(query_P, label_P))
            below_P = compared.best(score_P) - score_P
            columns += [score_P, below_P, np.log1p(compared.rank(score_P))]
        kept_P = slice(None) if allowed is None else np.isin(label_P, allowed)
        return Evidence(
            query_P=query_P[kept_P],
            label_P=label_P[kept_P],
            votes_P=pairs.votes_P[kept_P],
            feature_PX=_features(columns)[kept_P],
            num_queries=num_queries,
        )

    def _co_occurrence(
        self, query_N: Rows, label_N: Rows, weight_N: Floats, num_queries: int
    ) -> PairScores:
        """Weighted mean co-occurrence of each label with a query's likely labels.

        Args:
            query_N, label_N: likely labels, ascending by query. weight_N: their weights.
        """
        begin_B = np.searchsorted(query_N, np.arange(num_queries + 1))
        weight_N /= np.bincount(query_N, weight_N, minlength=num_queries)[query_N]
        return self._co_occurrence_LL.sums(begin_B, label_N, weight_N.astype(np.float32))
