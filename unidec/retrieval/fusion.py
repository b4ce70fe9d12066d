"""Learnt fusion: candidates of both heads and of the votes, ranked by a small network that reads what is known of each.

Legend: B queries, L labels, C candidates that the search gives, P pairs of a query and a candidate, F words, X
features, D width of a head.

    score(x, l) = network(features of x and l) + tail x log(inverse propensity of l)

The features are those of `FEATURES`, and of `BY_WORDS`, which come from a second network that ranks labels by words
alone (`word_scores.py`) and was trained on the training queries. The fusion is trained with the decoupled softmax over
each query's candidates (`fusion_fit.py`). Source: NGAME (section 3, "score fusion") learns how to combine the scores of
an encoder and a classifier, by decision trees over labels; here one network (`network.py`) serves all labels, and also
reads votes, words and frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator
from scipy.sparse import csr_matrix

from unidec.data.propensity import inverse_propensity
from unidec.retrieval.neighbours import Neighbours, Ranked, allowed_keys, best_of, candidate_keys
from unidec.retrieval.network import Floats, Network, Number
from unidec.retrieval.query_encoder import usable_cores
from unidec.retrieval.scoring_space import pair_scores, query_vectors
from unidec.retrieval.sparse import SparseRows
from unidec.retrieval.word_scores import WORD_FEATURES, WordScorer

CANDIDATES = 300  # labels that the search gives for each query that the fusion is trained on or ranks a hundred for
FEWEST_CANDIDATES = 100  # where fewer are asked for
RESCORE = 2  # labels for each candidate that an approximate search scores exactly
VOTED = 100  # labels with most votes, which are candidates too
FEATURES = (
    "blend", "dual encoder", "classifier", "votes", "words of the label", "words of its queries",
    "labels it comes with", "log frequency",
    "log rank by the blend", "log rank by the dual encoder", "log rank by the classifier", "log rank by votes",
    "blend below the best", "dual encoder below the best", "classifier below the best", "votes below the most",
    "label words below the best", "query words below the best", "best blend", "log words of the query",
)  # fmt: skip
BY_WORDS = ("score by words", "score by words below the best", "log rank by words")
_LIKELY = 10  # labels of the best blend that others may come with
_LIKELY_TEMPERATURE = 0.3  # of the softmax that weights them

Rows = npt.NDArray[np.int64]


class Fusion(Network):
    """A trained fusion, as bundle.json keeps it.

    Attributes:
        tail: weight of the log inverse propensity. propensity: its constants A and B.
        gain: what validation gained over the blend, by metric.
        words: the network that ranks by words; None: the fusion does without `BY_WORDS`.
    """

    propensity: tuple[Number, Number]
    tail: Number = 0.0
    gain: dict[str, Number] = Field(default_factory=dict)
    words: Network | None = None

    @model_validator(mode="after")
    def _check_features(self) -> Fusion:
        if len(self.mean) != (wanted := len(self.features)):
            raise ValueError(f"weights of {len(self.mean)} features instead of {wanted}")
        if self.words is not None and len(self.words.mean) not in (num := len(WORD_FEATURES), 2 * num):
            raise ValueError(f"weights of {len(self.words.mean)} word features instead of {num}, or twice as many")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return FEATURES if self.words is None else FEATURES + BY_WORDS


@dataclass(frozen=True)
class Evidence:
    """What is known of some pairs of a query and a candidate, ascending by query and label.

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
        """The k best by these scores; among equals the smaller label row comes first."""
        return best_of(self.query_P, self.label_P, score_P, self.votes_P, self.num_queries, k)


