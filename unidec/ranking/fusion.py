"""Learnt fusion: a small network ranks the candidates of both heads and of the votes by features of
query and label.

Legend: B queries, L labels, C candidates from the search, P pairs of a query and a candidate, F
words, X features,
M training queries, O pairs of a left-out query and one of its labels, T largest scores of a query,
D width of a head, H hidden units.

    score(x, l) = network(features of x and l) + tail * log(inverse propensity of l)

The features are `FEATURES`, optionally followed by `BY_WORDS`, which come from a second network.
That network ranks labels by words alone: by votes of similar training queries, and by cosines to
the words of the label's text and of its training queries. It is trained on training queries, each
scored as if it were absent from the training data ("left out"): its own vote, its words in the sums
of its labels and its count in their frequencies are subtracted, so that the network sees the same
distribution as for new queries (stacked generalisation, Wolpert 1992). The fusion is trained with
the decoupled softmax over each query's candidates (`fusion_fit.py`).

Source: NGAME (section 3, "score fusion") learns to combine the scores of an encoder and a
classifier, with decision
trees over labels. Here one network serves all labels, and also uses votes, words and label
frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.sparse import csr_matrix, diags, vstack

from unidec.cores import thread_pool
from unidec.data.propensity import inverse_propensity
from unidec.ranking.candidates import (
    DenseScores,
    PairScores,
    Ranked,
    SparseRows,
    allowed_keys,
    best_of,
    candidate_keys,
    keep_largest,
)
from unidec.ranking.heads import Heads
from unidec.ranking.neighbours import Neighbours
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
_QUERIES_AT_ONCE = 256
_BLOCK_SCORES = 1 << 23  # scores of all labels for the queries of one block
# largest word weights kept for the queries of a label; popular labels have thousands
_PROFILE_WORDS = 256
LIMIT = 6.0  # standard deviations from the mean at which a feature is clipped
_PAIRS_AT_ONCE = 1 << 11  # the hidden units of this number of pairs fit in the cache

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
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
        widths = {len(part) for part in (self.mean, self.scale, self.linear, *self.hidden)}
        if len(widths) != 1 or not len(self.hidden) == len(self.hidden_bias) == len(self.out):
            raise ValueError(f"the layers differ in width: {sorted(widths)} features")
        return self

    @cached_property
    def _arrays(self) -> tuple[Floats, ...]:
        parts = (
            self.mean,
            self.scale,
            self.linear,
            np.transpose(self.hidden),
            self.hidden_bias,
            self.out,
        )
        return tuple(np.asarray(part, dtype=np.float32) for part in parts)

    def scores(self, feature_PX: Floats) -> Floats:
        """Scores of pairs with the given features, float32 [P]."""
        mean_X, scale_X, linear_X, hidden_XH, bias_H, out_H = self._arrays
        out_P = np.empty(len(feature_PX), dtype=np.float32)
        for start in range(0, len(out_P), _PAIRS_AT_ONCE):
            block = slice(start, start + _PAIRS_AT_ONCE)
            x_PX = np.clip((feature_PX[block] - mean_X) / scale_X, -LIMIT, LIMIT)
            out_P[block] = x_PX @ linear_X + np.maximum(x_PX @ hidden_XH + bias_H, 0) @ out_H
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
        if len(self.mean) != len(self.features):
            raise ValueError(f"weights of {len(self.mean)} features, expected {len(self.features)}")
        if self.words is not None and len(self.words.mean) not in (
            num := len(WORD_FEATURES),
            2 * num,
        ):
            raise ValueError(
                f"weights of {len(self.words.mean)} word features, expected {num} or {2 * num}"
            )
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return FEATURES if self.words is None else FEATURES + BY_WORDS


@dataclass(frozen=True)
class WordScores:
    """Scores of all labels for B queries.

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
    by_label: DenseScores
    by_queries: DenseScores
    count_L: Floats
    num_words_B: npt.NDArray[np.int64]
    left_out_labels: PairScores | None = None
    by_first_words: WordScores | None = None

    def candidates(self) -> Rows:
        """Keys query * L + label of the best labels by each of the three scores, ascending."""
        scores: tuple[PairScores | DenseScores, ...] = (self.votes, self.by_label, self.by_queries)
        keys = [some.largest(count) for some, count in zip(scores, WORD_CANDIDATES, strict=True)]
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
            best.append(top_BT.max(axis=1)[query_P])
            columns += [
                value_P,
                best[-1] - value_P,
                np.log1p((top_BT[query_P] > value_P[:, None]).sum(axis=1)),
            ]
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
        neighbours: training queries, compared by words, with the labels' words. num_votes:
        neighbours that vote.
    """

    def __init__(self, neighbours: Neighbours, num_votes: int) -> None:
        self.neighbours = neighbours
        self.num_votes = num_votes
        # sums of the word vectors of each label's training queries (PECOS: PIFA); normalised below
        self._sum_LF = keep_largest(
            csr_matrix(neighbours.labels_ML.T @ neighbours.compared_MD), _PROFILE_WORDS
        )
        self._norm_L = np.sqrt(np.asarray(self._sum_LF.multiply(self._sum_LF).sum(axis=1)).ravel())
        unit_L = np.divide(1, self._norm_L, out=np.zeros_like(self._norm_L), where=self._norm_L > 0)
        # both kinds of label vectors in one matrix, for a single product
        words_2LF = vstack([neighbours.compared_labels, diags(unit_L) @ self._sum_LF], format="csr")
        self._words_F2L = SparseRows(words_2LF.T.tocsr())
        self.by_first_words = (
            None
            if neighbours.by_first_words is None
            else WordScorer(neighbours.by_first_words, num_votes)
        )

    @property
    def queries_at_once(self) -> int:
        """Queries to score in one call, so that their scores take about 32 MB."""
        scores = 3 * max(1, self.neighbours.num_labels) * (1 if self.by_first_words is None else 2)
        return max(1, min(_QUERIES_AT_ONCE, _BLOCK_SCORES // scores))

    def score(
        self, words_BF: csr_matrix, left_out: Rows | None = None, first_words: bool = True
    ) -> WordScores:
        """Scores of all labels.

        Args:
            words_BF: queries, from `WordSpace.vectors`.
            left_out: int64 [B], rows of the queries if they are training queries; each is treated
            as absent.
            first_words: also score by the first words, if they are stored.
        """
        neighbours = self.neighbours
        num_labels = self.neighbours.num_labels
        votes = neighbours.votes(words_BF, self.num_votes, left_out)
        by_words = self._words_F2L.product(words_BF)
        by_label = by_words.columns(0, num_labels)
        by_queries = by_words.columns(num_labels, 2 * num_labels)
        left_out_labels = None
        if left_out is not None:
            left_out_labels = PairScores.of(neighbours.labels_ML[left_out])
            key_O = left_out_labels.key_N
            query_O, label_O = np.divmod(key_O, num_labels)
            by_queries.put(
                key_O, self._without_query(words_BF[query_O], label_O, by_queries.at(key_O))
            )
        assert neighbours.words is not None
        num_words_B = neighbours.words.num_words(words_BF, neighbours.part)
        by_first_words = None
        if self.by_first_words is not None and first_words:
            by_first_words = self.by_first_words.score(words_BF, left_out)
        counts = (neighbours.label_counts, num_words_B)
        return WordScores(votes, by_label, by_queries, *counts, left_out_labels, by_first_words)

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
        # |q|^2
        square_O = np.asarray(words_OF.multiply(words_OF).multiply(in_sum_OF).sum(axis=1)).ravel()
        product_O = cosine_O * norm_O  # q . s
        rest_product_O = product_O - square_O  # q . (s - q)
        rest_square_O = norm_O**2 - 2 * product_O + square_O  # |s - q|^2
        valid = (rest_product_O > _ROUNDING * product_O) & (rest_square_O > _ROUNDING * norm_O**2)
        rest_norm_O = np.sqrt(np.maximum(rest_square_O, 0))
        return np.divide(
            rest_product_O, rest_norm_O, out=np.zeros_like(rest_product_O), where=valid
        )


@dataclass(frozen=True)
class Evidence:
    """Features and votes of pairs of a query and a candidate, ascending by query and label.

    Attributes:
        query_P, label_P: int64 [P].
        feature_PX: float32 [P, X].
        votes_P: float32 [P].
        num_queries: B.
    """

    query_P: Rows
    label_P: Rows
    feature_PX: Floats
    votes_P: Floats
    num_queries: int

    def top(self, score_P: Floats, k: int) -> Ranked:
        """The k best labels by the given scores; ties are ordered by label row."""
        return best_of(self.query_P, self.label_P, score_P, self.votes_P, self.num_queries, k)


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
        count_L = neighbours.label_counts
        self.log_frequency_L = np.log1p(count_L).astype(np.float32)
        inverse_L = inverse_propensity(
            count_L.astype(np.int64), neighbours.num_queries, *propensity
        )
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
        step = self.words.queries_at_once
        if len(found_BC) <= step:
            return self._read(encoded, found_BC, excluded, allowed)

        def read_block(start: int) -> Evidence:
            block = slice(start, start + step)
            excluded_keys = excluded - start * self.num_labels
            excluded_keys = excluded_keys[
                (excluded_keys >= 0) & (excluded_keys < step * self.num_labels)
            ]
            return self._read(encoded.take(block), found_BC[block], excluded_keys, allowed)

        with thread_pool() as threads:
            parts = list(threads.map(read_block, range(0, len(found_BC), step)))
        query_P = np.concatenate([part.query_P + i * step for i, part in enumerate(parts)])
        names = ("label_P", "feature_PX", "votes_P")
        label_P, feature_PX, votes_P = (
            np.concatenate([getattr(part, name) for part in parts]) for name in names
        )
        return Evidence(query_P, label_P, feature_PX, votes_P, len(found_BC))

    def rank(self, fusion: Fusion, evidence: Evidence, k: int, tail: float = 0.0) -> Ranked:
        """The k best labels by a fusion, with `tail` added to its weight of the log inverse
        propensity.
        """
        weight = np.float32(fusion.tail + tail)
        return evidence.top(
            fusion.scores(evidence.feature_PX) + weight * self.log_inverse_L[evidence.label_P], k
        )

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
            unrestricted = key_P
            key_P = np.union1d(
                unrestricted, allowed_keys(allowed, num_queries, num_labels, excluded)
            )
            reference_P = np.isin(key_P, unrestricted)
        query_P, label_P = np.divmod(key_P, num_labels)
        begin_B = np.searchsorted(query_P, np.arange(num_queries + 1))
        votes_P = scored.votes.at(key_P)
        de_P = self.de.pair_scores(self.de.queries(encoded.de_BD, None), query_P, label_P)
        clf_P = self.clf.pair_scores(self.clf.queries(None, encoded.clf_BD), query_P, label_P)
        blend_P = de_P + self.clf_weight * clf_P
        scores = (
            blend_P,
            de_P,
            clf_P,
            votes_P,
            scored.by_label.at(key_P),
            scored.by_queries.at(key_P),
        )
        best = [_best(score_P, reference_P, query_P, num_queries) for score_P in scores]
        rank_P, *other_ranks = (
            _rank(score_P, reference_P, query_P, begin_B) for score_P in scores[:4]
        )
        likely_N = np.flatnonzero(reference_P & (rank_P < _LIKELY))
        likely = (query_P[likely_N], label_P[likely_N], blend_P[likely_N])
        co_occurrence_P = self._co_occurrence_with_likely(*likely, best[0]).at(key_P)
        columns = [
            *scores,
            co_occurrence_P,
            self.log_frequency_L[label_P],
            *(np.log1p(rank) for rank in (rank_P, *other_ranks)),
            *(best_B[query_P] - score_P for best_B, score_P in zip(best, scores, strict=True)),
            best[0][query_P],
            np.log1p(scored.num_words_B)[query_P],
        ]
        if self.by_words is not None:
            score_P = self.by_words.scores(scored.features(query_P, label_P))
            below_P = _best(score_P, reference_P, query_P, num_queries)[query_P] - score_P
            columns += [score_P, below_P, np.log1p(_rank(score_P, reference_P, query_P, begin_B))]
        feature_PX = np.stack(columns, axis=1, dtype=np.float32, casting="same_kind")
        if allowed is None:
            return Evidence(query_P, label_P, feature_PX, votes_P, num_queries)
        keep_P = np.isin(label_P, allowed)
        return Evidence(
            query_P[keep_P], label_P[keep_P], feature_PX[keep_P], votes_P[keep_P], num_queries
        )

    def _co_occurrence_with_likely(
        self, query_N: Rows, label_N: Rows, blend_N: Floats, best_B: Floats
    ) -> DenseScores:
        """Co-occurrence of each label with a query's likely labels, weighted by a softmax over
        those.

        Args:
            query_N, label_N, blend_N: likely labels, ascending by query. best_B: largest blend of
            each query.
        """
        begin_B = np.searchsorted(query_N, np.arange(len(best_B) + 1))
        weight_N = np.exp((blend_N - best_B[query_N]) / np.float32(_LIKELY_TEMPERATURE))
        weight_N /= np.bincount(query_N, weight_N, minlength=len(best_B))[query_N]
        return self._co_occurrence_LL.sums(begin_B, label_N, weight_N.astype(np.float32))


def _best(
    value_P: Floats, reference_P: npt.NDArray[np.bool_], query_P: Rows, num_queries: int
) -> Floats:
    """The largest value of each query's reference candidates, float32 [B]; 0 for a query without
    any.
    """
    best_B = np.full(num_queries, -np.inf, dtype=np.float32)
    np.maximum.at(best_B, query_P[reference_P], value_P[reference_P])
    return np.where(np.isfinite(best_B), best_B, np.float32(0))


def _rank(
    value_P: Floats, reference_P: npt.NDArray[np.bool_], query_P: Rows, begin_B: Rows
) -> Floats:
    """The number of the query's reference candidates with a larger value, float32 [P]."""
    order = np.lexsort((-value_P, query_P))
    value = value_P[order]
    query = query_P[order]
    # reference candidates before each position
    before = np.concatenate([[0], np.cumsum(reference_P[order])])
    is_first = np.ones(len(order), dtype=bool)  # starts a run of equal values
    is_first[1:] = (value[1:] != value[:-1]) | (query[1:] != query[:-1])
    run = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    rank_P = np.empty(len(order), dtype=np.float32)
    rank_P[order] = before[run] - before[begin_B[query]]
    return rank_P
