"""The only code that ranks: candidates from the index and from votes, their scores, the fusion, and
the k best labels.

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
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.sparse import csr_matrix

from unidec.ranking.candidates import (
    Candidates,
    PairScores,
    Ranked,
    allowed_keys,
    candidate_keys,
    votes_alone,
)
from unidec.ranking.fusion import FEWEST_CANDIDATES, RESCORE, Fusion, LabelEvidence
from unidec.ranking.heads import Heads, Space
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Head = Literal["de", "clf"]
SINGLE_HEADS: tuple[Head, ...] = ("de", "clf")
MOST_POINTS = 32  # of a calibration
Score = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Index(Protocol):
    """Finds labels by the heads' score: `index.LabelIndex`, or `index.ExactIndex`."""

    def search(
        self, queries_BD: Floats, k: int, rescore: int = 0, excluded: Labels | None = None
    ) -> tuple[Floats, Labels]:
        """Scores and rows of the k best labels of each query that are not excluded, best first."""


@dataclass(frozen=True, kw_only=True)
class Voting:
    """How similar training queries vote.

    Attributes:
        neighbours: the training queries. num: how many of them vote. weight: of the votes beside
        the heads' score.
        head: whose vectors are compared, unless queries are compared by words.
    """

    neighbours: Neighbours
    num: int
    weight: float = 0.0
    head: Head = "de"

    def compared(self, encoded: Encoded) -> Floats | csr_matrix:
        """The part of the queries by which they are compared with training queries: words, or
        vectors of a head.
        """
        by_head = encoded.de_BD if self.head == "de" else encoded.clf_BD
        part = by_head if self.neighbours.words is None else encoded.words_BF
        assert part is not None
        return part

    def votes(self, encoded: Encoded) -> PairScores:
        """Votes of the nearest training queries."""
        return self.neighbours.votes(self.compared(encoded), self.num)

    def rank(self, encoded: Encoded, k: int, excluded: Labels | None = None) -> Ranked:
        """The k labels with the most votes; labels without votes are not returned."""
        return votes_alone(self.votes(encoded), k, excluded)


