"""The only code that ranks: finds candidates by the index and by votes, scores them, applies the
fusion, and selects the k best labels.

Legend: B queries, L labels, P pairs of a query and a candidate label, K results, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator
from scipy.sparse import csr_matrix

from unidec.config.section import Stored
from unidec.ranking.fusion import FEWEST_CANDIDATES, RESCORE, Fusion, LabelEvidence
from unidec.ranking.heads import (
    Candidates,
    Heads,
    PairScores,
    Ranked,
    Space,
    allowed_keys,
    candidate_keys,
    votes_alone,
)
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.sparse import NO_ROWS, Floats, Rows

Head = Literal["de", "clf"]
SINGLE_HEADS: tuple[Head, ...] = ("de", "clf")
MOST_POINTS = 32  # maximum number of points of a calibration
Score = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Index(Protocol):
    """Finds labels by the heads' score: `index.LabelIndex`, or `exact_index.ExactIndex`."""

    def search(
        self, queries_BD: Floats, k: int, rescore: int = 0, excluded: Rows | None = None
    ) -> tuple[Floats, Rows]:
        """Scores and rows of the k best labels of each query that are not excluded, best first."""


@dataclass(frozen=True, kw_only=True)
class Voting:
    """How similar training queries vote.

    Attributes:
        neighbours: the training queries. num: how many of them vote. weight: weight of the votes,
            relative to the heads' score.
        head: the head whose vectors are compared, unless queries are compared by words.
    """

    neighbours: Neighbours
    num: int
    weight: float = 0.0
    head: Head = "de"

    def compared(self, encoded: Encoded) -> Floats | csr_matrix:
        """The queries' representation that is compared with training queries: words, or vectors of
        a head.
        """
        by_head = encoded.de_BD if self.head == "de" else encoded.clf_BD
        part = by_head if self.neighbours.words is None else encoded.words_BF
        assert part is not None
        return part

    def votes(self, encoded: Encoded) -> PairScores:
        """Votes of the nearest training queries."""
        return self.neighbours.votes(self.compared(encoded), self.num)

    def rank(self, encoded: Encoded, k: int, excluded: Rows | None = None) -> Ranked:
        """The k labels with the most votes; labels without votes are not returned."""
        return votes_alone(self.votes(encoded), k, excluded)


