"""Votes of similar training queries: a third score beside the two heads'.

Legend: M training queries that vote, B queries, N nearest of them, L labels, D width of a head, P pairs of a query and
a label that may be among the best, K results.

    votes(x, l) = sum over the N nearest m of w(cos(x, m)) y_ml, divided by its largest value over all labels
    score(x, l) = heads(x, l) + weight * votes(x, l)

with w(c) = c^2, or exp((c - the largest c) / 0.05), for c above 0, else 0. Sources: the distance-weighted vote of
nearest neighbours (Dudani 1976); a model's score beside that of its nearest training examples, softmax over their
similarities (Khandelwal et al. 2020, kNN-LM, section 2). The largest vote is taken before anything is excluded, so that
a label's score does not depend on what else may be returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.sparse import csr_matrix

from unidec.data.storage import load_array
from unidec.errors import ArtifactError
from unidec.retrieval.arrow_file import read_plain_table
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.space import unit_rows

Vote = Literal["square", "softmax"]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

TEMPERATURE = 0.05  # of the softmax vote: that of the heads' own softmax, about
FILES = frozenset(f"neighbours/{name}" for name in ("vectors.npy", "indptr.npy", "labels.npy", "queries.arrow"))
# large: the titles of many queries are more than the 2 GB that a plain string column holds
QUERY_SCHEMA = pa.schema(
    [pa.field("uid", pa.large_string(), nullable=False), pa.field("title", pa.large_string(), nullable=False)]
)
_BATCH_ROWS = 65_536
_FIX = "write the bundle again: unidec index"


def square_vote(cosine_BN: Floats) -> Floats:
    """Square of the cosine, 0 where it is negative; float32 [B, N]."""
    return np.square(np.maximum(cosine_BN, np.float32(0)))


def softmax_vote(cosine_BN: Floats) -> Floats:
    """exp of the cosine over `TEMPERATURE`, the nearest's vote being 1, 0 where it is not positive; float32 [B, N]."""
    nearest_B1 = cosine_BN.max(axis=1, keepdims=True, initial=-1.0)
    return np.where(cosine_BN > 0, np.exp((cosine_BN - nearest_B1) / np.float32(TEMPERATURE)), np.float32(0))


VOTES: dict[Vote, Callable[[Floats], Floats]] = {"square": square_vote, "softmax": softmax_vote}