class Ranker:
    """Ranks labels for encoded queries. Serving, file prediction, tuning, evaluation and the
    profile of the data call it. Thread-safe. Its cost is that of its parts: no method takes or
    returns scores of all labels.

    Args:
        heads: the labels' vectors, and how they score.
        index: finds labels in the space of `heads`.
        voting: training queries that vote; None: none do.
        fusion: ranks by its networks; None: the weighted sum of heads and votes ranks.
        evidence: computes the fusion's features; None: made here if there is a fusion.
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
        self._alone = {head: heads.alone(head) for head in SINGLE_HEADS if head in heads.vectors}

    def rank(
        self,
        encoded: Encoded,
        k: int,
        excluded: Labels | None = None,
        *,
        head: Space = "both",
        tail: float = 0.0,
        allowed: Labels | None = None,
        found: Ranked | None = None,
    ) -> Ranked:
        """The k best labels of each query. They are as exact as the index; labels with votes are
        always scored.

        Args:
            k: at least 1; may exceed L.
            excluded: int64, unique keys query * L + label of pairs that must not be returned.
            head: "both": as the ranker ranks; "de" or "clf": by that head alone, without votes.
            tail: added to the fusion's weight of the log inverse propensity, which favours rare
                labels; ignored without a fusion.
            allowed: int64, ascending, rows of the only labels that may be returned; their scores
            are exact.
            found: the best labels by the heads' score, at least `CANDIDATES` of them or all,
                without excluded pairs; None: the index is searched.
        """
        excluded = np.zeros(0, dtype=np.int64) if excluded is None else excluded
        query_BD = self.heads.queries(encoded.de_BD, encoded.clf_BD, head)
        if self.evidence is not None and self.fusion is not None and head == "both":
            num = max(FEWEST_CANDIDATES, 3 * k)
            found = self._search(query_BD, num, excluded, RESCORE) if found is None else found
            evidence = self.evidence.read(encoded, found.rows[:, :num], excluded, allowed)
            return self.evidence.rank(self.fusion, evidence, k, tail)
        votes = None
        if self.voting is not None and head == "both":
            votes = self.voting.votes(encoded)
        num_queries = len(encoded)
        num_labels = self.heads.num_labels
        if allowed is not None:
            key_P = allowed_keys(allowed, num_queries, num_labels, excluded)
        else:
            found = self._search(query_BD, k, excluded) if found is None else found
            if votes is None:
                return Ranked(found.rows[:, :k], found.scores[:, :k])
            key_P = candidate_keys(found.rows[:, :k], votes.key_N, num_labels, excluded)
        heads_P = self.heads.pair_scores(query_BD, *np.divmod(key_P, num_labels))
        candidates = Candidates.of(
            key_P, heads_P, votes or PairScores.none((num_queries, num_labels))
        )
        ranked = candidates.top(0.0 if self.voting is None else self.voting.weight, k)
        return ranked if votes is not None else replace(ranked, knn_scores=None)

    def queries(self, encoded: Encoded) -> Floats:
        """Queries in the searched space, float32 [B, D']."""
        return self.heads.queries(encoded.de_BD, encoded.clf_BD)

    def search(self, encoded: Encoded, k: int, excluded: Labels | None = None) -> Ranked:
        """The k best labels by the heads' score alone, without votes and fusion."""
        return self._search(self.queries(encoded), k, excluded)

    def with_parts(self, encoded: Encoded, ranked: Ranked, most: int | None = None) -> Ranked:
        """The same labels with each head's own score; with `most`, scores of the first `most`
        labels only.
        """

        def own_scores(head: Head, query_BD: Floats | None) -> Floats | None:
            heads = self._alone.get(head)
            if heads is None or query_BD is None:
                return None
            return heads.found_scores(heads.queries(query_BD, query_BD), ranked.rows[:, :most])

        de_scores = own_scores("de", encoded.de_BD)
        return replace(ranked, de_scores=de_scores, clf_scores=own_scores("clf", encoded.clf_BD))

    def candidates(
        self, encoded: Encoded, clf_weights: Sequence[float], k: int, excluded: Labels | None = None
    ) -> Callable[[float], Candidates]:
        """Candidates for the k best labels by heads and votes, under any weight of the votes; to
        tune both weights.

        The candidates are all labels with votes, and the k best by the heads' score under the
        first, the middle and the last of `clf_weights` (ascending): only these three are searched.

        Returns:
            a function from the classifier's weight to the candidates with their scores, which are
            linear in the weight.
        """
        num_labels = self.heads.num_labels
        votes = PairScores.none((len(encoded), num_labels))
        if self.voting is not None:
            votes = self.voting.votes(encoded)
        found = []
        for weight in sorted({clf_weights[0], clf_weights[len(clf_weights) // 2], clf_weights[-1]}):
            query_BD = self.heads.weighted(weight).queries(encoded.de_BD, encoded.clf_BD)
            found.append(self._search(query_BD, k, excluded).rows)
        key_P = candidate_keys(np.concatenate(found, axis=1), votes.key_N, num_labels, excluded)
        query_P, label_P = np.divmod(key_P, num_labels)

        def score(head: Space) -> Floats:
            heads = self.heads.alone(head)
            return heads.pair_scores(heads.queries(encoded.de_BD, encoded.clf_BD), query_P, label_P)

        if self.heads.space == "both":
            heads_P = score("de")
            slope_P = score("clf")
        else:
            heads_P = score(self.heads.space)
            slope_P = np.zeros_like(heads_P)
        at_0 = Candidates.of(key_P, heads_P, votes)
        return lambda weight: replace(at_0, heads_P=heads_P + np.float32(weight) * slope_P)

    def _search(
        self, query_BD: Floats, k: int, excluded: Labels | None, rescore: int = 0
    ) -> Ranked:
        scores_BK, rows_BK = self.index.search(query_BD, k, rescore, excluded)
        return Ranked(rows_BK, scores_BK)


class Calibration(BaseModel):
    """Maps a score to the probability that a label with this score is relevant: points, as stored
    in bundle.json.

    Attributes:
        scores: strictly ascending, 1 to `MOST_POINTS`.
        probabilities: one for each score, non-decreasing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scores: Annotated[list[Score], Field(min_length=1, max_length=MOST_POINTS)]
    probabilities: Annotated[list[Probability], Field(max_length=MOST_POINTS)]

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if len(self.scores) != len(self.probabilities):
            raise ValueError(
                f"{len(self.scores)} scores, but {len(self.probabilities)} probabilities"
            )
        if (np.diff(self.scores) <= 0).any() or (np.diff(self.probabilities) < 0).any():
            raise ValueError(
                "scores must be strictly ascending, and probabilities must not fall with the score"
            )
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
        scores: scores by which the labels are ranked: those of the fusion (`fusion.py`), which are
            logits; without one, in the space "both", de_scores + clf_weight * clf_scores, plus
            knn_weight * knn_scores if training queries vote.
        de_scores, clf_scores: each head's own score; empty if the model lacks the head.
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
    """The first `count_B` labels of each query, by the names of all labels; with probabilities if
    calibrated.
    """
    # one look-up of all names: it costs the same for one name and for a thousand
    rows = [row[:count] for row, count in zip(ranked.rows, count_B, strict=True)]
    indices = pa.array(np.concatenate([np.zeros(0, dtype=np.int64), *rows]))
    uid_N = uids.take(indices).to_pylist()
    title_N = titles.take(indices).to_pylist()
    probabilities = None if calibration is None else calibration.of(ranked.scores)
    arrays = (ranked.scores, ranked.de_scores, ranked.clf_scores, ranked.knn_scores, probabilities)
    out: list[Prediction] = []
    for query, (count, end) in enumerate(zip(count_B, np.cumsum(count_B).tolist(), strict=True)):
        parts = ([] if array is None else array[query, :count].tolist() for array in arrays)
        out.append(Prediction(uid_N[end - count : end], title_N[end - count : end], *parts))
    return out