class Ranker:
    """Ranks labels for encoded queries. Thread-safe. Used by serving, file prediction, tuning,
    evaluation and the data profile. No method takes or returns scores of all labels.

    Args:
        heads: the labels' vectors, and how they score.
        index: finds labels in the space of `heads`.
        voting: training queries that vote; None: no votes.
        fusion: networks that rank; None: labels are ranked by the weighted sum of heads and votes.
        evidence: computes the fusion's features; None: created here if there is a fusion.
    """

    def __init__(
        self,
        heads: Heads,
        index: Index,
        voting: Voting | None = None,
        fusion: Fusion | None = None,
        evidence: LabelEvidence | None = None,
    ) -> None:
        self.heads = heads
        self.index = index
        self.voting = voting
        self.fusion = fusion
        self.evidence = evidence
        if evidence is None and fusion is not None and voting is not None:
            self.evidence = LabelEvidence(
                heads, voting.neighbours, voting.num, fusion.propensity, fusion.words
            )
        existing = [head for head in SINGLE_HEADS if head in heads.vectors]
        self._alone = {head: heads.alone(head) for head in existing}

    def rank(
        self,
        encoded: Encoded,
        k: int,
        excluded: Rows | None = None,
        *,
        head: Space = "both",
        tail: float = 0.0,
        allowed: Rows | None = None,
        found: Ranked | None = None,
    ) -> Ranked:
        """The k best labels of each query, as exactly as the index finds them; labels with votes
        are always scored.

        Args:
            k: at least 1; may exceed L.
            excluded: int64, unique keys query * L + label of pairs that must not be returned.
            head: "both": the full ranking; "de" or "clf": ranking by that head alone, without
                votes.
            tail: added to the fusion's weight of the log inverse propensity, which favours rare
                labels; ignored without a fusion.
            allowed: int64, ascending, rows of the only labels that may be returned; their scores
            are exact.
            found: the best labels by the heads' score, at least `CANDIDATES` of them or all,
                without excluded pairs; None: the index is searched.
        """
        excluded = NO_ROWS if excluded is None else excluded
        query_BD = self.heads.queries(encoded.de_BD, encoded.clf_BD, head)
        as_served = head == "both"
        if self.fusion is not None and self.evidence is not None and as_served:
            num = max(FEWEST_CANDIDATES, 3 * k)
            if found is None:
                found = self._search(query_BD, num, excluded, RESCORE)
            found_BC = found.rows[:, :num]
            evidence = self.evidence.read(encoded, found_BC, excluded, allowed)
            return self.evidence.rank(self.fusion, evidence, k, tail)
        voting = self.voting if as_served else None
        num_labels = self.heads.num_labels
        votes = self._votes(encoded, voting)
        if allowed is not None:
            key_P = allowed_keys(allowed, len(encoded), num_labels, excluded)
        else:
            if found is None:
                found = self._search(query_BD, k, excluded)
            found_BK = found.rows[:, :k]
            if voting is None:
                return Ranked(found_BK, found.scores[:, :k])
            key_P = candidate_keys(found_BK, votes.key_N, num_labels, excluded)
        candidates = Candidates.of(key_P, votes)
        score_P = self.heads.pair_scores(query_BD, candidates.query_P, candidates.label_P)
        if voting is None:
            return replace(candidates.best(score_P, k), knn_scores=None)
        weight = np.float32(voting.weight)
        return candidates.best(score_P + weight * candidates.votes_P, k)

    def queries(self, encoded: Encoded) -> Floats:
        """Queries in the searched space, float32 [B, D']."""
        return self.heads.queries(encoded.de_BD, encoded.clf_BD)

    def search(self, encoded: Encoded, k: int, excluded: Rows | None = None) -> Ranked:
        """The k best labels by the heads' score alone, without votes and fusion."""
        return self._search(self.queries(encoded), k, excluded)

    def with_parts(self, encoded: Encoded, ranked: Ranked) -> Ranked:
        """The same labels with the scores of each head alone."""

        def own_scores(head: Head, query_BD: Floats | None) -> Floats | None:
            heads = self._alone.get(head)
            if heads is None or query_BD is None:
                return None
            own_BD = heads.queries(query_BD, query_BD)
            return heads.found_scores(own_BD, ranked.rows)

        return replace(
            ranked,
            de_scores=own_scores("de", encoded.de_BD),
            clf_scores=own_scores("clf", encoded.clf_BD),
        )

    def candidates(
        self, encoded: Encoded, clf_weights: Sequence[float], k: int, excluded: Rows | None = None
    ) -> Callable[[float, float, int], Ranked]:
        """Candidates for the k best labels by heads and votes under any weight of the votes, to
        tune both weights.

        The candidates are all labels with votes, and the k best by the heads' score under the
        first, the middle and the last of `clf_weights` (ascending); other weights are not searched.

        Returns:
            a function of the classifier's weight, the votes' weight and a number of labels that
            ranks the candidates; scores are linear in both weights.
        """
        num_labels = self.heads.num_labels
        votes = self._votes(encoded, self.voting)
        found = []
        middle = clf_weights[len(clf_weights) // 2]
        for weight in sorted({clf_weights[0], middle, clf_weights[-1]}):
            query_BD = self.heads.weighted(weight).queries(encoded.de_BD, encoded.clf_BD)
            found.append(self._search(query_BD, k, excluded).rows)
        found_BC = np.concatenate(found, axis=1)
        key_P = candidate_keys(found_BC, votes.key_N, num_labels, excluded)
        candidates = Candidates.of(key_P, votes)

        def score(head: Space) -> Floats:
            heads = self.heads.alone(head)
            query_BD = heads.queries(encoded.de_BD, encoded.clf_BD)
            return heads.pair_scores(query_BD, candidates.query_P, candidates.label_P)

        if self.heads.space == "both":
            at_0_P = score("de")
            slope_P = score("clf")
        else:
            at_0_P = score(self.heads.space)
            slope_P = np.zeros_like(at_0_P)

        def ranked(clf_weight: float, knn_weight: float, k: int) -> Ranked:
            heads_P = at_0_P + np.float32(clf_weight) * slope_P
            return candidates.best(heads_P + np.float32(knn_weight) * candidates.votes_P, k)

        return ranked

    def _votes(self, encoded: Encoded, voting: Voting | None) -> PairScores:
        if voting is None:
            return PairScores.none((len(encoded), self.heads.num_labels))
        return voting.votes(encoded)

    def _search(self, query_BD: Floats, k: int, excluded: Rows | None, rescore: int = 0) -> Ranked:
        scores_BK, rows_BK = self.index.search(query_BD, k, rescore, excluded)
        return Ranked(rows_BK, scores_BK)


class Calibration(Stored):
    """Maps a score to the probability that a label with this score is relevant: points, as stored
    in bundle.json.

    Attributes:
        scores: strictly ascending, 1 to `MOST_POINTS`.
        probabilities: one for each score, non-decreasing.
    """

    scores: Annotated[list[Score], Field(min_length=1, max_length=MOST_POINTS)]
    probabilities: Annotated[list[Probability], Field(max_length=MOST_POINTS)]

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if len(self.scores) != len(self.probabilities):
            raise ValueError("the numbers of scores and probabilities differ")
        if min(np.diff(self.scores), default=1) <= 0:
            raise ValueError("scores must be strictly ascending")
        if min(np.diff(self.probabilities), default=0) < 0:
            raise ValueError("probabilities must not fall with the score")
        return self

    @cached_property
    def _points(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return np.asarray(self.scores), np.asarray(self.probabilities)

    def of(self, scores: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The probability of each score, float64 of the same shape, rounded to six decimals."""
        return np.interp(scores, *self._points).round(6)


@dataclass(frozen=True)
class Prediction:
    """The labels of one query, best first.

    Attributes:
        labels, titles: uid and title of each label.
        scores: scores by which the labels are ranked: logits of the fusion (`fusion.py`); without a
            fusion, in the space "both", de_scores + clf_weight * clf_scores, plus knn_weight *
            knn_scores if training queries vote.
        de_scores, clf_scores: score by each head alone; empty if the model lacks the head.
        knn_scores: votes of similar training queries, 0 to 1; empty if training queries do not
        vote.
        probabilities: probability that each label is relevant, given its score (`Calibration`);
            empty if the bundle has no calibration, or if the labels were not ranked as the bundle
            ranks.
        num_tokens, unknown_tokens: number of tokens of the query, and how many of them are not in
        the vocabulary.
        unknown_labels: number of allowed or denied uids that the bundle does not have.
    """

    labels: list[str]
    titles: list[str]
    scores: list[float]
    de_scores: list[float]
    clf_scores: list[float]
    knn_scores: list[float] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    num_tokens: int = 0
    unknown_tokens: int = 0
    unknown_labels: int = 0


def named_predictions(
    ranked: Ranked,
    count_B: Sequence[int],
    uids: pa.Array,
    titles: pa.Array,
    calibration: Calibration | None,
) -> list[Prediction]:
    """The first `count_B` labels of each query with their uids and titles; with probabilities if
    there is a calibration.
    """
    # a single look-up for all names: it costs the same for one name and for a thousand
    rows = [row[:count] for row, count in zip(ranked.rows, count_B, strict=True)]
    indices = pa.array(np.concatenate([NO_ROWS, *rows]))
    uid_N = uids.take(indices).to_pylist()
    title_N = titles.take(indices).to_pylist()
    probabilities = None if calibration is None else calibration.of(ranked.scores)
    arrays = (ranked.scores, ranked.de_scores, ranked.clf_scores, ranked.knn_scores, probabilities)
    out: list[Prediction] = []
    begin = 0
    for query, count in enumerate(count_B):
        parts = ([] if array is None else array[query, :count].tolist() for array in arrays)
        names = slice(begin, begin + count)
        out.append(Prediction(uid_N[names], title_N[names], *parts))
        begin += count
    return out
