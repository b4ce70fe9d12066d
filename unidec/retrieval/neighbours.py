"""Votes of similar training queries: a third score beside the two heads'.

Legend: M training queries that vote, B queries, N nearest of them, L labels, D width of a head (or number of words), P
pairs of a query and a label that may be among the best, K results.

    votes(x, l) = sum over the N nearest m of w(cos(x, m)) y_ml, divided by its largest value over all labels
    score(x, l) = heads(x, l) + weight * votes(x, l)

with w(c) = c^2, or exp((c - the largest c) / 0.05), for c above 0, else 0. Sources: the distance-weighted vote of
nearest neighbours (Dudani 1976); a model's score beside that of its nearest training examples, softmax over their
similarities (Khandelwal et al. 2020, kNN-LM, section 2). The largest vote is taken before anything is excluded, so that
a label's score does not depend on what else may be returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.storage import load_array
from unidec.errors import ArtifactError
from unidec.retrieval.arrow_file import read_texts_table, text_array, write_texts_table
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.scoring_space import unit_rows
from unidec.retrieval.words import WordSpace

Vote = Literal["square", "softmax"]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

TEMPERATURE = 0.05  # of the softmax vote: that of the heads' own softmax, about
_LABELS = ("indptr.npy", "labels.npy", "queries.arrow")
_WORDS = ("words_indptr.npy", "words.npy", "words_values.npy", "word_keys.npy", "word_weights.npy")
_LABEL_WORDS = ("label_words_indptr.npy", "label_words.npy", "label_words_values.npy")
FILES = frozenset(f"neighbours/{name}" for name in ("vectors.npy", *_LABELS, *_WORDS, *_LABEL_WORDS))
"""All that may lie there: either vectors.npy, or those of words, with or without those of the labels' words."""
_BLOCK_SCORES = 1 << 24  # cosines of one block of queries compared by words, at most
# large: the titles of many queries are more than the 2 GB that a plain string column holds
QUERY_SCHEMA = pa.schema(
    [pa.field("uid", pa.large_string(), nullable=False), pa.field("title", pa.large_string(), nullable=False)]
)
_FIX = "write the bundle again: unidec index build"


def _softmax(cosine_BN: Floats) -> Floats:
    """exp of the cosine over `TEMPERATURE`, the nearest's vote being 1, 0 where it is not positive; float32 [B, N]."""
    nearest_B1 = cosine_BN.max(axis=1, keepdims=True, initial=-1.0)
    return np.where(cosine_BN > 0, np.exp((cosine_BN - nearest_B1) / np.float32(TEMPERATURE)), np.float32(0))


VOTES: dict[Vote, Callable[[Floats], Floats]] = {
    "square": lambda cosine_BN: np.square(np.maximum(cosine_BN, np.float32(0))), "softmax": _softmax,
}  # fmt: skip