class Neighbours:
    """Training queries that vote. Voting is safe from several threads at once.

    Args:
        vectors_MD: their vectors in the head's space in which queries are compared; kept as float16 of unit length.
        labels_ML: CSR [M, L], their labels (relevance above 0); each is one vote.
        uids, titles: of the M queries.
        vote: how much a neighbour's vote counts by its cosine; a key of `VOTES`.

    Raises:
        ValueError: parts that differ in their number of queries, no query, numbers that are not finite, another vote.
    """

    def __init__(
        self, vectors_MD: npt.NDArray[Any], labels_ML: csr_matrix, uids: Any, titles: Any, vote: Vote = "softmax"
    ) -> None:
        if vote not in VOTES:
            raise ValueError(f"unknown vote {vote!r}, expected one of {', '.join(VOTES)}")
        own = np.asarray(vectors_MD)
        if not np.isfinite(own).all():
            raise ValueError("vectors_MD must be finite")
        self.vectors_MD = own if own.dtype == np.float16 else unit_rows(own).astype(np.float16)
        self.uids, self.titles, self.vote = _strings(uids), _strings(titles), vote
        counts = (len(own), _rows_of(labels_ML), len(self.uids), len(self.titles))
        if len(set(counts)) != 1 or not len(own):
            raise ValueError(f"vectors, labels, uids and titles must be of the same queries, got {counts}")
        self.labels_ML = _ones(labels_ML)
        self._index = LabelIndex.build(self.vectors_MD.astype(np.float32))

    @property
    def num_queries(self) -> int:
        """M."""
        return len(self.vectors_MD)

    @property
    def num_labels(self) -> int:
        """L."""
        return int(self.labels_ML.shape[1])

    def nearest(self, query_BD: Floats, num: int) -> tuple[Floats, Labels]:
        """The training queries of the largest cosine, best first; among equals the earlier comes first.

        Args:
            query_BD: float [B, D] in the space of `vectors_MD`, of any length.
            num: N, at least 1; all where it exceeds M.

        Returns:
            cosines float32 [B, N] (those of the float16 vectors), rows int64 [B, N].
        """
        return self._index.search(unit_rows(query_BD), min(num, self.num_queries))

    def votes(self, query_BD: Floats, num: int) -> csr_matrix:
        """Votes of the `num` nearest training queries.

        Args:
            query_BD, num: as in `nearest`.

        Returns:
            float32 CSR [B, L] with sorted indices, above 0, the largest of each row 1; a row is empty where no
            neighbour has a label or no cosine is positive.
        """
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

    def write(self, folder: Path) -> None:
        """Write the files of `FILES` below a bundle's folder; the same queries give the same bytes."""
        place = folder / "neighbours"
        place.mkdir()
        np.save(place / "vectors.npy", np.ascontiguousarray(self.vectors_MD), allow_pickle=False)
        np.save(place / "indptr.npy", self.labels_ML.indptr.astype(np.int64), allow_pickle=False)
        np.save(place / "labels.npy", self.labels_ML.indices.astype(np.int32), allow_pickle=False)
        table = pa.table({"uid": self.uids, "title": self.titles}, schema=QUERY_SCHEMA)
        with pa.OSFile(str(place / "queries.arrow"), "wb") as file, pa.ipc.new_file(file, QUERY_SCHEMA) as writer:
            for start in range(0, table.num_rows, _BATCH_ROWS):
                writer.write_table(table.slice(start, _BATCH_ROWS).combine_chunks())

    @property
    def num_bytes(self) -> int:
        """Size of what `write` writes, about."""
        return self.vectors_MD.nbytes + 4 * self.labels_ML.nnz + 8 * self.num_queries + self.titles.nbytes


