"""Candidate labels of queries, their scores by the heads, and the vector space that is searched:
both heads concatenated, or one of them.

Legend: L labels, B queries, C candidates, K results, P pairs or rows, D width of a head, D' width
of the space.

A search by inner product in this space ranks labels by

    both:  cos(Phi_D(x), Phi_D(z_l)) + clf_weight * clf(x, l)
    de:    cos(Phi_D(x), Phi_D(z_l))
    clf:   clf(x, l)

where clf(x, l) is cos(Phi_C(x), Psi_l) with `clf_normalize` (UniDEC, section "Inference":
`[Phi_D(z_l); normalize(Psi_l)]` against `[Phi_D(x); normalize(Phi_C(x))]`, clf_weight 1), else
Phi_C(x) . Psi_l + bias_l. The bias is an additional dimension, in which every query has the value
1; a cosine has no bias. The dual encoder returns vectors of unit length; with `model.normalize:
false` it does not, and their inner product takes the place of the cosine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from unidec.data.csr import keys_of
from unidec.errors import DataError
from unidec.model.arrays import heads_of
from unidec.ranking.sparse import (
    Array,
    Floats,
    Rows,
    at_places,
    compiled_reordered,
    first_of_each,
    largest_of_each,
)

Space = Literal["both", "de", "clf"]


class Heads:
    """The labels' vectors and how they score. Vectors in the space are computed on demand for the
    requested rows, from the heads' arrays, which may be memory-mapped.

    Args:
        vectors: "de": float32 [L, D], label embeddings of unit length, required in "both" and "de".
            "clf": float32 [L, D], rows of the classifier table, required in "both" and "clf".
            "bias": float32 [L], biases of the classifier, not used in "de" or with `clf_normalize`.
        clf_normalize: the classifier's score is a cosine.
        clf_weight: weight of the classifier's score in "both"; not used in the other spaces.

    Attributes:
        shape: (L, D'). names: the space's heads.

    Raises:
        ValueError: a part that the space requires is missing, or the parts differ in their number
        of labels.
    """

    def __init__(
        self,
        vectors: Mapping[str, Floats],
        space: Space,
        clf_normalize: bool,
        clf_weight: float = 1.0,
    ) -> None:
        self.space = space
        self.names = heads_of(space)
        self.clf_weight = clf_weight
        self._normalize = clf_normalize
        self.vectors = {name: np.asarray(array) for name, array in vectors.items()}
        counts = {len(array) for array in self.vectors.values()}
        if len(counts) > 1:
            raise ValueError(f"parts differ in their number of labels: {sorted(counts)}")
        nothing = self.take(slice(0))
        self.shape = (counts.pop(), nothing.shape[1])

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return self.shape[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments beside the vectors."""
        return {
            "space": self.space,
            "clf_normalize": self._normalize,
            "clf_weight": self.clf_weight,
        }

    def __len__(self) -> int:
        return self.num_labels

    def __getitem__(self, rows_P: Rows | slice) -> Floats:
        return self.take(rows_P)

    def alone(self, head: Space) -> Heads:
        """One head alone, in its own space."""
        return Heads(self.vectors, head, self._normalize)

    def weighted(self, clf_weight: float) -> Heads:
        """The same heads with another weight of the classifier."""
        return Heads(self.vectors, self.space, self._normalize, clf_weight)

    def queries(self, de_BD: Floats | None, clf_BD: Floats | None, head: Space = "both") -> Floats:
        """Query side of the space, float32 [B, D'], contiguous; its inner product with the label
        side is the score.

        Args:
            de_BD, clf_BD: query embeddings from the model's heads, as far as the space needs them.
            head: "both": the space's own score; "de" or "clf": the score of that head alone, in the
            same space.

        Raises:
            ValueError: a part that the space requires is missing. DataError: the space does not
            contain the head.
        """
        if head != "both" and self.space not in ("both", head):
            raise DataError(
                f"this bundle does not rank by the head {head!r}", where="head", expected=self.space
            )
        vectors = {"de": de_BD, "clf": clf_BD}
        if "bias" in self.vectors and clf_BD is not None:
            vectors["bias"] = np.ones(len(clf_BD), dtype=np.float32)
        out = _joined(self._parts(vectors, slice(None)))
        if self.space != "both" or de_BD is None:
            return out
        of_de, of_clf = np.split(out, [de_BD.shape[1]], axis=1)
        if head == "both":
            of_clf *= np.float32(self.clf_weight)
        else:
            other = of_clf if head == "de" else of_de
            other[:] = 0.0
        return out

    def take(self, rows_P: Rows | slice) -> Floats:
        """Label side of the space: vectors of the given rows, float32 [P, D'], contiguous."""
        return _joined(self._parts(self.vectors, rows_P))

    def scores(self, query_BD: Floats, rows_BC: Rows) -> Floats:
        """Scores of each query for the labels in its row of `rows_BC`, float32 [B, C]."""
        query_P = np.repeat(np.arange(len(rows_BC)), rows_BC.shape[1])
        return self.pair_scores(query_BD, query_P, rows_BC.ravel()).reshape(rows_BC.shape)

    def pair_scores(self, query_BD: Floats, query_P: Rows, label_P: Rows) -> Floats:
        """Scores of pairs of a query (a row of `query_BD`, float32 [B, D'] from `queries`) and a
        label: float32 [P].
        """
        out_P = np.zeros(len(query_P), dtype=np.float32)
        begin = 0
        for name in self.names:
            vectors_LD = self.vectors[name]
            row_P = label_P
            if vectors_LD.dtype != np.float32:
                vectors_LD = vectors_LD[label_P].astype(np.float32)
                row_P = np.arange(len(label_P))
            end = begin + vectors_LD.shape[1]
            is_cosine = self._normalize and name == "clf"
            part_BD = np.ascontiguousarray(query_BD[:, begin:end])
            _add_products(part_BD, query_P, vectors_LD, row_P, is_cosine, out_P)
            begin = end
        if begin < query_BD.shape[1]:
            out_P += query_BD[query_P, begin] * self.vectors["bias"][label_P]
        return out_P

    def found_scores(self, query_BD: Floats, rows_BK: Rows) -> Floats:
        """Score of each label that was found for a query, float32 [B, K]; NaN where `rows_BK` is
        -1.
        """
        out = np.full(rows_BK.shape, np.nan, dtype=np.float32)
        found_BK = rows_BK >= 0
        query_P, _ = np.nonzero(found_BK)
        out[found_BK] = self.pair_scores(query_BD, query_P, rows_BK[found_BK])
        return out

    def _parts(self, vectors: Mapping[str, Floats | None], rows_P: Rows | slice) -> list[Floats]:
        """Vectors of each part of the space: float32 [P, D], biases [P, 1]; raises as the class
        does.
        """
        parts = []
        for name in self.names:
            part = vectors.get(name)
            if part is None:
                what = f"space {self.space!r} needs the vectors of {name!r}, got None"
                raise ValueError(f"{what}: the model has no such head")
            parts.append(np.asarray(part[rows_P], dtype=np.float32))
        bias = vectors.get("bias")
        if self.space == "de":
            return parts
        if self._normalize:
            parts[-1] = unit_rows(parts[-1])
        elif bias is not None:
            bias_P = np.asarray(bias[rows_P], dtype=np.float32)
            parts.append(bias_P[:, None])
        return parts


@compiled_reordered
def _add_products(
    query_BD: Array, query_P: Array, label_LD: Array, label_P: Array, is_cosine: bool, out_P: Array
) -> None:
    """Add the inner product of each pair of vectors, divided by the label's length for a cosine."""
    for pair in range(len(query_P)):
        query_D = query_BD[query_P[pair]]
        label_D = label_LD[label_P[pair]]
        product = np.float32(0)
        square = np.float32(0)
        for d in range(len(query_D)):
            product += query_D[d] * label_D[d]
            square += label_D[d] * label_D[d]
        if not is_cosine:
            out_P[pair] += product
        elif square > 0:
            out_P[pair] += product / np.sqrt(square)


def _joined(parts: list[Floats]) -> Floats:
    joined = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    return np.ascontiguousarray(joined)


def as_heads(vectors: Heads | npt.NDArray) -> Heads:
    """Wraps an array [L, D], float32 or float16, as `Heads`; returns `Heads` unchanged."""
    if isinstance(vectors, Heads):
        return vectors
    return Heads({"de": vectors}, "de", clf_normalize=False)


def width(dim: int, space: Space, clf_normalize: bool, has_bias: bool) -> int:
    """Width D' of the space for heads of width `dim`."""
    bias = has_bias and not clf_normalize and space != "de"
    return len(heads_of(space)) * dim + int(bias)


def unit_rows(vectors_ND: Floats) -> Floats:
    """Rows scaled to unit length, float32; zero rows stay zero."""
    vectors = np.asarray(vectors_ND, dtype=np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)


@dataclass(frozen=True)
class Ranked:
    """The best labels of B queries.

    Attributes:
        rows: int64 [B, K] label rows, best first; -1 where a query has fewer than K results.
        scores: float32 [B, K]; -inf where there is no result.
        knn_scores: float32 [B, K], unweighted votes of similar training queries; NaN where there is
            no result; None if training queries do not vote.
        de_scores, clf_scores: float32 [B, K], score by each head alone; NaN where there is no
            result; None if the model lacks the head, and before `Ranker.with_parts`.
    """

    rows: Rows
    scores: Floats
    knn_scores: Floats | None = None
    de_scores: Floats | None = None
    clf_scores: Floats | None = None


@dataclass(frozen=True)
class PairScores:
    """Scores of pairs of a query and a label; a pair that is not stored has the score 0.

    Attributes:
        key_N: int64 [N], query * L + label, ascending and unique. score_N: float32 [N].
        shape: (B, L).
    """

    key_N: Rows
    score_N: Floats
    shape: tuple[int, int]

    @classmethod
    def none(cls, shape: tuple[int, int]) -> PairScores:
        """Scores without any stored pair."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), shape)

    @classmethod
    def of(cls, matrix_BL: csr_matrix) -> PairScores:
        """Scores from the stored entries of a matrix with sorted indices."""
        return cls(keys_of(matrix_BL), matrix_BL.data.astype(np.float32), matrix_BL.shape)

    def relative(self) -> PairScores:
        """Scores divided by the query's largest score; all must be positive."""
        query_N = self.key_N // self.shape[1]
        largest_B = np.zeros(self.shape[0], dtype=np.float32)
        np.maximum.at(largest_B, query_N, self.score_N)
        return replace(self, score_N=self.score_N / largest_B[query_N])

    def at(self, key_P: Rows) -> Floats:
        """Scores of the given pairs, float32 [P]."""
        if not len(self.key_N):
            return np.zeros(len(key_P), dtype=np.float32)
        last = len(self.key_N) - 1
        at_P = np.minimum(np.searchsorted(self.key_N, key_P), last)
        is_stored_P = self.key_N[at_P] == key_P
        return np.where(is_stored_P, self.score_N[at_P], np.float32(0))

    def best(self, count: int) -> tuple[Floats, Rows]:
        """Each query's `count` largest scores, largest first, and their keys: float32 and int64
        [B, count], padded with 0 and -1.
        """
        num_queries, num_labels = self.shape
        begin_B = np.searchsorted(self.key_N, num_labels * np.arange(num_queries + 1))
        place_BT = largest_of_each(begin_B, self.score_N, count)
        return at_places(self.score_N, place_BT, 0), at_places(self.key_N, place_BT, -1)


def first_keys(num_queries: int, num_labels: int) -> Rows:
    """Key of each query's first label, [B, 1]."""
    return num_labels * np.arange(num_queries, dtype=np.int64)[:, None]


@dataclass(frozen=True)
class Candidates:
    """Candidate pairs of a query and a label: unique, sorted by query and label. Only these pairs
    are ranked.

    Attributes:
        query_P, label_P: int64 [P]. votes_P: float32 [P], votes of each pair.
        num_queries: B.
    """

    query_P: Rows
    label_P: Rows
    votes_P: Floats
    num_queries: int

    @classmethod
    def of(cls, key_P: Rows, votes: PairScores) -> Candidates:
        """Candidates from their keys, which are ascending and unique."""
        num_queries, num_labels = votes.shape
        query_P, label_P = np.divmod(key_P, num_labels)
        return cls(query_P, label_P, votes.at(key_P), num_queries)

    def best(self, score_P: Floats, k: int) -> Ranked:
        """The k candidates of each query with the largest scores; ties are ordered by label row."""
        begin_B = first_of_each(self.query_P, self.num_queries)
        place_BK = largest_of_each(begin_B, score_P, k)
        return Ranked(
            rows=at_places(self.label_P, place_BK, -1),
            scores=at_places(score_P, place_BK, -np.inf),
            knn_scores=at_places(self.votes_P, place_BK, np.nan),
        )


def candidate_keys(found_BC: Rows, voted: Rows, num_labels: int, excluded: Rows | None) -> Rows:
    """Keys of the retrieved labels and of those with votes, ascending, without excluded pairs.

    If `found_BC` holds the heads' k best labels without excluded ones and `voted` every label with
    a vote, the k best labels by heads + weight * votes are among them, for any weight >= 0.

    Args:
        found_BC: label rows, -1 for no result. voted, excluded: int64 keys.
    """
    key_BC = first_keys(len(found_BC), num_labels) + found_BC
    return without(np.union1d(key_BC[found_BC >= 0], voted), excluded)


def allowed_keys(allowed: Rows, num_queries: int, num_labels: int, excluded: Rows | None) -> Rows:
    """Keys of the allowed labels (ascending rows) of each query, ascending, without excluded
    pairs.
    """
    key_BC = first_keys(num_queries, num_labels) + allowed
    return without(key_BC.ravel(), excluded)


def without(key_P: Rows, excluded: Rows | None) -> Rows:
    """`key_P` without the excluded keys."""
    if excluded is None or not excluded.size:
        return key_P
    return key_P[~np.isin(key_P, excluded)]


def votes_alone(votes: PairScores, k: int, excluded: Rows | None) -> Ranked:
    """The k labels with the most votes; labels without votes are not returned."""
    candidates = Candidates.of(without(votes.key_N, excluded), votes)
    return candidates.best(candidates.votes_P, k)