class LabelEvidence:
    """What fusion reads of labels and their training queries. Reading is safe from several threads at once.

    Args:
        vectors: the labels' arrays by name; both heads.
        clf_weight, clf_normalize: of the blend.
        neighbours: the training queries, compared by words, with the labels' words. num_votes: how many of them vote.
        propensity: the constants A and B of the data set.
        by_words: the network that ranks by words; None: `BY_WORDS` are not read.
    """

    def __init__(
        self,
        vectors: Mapping[str, Floats],
        clf_weight: float,
        clf_normalize: bool,
        neighbours: Neighbours,
        num_votes: int,
        propensity: tuple[float, float],
        by_words: Network | None = None,
    ) -> None:
        self.vectors, self.clf_weight, self.clf_normalize = vectors, np.float32(clf_weight), clf_normalize
        self.words, self.by_words = WordScorer(neighbours, num_votes), by_words
        count_L = neighbours.label_counts
        self.log_frequency_L = np.log1p(count_L).astype(np.float32)
        inverse_L = inverse_propensity(count_L.astype(np.int64), neighbours.num_queries, *propensity)
        self.log_inverse_L = np.log(inverse_L).astype(np.float32)
        self._together_LL = SparseRows(neighbours.together)

    def read(
        self,
        de_BD: Floats,
        clf_BD: Floats,
        words_BF: csr_matrix,
        found_BC: Rows,
        excluded: Rows,
        allowed: Rows | None = None,
    ) -> Evidence:
        """What is known of a query's candidates: the labels that were found, and those with votes.

        Args:
            de_BD, clf_BD, words_BF: queries as the encoder gives them.
            found_BC: labels of the best blend that are not excluded, -1 where there is none; `VOTED` are added.
            excluded: int64 keys query * L + label that are left out.
            allowed: the only labels that are kept; what is read of each is the same without it.
        """
        step = self.words.queries_at_once
        if len(found_BC) <= step:
            return self._read(de_BD, clf_BD, words_BF, found_BC, excluded, allowed)

        def read_block(start: int) -> Evidence:
            some, own = slice(start, start + step), excluded - start * self.num_labels
            own = own[(own >= 0) & (own < step * self.num_labels)]
            return self._read(de_BD[some], clf_BD[some], words_BF[some], found_BC[some], own, allowed)

        with ThreadPoolExecutor(usable_cores()) as threads:
            parts = list(threads.map(read_block, range(0, len(found_BC), step)))
        query_P = np.concatenate([part.query_P + i * step for i, part in enumerate(parts)])
        names = ("label_P", "feature_PX", "votes_P")
        label_P, feature_PX, votes_P = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return Evidence(query_P, label_P, feature_PX, votes_P, len(found_BC))

    def rank(self, fusion: Fusion, evidence: Evidence, k: int, tail: float = 0.0) -> Ranked:
        """The k best by a fusion, with so much more of the tail's part than it has."""
        weight = np.float32(fusion.tail + tail)
        return evidence.top(fusion.scores(evidence.feature_PX) + weight * self.log_inverse_L[evidence.label_P], k)

    @property
    def num_labels(self) -> int:
        """L."""
        return len(self.log_frequency_L)

    def _read(
        self, de_BD: Floats, clf_BD: Floats, words_BF: csr_matrix, found_BC: Rows, excluded: Rows, allowed: Rows | None
    ) -> Evidence:
        num_queries, num_labels = len(found_BC), self.num_labels
        scored = self.words.score(words_BF, first_words=self.by_words is not None)
        key_P = candidate_keys(found_BC, scored.votes.largest(VOTED), num_labels, excluded)
        usual_P = np.ones(len(key_P), dtype=bool)
        if allowed is not None:  # others are read too: how far a label is below the best must not depend on the choice
            usual = key_P
            key_P = np.union1d(usual, allowed_keys(allowed, num_queries, num_labels, excluded))
            usual_P = np.isin(key_P, usual)
        query_P, label_P = np.divmod(key_P, num_labels)
        begin_B = np.searchsorted(query_P, np.arange(num_queries + 1))
        votes_P = scored.votes.at(key_P)
        pairs = (query_P, label_P, self.vectors)
        de_P = pair_scores(de_BD, *pairs, "de", self.clf_normalize)
        own_BD = query_vectors(None, clf_BD, "clf", 1.0, self.clf_normalize, "bias" in self.vectors)
        clf_P = pair_scores(own_BD, *pairs, "clf", self.clf_normalize)
        blend_P = de_P + self.clf_weight * clf_P
        compared = (blend_P, de_P, clf_P, votes_P, scored.label_BL[query_P, label_P], scored.query_BL[query_P, label_P])
        best = [_best(part, usual_P, begin_B) for part in compared]
        rank_P, *other_ranks = (_rank(part, usual_P, query_P, begin_B) for part in compared[:4])
        likely_L = np.flatnonzero(usual_P & (rank_P < _LIKELY))
        together_P = self._likely_together(query_P[likely_L], label_P[likely_L], blend_P[likely_L], best[0])[key_P]
        columns = [
            *compared, together_P, self.log_frequency_L[label_P],
            *(np.log1p(rank) for rank in (rank_P, *other_ranks)),
            *(top[query_P] - part for top, part in zip(best, compared, strict=True)),
            best[0][query_P], np.log1p(scored.num_words_B)[query_P],
        ]  # fmt: skip
        if self.by_words is not None:
            score_P = self.by_words.scores(scored.features(query_P, label_P))
            below_P = _best(score_P, usual_P, begin_B)[query_P] - score_P
            columns += [score_P, below_P, np.log1p(_rank(score_P, usual_P, query_P, begin_B))]
        feature_PX = np.stack(columns, axis=1, dtype=np.float32, casting="same_kind")
        out = Evidence(query_P, label_P, feature_PX, votes_P, num_queries)
        if allowed is None:
            return out
        kept = np.isin(label_P, allowed)
        return Evidence(query_P[kept], label_P[kept], feature_PX[kept], votes_P[kept], num_queries)

    def _likely_together(self, query_N: Rows, label_N: Rows, blend_N: Floats, best_B: Floats) -> Floats:
        """How often each label comes with a query's likely ones, weighted by their softmax: float32 [B * L].

        Args:
            query_N, label_N, blend_N: the likely labels of each query, ascending by query. best_B: their best blend.
        """
        begin_B = np.searchsorted(query_N, np.arange(len(best_B) + 1))
        weight_N = np.exp((blend_N - best_B[query_N]) / np.float32(_LIKELY_TEMPERATURE))
        weight_N /= np.bincount(query_N, weight_N, minlength=len(best_B))[query_N]
        return self._together_LL.sums(begin_B, label_N, weight_N.astype(np.float32)).ravel()


def _best(value_P: Floats, usual_P: npt.NDArray[np.bool_], begin_B: Rows) -> Floats:
    """The largest value of each query's usual candidates, float32 [B]; 0 where it has none."""
    out = np.zeros(len(begin_B) - 1, dtype=np.float32)
    some = np.flatnonzero(np.diff(begin_B))
    if len(some):
        out[some] = np.maximum.reduceat(np.where(usual_P, value_P, -np.inf), begin_B[some])
    return np.where(np.isfinite(out), out, np.float32(0))


def _rank(value_P: Floats, usual_P: npt.NDArray[np.bool_], query_P: Rows, begin_B: Rows) -> Floats:
    """How many usual candidates of the query have a larger value, float32 [P]."""
    order = np.lexsort((-value_P, query_P))
    value, query = value_P[order], query_P[order]
    before = np.concatenate([[0], np.cumsum(usual_P[order])])  # usual candidates before each place
    begins = np.ones(len(order), dtype=bool)  # a run of equals begins here
    begins[1:] = (value[1:] != value[:-1]) | (query[1:] != query[:-1])
    run = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    rank_P = np.empty(len(order), dtype=np.float32)
    rank_P[order] = before[run] - before[begin_B[query]]
    return rank_P
