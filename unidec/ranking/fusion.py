"""Learnt fusion: a small network ranks the candidates of heads and votes by their features.

Legend: B queries, L labels, C candidates from the search, P pairs of a query and a candidate, S
scores of a pair, X features, D width of a head, H hidden units.

    score(x, l) = network(features of x and l) + tail * log(inverse propensity of l)

The features are `FEATURES`, optionally followed by `BY_WORDS`, which come from a second network.
That network ranks labels by words alone: by votes of similar training queries, and by cosines to
the words of the label's text and of its training queries. It is trained on training queries, each
scored as if it were absent from the training data ("left out"): the query's vote, its words in its
labels' word sums and its count in their frequencies are subtracted, so that features have the same
distribution as for new queries (stacked generalisation, Wolpert 1992). The fusion is trained with
the decoupled softmax over each query's candidates (`fusion_fit.py`).

Source: NGAME (section 3, "score fusion") learns to combine the scores of an encoder and a
classifier, with decision trees over labels. Here one network serves all labels, and also uses
votes, words and label frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from unidec.config.section import Stored
from unidec.cores import thread_pool
from unidec.data.chunks import blocks
from unidec.data.propensity import inverse_propensity
from unidec.ranking.heads import Candidates, Heads, Ranked, allowed_keys, candidate_keys
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.sparse import (
    NOT_REACHED,
    Array,
    Csr,
    Floats,
    Rows,
    Sums,
    Workspace,
    add,
    compiled,
    first_of_each,
)
from unidec.ranking.word_scores import WordScorer

CANDIDATES = 300  # labels searched per query to train the fusion, or to return 100 labels
FEWEST_CANDIDATES = 100  # labels searched if fewer results are requested
RESCORE = 2  # labels per candidate that an approximate search scores exactly
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
_LIKELY = 10  # labels with the largest blend, whose co-occurrence with a candidate is a feature
_LIKELY_TEMPERATURE = np.float32(0.3)  # of the softmax that weights those labels
QUERIES_AT_ONCE = 256
# column indices of features
_CO_OCCURRENCE = FEATURES.index("labels it comes with")
_FREQUENCY = FEATURES.index("log frequency")
# features of each score: itself, its difference from the best one, and its rank (or nothing)
_OF_SCORES = (
    ("blend", "blend below the best", "log rank by the blend"),
    ("dual encoder", "dual encoder below the best", "log rank by the dual encoder"),
    ("classifier", "classifier below the best", "log rank by the classifier"),
    ("votes", "votes below the most", "log rank by votes"),
    ("words of the label", "label words below the best", ""),
    ("words of its queries", "query words below the best", ""),
    BY_WORDS,
)
_COLUMN_OF = {name: column for column, name in enumerate(FEATURES + BY_WORDS)}
_COLUMNS = np.array([[_COLUMN_OF.get(name, -1) for name in names] for names in _OF_SCORES])
_BEST = FEATURES.index("best blend")
_WORDS = FEATURES.index("log words of the query")
LIMIT = 6.0  # standard deviations from the mean at which a feature is clipped
_PAIRS_AT_ONCE = 1 << 11  # the hidden units of this number of pairs fit in the cache

Number = Annotated[float, Field(allow_inf_nan=False)]


class Network(Stored):
    """A small network that scores pairs of a query and a label from their features, as stored in
    bundle.json.

        score(x, l) = w . f(x, l) + sum over h of o_h max(0, v_h . f(x, l) + b_h)

    where f(x, l) are the standardised features: mean subtracted, divided by the standard deviation,
    and clipped.

    Attributes:
        mean, scale: of each feature, [X]; scale above 0.
        linear: [X]. hidden: [H][X], hidden_bias and out: [H].
    """

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
        for begin in range(0, len(out_P), _PAIRS_AT_ONCE):
            block = slice(begin, begin + _PAIRS_AT_ONCE)
            x_PX = np.clip((feature_PX[block] - mean_X) / scale_X, -LIMIT, LIMIT)
            hidden_PH = np.maximum(x_PX @ hidden_XH + bias_H, 0)
            out_P[block] = x_PX @ linear_X + hidden_PH @ out_H
        return out_P


class Fusion(Network):
    """A trained fusion, as stored in bundle.json.

    Attributes:
        tail: weight of the log inverse propensity. propensity: its constants A and B.
        gain: improvement over the blend on the validation split, by metric.
        words: network that ranks by words; None: the fusion does not use `BY_WORDS`.
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


@dataclass(frozen=True)
class Evidence(Candidates):
    """Candidates with their features, float32 [P, X]."""

    feature_PX: Floats