class Neighbours:
    """Training queries that vote. Voting is safe from several threads at once.

    Args:
        vectors_MD: what queries are compared by: their vectors in a head's space, kept as float16 of unit length; or
            with `words` CSR, their words.
        labels_ML: CSR [M, L], their labels (relevance above 0); each is one vote.
        uids, titles: of the M queries.
        vote: how much a neighbour's vote counts by its cosine; a key of `VOTES`.
        words: the space of the CSR `vectors_MD`; None for a head's.
        label_words_LF: the labels' texts in that space, CSR; None: not kept.

    Raises:
        ValueError: parts that differ in their number of queries, no query, numbers that are not finite, another vote.
    """

    def __init__(
        self,
        vectors_MD: npt.NDArray[Any] | csr_matrix,
        labels_ML: csr_matrix,
        uids: Any,
        titles: Any,
        vote: Vote = "softmax",
        words: WordSpace | None = None,
        label_words_LF: csr_matrix | None = None,
    ) -> None:
        if vote not in VOTES:
            raise ValueError(f"unknown vote {vote!r}, expected one of {', '.join(VOTES)}")
        self.uids, self.titles = (text_array(texts, pa.large_string()) for texts in (uids, titles))
        self.vote, self.words = vote, words
        self.vectors_MD: Any
        if words is None:
            own = np.asarray(vectors_MD)
            if not np.isfinite(own).all():
                raise ValueError("vectors_MD must be finite")
            self.vectors_MD = own if own.dtype == np.float16 else unit_rows(own).astype(np.float16)
        else:
            # as they are stored: a query must find the same neighbours before and after
            self.vectors_MD = _halved(vectors_MD)
            if self.vectors_MD.shape[1] != words.num_features or not np.isfinite(self.vectors_MD.data).all():
                raise ValueError("vectors_MD must be finite, and have a column for each word")
        counts = (self.vectors_MD.shape[0], labels_ML.shape[0], len(self.uids), len(self.titles))
        if len(set(counts)) != 1 or not counts[0]:
            raise ValueError(f"vectors, labels, uids and titles must be of the same queries, got {counts}")
        self.label_words_LF = None if label_words_LF is None else _halved(label_words_LF)
        self.labels_ML = csr_matrix(labels_ML > 0, dtype=np.float32)
        self.labels_ML.sum_duplicates()
        self.labels_ML.data[:] = 1.0  # each label of a row once
        self._index = LabelIndex.build(self.vectors_MD.astype(np.float32)) if words is None else None
        self._by_word: Any = None if words is None else csr_matrix(self.vectors_MD.T)

    @property
    def num_queries(self) -> int:
        """M."""
        return int(self.vectors_MD.shape[0])

    @property
    def num_labels(self) -> int:
        """L."""
        return int(self.labels_ML.shape[1])

    def nearest(self, query_BD: Floats | csr_matrix, num: int) -> tuple[Floats, Labels]:
        """The training queries of the largest cosine, best first; among equals the earlier comes first.

        Args:
            query_BD: float [B, D] in the space of `vectors_MD`, of any length; CSR of `words.vectors` with words.
            num: N, at least 1; all where it exceeds M.

        Returns:
            cosines float32 [B, N] (those of the float16 vectors), rows int64 [B, N].
        """
        num = min(num, self.num_queries)
        if self._index is not None:
            return self._index.search(unit_rows(query_BD), num)
        step = max(1, _BLOCK_SCORES // self.num_queries)
        starts = range(0, max(1, query_BD.shape[0]), step)
        found = [_largest((query_BD[start : start + step] @ self._by_word).toarray(), num) for start in starts]
        cosine_BN, row_BN = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return cosine_BN, row_BN

    def votes(self, query_BD: Floats | csr_matrix, num: int) -> csr_matrix:
        """Votes of the `num` nearest training queries: float32 CSR [B, L] with sorted indices, above 0, the largest of
        each row 1; a row is empty where no neighbour has a label or no cosine is positive."""
        cosine_BN, row_BN = self.nearest(query_BD, num)
        begin = np.arange(len(row_BN) + 1) * row_BN.shape[1]
        shape = (len(row_BN), self.num_queries)
        votes_BM = csr_matrix((VOTES[self.vote](cosine_BN).ravel(), row_BN.ravel(), begin), shape=shape)
        votes_BL = csr_matrix(votes_BM @ self.labels_ML)
        votes_BL.eliminate_zeros()
        votes_BL.sort_indices()
        if votes_BL.nnz:
            most_B = votes_BL.max(axis=1).toarray().ravel()
            votes_BL.data /= np.repeat(most_B, np.diff(votes_BL.indptr))
        return votes_BL

    def write(self, folder: Path, label_words: bool = False) -> None:
        """Write the files of `FILES` below a bundle's folder, the labels' words on demand; the same queries give the
        same bytes."""
        place, own, labels_ML = folder / "neighbours", self.vectors_MD, self.labels_ML
        place.mkdir()
        arrays: dict[str, npt.NDArray[Any]] = {"vectors.npy": own}
        if self.words is not None:
            arrays = dict(zip(_WORDS, (*_stored(own), self.words.keys_F, self.words.idf_F), strict=True))
        if label_words:
            assert self.label_words_LF is not None
            arrays |= zip(_LABEL_WORDS, _stored(self.label_words_LF), strict=True)
        arrays |= {"indptr.npy": labels_ML.indptr.astype(np.int64), "labels.npy": labels_ML.indices.astype(np.int32)}
        for name, array in arrays.items():
            np.save(place / name, np.ascontiguousarray(array), allow_pickle=False)
        write_texts_table(place / "queries.arrow", pa.table([self.uids, self.titles], schema=QUERY_SCHEMA))

    @property
    def num_bytes(self) -> int:
        """Size of what `write` writes, about."""
        own = self.vectors_MD.nbytes if self.words is None else 6 * self.vectors_MD.nnz
        return own + 4 * self.labels_ML.nnz + self.titles.nbytes


def read_neighbours(
    folder: Path,
    num_queries: int,
    num_pairs: int,
    num_labels: int,
    dim: int,
    vote: Vote,
    tokenizer_folder: Path | None = None,
    with_label_words: bool = False,
) -> Neighbours:
    """What `Neighbours.write` wrote below a bundle's folder, everything checked against these numbers.

    Args:
        dim: width of the vectors; with `tokenizer_folder` the number of words.
        tokenizer_folder: of the model, where queries are compared by words.
        with_label_words: the labels' words were written too.

    Raises:
        ArtifactError: missing, of another type or size, not finite, or labels that do not exist.
    """
    place, words = folder / "neighbours", None
    labels_ML = _read_csr(place, "indptr.npy", "labels.npy", (num_queries, num_labels), num_pairs)
    label_words = None
    if tokenizer_folder is None:
        vectors: Any = _read(place / "vectors.npy", np.float16, (num_queries, dim))
    else:
        vectors = _read_words(place, _WORDS[:3], (num_queries, dim))
        if with_label_words:
            label_words = _read_words(place, _LABEL_WORDS, (num_labels, dim))
        keys, weights = _read(place / "word_keys.npy", np.uint64, (dim,)), _read(place / "word_weights.npy", np.float32)
        try:
            words = WordSpace(tokenizer_folder, keys, weights)
        except ValueError as error:
            where = str(place / "word_keys.npy")
            raise ArtifactError("damaged words", where=where, got=str(error), fix=_FIX) from error
    table = read_texts_table(place / "queries.arrow", QUERY_SCHEMA, num_queries)
    return Neighbours(vectors, labels_ML, table["uid"], table["title"], vote, words, label_words)


def _halved(matrix: csr_matrix) -> csr_matrix:
    """A copy with the values that float16 keeps, float32."""
    out = csr_matrix(matrix, dtype=np.float32, copy=True)
    out.data = out.data.astype(np.float16).astype(np.float32)
    return out


def _stored(matrix: csr_matrix) -> tuple[npt.NDArray[Any], ...]:
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.data.astype(np.float16)


def _read_words(place: Path, names: Sequence[str], shape: tuple[int, int]) -> csr_matrix:
    values = _read(place / names[2], np.float16)
    return _read_csr(place, names[0], names[1], shape, len(values), values)


def _read_csr(
    place: Path, name: str, columns: str, shape: tuple[int, int], num_pairs: int, values: npt.NDArray[Any] | None = None
) -> csr_matrix:
    """A matrix of two files, `name` with where rows begin and `columns`; float32, 1 everywhere without values."""
    indptr, indices = _read(place / name, np.int64, (shape[0] + 1,)), _read(place / columns, np.int32, (num_pairs,))
    if indptr[-1] != num_pairs:
        raise ArtifactError(f"rows that do not fit {columns}", where=str(place / name), fix=_FIX)
    data = np.ones(num_pairs, dtype=np.float32) if values is None else values.astype(np.float32)
    try:
        matrix = csr_matrix((data, indices, indptr), shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise ArtifactError(f"damaged {columns} or {name}", where=str(place / columns), got=error, fix=_FIX) from error
    return matrix


def _read(where: Path, dtype: Any, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """An array of finite numbers; of any length without a shape."""
    array = load_array(where, dtype, ndim=len(shape or (0,)))
    if shape is not None and array.shape != shape:
        raise ArtifactError("another shape", where=str(where), got=array.shape, expected=shape, fix=_FIX)
    if not np.isfinite(array).all():
        raise ArtifactError("numbers that are not finite", where=str(where), fix=_FIX)
    return array


def _largest(score_BM: Floats, num: int) -> tuple[Floats, Labels]:
    """The `num` largest of each row, best first, among equals the smaller column: float32 and int64 [B, num]."""
    # ties at the edge go to the smaller column too: what is above the smallest that is taken, then its equals in order
    edge_B1 = -np.partition(-score_BM, num - 1, axis=1)[:, num - 1 : num]
    above_BM, equal_BM = score_BM > edge_B1, score_BM == edge_B1
    room_B1 = num - above_BM.sum(axis=1, keepdims=True)
    taken_BM = above_BM | (equal_BM & (np.cumsum(equal_BM, axis=1) <= room_B1))
    column_BN = np.nonzero(taken_BM)[1].reshape(-1, num)
    score_BN = np.take_along_axis(score_BM, column_BN, axis=1)
    order_BN = np.argsort(-score_BN, axis=1, kind="stable")
    return np.take_along_axis(score_BN, order_BN, axis=1), np.take_along_axis(column_BN, order_BN, axis=1)


@dataclass(frozen=True)
class Ranked:
    """The best labels of B queries.

    Attributes:
        rows: int64 [B, K], best first; -1 where there are fewer than K.
        scores: float32 [B, K]; -inf there.
        votes: float32 [B, K], the votes' part before its weight; NaN there; None where nothing votes.
    """

    rows: Labels
    scores: Floats
    votes: Floats | None = None


@dataclass(frozen=True)
class Candidates:
    """Pairs of a query and a label, each once, by query and label: the only ones that can be among the best.

    Attributes:
        query_P, label_P: int64 [P]; heads_P, votes_P: float32 [P], each pair's two scores.
        num_queries: B.
    """

    query_P: Labels
    label_P: Labels
    heads_P: Floats
    votes_P: Floats
    num_queries: int

    @classmethod
    def of(
        cls,
        found_BK: Labels,
        votes_BL: csr_matrix,
        heads: Callable[[Labels, Labels], Floats],
        excluded: Labels | None = None,
    ) -> Candidates:
        """The heads' k best labels, and all that got a vote, without excluded pairs: the k best of the sum are among
        them, whatever the votes' weight (>= 0).

        Args:
            found_BK: label rows of the heads' best that are not excluded, -1 where there is none.
            votes_BL: of `Neighbours.votes`.
            heads: (query_P, label_P) -> the heads' scores float32 [P].
            excluded: int64 keys query * L + label that are left out.
        """
        num_queries, num_labels = votes_BL.shape
        place_BK = np.arange(num_queries, dtype=np.int64)[:, None] * num_labels + found_BK
        voted = np.ravel_multi_index(votes_BL.nonzero(), votes_BL.shape)
        keys = np.union1d(place_BK[found_BK >= 0], voted)
        if excluded is not None and excluded.size:
            keys = keys[~np.isin(keys, excluded)]
        query_P, label_P = np.divmod(keys, num_labels)
        votes_P = np.asarray(votes_BL[query_P, label_P] if keys.size else [], dtype=np.float32).ravel()
        return cls(query_P, label_P, heads(query_P, label_P), votes_P, num_queries)

    def top(self, weight: float, k: int) -> Ranked:
        """The k best of heads + weight x votes; among equals the smaller label row comes first."""
        total_P = self.heads_P + np.float32(weight) * self.votes_P
        return best_of(self.query_P, self.label_P, total_P, self.votes_P, self.num_queries, k)


def best_of(query_P: Labels, label_P: Labels, score_P: Floats, votes_P: Floats, num_queries: int, k: int) -> Ranked:
    """The k pairs of each query with the largest scores; among equals the smaller label row comes first.

    Args:
        query_P, label_P: int64 [P], each pair once. score_P, votes_P: float32 [P].
    """
    order = np.lexsort((label_P, -score_P, query_P))
    query = query_P[order]
    begin_B = np.concatenate([[0], np.cumsum(np.bincount(query, minlength=num_queries))])
    rank = np.arange(len(order)) - begin_B[query]
    order, query, rank = (x[rank < k] for x in (order, query, rank))
    rows = np.full((num_queries, k), -1, dtype=np.int64)
    scores = np.full((num_queries, k), -np.inf, dtype=np.float32)
    votes = np.full((num_queries, k), np.nan, dtype=np.float32)
    rows[query, rank], scores[query, rank] = label_P[order], score_P[order]
    votes[query, rank] = votes_P[order]
    return Ranked(rows, scores, votes)


def votes_alone(votes_BL: csr_matrix, k: int, excluded: Labels | None = None) -> Ranked:
    """The k labels with most votes; labels without any are not returned."""
    nothing = np.zeros((votes_BL.shape[0], 0), dtype=np.int64)
    found = Candidates.of(nothing, votes_BL, lambda query_P, _: np.zeros(len(query_P), dtype=np.float32), excluded)
    return found.top(1.0, k)