def read_neighbours(
    folder: Path, num_queries: int, num_pairs: int, num_labels: int, dim: int, vote: Vote
) -> Neighbours:
    """What `Neighbours.write` wrote below a bundle's folder, everything checked against these numbers.

    Raises:
        ArtifactError: missing, of another type or size, not finite, or labels that do not exist.
    """
    place = folder / "neighbours"
    for name in sorted(FILES):
        if not (folder / name).is_file():
            raise ArtifactError("a file of a bundle is missing", where=str(folder / name), fix=_FIX)
    vectors_MD = load_array(place / "vectors.npy", np.float16, ndim=2)
    indptr, labels = load_array(place / "indptr.npy", np.int64), load_array(place / "labels.npy", np.int32)
    shapes = (
        ("vectors.npy", vectors_MD, (num_queries, dim)),
        ("indptr.npy", indptr, (num_queries + 1,)),
        ("labels.npy", labels, (num_pairs,)),
    )
    for name, array, shape in shapes:
        if array.shape != shape:
            raise ArtifactError("another shape", where=str(place / name), got=array.shape, expected=shape, fix=_FIX)
    if indptr[0] != 0 or indptr[-1] != num_pairs or (np.diff(indptr) < 0).any():
        raise ArtifactError("rows that do not fit the labels", where=str(place / "indptr.npy"), fix=_FIX)
    if num_pairs and not (int(labels.min()) >= 0 and int(labels.max()) < num_labels):
        raise ArtifactError(
            "labels that do not exist", where=str(place / "labels.npy"), expected=f"0 to {num_labels - 1}", fix=_FIX
        )
    if not np.isfinite(vectors_MD).all():
        raise ArtifactError("numbers that are not finite", where=str(place / "vectors.npy"), fix=_FIX)
    where = place / "queries.arrow"
    try:
        table = read_plain_table(where, QUERY_SCHEMA)
        table.validate(full=True)
    except (pa.ArrowException, ValueError, MemoryError, OSError, StopIteration) as error:
        raise ArtifactError("not a readable Arrow file", where=str(where), got=str(error)[:200], fix=_FIX) from error
    if table.num_rows != num_queries or any(column.null_count for column in table.columns):
        raise ArtifactError(
            "another number of queries", where=str(where), got=table.num_rows, expected=num_queries, fix=_FIX
        )
    labels_ML = csr_matrix((np.ones(num_pairs, dtype=np.float32), labels, indptr), shape=(num_queries, num_labels))
    return Neighbours(vectors_MD, labels_ML, table["uid"], table["title"], vote)


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
        """What the heads rank highest, and all labels that got a vote, without excluded pairs.

        A label without a vote that is among the k best of the sum is among the k best of the heads: so with the heads'
        k best labels that are not excluded in `found_BK`, the k best of the sum are here, whatever the weight (>= 0).

        Args:
            found_BK: label rows, -1 where there is none.
            votes_BL: of `Neighbours.votes`.
            heads: (query_P, label_P) -> the heads' scores float32 [P].
            excluded: int64 keys query * L + label that are left out.
        """
        num_queries, num_labels = votes_BL.shape
        place_BK = np.arange(num_queries, dtype=np.int64)[:, None] * num_labels + found_BK
        voted = np.repeat(np.arange(num_queries, dtype=np.int64), np.diff(votes_BL.indptr)) * num_labels
        voted += votes_BL.indices
        keys = np.union1d(place_BK[found_BK >= 0], voted)
        if excluded is not None and excluded.size:
            keys = keys[~np.isin(keys, excluded)]
        votes_P = np.zeros(len(keys), dtype=np.float32)
        if voted.size:
            at = np.minimum(np.searchsorted(voted, keys), voted.size - 1)
            votes_P = np.where(voted[at] == keys, votes_BL.data[at], np.float32(0)).astype(np.float32)
        query_P, label_P = np.divmod(keys, num_labels)
        return cls(query_P, label_P, heads(query_P, label_P), votes_P, num_queries)

    def top(self, weight: float, k: int) -> Ranked:
        """The k best of heads + weight x votes; among equals the smaller label row comes first."""
        total_P = self.heads_P + np.float32(weight) * self.votes_P
        order = np.lexsort((self.label_P, -total_P, self.query_P))
        query = self.query_P[order]
        begin_B = np.concatenate([[0], np.cumsum(np.bincount(query, minlength=self.num_queries))])
        rank = np.arange(len(order)) - begin_B[query]
        order, query, rank = (x[rank < k] for x in (order, query, rank))
        rows = np.full((self.num_queries, k), -1, dtype=np.int64)
        scores = np.full((self.num_queries, k), -np.inf, dtype=np.float32)
        votes = np.full((self.num_queries, k), np.nan, dtype=np.float32)
        rows[query, rank], scores[query, rank] = self.label_P[order], total_P[order]
        votes[query, rank] = self.votes_P[order]
        return Ranked(rows, scores, votes)


def votes_alone(votes_BL: csr_matrix, k: int, excluded: Labels | None = None) -> Ranked:
    """The k labels with most votes; labels without any are not returned."""
    nothing = np.zeros((votes_BL.shape[0], 0), dtype=np.int64)
    found = Candidates.of(nothing, votes_BL, lambda query_P, _: np.zeros(len(query_P), dtype=np.float32), excluded)
    return found.top(1.0, k)


def _ones(labels_ML: csr_matrix) -> csr_matrix:
    """Each label of a row once, with 1 as its value."""
    ones = csr_matrix(labels_ML > 0, dtype=np.float32)
    ones.sum_duplicates()
    ones.data[:] = 1.0
    return ones


def _rows_of(matrix: csr_matrix) -> int:
    return int(matrix.shape[0])


def _strings(values: Iterable[str] | pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.cast(pa.large_string())
    return pa.array(list(values), pa.large_string())