class LabelEvidence:
    """Computes the fusion's features from labels and training queries. `read` is thread-safe.

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
        self._co_occurrence = Csr.of(neighbours.co_occurrence)
        self._of_labels = Workspace(neighbours.num_labels)

    def read(
        self, encoded: Encoded, found_BC: Rows, excluded: Rows, allowed: Rows | None = None
    ) -> Evidence:
        """Features of each query's candidates: the labels in `found_BC`, and the `VOTED` labels
        with the most votes.

        Args:
            encoded: queries, encoded by both heads and as words.
            found_BC: labels with the largest blend, without excluded ones; -1 for no label.
            excluded: int64 keys query * L + label of excluded pairs.
            allowed: the only labels to return; this does not change a label's features.
        """
        if len(found_BC) <= QUERIES_AT_ONCE:
            return self._read(encoded, found_BC, excluded, allowed)

        def read_block(block: slice) -> Evidence:
            key = excluded - block.start * self.num_labels
            is_here = (key >= 0) & (key < QUERIES_AT_ONCE * self.num_labels)
            evidence = self._read(encoded.take(block), found_BC[block], key[is_here], allowed)
            return replace(evidence, query_P=evidence.query_P + block.start)

        with thread_pool() as threads:
            parts = list(threads.map(read_block, blocks(len(found_BC), QUERIES_AT_ONCE)))
        columns = {}
        for name in ("query_P", "label_P", "votes_P", "feature_PX"):
            columns[name] = np.concatenate([getattr(part, name) for part in parts])
        return Evidence(**columns, num_queries=len(found_BC))

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
        _, voted_BT = scored.most_votes
        key_P = candidate_keys(found_BC, voted_BT[voted_BT >= 0], num_labels, excluded)
        is_reference_P = np.ones(len(key_P), dtype=bool)  # candidates that others are compared with
        # ranks and differences refer to all candidates, whichever labels are allowed
        if allowed is not None:
            reference = key_P
            key_P = np.union1d(key_P, allowed_keys(allowed, num_queries, num_labels, excluded))
            is_reference_P = np.isin(key_P, reference)
        query_P, label_P = np.divmod(key_P, num_labels)
        de_BD = self.de.queries(encoded.de_BD, None)
        clf_BD = self.clf.queries(None, encoded.clf_BD)
        de_P = self.de.pair_scores(de_BD, query_P, label_P)
        clf_P = self.clf.pair_scores(clf_BD, query_P, label_P)
        blend_P = de_P + self.clf_weight * clf_P
        by_words = scored.read(key_P)
        scores = [blend_P, de_P, clf_P, *by_words.score_SP]
        features: tuple[str, ...] = FEATURES
        if self.by_words is not None:
            features += BY_WORDS
            scores.append(self.by_words.scores(scored.features(query_P, label_P, by_words)))
        begin_B = first_of_each(query_P, num_queries)
        candidates = _Candidates(begin_B, label_P, is_reference_P)
        feature_PX = np.empty((len(key_P), len(features)), dtype=np.float32)
        sums = self._of_labels.sums
        _fill_features(candidates, np.stack(scores), self._co_occurrence, sums, feature_PX)
        feature_PX[:, _FREQUENCY] = self.log_frequency_L[label_P]
        feature_PX[:, _WORDS] = np.log1p(scored.num_words_B)[query_P]
        is_kept_P = slice(None) if allowed is None else np.isin(label_P, allowed)
        return Evidence(
            query_P=query_P[is_kept_P],
            label_P=label_P[is_kept_P],
            votes_P=by_words.score_SP[0][is_kept_P],
            feature_PX=feature_PX[is_kept_P],
            num_queries=num_queries,
        )


class _Candidates(NamedTuple):
    """Candidates in the order of their queries, with offsets begin_B, int [B + 1]; each is compared
    with the reference candidates of its query.
    """

    begin_B: Array
    label_P: Array
    is_reference_P: Array


@compiled
def _fill_features(
    candidates: _Candidates, score_SP: Array, co_occurrence_LL: Csr, sums: Sums, feature_PX: Array
) -> None:
    """Fill in the features of the scores, and "labels it comes with"."""
    for query in range(len(candidates.begin_B) - 1):
        pairs = slice(candidates.begin_B[query], candidates.begin_B[query + 1])
        is_reference_C = candidates.is_reference_P[pairs]
        feature_CX = feature_PX[pairs]
        for s in range(len(score_SP)):
            score_C = score_SP[s, pairs]
            best, rank_C = _compare(score_C, is_reference_C)
            feature_CX[:, _COLUMNS[s, 0]] = score_C
            feature_CX[:, _COLUMNS[s, 1]] = best - score_C
            if _COLUMNS[s, 2] >= 0:
                feature_CX[:, _COLUMNS[s, 2]] = np.log1p(rank_C)
            if s == 0:
                feature_CX[:, _BEST] = best
                is_likely_C = is_reference_C & (rank_C < _LIKELY)
                weight_C = _weights(score_C - best, is_likely_C)
                label_C = candidates.label_P[pairs]
                mean_C = feature_CX[:, _CO_OCCURRENCE]
                _fill_co_occurrence(label_C, weight_C, co_occurrence_LL, sums, mean_C)


@compiled
def _compare(score_C: Array, is_reference_C: Array) -> Any:
    """The largest score of a query's reference candidates, 0 if there is none; and for each
    candidate the number of references with a larger score.
    """
    reference = np.sort(score_C[is_reference_C])
    rank_C = len(reference) - np.searchsorted(reference, score_C, side="right")
    best = reference[-1] if len(reference) else np.float32(0)
    return best, rank_C


@compiled
def _weights(below_C: Array, is_likely_C: Array) -> Any:
    """Softmax of the likely labels' blends, given their differences from the best; 0 for others."""
    weight_C = np.zeros_like(below_C)
    total = np.float32(0)
    for c in range(len(below_C)):
        if is_likely_C[c]:
            weight_C[c] = np.exp(below_C[c] / _LIKELY_TEMPERATURE)
            total += weight_C[c]
    return weight_C / total


@compiled
def _fill_co_occurrence(
    label_C: Array, weight_C: Array, co_occurrence_LL: Csr, sums: Sums, mean_C: Array
) -> None:
    """Each candidate's mean co-occurrence with the query's weighted labels."""
    num_reached = np.int64(0)
    for c in range(len(label_C)):
        if weight_C[c] > 0:
            label = label_C[c]
            for place in range(co_occurrence_LL.begin[label], co_occurrence_LL.begin[label + 1]):
                share = weight_C[c] * co_occurrence_LL.value[place]
                num_reached = add(sums, num_reached, co_occurrence_LL.column[place], share)
    for c in range(len(label_C)):
        total = sums.total[label_C[c]]
        mean_C[c] = 0 if total == NOT_REACHED else total
    for n in range(num_reached):
        sums.total[sums.reached[n]] = NOT_REACHED
